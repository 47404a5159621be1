"""Read the replays of a report from the store (by id, the newest, or all), and build the report with its charts.

Inputs come from each replay's `spec.json`; results and resolved configurations come from the catalog, which is brought up to date
first. A replay with an unreadable specification is left out with a note, because the others are still worth a report. The charts
answer in order: is it right, how fast is it, what did the workers do.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actordbg.base.errors import ActordbgError, CorruptDump, NothingToDo, StoreProblem
from actordbg.base.owners import whose
from actordbg.base.units import LAST, plural
from actordbg.catalog import query
from actordbg.catalog.columns import DumpRow
from actordbg.catalog.lab_columns import Comparison, ReplayRow
from actordbg.catalog.selections import no_match
from actordbg.catalog.where import quoted
from actordbg.compare.sides import own_comparisons
from actordbg.document.blocks import Block, Chart
from actordbg.formats.dump_record import now_timestamp
from actordbg.judge.report_model import Summary
from actordbg.judge.summary import restrict, summarise
from actordbg.recorded.lint import LintFindings, with_known
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.records.journal import SPEC, read_why
from actordbg.records.replay_record import ReplaySpec
from actordbg.records.run_files import read_counters
from actordbg.replay.replay_data import ReplayData
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from actordbg.judge.token_charts import Texts

ALL = "all"
MOST_CALLS = 20_000
_WHYS = 3
"""How many reasons for uncompared dumps a report gives; the comparison has all of them."""


@dataclass(frozen=True)
class Material:
    """The replays of a report, in order. selection: how they were chosen, in words. notes: what was left out. linted: the laws of
    recorded data that their dumps break.
    """

    replays: tuple[ReplayData, ...]
    selection: str
    notes: tuple[str, ...] = ()
    linted: LintFindings = field(default_factory=LintFindings)

    def summary(self) -> Summary:
        """Summarize the replays."""
        return summarise(self.replays, selection=self.selection, now=now_timestamp(), notes=self.notes)


def load(store: Store, names: Sequence[str] = (), where: str | None = None) -> Material:
    """Load the replays that `names` select: ids, unique prefixes of ids, `last` or `all`; without names, the last replay.

    where: keep only inputs whose dumps match. Raises StoreProblem without a store, UsageError for an unknown replay, WhereError
    for a forbidden condition, NothingToDo if replays have results but the condition selects none of them. A store without
    replays gives an empty Material.
    """
    catalog = query.open_fresh(store, where)
    names = list(names) or [LAST]
    rows = _chosen(catalog, names)
    replays, notes = [], _left_open(catalog, rows) if LAST in names else []
    for row in rows:
        try:
            replays.append(_read(catalog, row))
        except StoreProblem as problem:
            notes.append(f"{row.replay_id} is left out: {problem.message}")
    if where is not None:
        selected = {row.dump_id for row in query.select_dumps(catalog, where)}
        with_results, replays = replays, [restrict(data, selected.__contains__) for data in replays]
        if any(data.results for data in with_results) and not any(data.results for data in replays):
            why = f"none of the dumps that match {where} ({len(selected):,}) has a result in these replays"
            why = why if selected else no_match(catalog, where)
            raise NothingToDo(
                f"nothing to report: {why}",
                hint="run `actordbg dump ls --where` to see what a condition selects",
            )
        notes.append(f'only inputs selected by --where "{where}"; dumps that were pruned since are left out')
    selection = plural(len(rows), "replay")
    if ALL in names:
        selection = f"the whole store, {selection}"
    elif names == [LAST]:
        selection = "the last replay"
    inputs = {result.dump_id for data in replays for result in data.results}
    return Material(tuple(replays), selection, tuple(notes), with_known(catalog, LintFindings(), inputs))


_REASONS = "comparison_id = ? AND reasons IS NOT NULL ORDER BY dump_id"


def _left_open(catalog: query.Catalog, rows: Sequence[ReplayRow]) -> list[str]:
    """Return a note if an unfinished replay is newer than all of `rows`."""
    newest = next(iter(query.list_own_replays(catalog)), None)
    if newest is None or newest.status not in query.OPEN or any(row.replay_id >= newest.replay_id for row in rows):
        return []
    return [f"{newest.replay_id} is newer and {newest.status}: `actordbg replay --resume {newest.replay_id}` continues"]


def _chosen(catalog: query.Catalog, names: Sequence[str]) -> list[ReplayRow]:
    """Return the catalog rows that the names select, each once."""
    rows: dict[str, ReplayRow] = {}
    for name in names:
        if name == ALL:
            matches = list(reversed(query.list_replays(catalog)))
        elif name == LAST:
            newest = query.newest_configuration(catalog, typed=True)
            matches = [newest] if newest is not None else query.list_replays(catalog, limit=1)
        else:
            matches = [query.get_replay(catalog, name)]
        rows |= {row.replay_id: row for row in matches if row.replay_id not in rows}
    return list(rows.values())


def _read(catalog: query.Catalog, row: ReplayRow) -> ReplayData:
    spec = ReplaySpec.from_file(catalog.store.replays / row.replay_id / SPEC)
    results = query.results_for(catalog, row.replay_id)
    compared = tuple(own_comparisons(catalog, row.replay_id))
    for comparison in compared:
        if not comparison.compared and not comparison.reasons:
            reasons = query.table_rows(catalog, Comparison, _REASONS, (comparison.comparison_id,))
            comparison.reasons = "; ".join(list(dict.fromkeys(dump.reasons for dump in reasons if dump.reasons))[:_WHYS]) or None
    why = read_why(catalog.store.replays / row.replay_id)
    owner = whose(catalog.store.replays / row.replay_id / SPEC)
    return ReplayData(spec, row.resolved or {}, row.status, tuple(results), comparisons=compared, why=why, whose=owner)


def report_blocks(store: Store, material: Material, texts: Texts | None = None) -> list[Block]:
    """Build the whole report on these replays, with its charts."""
    from actordbg.judge.replay_document import document  # an explanation loads replays without it

    summary = material.summary()
    charts = {replay.label: pictures(store, data, texts) for replay, data in zip(summary.replays, material.replays, strict=True)}
    return document(summary, charts, material.linted)


def pictures(store: Store, data: ReplayData, texts: Texts | None = None) -> list[Chart]:
    """Draw the charts of one replay.

    First those of its newest comparison with the truth (else with another replay), last the timeline of the training run of its
    first input; `actordbg ui` shows further runs.
    """
    from actordbg.judge.replay_charts import replay_charts, run_timeline

    charts: list[Chart] = []
    for row in sorted(data.comparisons, key=lambda row: row.against_kind != "truth")[:1]:
        from actordbg.judge.comparison_document import comparison_charts  # and numpy

        with contextlib.suppress(ActordbgError):  # the report's text names what is damaged
            record = ComparisonRecord.from_file(store.comparisons / f"{row.comparison_id}.json")
            charts += comparison_charts(store, record, texts)
    charts += replay_charts(data)
    with contextlib.suppress(IndexError, ActordbgError):  # no input, or one that was pruned
        run = query.get_dump(store, data.spec.inputs[0].dump_id).run
        chart = run_timeline(run, calls_of(store, run), dropped_of(store, run))
        charts += [chart] if chart is not None else []
    return charts


def calls_of(source: Store | query.Catalog, run: str) -> list[DumpRow]:
    """Return the recorded calls of a run, oldest first."""
    return query.select_dumps(source, f"run = {quoted(run)}", limit=MOST_CALLS)


def dropped_of(store: Store, run: str) -> dict[int, int]:
    """Return how many calls each rank of a run dropped, from its published counters; unreadable counters are skipped."""
    dropped: Counter[int] = Counter()
    for path in store.counters.glob("*/[!.]*.json"):
        with contextlib.suppress(CorruptDump):
            counters = read_counters(path)
            if counters["run"] == run:
                dropped[counters["rank"]] += sum(counters.get("dropped", {}).values())
    return dict(dropped)
