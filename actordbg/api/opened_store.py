"""A store as an object: its dumps, adding to it, and the commands that replay, each of which returns a `CommandResult`.

    store = actordbg.open("store")
    store.check(where="seq_len>4096", model="/models/llama-3.1-8b", packing=True).raise_if_wrong()

Settings are those of the command line, by their names with underscores ([list](replay-settings.md)). As there, the environment
and `actordbg.toml` give the defaults.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.actor.model_code import require_consent
from actordbg.api import planning
from actordbg.api.dump_list import DumpList, StoredDump, typed
from actordbg.api.planning import Advance, DumpSelection
from actordbg.base.errors import NothingToDo, Unsupported, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.catalog.query import count_dumps, get_dump, get_replay, open_fresh, select_dumps
from actordbg.config import consent
from actordbg.config.replay_config import ALL_LAWS, ANY_WIDER, AXES, SETTINGS, ReplayConfig
from actordbg.config.sources import Asked, build_config, load_settings, settings_in
from actordbg.document.command_result import CommandResult
from actordbg.replay.plan import DEFAULT_SHUFFLE_SEED, Plan
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec, run_replay
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from torch import Tensor

    from actordbg.api.recording import CallRecording

SAMPLE = 8
"""Number of dumps to check by default."""


def _quiet(steps: int, note: str = "", total: int | None = None) -> None:
    """Report no progress."""


class OpenStore:
    """A store by its folder, made when something is added. on_progress: called as `on_progress(steps, note="", total=None)`."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, on_progress: Advance = _quiet) -> None:
        self._settings = load_settings(folder if folder is None else os.fspath(folder))
        if self._settings.url is not None:
            hint = "run `actordbg store pull`, and open the folder"
            raise Unsupported(f"{self._settings.url} is not a folder of this machine", hint=hint)
        self._store, self.on_progress = Store(self._settings.store), on_progress

    @property
    def folder(self) -> Path:
        """The store's folder."""
        return self._store.root

    def __repr__(self) -> str:
        return f"<the store {self.folder}>"

    def dumps(self, where: str | None = None, *, order: str = "time") -> DumpList:
        """Return the dumps that a condition selects, by time, newest, length or longest. Raises WhereError."""
        return DumpList(self._store, where, order)

    def sample(self, where: str | None = None, count: int = SAMPLE) -> DumpList:
        """Return a diverse sample of the dumps that a condition selects: those that `check` replays."""
        return self.dumps(self._sampled(where, count))

    def dump(self, name: str = "last") -> StoredDump:
        """Return a dump by its id, the beginning of an id, or its handle; by default the newest."""
        return typed(self._store, get_dump(self._store.require(), name))

    def add(
        self,
        sequences: Tensor,
        attention_mask: Tensor | None = None,
        *,
        action_mask: Tensor | None = None,
        log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        temperature: float = 1.0,
        model: Any = None,
        run: str = "added",
    ) -> StoredDump:
        """Add a batch as a dump. sequences: token ids, int [B, S]. attention_mask: [B, S]; None: all tokens are real.

        action_mask: [B, A], which of the last A next tokens count. log_probs, entropy: what the run computed, [B, A], or [B, S-1]
        without an action mask; `check(recorded=True)` compares them. model: where its name and dtype are read from.
        """
        import torch

        from actordbg.api.recording import CallRecording, required
        from actordbg.trainers.plain_adapter import Plain
        from actordbg.trainers.seam import Rows, Scores

        rows = Rows(torch.nn.Module() if model is None else model, sequences, attention_mask, action_mask, temperature)
        required(rows, Scores(log_probs, entropy))
        recording = CallRecording("plain", self._store, run)
        recording.write(rows, Scores(log_probs, entropy), Plain.seams[0])
        return recording.dumps()[0]

    def record(self, target: Any, *, run: str = "recorded") -> CallRecording:
        """Record each call of a model, of an adapter's functions, or of a function of rows (`tapping.Tap`), with its log-probs.

        Use it as a context manager, or call what it returns instead of the target: `score = store.record(score)`.
        """
        from actordbg.api.recording import CallRecording

        return CallRecording(target, self._store, run)

    def replay(
        self, where: str | None = None, *, files: Sequence[str | Path] = (), order: str = "time", max_inputs: int | None = None,
        failed: bool = False, trust_remote_code: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Replay recorded inputs, as `actordbg replay` does. Raises NothingToDo if none was selected."""
        from actordbg.api.replays import replay_answer

        with self._consent(trust_remote_code):
            requested, _ = self._requested(settings)
            chosen = self._selected(where, files, order, max_inputs, failed=failed)
            plan = self._planned("replay", requested.config, chosen)
            findings = planning.require_runnable(self._store, plan.spec)
            run_replay(self._store, plan.spec, planning.counting(self._steps(len(plan.spec.inputs))))
            return replay_answer(self._store, plan.spec, selected=len(plan.spec.inputs), skipped=plan.skipped, findings=findings)

    def laws(self, where: str | None = None, *, sample: int = SAMPLE, **settings: Any) -> CommandResult:
        """Replay a diverse sample of dumps and check the laws (invariance checks) of each."""
        return self.replay(self._sampled(where, sample), **{"laws": ALL_LAWS, **settings})

    def check(
        self, where: str | None = None, *, files: Sequence[str | Path] = (), sample: int = SAMPLE, recorded: bool = False,
        trust_remote_code: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Replay a diverse sample of dumps, and judge it by the laws and the truth, as `actordbg check` does.

        recorded: also judge the run's own outputs; then `model` must hold that step's weights.
        """
        from actordbg.api.checks import check_answer, lint_newest
        from actordbg.judge.check import run_check

        with self._consent(trust_remote_code):
            requested, flags = self._requested(settings)
            chosen = self._selected(where if files else self._sampled(where, sample), files)
            plan = self._planned("check", planning.to_judge(requested, flags), chosen)
            plan = planning.with_affordable_laws(plan, requested, flags)
            planning.require_runnable(self._store, plan.spec)
            model = (
                None if "model" in planning.settings_given(requested, flags) else planning.recorded_model(self._store, plan.spec)
            )
            of, advance = count_dumps(open_fresh(self._store), where), self._steps(3 * len(plan.spec.inputs))
            checked = run_check(
                self._store,
                plan.spec,
                recorded=recorded,
                on_stage=lambda stage: advance(0, note=stage),
                on_event=planning.counting(advance),
            )
            if not files:
                checked = replace(checked, lint=lint_newest(self._store, where))
            return check_answer(self._store, checked, of=len(plan.spec.inputs) if files else of, recorded=model)

    def compare(
        self, a: str = "last", b: str = "truth", *, where: str | None = None, truth: str = ANY_WIDER, flat: bool = False,
        worst: int = 10, trust_remote_code: bool = False, **limits: float,
    ) -> CommandResult:  # fmt: skip
        """Compare a replay with another, with "truth" (computed if it is missing) or with "recorded", the run's own outputs.

        truth: its dtype. flat: fixed limits instead of rounding measured on each dump. worst: how many dumps the text lists.
        limits: of measures, in nats or shares ([list](thresholds.md)): `max_abs=0.01`.
        """
        from actordbg.judge.comparing import compare, save
        from actordbg.judge.comparison_document import comparison_charts, document
        from actordbg.judge.find_truth import ensure_rounding, ensure_truth
        from actordbg.judge.thresholds import asked

        with self._consent(trust_remote_code):
            catalog, own = open_fresh(self._store.require(), where), asked(dict(limits))
            replay_id, rounding, on_event = get_replay(catalog, a).replay_id, None, planning.counting(self.on_progress)
            only = None if where is None else {row.dump_id for row in select_dumps(catalog, where)}
            if b == "truth":
                b = ensure_truth(self._store, replay_id, dtype=truth, on_event=on_event)
                rounding = None if flat else ensure_rounding(self._store, replay_id, on_event=on_event)
            record = compare(self._store, replay_id, b, thresholds=own, rounding=rounding, only=only)
            save(self._store, record)
            blocks = document(record, worst, comparison_charts(self._store, record))
            return CommandResult(record.good, {**vars(record), "good": record.good}, blocks)

    def locate(
        self, replay: str | None = None, *, where: str | None = None, trust_remote_code: bool = False, **settings: Any
    ) -> CommandResult:
        """Name the module in which a configuration goes wrong: that of a replay, or these settings on the dumps of `where`."""
        from actordbg.api.locating import locate_answer, of_one_input

        with self._consent(trust_remote_code):
            if replay is not None and (where is not None or settings):
                raise UsageError("a replay has its own configuration and inputs", hint="name a replay, or settings")
            if replay is not None:
                spec = load_spec(self._store, get_replay(self._store.require(), replay).replay_id)
            else:
                spec = self._planned("locate", self._requested(settings)[0].config, self._selected(where, ())).spec
            spec = of_one_input(spec, spec.command)
            planning.require_runnable(self._store, spec)
            run_replay(self._store, spec, planning.counting(self._steps(1)))
            return locate_answer(spec, data_of(self._store, spec).results)

    def step(self, number: int, run: str | None = None, *, trust_remote_code: bool = False, **settings: Any) -> CommandResult:
        """Replay optimizer step `number` of a run from its recorded losses, as `actordbg step` does."""
        from actordbg.api.steps import step_answer

        with self._consent(trust_remote_code):
            config = self._requested(settings)[0].config
            self._store.require_writable()
            return step_answer(self._store, run, number, config, planning.counting(self.on_progress), self._steps)

    def matrix(
        self, where: str | None = None, *, files: Sequence[str | Path] = (), order: str = "time", max_inputs: int | None = None,
        trust_remote_code: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Replay the same inputs under each combination of settings: `matrix(attn=["sdpa", "eager"], packing=[False, True])`."""
        from actordbg.api.matrices import matrix_answer, new_record
        from actordbg.campaign import run_matrix as matrices

        with self._consent(trust_remote_code):
            flags = settings_in(_plain(settings), "matrix()", SETTINGS.values(), tuple(AXES))
            axes = {name: str(flags.pop(name)) for name in AXES if name in flags}
            base = planning.to_judge(requested := build_config(self._settings, flags), flags)
            require_consent(requested.config.model)
            seed, paths = DEFAULT_SHUFFLE_SEED, self._selected(where, files).files
            selected = matrices.select(self._store, base, where, paths, order, max_inputs, seed)
            if not selected.rows:
                raise self._nothing("replay", where)
            options = {"order": order, "shuffle_seed": seed, "skip_known": False, "slower": None, "power": False}
            options |= {"oracle": ANY_WIDER, matrices.FILES: [os.fspath(path) for path in paths]}
            about = {"selection": where, "command": _command("matrix", where, base, axes)}
            record = new_record(base, axes, selected, options, **about)
            surroundings, advance = matrices.Surroundings(selected.defaults), self._steps(matrices.steps_left(record))
            surroundings.on_progress = lambda words, steps: advance(steps, note=words)
            matrices.run_matrix(self._store, record, selected.rows, surroundings)
            return matrix_answer(self._store, matrices.load(self._store, record.matrix_id))

    def _requested(self, settings: Mapping[str, Any]) -> tuple[Asked, dict[str, Any]]:
        """Return the configuration, and the settings that the caller gave. Raises UsageError for unknown or invalid ones."""
        flags = settings_in(_plain(settings), "settings", SETTINGS.values())
        requested = build_config(self._settings, flags)
        require_consent(requested.config.model)
        return requested, flags

    def _selected(
        self,
        where: str | None,
        files: Sequence[str | Path],
        order: str = "time",
        most: int | None = None,
        *,
        failed: bool = False,
    ) -> DumpSelection:
        chosen, _ = (
            DumpSelection(where, tuple(map(Path, files)), order, most).narrowed(self._store, failed=failed).imported(self._store)
        )
        self._store.require_writable()
        return chosen

    def _sampled(self, where: str | None, count: int) -> str | None:
        return DumpSelection(where).narrowed(self._store, diverse=count).where

    def _planned(self, name: str, config: ReplayConfig, chosen: DumpSelection) -> Plan:
        plan = planning.planned(self._store, config, chosen, _command(name, chosen.where, config))
        if not plan.spec.inputs:
            raise self._nothing(name, chosen.where)
        return plan

    def _nothing(self, purpose: str, where: str | None) -> NothingToDo:
        reason = planning.why_nothing(self._store, where)
        return NothingToDo(f"nothing to {purpose}: {reason}", hint="select dumps with where=... or files=[...]")

    def _steps(self, total: int) -> Advance:
        """Return the progress callback, told of the number of steps."""
        self.on_progress(0, total=total)
        return self.on_progress

    @contextlib.contextmanager
    def _consent(self, given: bool) -> Iterator[None]:
        """Let models run their own code while the block lasts."""
        (consent.give if given else consent.withhold)()
        try:
            yield
        finally:
            consent.withhold()


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a file has them: text for a path, a list for a tuple."""
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def _command(name: str, where: str | None, config: ReplayConfig, axes: Mapping[str, str] | None = None) -> str:
    """Return the command line that does the same."""
    listed = dict(axes or {})
    options = [word for key, setting in SETTINGS.items() if name in setting.commands and key not in listed
               for word in setting.options(getattr(config, key))]  # fmt: skip
    options += [word for key, values in listed.items() for word in (SETTINGS[key].flag, values)]
    return " ".join(map(in_shell, ["actordbg", name, *(["--where", where] if where else []), *options]))


def open(folder: str | os.PathLike[str] | None = None, *, on_progress: Advance = _quiet) -> OpenStore:
    """Open a store: a folder, or by default that of ACTORDBG_STORE, `actordbg.toml` or ./store. See `OpenStore`."""
    return OpenStore(folder, on_progress=on_progress)


def record(target: Any, store: OpenStore | str | os.PathLike[str], *, run: str = "recorded") -> CallRecording:
    """Record each call of a model, of an adapter's functions, or of a function of rows into a store: see `OpenStore.record`."""
    return (store if isinstance(store, OpenStore) else OpenStore(store)).record(target, run=run)
