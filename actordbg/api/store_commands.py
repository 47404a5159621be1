"""The commands that replay and judge, as methods of a store: each returns a `CommandResult`. The command line calls these.

Those that are commands as they stand are inherited (`plain_commands`). `where` is a condition or a `DumpSelection`. Settings are
those of the command line, by their names with underscores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.api.desk import DumpSelection
from actordbg.api.plain_commands import PlainCommands, consenting
from actordbg.base.errors import UsageError
from actordbg.config.replay_config import ALL_LAWS, ANY_WIDER, AXES, SETTINGS, TRAINING_AXES
from actordbg.config.training_options import TrainingOptions
from actordbg.document.command_result import CommandResult
from actordbg.formats.store_files import atomic_write, make_folder

if TYPE_CHECKING:
    from actordbg.api.checks import CheckResult
    from actordbg.api.reports import Report

SAMPLE = 8
"""Number of dumps to check by default."""
Where = str | DumpSelection | None


class StoreCommands(PlainCommands):
    """What can be asked of a store."""

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

        return compared(
            self._desk,
            a,
            b,
            where,
            limits,
            noise=noise,
            truth=truth,
            flat=flat,
            power=power,
            worst=worst,
            tokenizer=tokenizer,
            charts=charts,
        )

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
            chosen = desk.selected(_chosen(where))
            config = desk.asked(self._flags(settings), desk.first_record(chosen)).config
            spec = desk.planned("locate", config, chosen, "locate a fault with").spec
            command = spec.command
        return locate_answer(*run_located(desk, spec, command))

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
        from actordbg.api.replaying import noise

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

        return matrix(
            self._desk,
            _chosen(where, files, order, max_inputs),
            self._flags(settings, tuple(AXES)),
            truth=truth,
            power=power,
            skip_known=skip_known,
            baseline=baseline,
            slower=slower,
            dry_run=dry_run,
        )

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
        from actordbg.api.campaigns import train_check

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
