"""All pictures of a replay, in the order in which a reader asks: is it right, how fast is it, what did the workers do."""

from __future__ import annotations

from actordbg.base.errors import ActordbgError
from actordbg.catalog import query
from actordbg.catalog.tables import ComparisonRow
from actordbg.formats.comparison_record import ComparisonRecord
from actordbg.formats.noise_record import NoiseRecord
from actordbg.report.blocks import Chart
from actordbg.report.comparison_charts import comparison_charts
from actordbg.report.replay_charts import replay_charts
from actordbg.report.report_model import ReplayData
from actordbg.report.run_timeline import calls_of, dropped_of, run_timeline
from actordbg.report.token_charts import Texts
from actordbg.store.layout import Store


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


def _compared(store: Store, row: ComparisonRow, texts: Texts | None) -> list[Chart]:
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
