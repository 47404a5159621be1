"""Draw charts of a replay (workers over time, time and memory by length) and of a training run's dumps over time.

Pure. Each function returns a Chart, or None if there is nothing to show. Warm-up is drawn separately from steady inputs, as
`records/replay_record.py` defines them. If a chart cannot hold all inputs, failed inputs are kept and the rest are thinned.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from actordbg.base.units import plural
from actordbg.catalog.columns import DumpRow
from actordbg.document.blocks import Chart, Grid, number, seconds
from actordbg.document.specifications import (
    ACCENT,
    BAD,
    MOST_MARKS,
    PART,
    Spec,
    coloured,
    hints,
    layer,
    layered,
    names,
    quantity,
    rows_high,
    thinned,
)
from actordbg.records.replay_record import (
    CRASHED,
    FAILED,
    HUNG,
    PASSED,
    STOPPED,
    median,
    warm_up_of,
)
from actordbg.replay.replay_data import ReplayData

Values = list[dict[str, Any]]
_KINDS = {"steady": ACCENT, "first input": PART, "compiled": "#8a6fb0", "did not pass": BAD}
_BAD = (FAILED, CRASHED, HUNG, STOPPED)
_MOST_LANES = 64
_NANOSECONDS = 9
"""Decimals of a second: calls of a small model follow each other within milliseconds."""
TRIGGERS = {
    "nan": "#d1495b",
    "exception": "#8a2be2",
    "oom": "#b8860b",
    "slow": "#d99a1c",
    "logprobs": "#c2185b",
    "before": "#8d99a6",
}
MIB = 2.0**20


def replay_charts(data: ReplayData) -> list[Chart]:
    """Draw the charts of a replay, without empty ones."""
    what = "forward and backward" if any(result.backward_s is not None for result in data.results) else "forward"
    took = {
        result.dump_id: result.forward_s + (result.backward_s or 0.0) for result in data.results if result.forward_s is not None
    }
    peaks = {row.dump_id: row.peak_memory_bytes / MIB for row in data.results if row.peak_memory_bytes is not None}
    made = (
        _by_length(data, took, f"Time by length: {what}", f"{what}, s", "Seconds of each input by seq_len, padding included."),
        _by_length(data, peaks, "Memory by length", "peak, MiB", "Peak memory of the worker while an input ran, by seq_len."),
        timeline(data),
    )  # fmt: skip
    return [chart for chart in made if chart is not None]


def _by_length(data: ReplayData, values: Mapping[str, float], title: str, axis: str, says: str) -> Chart | None:
    """Draw `values` (by dump id) over the lengths of the inputs."""
    unit = axis.rpartition(", ")[2]
    by_id = {given.dump_id: given for given in data.spec.inputs}
    first, compiling = warm_up_of(data.results)
    rows: Values = []
    for result in data.results:
        if (name := result.dump_id) in values and name in by_id:
            kind = "first input" if name in first else "compiled" if name in compiling else "steady"
            kind = "did not pass" if result.status in _BAD else kind
            given = by_id[name]
            rows.append({"n": given.seq_len, "v": float(f"{values[name]:.5g}"), "k": kind, "d": name, "b": given.batch_size})
    if not rows:
        return None
    kept = kept_marks(rows, lambda row: row["k"] == "did not pass")
    kinds = {name: color for name, color in _KINDS.items() if any(row["k"] == name for row in kept)}
    shown = hints(("d", "dump"), ("n", "seq_len"), ("b", "batch size"), ("v", axis), ("k", "input"))
    points = layer("point", look={"size": 42, "opacity": 0.75, "filled": True}, tooltip=shown)
    spec = layered(kept, points, x=quantity("n", "seq_len, tokens"), y=quantity("v", axis), color=coloured("k", kinds))
    steady = [row["v"] for row in rows if row["k"] == "steady"]
    says += f" Median of {plural(len(steady), 'steady input')}: {number(median(steady))} {unit}." if steady else ""
    table = []
    for length in thinned(sorted({row["n"] for row in rows}), 24):
        at = [row["v"] for row in rows if row["n"] == length]
        table.append((f"{length:,}", str(len(at)), number(min(at)), number(median(at)), number(max(at))))
    columns = ("seq_len", "inputs", f"least {unit}", f"median {unit}", f"most {unit}")
    return Chart(title, says, spec, Grid(columns, table), left_out(kept, rows), half=True)


def timeline(data: ReplayData) -> Chart | None:
    """Draw each worker's inputs over time: a line per worker, a bar per input."""
    lengths = {given.dump_id: given.seq_len for given in data.spec.inputs}
    rows: Values = [
        {"w": result.worker, "a": moment(result.started_at), "z": moment(result.finished_at), "s": result.status,
         "n": lengths.get(result.dump_id, 0), "d": result.dump_id}
        for result in data.results
        if result.started_at and result.finished_at
    ]  # fmt: skip
    if not rows:
        return None
    start = min(row["a"] for row in rows)
    for row in rows:
        row |= {"a": round(row["a"] - start, 3), "z": round(row["z"] - start, 3), "t": round(row["z"] - row["a"], 3)}
    workers = _by(rows, "w")
    some = list(workers)[:_MOST_LANES]
    kept = kept_marks([row for worker in some for row in workers[worker]], lambda row: row["s"] != PASSED)
    for row in kept:
        row["l"] = f"worker {row['w']}"
    bad = [row for row in kept if row["s"] != PASSED]
    colors = coloured("s", dict.fromkeys((row["s"] for row in bad), BAD))
    shown = hints(("d", "dump"), ("n", "seq_len"), ("t", "seconds"), ("s", "status"))
    spec = _over_time("l", "seconds since the first input", kept, shown, marked=bad, at="z", colors=colors, lines=len(some))
    busy = {worker: sum(row["t"] for row in mine) for worker, mine in workers.items()}
    says = f"{plural(len(workers), 'worker')}, {plural(len(rows), 'input')} in {seconds(max(row['z'] for row in rows))} s."
    says += " Each bar is an input, colored by length."
    if len(workers) > 1:
        slowest = max(busy, key=lambda worker: busy[worker])
        says += f" Busiest: worker {slowest}, {seconds(busy[slowest])} s."
    table = [
        (f"worker {worker}", str(len(mine)), seconds(busy[worker]), seconds(max(row["t"] for row in mine)),
         str(sum(row["s"] != PASSED for row in mine)))
        for worker, mine in workers.items()
    ]  # fmt: skip
    grid = Grid(("worker", "inputs", "busy s", "longest s", "did not pass"), table, {"worker"})
    return Chart("Replay timeline", says, spec, grid, left_out(kept, rows))


