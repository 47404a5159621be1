"""Is a cell that passed also right, and has it become worse? Each is compared with the truth, and with a baseline.

A cell that finished with wrong numbers is the most dangerous one of a table, because it looks green. So every passed cell is
compared with the truth for its inputs, unless that is switched off. If nothing could be compared, the cell is not green.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from actordbg.base.errors import ActordbgError, MachineFault, StoreProblem, UsageError
from actordbg.campaign import matrix_files as matrices
from actordbg.judge.comparison_document import flat_where_it_matters
from actordbg.judge.summary import summarise
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED
from actordbg.records.journal import read_results
from actordbg.records.matrix_record import FAILED, UNAVAILABLE, MatrixCell, MatrixRecord
from actordbg.records.replay_record import PASSED as INPUT_PASSED
from actordbg.records.replay_record import ResultRecord
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

SHOWN = 3
"""How many dumps a regression names."""


def judged(store: Store, cell: MatrixCell, truth_dtype: str, power: bool = False, **heard: Any) -> tuple[MatrixCell, str | None]:
    """A passed cell with its verdict against the truth in `truth_dtype`, and the truth's replay. A missing truth is run now.

    power: plant faults, to see which would be noticed. `heard`: what `run_replay` takes beside the specification. A truth that
    cannot be computed leaves the cell `not-compared`, with the reason.
    """
    from actordbg.judge.comparing import compare, save
    from actordbg.judge.find_truth import ensure_rounding, ensure_truth

    assert cell.replay_id is not None
    try:
        truth = ensure_truth(store, cell.replay_id, dtype=truth_dtype, **heard)
        rounding = ensure_rounding(store, cell.replay_id, planted=power, **heard)
        record = compare(store, cell.replay_id, truth, rounding=rounding)
    except MachineFault:
        raise
    except ActordbgError as problem:
        return replace(cell, verdict=NOT_COMPARED, reason=f"no truth to compare with: {problem.message}"), None
    save(store, record)
    why = "; ".join(record.reasons) or next(("; ".join(dump.reasons) for dump in record.dumps if dump.reasons), "")
    if record.good:
        flat = ["what rounding does to these inputs, so the limits are flat"] if flat_where_it_matters(record) else []
        unjudged = [f"not judged against the truth: {said}" for said in (*flat, *record.unjudged)]
        why = "; ".join(filter(None, (cell.reason, *unjudged)))
    apart = [dump.log_probs.max_abs for dump in record.dumps if dump.log_probs and dump.log_probs.max_abs is not None]
    return replace(
        cell,
        verdict=record.verdict,
        comparison_id=record.comparison_id,
        max_abs=max(apart, default=None),
        excludes=record.excludes,
        reason=why,
    ), truth


@dataclass(frozen=True)
class Baseline:
    """What cells are compared with: one replay for all cells, or the cell of a matrix with the same configuration.

    slower: a cell regressed if its forward takes more than this many times as long; None: time does not matter.
    """

    replay_id: str | None = None
    matrix: MatrixRecord | None = None
    slower: float | None = None

    @property
    def name(self) -> str:
        """Its id."""
        return self.replay_id or (self.matrix.matrix_id if self.matrix else "")

    def cell_like(self, cell: MatrixCell) -> MatrixCell | None:
        """The baseline's cell with the same configuration."""
        cells = self.matrix.cells if self.matrix else ()
        return next((one for one in cells if _configured(one) == _configured(cell)), None)

    def replay_for(self, cell: MatrixCell) -> str | None:
        """The replay to compare this cell with; None if the baseline has none."""
        like = self.cell_like(cell)
        return like.replay_id if like else self.replay_id


def _configured(cell: MatrixCell) -> dict[str, Any]:
    """A cell's configuration without what is only asked of it."""
    return {name: value for name, value in cell.config.items() if name not in ("laws", "accept")}


