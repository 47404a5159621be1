"""Pictures of one replay: its workers over time, time and memory by length, where the seconds went, and the laws. Pure.

Each function gives a Chart, or None where nothing was measured that it could show. Warm-up is drawn apart from steady inputs, as
`report/arithmetic.py` tells them apart. Of more inputs than a picture can hold, what did not pass is kept and the rest thinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from actordbg.base.units import plural
from actordbg.formats.law_answer import BROKEN, KEPT, NONDETERMINISTIC, NOT_CHECKED, WITHIN_ROUNDING, answers_of
from actordbg.formats.replay_record import CRASHED, FAILED, HUNG, PASSED, STOPPED, ReplayInput, ResultRecord
from actordbg.report.arithmetic import median, warm_up_of
from actordbg.report.blocks import Chart, Grid, number, seconds
from actordbg.report.report_model import ReplayData
from actordbg.report.specifications import (
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
    rows = _points(data, lambda one: None if one.forward_s is None else one.forward_s + (one.backward_s or 0.0))
    what = "forward and backward" if any(one.backward_s is not None for one in data.results) else "forward"
    return _scatter(rows, f"Time by length: {what}", f"{what}, s", "s", "Seconds of each input by seq_len, padding included.")


def memory_by_length(data: ReplayData) -> Chart | None:
    """Peak memory of each input, by its length."""
    rows = _points(data, lambda one: None if one.peak_memory_bytes is None else one.peak_memory_bytes / MIB)
    return _scatter(rows, "Memory by length", "peak, MiB", "MiB", "Peak memory of the worker while an input ran, by seq_len.")


def _points(data: ReplayData, value_of: Callable[[ResultRecord], float | None]) -> Values:
    by_id = {one.dump_id: one for one in data.spec.inputs}
    first, compiling = warm_up_of(data.results)
    rows: Values = []
    for one in data.results:
        value, given = value_of(one), by_id.get(one.dump_id)
        if value is not None and given is not None:
            kind = _kind(one, first, compiling)
            rows.append({"n": given.seq_len, "v": _rounded(value), "k": kind, "d": one.dump_id, "b": given.batch_size})
    return rows


def _kind(one: ResultRecord, first: set[str], compiling: set[str]) -> str:
    if one.status in _BAD:
        return "did not pass"
    return "first input" if one.dump_id in first else "compiled" if one.dump_id in compiling else "steady"


def _scatter(rows: Values, title: str, axis: str, unit: str, says: str) -> Chart | None:
    if not rows:
        return None
    kept = kept_marks(rows, lambda one: one["k"] == "did not pass")
    kinds = {name: colour for name, colour in _KINDS.items() if any(one["k"] == name for one in kept)}
    shown = hints(("d", "dump"), ("n", "seq_len"), ("b", "batch size"), ("v", axis), ("k", "input"))
    points = layer("point", look={"size": 42, "opacity": 0.75, "filled": True}, tooltip=shown)
    spec = layered(kept, points, x=quantity("n", "seq_len"), y=quantity("v", axis), color=coloured("k", None, kinds))
    steady = [one["v"] for one in rows if one["k"] == "steady"]
    middle = f" Median of {plural(len(steady), 'steady input')}: {number(median(steady))} {unit}." if steady else ""
    return Chart(title, says + middle, spec, _by_n(rows, unit), left_out(kept, rows), half=True)


def _by_n(rows: Values, unit: str) -> Grid:
    lengths = sorted({one["n"] for one in rows})
    some = thinned(lengths, 24)
    table = []
    for n in some:
        at = [one["v"] for one in rows if one["n"] == n]
        table.append((f"{n:,}", str(len(at)), number(min(at)), number(median(at)), number(max(at))))
    return Grid(("seq_len", "inputs", f"least {unit}", f"median {unit}", f"most {unit}"), tuple(table))


def timeline(data: ReplayData) -> Chart | None:
    """Each worker's inputs over time: a lane for each worker, a bar for each input."""
    timed = [(one, *_moments(one)) for one in data.results if one.started_at and one.finished_at]
    if not timed:
        return None
    by_id = {one.dump_id: one for one in data.spec.inputs}
    start = min(begin for _, begin, _ in timed)
    rows = [_bar(one, begin - start, end - start, by_id.get(one.dump_id)) for one, begin, end in timed]
    rows.sort(key=lambda one: (one["w"], one["a"]))
    lanes = list(dict.fromkeys(one["w"] for one in rows))
    shown = [one for one in rows if one["w"] in lanes[:_MOST_LANES]]
    kept = kept_marks(shown, lambda one: one["s"] != PASSED)
    for one in kept:
        one["l"] = f"worker {one['w']}"
    length = {"field": "n", "type": "quantitative", "title": "seq_len"}
    lane, since = names("l", None), quantity("a", "seconds since the first input")
    layers = [layer("bar", look={"opacity": 0.9}, x=since, x2={"field": "z"}, y=lane, color=length, tooltip=_SHOWN)]
    if bad := [one for one in kept if one["s"] != PASSED]:
        at = {"field": "z", "type": "quantitative"}
        colours = coloured("s", None, dict.fromkeys((one["s"] for one in bad), BAD))
        layers.append(layer("point", bad, {"size": 90, "filled": True}, x=at, y=lane, color=colours, tooltip=_SHOWN))
    spec = layered(kept, *layers, height=lanes_high(min(len(lanes), _MOST_LANES)))
    return Chart("The replay over time", _said(rows, lanes), spec, _lanes(rows, lanes), left_out(kept, rows))