def run_timeline(run: str, rows: Sequence[DumpRow], dropped: Mapping[int, int] = MappingProxyType({})) -> Chart | None:
    """Draw the recorded calls of a run: a line per rank, a mark per call colored by length, and the triggers.

    dropped: by rank, how many calls were counted but not kept; their times are unknown. A dump records when its call began, so a
    straggler shows as a line that falls behind the others, or as a gap that no other line has.
    """
    marks: Values = [
        {"r": f"rank {row.rank}" + (f", {dropped[row.rank]} dropped" if dropped.get(row.rank) else ""), "q": row.rank,
         "a": moment(row.timestamp), "n": row.seq_len, "b": row.batch_size, "o": row.role or "-", "g": row.triggered or "",
         "d": row.dump_id}
        for row in rows if moment(row.timestamp)
    ]  # fmt: skip
    if not marks:
        return None
    start = min(mark["a"] for mark in marks)
    for mark in marks:
        mark["a"] = round(mark["a"] - start, _NANOSECONDS)
    took, ranks = max(mark["a"] for mark in marks), sorted({row.rank for row in rows})
    ranks_marks = _by([mark for mark in marks if mark["q"] in ranks[:_MOST_LANES]], "q")
    drawn = [mark for mine in ranks_marks.values() for mark in mine]
    kept = kept_marks(drawn, lambda mark: bool(mark["g"]))
    width = max((mark["a"] for mark in kept), default=1.0) / 400 or 0.01
    for mark in kept:
        mark["z"] = round(mark["a"] + width, _NANOSECONDS)
    triggered = [mark for mark in kept if mark["g"]]
    colors = coloured("g", {mark["g"]: TRIGGERS.get(mark["g"], TRIGGERS["before"]) for mark in triggered})
    shown = hints(("d", "dump"), ("n", "seq_len"), ("b", "batch size"), ("o", "role"), ("g", "trigger"))
    lines = min(len(ranks), _MOST_LANES)
    spec = _over_time("r", "seconds since the first call", kept, shown, marked=triggered, at="a", colors=colors, lines=lines)
    lost = sum(dropped.values())
    says = f"{plural(len(rows), 'call')} of {plural(len(ranks), 'rank')} in {seconds(took)} s; a mark is a recorded call,"
    says += " colored by length. A rank that lags is a straggler."
    says += f" {plural(lost, 'call')} dropped (counted, not kept)." if lost else ""
    note = left_out(kept, drawn) + (f" {_MOST_LANES} of {len(ranks)} ranks." if len(ranks) > _MOST_LANES else "")
    table = []
    for mine in ranks_marks.values():
        gaps = [later["a"] - mark["a"] for mark, later in pairwise(mine)]
        times = map(seconds, (mine[0]["a"], mine[-1]["a"], max(gaps, default=None)))
        table.append((mine[0]["r"], str(len(mine)), *times, str(sum(bool(mark["g"]) for mark in mine))))
    grid = Grid(("rank", "calls", "first, s", "last, s", "longest gap, s", "triggered"), table, {"rank"})
    return Chart(f"Run timeline: {run}", says, spec, grid, note.strip())


