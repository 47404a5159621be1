"""The commands that replay and judge, as methods of a store: each returns a `CommandResult`. The command line calls these.

Those that are commands as they stand have the options in their signature and the help in their docstring, as in
`plain_commands`; `cli/from_signature.py` has what `Where` and the other types stand for there. `where` is a condition or a
`DumpSelection`. Settings are those of the command line, by their names with underscores; `files`, `order`, `max_inputs` and
`failed` among them select dumps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from actordbg.api.plain_commands import PlainCommands, Power, Truth, consenting
from actordbg.base.errors import UsageError
from actordbg.base.option import Option
from actordbg.config.replay_config import ANY_WIDER, AXES, SETTINGS, TRAINING_AXES, TRUTHS

if TYPE_CHECKING:
    from typing import TypeAlias

    from actordbg.api.checks import CheckResult
    from actordbg.api.desk import DumpSelection
    from actordbg.api.reports import Report
    from actordbg.document.command_result import CommandResult

    Where: TypeAlias = str | DumpSelection | None
    Limits: TypeAlias = float | None
    Training: TypeAlias = Mapping[str, Any] | None

SAMPLE = 8
"""Number of dumps to check by default."""
_THRESHOLDS = "Thresholds (inf: not checked)"
_SELECTING = ("files", "order", "max_inputs", "failed")


def _checked(truth: str | None) -> str | None:
    """Return the dtype of a truth. Raises UsageError if a truth cannot have it."""
    if truth not in (None, ANY_WIDER, *TRUTHS):
        raise UsageError(f"--truth cannot be {truth}", hint=f"one of: {', '.join(TRUTHS)}")
    return truth


class StoreCommands(PlainCommands):
    """What can be asked of a store. Where a method has settings, `files`, `order`, `max_inputs` and `failed` select dumps."""

    def keep_page(self, answer: CommandResult) -> Path:
        """Write an answer's page into the store's reports/, and return its path."""
        from actordbg.formats.store_files import atomic_write, make_folder

        make_folder(self._store.reports)
        path = self._store.reports / f"check-{answer['replay_id']}.html"
        atomic_write(path, answer.to_html())
        return path

    def _asked(
        self, where: Where, settings: Mapping[str, Any], lists: Collection[str] = ()
    ) -> tuple[DumpSelection, dict[str, Any]]:
        """Return the selection of dumps, and the settings. A `DumpSelection` says all but more files itself."""
        from actordbg.api.desk import DumpSelection

        given = dict(settings)
        selecting = {name: given.pop(name) for name in _SELECTING if name in given}
        files = tuple(map(Path, selecting.pop("files", ())))
        if isinstance(where, DumpSelection):
            chosen = replace(where, files=(*where.files, *files), **selecting)
        else:
            chosen = DumpSelection(where, files, **selecting)
        return chosen, self._flags(given, lists)

    @consenting
    def replay(
        self, where: Where = None, *, dry_run: bool = False, trust_remote_code: bool = False, **settings: Any
    ) -> CommandResult:
        """Replay recorded inputs, as `actordbg replay` does. Raises NothingToDo if none was selected.

        files, order, max_inputs, failed (only dumps that did not pass last time): select the dumps. dry_run: only say what would
        run.
        """
        from actordbg.api.replaying import new

        return new(self._desk, *self._asked(where, settings), dry_run=dry_run)

    @consenting
    def replay_again(self, replay: str = "last", *, dry_run: bool = False, trust_remote_code: bool = False) -> CommandResult:
        """Continue a stopped replay under its own configuration."""
        from actordbg.api.replaying import resumed

        return resumed(self._desk, replay, dry_run=dry_run)

    @consenting
    def check(
        self,
        where: Where = None,
        *,
        sample: int = SAMPLE,
        recorded: bool = False,
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> CheckResult:
        """Replay a diverse sample of dumps, and judge it by the laws and the truth, as `actordbg check` does.

        files, order, max_inputs: select the dumps. recorded: also judge the run's own outputs; then `model` must hold that step's
        weights.
        """
        from actordbg.api.checks import check

        return check(self._desk, *self._asked(where, settings), sample=sample, recorded=recorded)

    @consenting
    def compare(
        self, a: str = "last", b: str = "truth", *, noise: str | None = None, truth: Truth = None,
        trust_remote_code: bool = False, flat: Annotated[bool, Option("--flat-limits", heading=_THRESHOLDS, rank=30)] = False,
        power: Power = False, where: str | None = None, worst: Annotated[int, Option("--limit", min=0)] = 10,
        tokenizer: str | Path | None = None, charts: bool = True, **limits: Limits,
    ) -> CommandResult:  # fmt: skip
        """Compare a replay with another, or with the truth.

        B may also be `recorded`: the run's own recorded outputs. Compares each dump that both sides have: log-probs per token and
        per sequence, entropies, loss, gradient norm and kept gradients. Thresholds follow the less precise dtype of the two sides
        unless a flag sets them. Computes the truth if it does not exist yet; `last` is the newest replay that is not a truth.
        Saves the comparison in comparisons/, and `report` shows it.

        Exit code: 1 on a mismatch, if A failed on an input that B passed, or if nothing could be compared.

        Example: actordbg compare last truth --noise

        Args:
            a (A): Replay under test: an id, a name, `@1` or `last`.
            b (B): Another replay, `truth`, or `recorded`: the run's own outputs.
            noise ([ID|last]): Ignore differences within a noise floor (`actordbg noise`); last: the newest for A's settings.
            flat: Use fixed limits instead of rounding measured on each dump.
            worst: Show the N worst dumps; 0 for all.
        """
        from actordbg.api.comparing import compared

        return compared(
            self._desk,
            a,
            b,
            where,
            limits,
            noise=noise,
            truth=_checked(truth) or ANY_WIDER,
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
        """Name the module in which a configuration goes wrong.

        Loads transformers' own model of the same checkpoint beside the Actor's. Compares what both are, bit for bit: parameters,
        buffers, ties, attributes. Then runs one input (most rows, most padding) with the truth's values in front of every module,
        and measures what each module adds, in units of what the dtype costs a healthy model there: 1.00 everywhere if all is
        right.

        Exit code: 1 if anything is wrong or nothing could be checked; 5 if no dump was selected.

        Example: actordbg locate last

        Example: actordbg locate --where "rank=0" --model /models/llama-3.1-8b --dtype bf16 --packing

        Args:
            replay (REPLAY): Use the configuration and inputs of this replay: an id, a name, `@1` or `last`.
        """
        from actordbg.api.explaining import locate_answer, run_located
        from actordbg.catalog.dump_verdicts import LOCATED

        desk = self._desk
        if replay is not None and (where is not None or settings):
            given = "".join(f", not {SETTINGS[name].flag}" for name in settings if name in SETTINGS)
            raise UsageError(f"a replay has its own configuration and inputs{given}", hint="name a replay, or settings")
        if replay is not None:
            self._store.require_writable()
            spec = desk.replayed(replay)
            command = f"{LOCATED}{spec.replay_id}"  # as of `explain`: "last" goes on meaning what was judged
        else:
            chosen, flags = self._asked(where, settings)
            chosen = desk.selected(chosen)
            config = desk.asked(flags, desk.first_record(chosen)).config
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
    def noise(self, where: Where = None, *, trust_remote_code: bool = False, **settings: Any) -> CommandResult:
        """Measure a configuration's own numerical noise.

        Replays the same inputs unchanged, a second time, with more padding, with every row twice and with rows reversed; and row
        by row in the configuration's dtype and in a wider dtype. Results should not depend on any of that, so every change is
        noise. `actordbg compare A B --noise` then reports only differences beyond this noise floor. Runs up to seven replays,
        which stay in the store.

        Example: actordbg noise --max-inputs 5 --dtype bf16 --packing
        """
        from actordbg.api.replaying import noise

        return noise(self._desk, *self._asked(where, settings))

    @consenting
    def matrix(
        self, where: Where = None, *, trust_remote_code: bool = False, skip_known: Annotated[bool, Option(rank=30)] = False,
        no_truth: Annotated[bool, Option(rank=30)] = False, power: Power = False, truth: Truth = ANY_WIDER,
        baseline: str | None = None, slower: Annotated[float | None, Option(rank=30)] = None, resume: str | None = None,
        show: str | None = None, dry_run: Annotated[bool, Option(rank=13)] = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Find which setting combinations run and are right.

        Replays the same inputs under every combination of the listed settings, checks the laws (invariance checks) on some
        inputs, and compares every cell that passes with the truth. Default axes: flash_attention_2 and sdpa, compiled or not,
        packed or not. Each cell is a replay; cells that can share a loaded Actor do. Cells that cannot run here are listed as
        unavailable, with a workaround.

        Exit code: 1 if a cell failed, is wrong, is unfinished or is worse than in --baseline, or if no cell could run.

        Example: actordbg matrix --where "seq_len>1800" --max-inputs 3 --attn sdpa,eager --packing both --compile off

        Args:
            skip_known: Skip cells known to fail (default: run them).
            no_truth: Skip the truth; "passed" then only means finished.
            baseline (MATRIX|last): Exit 1 only for cells worse than the same cell of this matrix; failures it shares do not
                count.
            slower (FACTOR): Count a cell this many times slower as a regression.
            resume (MATRIX|last): Continue a stopped matrix.
            show (MATRIX|last): Print an existing matrix; run nothing.
            dry_run: Print the cells; run nothing.
        """
        from actordbg.api.campaigns import matrix, resumed_matrix, shown_matrix

        if show is not None:
            return shown_matrix(self._store, show)
        if resume is not None:
            return resumed_matrix(self._desk, resume, dry_run=dry_run)
        return matrix(
            self._desk,
            *self._asked(where, settings, tuple(AXES)),
            truth=None if no_truth else _checked(truth),
            power=power,
            skip_known=skip_known,
            baseline=baseline,
            slower=slower,
            dry_run=dry_run,
        )

    @consenting
    def train_check(
        self, where: Where = None, *, training: Training = None, trust_remote_code: bool = False, resume: str | None = None,
        show: str | None = None, dry_run: bool = False, **settings: Any,
    ) -> CommandResult:  # fmt: skip
        """Train a few steps under each configuration and compare.

        Real steps of AdamW over recorded inputs: the same initial weights, the same micro-batches in each step, gradients
        clipped. Without a list: the plain Actor, ZeRO 2, fsdp2, and fsdp2 with tensor parallelism, with a ring, with both. Each
        is judged at every step by loss, gradient norm and update norm, against the plain Actor in fp32. Takes NUM_GPUS, MODEL,
        TP_SIZE, SKIP_RING and the other variables of the trainer's backend test suite; a flag wins.
        Takes as many inputs as its steps take twice, so that the loss over the same inputs says whether it falls. Exit code 1 if
        a configuration fails, diverges from the baseline, or its loss is not known to fall, or if none could run.

        Example: actordbg train-check --where "seq_len<512" --steps 20 --backend deepspeed,fsdp2 --zero-stage 2 --tp 1,2 --nproc 4

        Args:
            resume ([CHECK|last]): Continue a stopped check.
            show ([CHECK|last]): Print an existing check; run nothing.
            dry_run: Print the configurations; run nothing.
        """
        from actordbg.api.campaigns import resumed_check, shown_check, train_check
        from actordbg.config.training_options import TrainingOptions

        if show is not None:
            return shown_check(self._store, show)
        if resume is not None:
            return resumed_check(self._desk, resume, dry_run=dry_run)
        how = training if isinstance(training, TrainingOptions) else TrainingOptions(**training or {})
        return train_check(self._desk, *self._asked(where, settings, TRAINING_AXES), how, dry_run=dry_run)
