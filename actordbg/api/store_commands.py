"""The commands that replay and judge, as methods of a store: each returns a `CommandResult`. The command line calls these.

`where` is a condition or a `DumpSelection`. Settings are those of the command line, by their names with underscores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from actordbg.api.client import Client
from actordbg.api.desk import Desk, DumpSelection
from actordbg.base.errors import UsageError
from actordbg.config.replay_config import ALL_LAWS, ANY_WIDER, AXES, ENDPOINT, SETTINGS, TRAINING_AXES
from actordbg.document.command_result import CommandResult
from actordbg.formats.store_files import atomic_write, make_folder

if TYPE_CHECKING:
    from actordbg.api.checks import CheckResult
    from actordbg.api.reports import Report

SAMPLE = 8
"""Number of dumps to check by default."""
TRIALS, SECONDS = 200, 300.0
"""The usual budget of a reduction."""
Where = str | DumpSelection | None


Method = TypeVar("Method", bound=Callable[..., Any])


def consenting(method: Method) -> Method:
    """Let models run their own code while a method runs, if its argument `trust_remote_code` says so."""

    @functools.wraps(method)
    def called(self: StoreCommands, *given: Any, **named: Any) -> Any:
        with self.client.consent(named.get("trust_remote_code", False)):
            return method(self, *given, **named)

    return cast(Method, called)


class StoreCommands:
    """What can be asked of a store."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._store = desk, desk.store

    @property
    def folder(self) -> Path:
        """The store's folder."""
        return self._store.root

    @property
    def client(self) -> Client:
        """The program or terminal that is told of progress."""
        return self._desk.client

    def _flags(self, settings: Mapping[str, Any], lists: Collection[str] = ()) -> dict[str, Any]:
        return self.client.settings(settings, lists)

    def keep_page(self, answer: CommandResult) -> Path:
        """Write an answer's page into the store's reports/, and return its path."""
        make_folder(self._store.reports)
        path = self._store.reports / f"check-{answer['replay_id']}.html"
        atomic_write(path, answer.to_html().encode())
        return path

    @consenting
    def replay(
        self, where: Where = None, *, files: Sequence[str | Path] = (), order: str = "time", max_inputs: int | None = None,
        failed: bool = False, dry_run: bool = False, trust_remote_code: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Replay recorded inputs, as `actordbg replay` does. Raises NothingToDo if none was selected.

        failed: only dumps that did not pass last time. dry_run: only say what would run.
        """
        from actordbg.api.replaying import new

        flags = self._flags(settings)
        return new(self._desk, _chosen(where, files, order, max_inputs, failed=failed), flags, dry_run=dry_run)

    @consenting
    def replay_again(self, replay: str = "last", *, dry_run: bool = False, trust_remote_code: bool = False) -> CommandResult:
        """Continue a stopped replay under its own configuration."""
        from actordbg.api.replaying import resumed

        return resumed(self._desk, replay, dry_run=dry_run)

    def configuration(self, **settings: Any) -> dict[str, Any]:
        """Return the settings of a replay that are given here, by the environment or by a file, by the names of their options."""
        flags = self._flags(settings)
        asked = self._desk.asked(flags)
        return {SETTINGS[name].option: getattr(asked.config, name) for name in {**flags, **asked.sources}}

    @consenting
    def build_actor(
        self, *, batch_size: int = 2, seq_len: int = 128, trust_remote_code: bool = False, **settings: Any
    ) -> CommandResult:
        """Build the actor alone, in another process, and run one forward of a synthetic input. Uses no dumps of the store."""
        from actordbg.api.replaying import built_alone

        return built_alone(self._desk, self._flags(settings), batch_size, seq_len)

    def laws(self, where: Where = None, *, sample: int = SAMPLE, **settings: Any) -> CommandResult:
        """Replay a diverse sample of dumps and check the laws (invariance checks) of each."""
        return self.replay(_chosen(where).sampled(sample), **{"laws": ALL_LAWS, **settings})

    @consenting
    def check(
        self, where: Where = None, *, files: Sequence[str | Path] = (), sample: int = SAMPLE, recorded: bool = False,
        trust_remote_code: bool = False, **settings: Any,
    ) -> CheckResult:  # fmt: skip
        """Replay a diverse sample of dumps, and judge it by the laws and the truth, as `actordbg check` does.

        recorded: also judge the run's own outputs; then `model` must hold that step's weights.
        """
        from actordbg.api.checks import check

        flags = self._flags(settings)
        return check(self._desk, _chosen(where, files), flags, sample=sample, recorded=recorded)

    def lint(self, where: str | None = None, *, max_inputs: int | None = None) -> CommandResult:
        """Check recorded data against its laws, without a model, as `actordbg lint` does. max_inputs: only the newest."""
        from actordbg.api.checks import linted

        return linted(self._desk, where, max_inputs)

    @consenting
    def compare(
        self, a: str = "last", b: str = "truth", *, where: str | None = None, noise: str | None = None, truth: str = ANY_WIDER,
        flat: bool = False, power: bool = False, worst: int = 10, tokenizer: str | Path | None = None, charts: bool = True,
        trust_remote_code: bool = False, **limits: float | None,
    ) -> CommandResult:  # fmt: skip
        """Compare a replay with another, with "truth" (computed if it is missing) or with "recorded", the run's own outputs.

        noise: ignore differences within a noise floor, an id or "last". truth: its dtype. flat: fixed limits instead of rounding
        measured on each dump. power: also which planted faults would be detected. worst: how many dumps the text lists.
        tokenizer: adds text to the charts of tokens. limits: of measures, in nats or shares ([list](thresholds.md)):
        `max_abs=0.01`.
        """
        from actordbg.api.comparing import compared

        about: dict[str, Any] = {"noise": noise, "truth": truth, "flat": flat, "power": power, "worst": worst, "charts": charts}
        return compared(self._desk, a, b, where, limits, tokenizer=tokenizer, **about)

    @consenting
    def explain(
        self, replay: str = "last", *, against: str | None = None, other_models: Sequence[str] = (),
        trust_remote_code: bool = False,
    ) -> CommandResult:  # fmt: skip
        """Explain what is wrong with a replay, where, and since when, as `actordbg explain` does.

        against: "rollout" says which side is wrong by the engine's recorded log-probs. other_models: with it, models whose
        weights a side may have had.
        """
        from actordbg.api.explaining import explained, sides_explained

        self._store.require()
        spec = self._desk.replayed(replay)
        if against is not None or spec.config.backend == ENDPOINT:
            return sides_explained(self._desk, spec, other_models, engine=against is None)
        if other_models:
            raise UsageError("--other-model needs --against", hint="add --against rollout")
        return explained(self._desk, spec)

    @consenting
    def locate(
        self, replay: str | None = None, *, where: Where = None, trust_remote_code: bool = False, **settings: Any
    ) -> CommandResult:
        """Name the module in which a configuration goes wrong: that of a replay, or these settings on the dumps of `where`."""
        from actordbg.api.explaining import locate_answer, run_located

        desk = self._desk
        if replay is not None and (where is not None or settings):
            raise UsageError("a replay has its own configuration and inputs", hint="name a replay, or settings")
        if replay is not None:
            self._store.require_writable()
            spec = desk.replayed(replay)
            command = desk.client.command or f"actordbg locate {spec.replay_id}"
        else:
            chosen, config = desk.selected(_chosen(where)), desk.asked(self._flags(settings)).config
            spec = desk.planned("locate", config, chosen, "locate a fault with").spec
            command = spec.command
        return locate_answer(*run_located(desk, spec, command))

    @consenting
    def reduce(
        self, name: str = "last", *, trials: int = TRIALS, seconds: float = SECONDS, trust_remote_code: bool = False
    ) -> CommandResult:
        """Reduce a wrong replay or comparison to the smallest case with the same fault, or continue, as `actordbg reduce` does.

        trials, seconds: the budget of this call.
        """
        from actordbg.api.reducing import reduced, reduction_answer

        return reduction_answer(reduced(self._desk, name, trials, seconds))

    @consenting
    def repro(
        self, name: str = "last", out: str | Path = "repro.py", *, issue: str | Path | None = None, fixed: str | None = None,
        trials: int = TRIALS, seconds: float = SECONDS, trust_remote_code: bool = False,
    ) -> CommandResult:  # fmt: skip
        """Write a script that shows the fault without actordbg, and with `issue` the text around it, as `actordbg repro` does.

        fixed: an interpreter in whose environment the fault is gone. Raises BadResult if the script does not show the fault.
        """
        from actordbg.api.reducing import known_or_reduced, write_repro
        from actordbg.document.page import check_place

        check_place(Path(out))
        check_place(None if issue is None else Path(issue))
        record = known_or_reduced(self._desk, name, trials, seconds)
        return write_repro(record, Path(out), issue=None if issue is None else Path(issue), fixed=fixed)

    def bundle(
        self, *names: str, where: str | None = None, out: str | Path = "bundle.tar.zst", redact: bool = False,
        keep_ids: Collection[int] = (), model: str = "", to: str | None = None, public: bool = False,
    ) -> CommandResult:  # fmt: skip
        """Pack replays, comparisons and dumps into one archive, as `actordbg bundle` does.

        redact: permute token ids, except `keep_ids`, padding and the special tokens of `model`. to: upload it, `hf://datasets/...`.
        """
        from actordbg.api.reducing import bundled
        from actordbg.document.page import check_place

        check_place(Path(out))
        return bundled(self._store, names, where, Path(out), redact=redact, keep=keep_ids, model=model, to=to, public=public)

    @consenting
    def step(
        self, number: int, run: str | None = None, *, tokenizer: str | Path | None = None, trust_remote_code: bool = False,
        **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Replay optimizer step `number` of a run from its recorded losses, as `actordbg step` does.

        run: None if only one run has that step. `model` must hold that step's weights. tokenizer: adds text to token charts.
        """
        from actordbg.api.steps import replayed_step

        return replayed_step(self._desk, number, run, self._flags(settings), tokenizer)

    def turns(
        self, dump: str | None = None, *, run: str | None = None, tokenizer: str | Path | None = None, template: str | None = None
    ) -> CommandResult:
        """Check that the ids that a rollout sampled are those that were trained on, in a run recorded with `run --turns`.

        dump: only conversations that became its rows. tokenizer: adds the text. template: judge this model's chat template.
        """
        from actordbg.api.reports import texts_of
        from actordbg.judge.chat_template import template_answer
        from actordbg.judge.turns import trajectories_of, turns_answer

        if template is not None:
            return template_answer(template, trajectories_of(self._store, run)[0] if self._store.exists() else [])
        return turns_answer(self._store.require(), dump, run=run, decode=texts_of(tokenizer))

    def weights(self, run: str | None = None) -> CommandResult:
        """Check that rollout engines got the weights that were sent, in a run recorded with `run --hash-weights`."""
        from actordbg.judge.weight_ladder import weights_answer

        return weights_answer(self._store.require(), run)

    def report(self, *replays: str, where: str | None = None, tokenizer: str | Path | None = None, charts: bool = True) -> Report:
        """Report replays side by side, by default the last: results, causes of failures, time, memory. "all" lists them all.

        where: only inputs whose dumps match. tokenizer: adds text to the charts of tokens. `to_csv()` has every result.
        """
        from actordbg.api.reports import report

        return report(self._store, replays, where, tokenizer=tokenizer, charts=charts)

    def replays(self, *, everything: bool = False) -> list[dict[str, Any]]:
        """List this user's replays, newest first, with handle and verdict; everything: also truths, cells, other users'."""
        from actordbg.catalog.query import open_fresh
        from actordbg.judge.replay_list import listed

        return listed(open_fresh(self._store.require()), everything=everything)

    @consenting
    def noise(
        self, where: Where = None, *, files: Sequence[str | Path] = (), order: str = "time", max_inputs: int | None = None,
        trust_remote_code: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Measure a configuration's own numerical noise, as `actordbg noise` does; `compare(noise="last")` then ignores it."""
        from actordbg.api.measuring import noise

        return noise(self._desk, _chosen(where, files, order, max_inputs), self._flags(settings))

    @consenting
    def matrix(
        self, where: Where = None, *, files: Sequence[str | Path] = (), order: str = "time", max_inputs: int | None = None,
        truth: str | None = ANY_WIDER, power: bool = False, skip_known: bool = False, baseline: str | None = None,
        slower: float | None = None, dry_run: bool = False, trust_remote_code: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Replay the same inputs under each combination of settings: `matrix(attn=["sdpa", "eager"], packing=[False, True])`.

        truth: its dtype; None: "passed" only means finished. power: also which planted faults would be detected. skip_known:
        skip cells that are known to fail. baseline: an earlier matrix, whose failures do not count again; slower: by what factor
        a cell may be slower than there. dry_run: only say what would run.
        """
        from actordbg.api.campaigns import matrix

        about: dict[str, Any] = {"truth": truth, "power": power, "skip_known": skip_known, "baseline": baseline, "slower": slower}
        flags = self._flags(settings, tuple(AXES))
        return matrix(self._desk, _chosen(where, files, order, max_inputs), flags, dry_run=dry_run, **about)

    @consenting
    def matrix_again(
        self, matrix: str = "last", *, run: bool = True, dry_run: bool = False, trust_remote_code: bool = False
    ) -> CommandResult:
        """Continue a stopped matrix; with `run=False`, only return the answer of a matrix that ran."""
        from actordbg.api.campaigns import resumed_matrix, shown_matrix

        return resumed_matrix(self._desk, matrix, dry_run=dry_run) if run else shown_matrix(self._store, matrix)

    @consenting
    def train_check(
        self, where: Where = None, *, files: Sequence[str | Path] = (), order: str = "time", max_inputs: int | None = None,
        training: Mapping[str, Any] | None = None, dry_run: bool = False, trust_remote_code: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Train a few steps under each configuration and compare, as `actordbg train-check` does.

        training: its hyperparameters by the names of the command's options: `{"steps": 20, "lr": 1e-6}`. dry_run: only say what
        would run. The environment variables of the trainer's test suite apply as there.
        """
        from actordbg.api.campaigns import TrainingOptions, train_check

        how = TrainingOptions(**training or {})
        flags = self._flags(settings, TRAINING_AXES)
        return train_check(self._desk, _chosen(where, files, order, max_inputs), flags, how, dry_run=dry_run)

    @consenting
    def train_check_again(
        self, check: str = "last", *, run: bool = True, dry_run: bool = False, trust_remote_code: bool = False
    ) -> CommandResult:
        """Continue a stopped training check; with `run=False`, only return the answer of a check that ran."""
        from actordbg.api.campaigns import resumed_check, shown_check

        return resumed_check(self._desk, check, dry_run=dry_run) if run else shown_check(self._store, check)


def _chosen(
    where: Where,
    files: Sequence[str | Path] = (),
    order: str = "time",
    max_inputs: int | None = None,
    *,
    failed: bool = False,
) -> DumpSelection:
    """Return the selection; a `DumpSelection` says everything itself."""
    if isinstance(where, DumpSelection):
        return replace(where, files=(*where.files, *map(Path, files)))
    return DumpSelection(where, tuple(map(Path, files)), order, max_inputs, failed=failed)
