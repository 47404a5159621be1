"""Pictures of one replay: its workers over time, time and memory by length, where the seconds went, and the laws. Pure.

Each function gives a Chart, or None where nothing was measured that it could show. Warm-up is drawn apart from steady inputs, as
`records/arithmetic.py` tells them apart. Of more inputs than a picture can hold, what did not pass is kept and the rest thinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from actordbg.base.units import plural
from actordbg.document.blocks import Chart, Grid, number, seconds
from actordbg.document.specifications import (
    ACCENT,
    BAD,
    GOOD,
    MOST_MARKS,
    PART,
    QUIET,
    coloured,
    hints,
    layer,
    layered,
    names,
    quantity,
    thinned,
)
from actordbg.records.arithmetic import median, warm_up_of
from actordbg.records.replay_record import (
    BROKEN,
    CRASHED,
    FAILED,
    HUNG,
    KEPT,
    NONDETERMINISTIC,
    NOT_CHECKED,
    PASSED,
    STOPPED,
    WITHIN_ROUNDING,
    answers_of,
)
from actordbg.replay.replay_data import ReplayData

Values = list[dict[str, Any]]
_KINDS = {"steady": ACCENT, "first input": PART, "compiled": "#8a6fb0", "did not pass": BAD}
_BAD = (FAILED, CRASHED, HUNG, STOPPED)
_LAWS = {KEPT: GOOD, WITHIN_ROUNDING: "#8fc7ae", NOT_CHECKED: QUIET, NONDETERMINISTIC: PART, BROKEN: BAD}
_MOST_LANES = 64
MIB = 2.0**20


def replay_charts(data: ReplayData) -> list[Chart]:
    """Every picture of a replay that there is something to show in."""
    made = (by_length(data), memory_by_length(data), timeline(data), spent(data), laws(data))
    return [chart for chart in made if chart is not None]


def by_length(data: ReplayData) -> Chart | None:
    """Seconds of forward and backward of each input, by its length."""
    what = "forward and backward" if any(result.backward_s is not None for result in data.results) else "forward"
    says = "Seconds of each input by seq_len, padding included."
    took = {
        result.dump_id: result.forward_s + (result.backward_s or 0.0) for result in data.results if result.forward_s is not None
    }
    return _scatter(data, took, f"Time by length: {what}", f"{what}, s", "s", says)


def memory_by_length(data: ReplayData) -> Chart | None:
    """Peak memory of each input, by its length."""
    peaks = {one.dump_id: one.peak_memory_bytes / MIB for one in data.results if one.peak_memory_bytes is not None}
    says = "Peak memory of the worker while an input ran, by seq_len."
    return _scatter(data, peaks, "Memory by length", "peak, MiB", "MiB", says)


def _scatter(data: ReplayData, values: Mapping[str, float], title: str, axis: str, unit: str, says: str) -> Chart | None:
    """Points of values by dump id, over the lengths of the inputs."""
    by_id = {given.dump_id: given for given in data.spec.inputs}
    first, compiling = warm_up_of(data.results)
    rows: Values = []
    for result in data.results:
        if (name := result.dump_id) in values and name in by_id:
            kind = "first input" if name in first else "compiled" if name in compiling else "steady"
            kind = "did not pass" if result.status in _BAD else kind
            given = by_id[name]
            rows.append({"n": given.seq_len, "v": _rounded(values[name]), "k": kind, "d": name, "b": given.batch_size})
    if not rows:
        return None
    kept = kept_marks(rows, lambda row: row["k"] == "did not pass")
    kinds = {name: colour for name, colour in _KINDS.items() if any(row["k"] == name for row in kept)}
    shown = hints(("d", "dump"), ("n", "seq_len"), ("b", "batch size"), ("v", axis), ("k", "input"))
    points = layer("point", look={"size": 42, "opacity": 0.75, "filled": True}, tooltip=shown)
    spec = layered(kept, points, x=quantity("n", "seq_len"), y=quantity("v", axis), color=coloured("k", None, kinds))
    steady = [row["v"] for row in rows if row["k"] == "steady"]
    says += f" Median of {plural(len(steady), 'steady input')}: {number(median(steady))} {unit}." if steady else ""
    table = []
    for length in thinned(sorted({row["n"] for row in rows}), 24):
        at = [row["v"] for row in rows if row["n"] == length]
        table.append((f"{length:,}", str(len(at)), number(min(at)), number(median(at)), number(max(at))))
    columns = ("seq_len", "inputs", f"least {unit}", f"median {unit}", f"most {unit}")
    return Chart(title, says, spec, Grid(columns, table), left_out(kept, rows), half=True)


def timeline(data: ReplayData) -> Chart | None:
    """Each worker's inputs over time: a lane for each worker, a bar for each input."""
    timed = [(one, moment(one.started_at), moment(one.finished_at)) for one in data.results if one.started_at and one.finished_at]
    if not timed:
        return None
    lengths = {given.dump_id: given.seq_len for given in data.spec.inputs}
    start = min(begin for _, begin, _ in timed)
    rows: Values = [
        {"w": one.worker, "a": round(begin - start, 3), "z": round(end - start, 3), "t": round(end - begin, 3), "s": one.status,
         "n": lengths.get(one.dump_id, 0), "d": one.dump_id}
        for one, begin, end in timed
    ]  # fmt: skip
    rows.sort(key=lambda row: (row["w"], row["a"]))
    lanes: dict[int, Values] = {}
    for row in rows:
        lanes.setdefault(row["w"], []).append(row)
    some = list(lanes)[:_MOST_LANES]
    kept = kept_marks([row for row in rows if row["w"] in some], lambda row: row["s"] != PASSED)
    for row in kept:
        row["l"] = f"worker {row['w']}"
    length = {"field": "n", "type": "quantitative", "title": "seq_len"}
    shown = hints(("d", "dump"), ("n", "seq_len"), ("t", "seconds"), ("s", "status"))
    lane, since = names("l", None), quantity("a", "seconds since the first input")
    layers = [layer("bar", look={"opacity": 0.9}, x=since, x2={"field": "z"}, y=lane, color=length, tooltip=shown)]
    if bad := [row for row in kept if row["s"] != PASSED]:
        at = {"field": "z", "type": "quantitative"}
        colours = coloured("s", None, dict.fromkeys((row["s"] for row in bad), BAD))
        layers.append(layer("point", bad, {"size": 90, "filled": True}, x=at, y=lane, color=colours, tooltip=shown))
    busy = {lane: sum(row["t"] for row in mine) for lane, mine in lanes.items()}
    says = f"{plural(len(lanes), 'worker')}, {plural(len(rows), 'input')} in {seconds(max(row['z'] for row in rows))} s."
    says += " A bar is an input, its colour is its length."
    if len(lanes) > 1:
        slowest = max(busy, key=lambda lane: busy[lane])
        says += f" Busiest: worker {slowest}, {seconds(busy[slowest])} s."
    table = [
        (f"worker {lane}", str(len(mine)), seconds(busy[lane]), seconds(max(row["t"] for row in mine)),
         str(sum(row["s"] != PASSED for row in mine)))
        for lane, mine in lanes.items()
    ]  # fmt: skip
    grid = Grid(("worker", "inputs", "busy s", "longest s", "did not pass"), table, {"worker"})
    return Chart("The replay over time", says, layered(kept, *layers, height=lanes_high(len(some))), grid, left_out(kept, rows))


