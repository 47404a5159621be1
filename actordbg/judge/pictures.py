"""All pictures of a replay, in the order in which a reader asks: is it right, how fast is it, what did the workers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import ActordbgError, CorruptDump
from actordbg.base.units import plural
from actordbg.catalog import query
from actordbg.catalog.query import DumpRow
from actordbg.document.blocks import Block, Chart, Grid, seconds
from actordbg.document.specifications import coloured, hints, layer, layered, names, quantity
from actordbg.formats.recording_reading import read_counters
from actordbg.judge.comparison_charts import comparison_charts
from actordbg.judge.load_replays import Material
from actordbg.judge.replay_charts import kept_marks, lanes_high, left_out, moment, replay_charts
from actordbg.judge.replay_document import document
from actordbg.judge.summary import SLOWEST
from actordbg.judge.token_charts import Texts
from actordbg.records.comparison_record import ComparisonRecord, NoiseRecord
from actordbg.replay.replay_data import ReplayData
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from actordbg.catalog.lab_models import ComparisonRun


def report_blocks(store: Store, material: Material, slowest: int = SLOWEST, texts: Texts | None = None) -> list[Block]:
    """The whole report on these replays, with its pictures."""
    summary = material.summary(slowest)
    charts = {one.label: pictures(store, data, texts) for one, data in zip(summary.replays, material.replays, strict=True)}
    return document(summary, charts)


def pictures(store: Store, data: ReplayData, texts: Texts | None = None) -> list[Chart]:
    """The charts of one replay, those of its newest comparison with the truth first (without one: with another replay)."""
    rows = sorted(data.comparisons, key=lambda row: row.against_kind != "truth")
    return [*(_compared(store, rows[0], texts) if rows else []), *replay_charts(data), *_runs(store, data)]


def _runs(store: Store, data: ReplayData) -> list[Chart]:
    """The training run of the first input over time; a replay of several runs has the others in `actordbg ui`."""
    try:
        run = query.get_dump(store, data.spec.inputs[0].dump_id).run
    except (IndexError, ActordbgError):
        return []  # no input, or one that was pruned
    chart = run_timeline(run, calls_of(store, run), dropped_of(store, run))
    return [chart] if chart is not None else []


def _compared(store: Store, row: ComparisonRun, texts: Texts | None) -> list[Chart]:
    try:
        record = ComparisonRecord.from_file(store.comparisons / f"{row.comparison_id}.json")
    except ActordbgError:
        return []  # the report's own words name what is damaged
    return comparison_charts(store, record, texts, floor_of(store, record))


def floor_of(store: Store, record: ComparisonRecord) -> float | None:
    """The noise floor of a log-prob that the comparison was judged with."""
    if record.noise_id is None:
        return None
    try:
        return NoiseRecord.from_file(store.noise / f"{record.noise_id}.json").floor.get("max_abs")
    except ActordbgError:
        return None


# A training run over time, from its dumps: ranks as lanes, calls as marks by length, and what was kept for a reason. Pure.
#
# A dump says when its call began. So a straggler is a lane that falls behind the others, and a gap that only one lane has.


TRIGGERS = {
    "nan": "#d1495b",
    "exception": "#8a2be2",
    "oom": "#b8860b",
    "slow": "#d99a1c",
    "logprobs": "#c2185b",
    "before": "#8d99a6",
}
_MOST_RANKS, MOST_CALLS = 64, 20_000


def run_timeline(run: str, rows: Sequence[DumpRow], dropped: Mapping[int, int] | None = None) -> Chart | None:
    """The calls of a run that were kept. dropped: by rank, calls that it counted and could not keep; when, it does not know."""
    dropped = dropped or {}
    timed = [(row, moment(row.timestamp)) for row in rows if moment(row.timestamp)]
    if not timed:
        return None
    start = min(at for _, at in timed)
    ranks = sorted({row.rank for row in rows})
    marks: list[dict[str, Any]] = [
        {"r": f"rank {row.rank}" + (f", {dropped[row.rank]} dropped" if dropped.get(row.rank) else ""), "q": row.rank,
         "a": round(at - start, 3), "n": row.seq_len, "b": row.batch_size, "o": row.role or "-", "g": row.triggered or "",
         "d": row.dump_id}
        for row, at in timed if row.rank in ranks[:_MOST_RANKS]
    ]  # fmt: skip
    marks.sort(key=lambda mark: (mark["q"], mark["a"]))
    kept = kept_marks(marks, lambda one: bool(one["g"]))
    lane, since = names("r", None), quantity("a", "seconds since the first call")
    length = {"field": "n", "type": "quantitative", "title": "seq_len"}
    shown = hints(("d", "dump"), ("n", "seq_len"), ("b", "batch size"), ("o", "role"), ("g", "kept for"))
    width = max((one["a"] for one in kept), default=1.0) / 400 or 0.01
    for one in kept:
        one["z"] = round(one["a"] + width, 3)
    layers = [layer("bar", kept, {"opacity": 0.9}, x=since, x2={"field": "z"}, y=lane, color=length, tooltip=shown)]
    if odd := [one for one in kept if one["g"]]:
        colours = coloured("g", None, {one: TRIGGERS.get(one, TRIGGERS["before"]) for one in dict.fromkeys(o["g"] for o in odd)})
        layers.append(layer("point", odd, {"size": 80, "filled": True}, x=since, y=lane, color=colours, tooltip=shown))
    spec = layered([], *layers, height=lanes_high(min(len(ranks), _MOST_RANKS)))
    lost = f" {plural(sum(dropped.values()), 'call')} dropped: counted, and not kept." if sum(dropped.values()) else ""
    says = f"{plural(len(rows), 'call')} of {plural(len(ranks), 'rank')} in {seconds(max(at for _, at in timed) - start)} s; "
    says += f"a mark is a recorded call, its colour its length. A lane that falls behind is a straggler.{lost}"
    note = left_out(kept, marks) + (f" {_MOST_RANKS} of {len(ranks)} ranks." if len(ranks) > _MOST_RANKS else "")
    return Chart(f"The run over time: {run}", says, spec, _ranks(marks), note.strip())


def calls_of(source: Store | query.Catalog, run: str) -> list[DumpRow]:
    """The recorded calls of a run, the oldest first."""
    return query.select_dumps(source, f"run = {quoted(run)}", limit=MOST_CALLS)


def dropped_of(store: Store, run: str) -> dict[int, int]:
    """How many calls each rank of a run dropped, by its published counters; one that cannot be read counts nothing."""
    found: Counter[int] = Counter()
    for path in store.counters.glob("*/[!.]*.json"):
        try:
            counted = read_counters(path)
        except CorruptDump:
            continue
        if counted["run"] == run:
            found[counted["rank"]] += sum(counted.get("dropped", {}).values())
    return dict(found)


def quoted(text: str) -> str:
    """`text` as a value of a condition."""
    return "'" + text.replace("'", "''") + "'"


def _ranks(marks: Sequence[dict[str, Any]]) -> Grid:
    rows = []
    for rank, own in groupby(marks, key=lambda mark: mark["r"]):
        mine = list(own)
        times = sorted(mark["a"] for mark in mine)
        longest = max((b - a for a, b in pairwise(times)), default=None)
        rows.append(
            (rank, str(len(mine)), seconds(times[0]), seconds(times[-1]), seconds(longest), str(sum(bool(o["g"]) for o in mine)))
        )
    return Grid(("rank", "calls", "first, s", "last, s", "longest gap, s", "kept for a reason"), tuple(rows), {"rank"})