def _by(rows: Values, key: str) -> dict[Any, Values]:
    """Group the rows by the value of `key`, ascending; sort each group by start time."""
    groups: dict[Any, Values] = {}
    for row in sorted(rows, key=lambda row: (row[key], row["a"])):
        groups.setdefault(row[key], []).append(row)
    return groups


def _over_time(name: str, axis: str, rows: Values, shown: list[Spec], marked: Values, at: str, colors: Spec, lines: int) -> Spec:
    """Draw bars from `a` to `z`, a line per value of `name`, colored by length, with a point on `marked` rows at field `at`."""
    length: Spec = {"field": "n", "type": "quantitative", "title": "seq_len, tokens"}
    line = names(name, None)
    if len({row["n"] for row in rows}) == 1:
        length["legend"] = None  # a scale of one length has no ticks to read
    since, end = quantity("a", axis), {"field": "z"}
    layers = [layer("bar", rows, {"opacity": 0.9}, x=since, x2=end, y=line, color=length, tooltip=shown)]
    if marked:
        where = {"field": at, "type": "quantitative"}
        layers.append(layer("point", marked, {"size": 85, "filled": True}, x=where, y=line, color=colors, tooltip=shown))
    return layered([], *layers, height=rows_high(lines))


def kept_marks(rows: Values, special: Callable[[dict[str, Any]], bool]) -> Values:
    """Return as many rows as a chart can hold: the special rows first, the rest thinned."""
    if len(rows) <= MOST_MARKS:
        return rows
    chosen = [row for row in rows if special(row)][: MOST_MARKS // 2]
    return chosen + thinned([row for row in rows if not special(row)], MOST_MARKS - len(chosen))


def left_out(kept: Sequence[Any], rows: Sequence[Any]) -> str:
    return f"{len(kept):,} of {len(rows):,} shown, evenly sampled; failures first." if len(kept) < len(rows) else ""


def moment(text: str) -> float:
    """Convert a record's timestamp to seconds since 1970; 0 if it is not a timestamp."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