def spent(data: ReplayData) -> Chart | None:
    """Where the seconds of the workers went."""
    first, compiling = warm_up_of(data.results)
    steady = {result.dump_id for result in data.results} - first - compiling
    parts = {"reading inputs": sum(result.load_s or 0.0 for result in data.results)}
    for name, ids in (("forward of first inputs", first), ("forward that compiled", compiling), ("steady forward", steady)):
        parts[name] = sum(result.forward_s or 0.0 for result in data.results if result.dump_id in ids)
    parts["backward"] = sum(result.backward_s or 0.0 for result in data.results)
    if isinstance(build := data.resolved.get("load_s"), int | float):
        parts = {"building the Actor": float(build)} | parts
    rows: Values = [{"p": name, "s": _rounded(value)} for name, value in parts.items() if value]
    if not rows:
        return None
    total = sum(row["s"] for row in rows)
    bars = layer("bar", look={"color": ACCENT}, tooltip=hints(("p", "part"), ("s", "seconds")))
    spec = layered(rows, bars, height=lanes_high(len(rows)), x=quantity("s", "seconds of all workers"), y=names("p", None))
    largest = max(rows, key=lambda row: row["s"])
    says = f"{seconds(total)} s in all workers; {largest['s'] / total:.0%} of it: {largest['p']}."
    table = Grid(("part", "s", "share"), [(row["p"], seconds(row["s"]), f"{row['s'] / total:.1%}") for row in rows], {"part"})
    return Chart("Where the seconds went", says, spec, table)


def laws(data: ReplayData) -> Chart | None:
    """What each law said of each input that was asked."""
    lengths = {given.dump_id: given.seq_len for given in data.spec.inputs}
    asked = [(result, answers) for result in data.results if (answers := answers_of(result.extra))]
    rows: Values = [
        {"i": f"{place}", "l": answer.law, "v": answer.verdict, "d": result.dump_id, "n": lengths.get(result.dump_id, 0),
         "w": answer.words[:160]}
        for place, (result, answers) in enumerate(asked, 1)
        for answer in answers
    ]  # fmt: skip
    if not rows:
        return None
    kept = rows[:MOST_MARKS]
    shown = hints(("l", "law"), ("v", "verdict"), ("d", "dump"), ("n", "seq_len"), ("w", "why"))
    kinds = {name: colour for name, colour in _LAWS.items() if any(row["v"] == name for row in kept)}
    cells = layer("rect", look={"opacity": 0.9}, tooltip=shown)
    high = lanes_high(len({row["l"] for row in kept}))
    spec = layered(kept, cells, height=high, x=names("i", "input"), y=names("l", None), color=coloured("v", None, kinds))
    counts = Counter((row["l"], row["v"]) for row in rows)
    bad = sum(count for (_, verdict), count in counts.items() if verdict in (BROKEN, NONDETERMINISTIC))
    says = f"{plural(len(rows), 'answer')}, {bad} of them against a law; what must not matter was changed in each input."
    table = [(law, *(str(counts[law, verdict]) for verdict in kinds)) for law in dict.fromkeys(row["l"] for row in rows)]
    return Chart("Laws", says, spec, Grid(("law", *kinds), table, {"law"}), left_out(kept, rows))


def kept_marks(rows: Values, special: Callable[[dict[str, Any]], bool]) -> Values:
    """What a picture can hold: everything special, and the rest thinned."""
    if len(rows) <= MOST_MARKS:
        return rows
    odd = [one for one in rows if special(one)][: MOST_MARKS // 2]
    return odd + thinned([one for one in rows if not special(one)], MOST_MARKS - len(odd))


def left_out(kept: Sequence[Any], rows: Sequence[Any]) -> str:
    return f"{len(kept):,} of {len(rows):,} are drawn, spread evenly; what did not pass first." if len(kept) < len(rows) else ""


def lanes_high(lanes: int) -> int:
    return max(60, min(640, 26 * lanes))


def moment(text: str) -> float:
    """Seconds since 1970 of a timestamp of a record; 0 for what is none."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