def open_baseline(store: Store, name: str, slower: float | None) -> Baseline:
    """Open a replay or a matrix by its id or the beginning of one; UsageError if the store has neither."""
    if name not in matrices.names(store):
        with contextlib.suppress(StoreProblem):
            return Baseline(replay_id=load_spec(store, name).replay_id, slower=slower)
    try:
        return Baseline(matrix=matrices.load(store, name), slower=slower)
    except UsageError:
        raise UsageError(
            f"--baseline {name} is neither a replay nor a matrix of this store",
            hint="`actordbg report --all` lists replays; a matrix's id is the first line of its table",
        ) from None


def require_common(store: Store, baseline: Baseline, cells: Sequence[MatrixCell], dump_ids: Sequence[str]) -> None:
    """Raise UsageError if no dump can be compared with the baseline: that must not look like "nothing regressed"."""
    replays = {baseline.replay_for(cell) for cell in cells} - {None}
    passed = {
        dump_id
        for replay_id in replays
        for dump_id, result in read_results(store.replays / str(replay_id)).items()
        if result.status == INPUT_PASSED
    }
    if not passed.intersection(dump_ids):
        what = "has no cell in common with this one" if not replays else "has passed none of these dumps"
        raise UsageError(f"--baseline {baseline.name} {what}: nothing could regress", hint="select the dumps that it replayed")


def regressions(store: Store, cell: MatrixCell, baseline: Baseline) -> tuple[str, ...]:
    """What got worse, in words; () if nothing did, or if the baseline has nothing to compare this cell with.

    A dump that passed there and does not pass here; log-probs that differ from those there by more than `compare` allows, or
    that cannot be compared with them (another temperature, another model, outputs that were not kept); a
    forward that takes more than `slower` times as long (input by input, the median over inputs that are steady in both); a
    cell of a matrix that ran there and is unavailable here, or that failed here and did not run there.
    """
    from actordbg.judge.comparing import compare

    like, theirs = baseline.cell_like(cell), baseline.replay_for(cell)
    if cell.status == UNAVAILABLE:
        return (f"it passed in the baseline, and is unavailable here: {cell.reason}",) * bool(like and like.good)
    if theirs is None:
        return ("it failed, and did not run in the baseline",) * (cell.status == FAILED)
    if cell.replay_id is None or theirs == cell.replay_id:
        return ()
    there, here = read_results(store.replays / theirs), read_results(store.replays / cell.replay_id)
    asked = {item.dump_id for item in load_spec(store, cell.replay_id).inputs}
    expected = sorted(dump_id for dump_id, result in there.items() if result.status == INPUT_PASSED and dump_id in asked)
    lost = [dump_id for dump_id in expected if dump_id not in here or here[dump_id].status != INPUT_PASSED]
    worse = [f"passed in the baseline, not here: {_named(lost)}"] if lost else []
    # equal bit for bit, and the backward too: nothing needs comparing
    if both := [dump_id for dump_id in expected if dump_id not in lost and not _alike(here[dump_id], there[dump_id])]:
        record = compare(store, cell.replay_id, theirs, only=both)
        bad = [dump.dump_id for dump in record.dumps if dump.verdict == MISMATCH]
        worse += [f"other numbers than in the baseline: {_named(bad)}"] if bad else []
        if record.verdict == NOT_COMPARED:
            why = next((reason for dump in record.dumps for reason in dump.not_compared.values()), "")
            worse.append(f"its numbers cannot be compared with the baseline's: {'; '.join(record.reasons) or why}")
    if baseline.slower is not None:
        replays = [data_of(store, load_spec(store, replay_id)) for replay_id in (theirs, cell.replay_id)]
        comparison = summarise(replays, selection="", now="").comparison
        ratio = comparison.rows[1].forward_ratio if comparison else None
        if ratio is not None and ratio > baseline.slower:
            worse.append(f"the forward takes {ratio:.2f} times as long as in the baseline")
    return tuple(worse)


def _alike(here: ResultRecord, there: ResultRecord) -> bool:
    names = ("output_digest", "loss", "grad_norm")
    return here.output_digest is not None and all(getattr(here, name) == getattr(there, name) for name in names)


def _named(dumps: Sequence[str]) -> str:
    more = f" and {len(dumps) - SHOWN} more" if len(dumps) > SHOWN else ""
    return ", ".join(dumps[:SHOWN]) + more