_SHOWN = hints(("d", "dump"), ("n", "seq_len"), ("t", "seconds"), ("s", "status"))


def _bar(one: ResultRecord, begin: float, end: float, given: ReplayInput | None) -> dict[str, Any]:
    return {"w": one.worker, "a": round(begin, 3), "z": round(end, 3), "t": round(end - begin, 3), "s": one.status,
            "n": given.seq_len if given else 0, "d": one.dump_id}  # fmt: skip


def _said(rows: Values, lanes: Sequence[int]) -> str:
    end = max(one["z"] for one in rows)
    busy = {lane: sum(one["t"] for one in rows if one["w"] == lane) for lane in lanes}
    text = f"{plural(len(lanes), 'worker')}, {plural(len(rows), 'input')} in {seconds(end)} s."
    text += " A bar is an input, its colour is its length."
    if len(lanes) > 1:
        slowest = max(busy, key=lambda lane: busy[lane])
        text += f" Busiest: worker {slowest}, {seconds(busy[slowest])} s."
    return text


def _lanes(rows: Values, lanes: Sequence[int]) -> Grid:
    table = []
    for lane in lanes:
        mine = [one for one in rows if one["w"] == lane]
        bad = sum(one["s"] != PASSED for one in mine)
        table.append(
            (f"worker {lane}", str(len(mine)), seconds(sum(o["t"] for o in mine)), seconds(max(o["t"] for o in mine)), str(bad))
        )
    return Grid(("worker", "inputs", "busy s", "longest s", "did not pass"), tuple(table), frozenset({"worker"}))


def spent(data: ReplayData) -> Chart | None:
    """Where the seconds of the workers went."""
    first, compiling = warm_up_of(data.results)
    parts = {
        "reading inputs": sum(one.load_s or 0.0 for one in data.results),
        "forward of first inputs": _forward(one for one in data.results if one.dump_id in first),
        "forward that compiled": _forward(one for one in data.results if one.dump_id in compiling),
        "steady forward": _forward(one for one in data.results if one.dump_id not in first | compiling),
        "backward": sum(one.backward_s or 0.0 for one in data.results),
    }
    if isinstance(build := data.resolved.get("load_s"), int | float):
        parts = {"building the Actor": float(build)} | parts
    rows: Values = [{"p": name, "s": _rounded(value)} for name, value in parts.items() if value]
    if not rows:
        return None
    total = sum(one["s"] for one in rows)
    bars = layer("bar", look={"color": ACCENT}, tooltip=hints(("p", "part"), ("s", "seconds")))
    spec = layered(rows, bars, height=lanes_high(len(rows)), x=quantity("s", "seconds of all workers"), y=names("p", None))
    largest = max(rows, key=lambda one: one["s"])
    says = f"{seconds(total)} s in all workers; {largest['s'] / total:.0%} of it: {largest['p']}."
    table = Grid(
        ("part", "s", "share"), tuple((o["p"], seconds(o["s"]), f"{o['s'] / total:.1%}") for o in rows), frozenset({"part"})
    )
    return Chart("Where the seconds went", says, spec, table)


def _forward(results: Iterable[ResultRecord]) -> float:
    return sum(one.forward_s or 0.0 for one in results)


def laws(data: ReplayData) -> Chart | None:
    """What each law said of each input that was asked."""
    by_id = {one.dump_id: one for one in data.spec.inputs}
    rows: Values = []
    for number_of, one in enumerate(result for result in data.results if answers_of(result.extra)):
        length = by_id[one.dump_id].seq_len if one.dump_id in by_id else 0
        rows += [
            {
                "i": f"{number_of + 1}",
                "l": answer.law,
                "v": answer.verdict,
                "d": one.dump_id,
                "n": length,
                "w": answer.words[:160],
            }
            for answer in answers_of(one.extra)
        ]
    if not rows:
        return None
    kept = rows[:MOST_MARKS]
    shown = hints(("l", "law"), ("v", "verdict"), ("d", "dump"), ("n", "seq_len"), ("w", "why"))
    kinds = {name: colour for name, colour in _LAWS.items() if any(one["v"] == name for one in kept)}
    cells = layer("rect", look={"opacity": 0.9}, tooltip=shown)
    high = lanes_high(len({one["l"] for one in kept}))
    spec = layered(kept, cells, height=high, x=names("i", "input"), y=names("l", None), color=coloured("v", None, kinds))
    bad = sum(one["v"] in (BROKEN, NONDETERMINISTIC) for one in rows)
    says = f"{plural(len(rows), 'answer')}, {bad} of them against a law; what must not matter was changed in each input."
    table = Grid(("law", *kinds), tuple((law, *(str(sum(o["l"] == law and o["v"] == v for o in rows)) for v in kinds))
                 for law in dict.fromkeys(one["l"] for one in rows)), frozenset({"law"}))  # fmt: skip
    return Chart("Laws", says, spec, table, left_out(kept, rows))


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


def _moments(one: ResultRecord) -> tuple[float, float]:
    return moment(one.started_at), moment(one.finished_at)


def moment(text: str) -> float:
    """Seconds since 1970 of a timestamp of a record; 0 for what is none."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
