"""The pages of `actordbg ui`: lists with links to the documents that commands write. Reads the store, writes nothing.

The chosen filters (facets) become a `--where`, shown with the command to type, so that a selection can be replayed in a terminal.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from actordbg.base.errors import ActordbgError, NothingToDo, UsageError
from actordbg.base.foreign_text import in_html, in_shell
from actordbg.base.owners import is_own, marked, name_of
from actordbg.base.units import ago, human_bytes, passed_of, plural, resolve
from actordbg.campaign.cell_outcomes import context_of
from actordbg.campaign.matrix_document import matrix_document, matrix_verdict
from actordbg.campaign.run_matrix import load as load_matrix, names as matrix_names
from actordbg.catalog import query
from actordbg.catalog.selections import frequent_values, verdict_of
from actordbg.catalog.tables import CALLER
from actordbg.catalog.where import all_of, quoted
from actordbg.compare.sides import GOLDEN, RECORDED, rests_on_others
from actordbg.document.blocks import Block, Heading, Items, Paragraph, number, seconds
from actordbg.document.page import as_html
from actordbg.judge.comparison_document import comparison_charts, document as comparison_page, word_of
from actordbg.judge.load_replays import calls_of, dropped_of, load, report_blocks
from actordbg.judge.replay_charts import run_timeline
from actordbg.judge.replay_list import listed
from actordbg.judge.verdicts import selecting
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.records.finding import BROKEN
from actordbg.store.layout import Store, read_with_owner
from actordbg.ui.ui_lists import (
    NOTHING,
    SHOWN,
    Asked,
    Link,
    Row,
    anchor,
    facets_form,
    first_of,
    headings,
    link_to,
    linked_table,
    listing,
    pager,
    sort_of,
)

FACETS = ("run", "rank", "role", "verdict", "broken", "triggered", "source")
_PARTS = ("store", "dumps", "replays", "matrices", "comparisons")


def store_page(store: Store) -> str:
    """Render the start page: the store's size, runs and newest replays."""
    catalog = query.open_fresh(store)
    runs = frequent_values(catalog, "run")
    blocks: list[Block] = [
        Heading(f"store {store.root}", 1),
        Paragraph(f"{plural(query.count_dumps(catalog), 'dump')}, {human_bytes(query.dump_bytes(catalog))}"),
    ]
    links = "".join(f"<li>{anchor(*link_to('runs', str(name)))}: {in_html(plural(count, 'dump'))}</li>" for name, count in runs)
    newest = listing("replays", NOTHING, replay_rows(catalog)[:10], (), {"max diff, nats"})
    below = f"<h2>Runs</h2><ul>{links}</ul><h2>Newest replays</h2>{newest}"
    return _page(blocks, f"{below}<h2>Newest comparisons</h2>{_comparisons(store, NOTHING, 10)}")


COLUMNS = {
    "dump": "dump_id", "run": "run", "rank": "rank", "B": "batch_size", "S": "seq_len", "tokens": "tokens", "role": "role",
    "verdict": "verdict", "broken": "broken", "trigger": "triggered", "bytes": "bytes", "when": "timestamp",
}  # fmt: skip
"""The columns of the list of dumps, and those of `--where` that they are sorted by."""


def dumps_page(store: Store, asked: Asked = NOTHING) -> str:
    """Render the dumps that the facets select, with the command that selects them."""
    where = condition_of(asked)
    catalog = query.open_fresh(store, where)
    count = query.count_dumps(catalog, where)
    sign, named = sort_of(asked, COLUMNS)
    order = sign + COLUMNS[named] if named else "newest"
    rows = query.select_dumps(catalog, where, order=order, limit=SHOWN, offset=first_of(asked))
    words = ["actordbg", "replay", *(["--where", where] if where else ["--all"])]
    command = Items((f"command: {' '.join(map(in_shell, words))}",))
    blocks: list[Block] = [Heading("dumps", 1), Paragraph(plural(count, "dump")), command]
    cells = [
        (link_to("dumps", row.dump_id), link_to("runs", row.run), str(row.rank), str(row.batch_size), f"{row.seq_len:,}",
         f"{row.tokens:,}", row.role or "-", verdict_of(row) or "not replayed", row.broken or "-", row.triggered or "-",
         human_bytes(row.bytes), ago(row.timestamp))
        for row in rows
    ]  # fmt: skip
    known = {name: [value for value, _ in frequent_values(catalog, name)] for name in FACETS}
    typed = (("shortest", "S at least"), ("longest", "S at most"), ("where", "condition (SQL)"))
    table_of = linked_table(COLUMNS, cells, {"rank", "B", "S", "tokens", "bytes"}, headings("dumps", asked, COLUMNS))
    return _page(blocks, facets_form("dumps", asked, known, typed) + table_of + pager("dumps", asked, count))


def condition_of(facets: Asked) -> str | None:
    """Build the `--where` of the chosen facets; None without any."""
    parts = [f"{name} = {_quoted(name, value)}" for name in FACETS if (value := facets.get(name, "").strip()) not in ("", "-")]
    parts += [f"{name} is null" for name in FACETS if facets.get(name) == "-"]
    for name, sign in (("shortest", ">="), ("longest", "<=")):
        if (value := facets.get(name, "").strip()).isdecimal():
            parts.append(f"seq_len {sign} {value}")
    more = facets.get("where", "").strip()
    parts += [all_of([more]) if parts else more] if more else []
    return " and ".join(parts) or None


def dump_page(store: Store, dump_id: str) -> str:
    """Render a dump: its catalog row, and its result in every replay."""
    catalog = query.open_fresh(store)
    row = query.get_dump(catalog, dump_id)
    fields = {name: value for name, value in vars(row).items() if value not in (None, "", {}) and name != "dump_id"}
    facts = (f"{name.replace('_', ' ')}: {_fact(name, value)}" for name, value in fields.items())
    command = f"command: actordbg replay --where {selecting([row.dump_id])}"
    blocks: list[Block] = [Heading(f"dump {row.dump_id}", 1), Items((command, *facts)), Heading("Replayed", 2)]
    cells = [
        (
            link_to("replays", result.replay_id),
            result.status,
            seconds(result.forward_s),
            human_bytes(result.peak_memory_bytes),
            result.signature or "-",
        )
        for result in query.results_of_dump(catalog, row.dump_id)
    ]
    return _page(blocks, linked_table(("replay", "status", "fwd s", "peak mem", "failure"), cells, {"fwd s", "peak mem"}))


def _fact(name: str, value: Any) -> str:
    """Format a column's value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("bytes", "peak_memory"):
        return human_bytes(value)
    if isinstance(value, float):
        return f"{seconds(value)} s" if name.endswith("_s") else number(value, 4)
    return f"{value:,}" if isinstance(value, int) else str(value)


def run_page(store: Store, run: str) -> str:
    """Render a training run over time, with a link to its dumps."""
    catalog = query.open_fresh(store)
    if not (rows := calls_of(catalog, run)):
        raise NothingToDo(f"no run named {run} has dumps in this store", hint="choose a run on the store's page")
    chart = run_timeline(run, rows, dropped_of(store, run))
    blocks: list[Block] = [Heading(f"run {run}", 1), Paragraph(plural(len(rows), "dump")), *([chart] if chart else [])]
    return _page(blocks, f"<p>{anchor('its dumps', 'dumps/?' + urlencode({'run': run}))}</p>")


def replays_page(store: Store, asked: Asked = NOTHING) -> str:
    """Render replays, newest first: this user's with their handles, or all; with the pages of checks, and newest comparisons."""
    catalog = query.open_fresh(store)
    rows = replay_rows(catalog, everything=bool(asked.get("all")))
    every = f"all {plural(len(query.list_replays(catalog)), 'replay')}: truths, variations, matrix cells, other users' too"
    more = "" if asked.get("all") else anchor(every, "replays/?all=1")
    below = listing("replays", asked, rows, ("verdict", "broken", "run", "by"), {"max diff, nats"}) + f"<p>{more}</p>"
    return _page([Heading("replays", 1)], f"{below}<h2>Newest comparisons</h2>{_comparisons(store, {}, 10)}")


_BEFORE = re.compile(r"actordbg (?:--store \S+ )?")
"""What stands before a command's name."""


def replay_rows(catalog: query.Catalog, *, everything: bool = False) -> list[Row]:
    """Return the replays of a list. by: the command that ran them. broken, run: the rules that fail, and whose dumps ran."""
    runs, broken = (defaultdict[str, set[str]](set) for _ in range(2))
    of_runs = f"SELECT DISTINCT x.replay_id, k.run FROM result AS x JOIN dump AS d ON d.dump_id = x.dump_id {CALLER}"
    for facts, sql in ((runs, of_runs), (broken, f"SELECT DISTINCT replay_id, law FROM law_answer WHERE verdict = '{BROKEN}'")):
        for replay_id, value in query.answers(catalog, sql):
            facts[replay_id].add(value)
    checks = set(check_names(catalog.store))
    rows = []
    for replay in listed(catalog, everything=everything):
        name, words = replay["replay_id"], _BEFORE.sub("", str(replay["command"] or "-")).split()
        rows.append(
            Row(
                {
                    "verdict": marked(replay["verdict"], replay["whose"]),
                    "replay": link_to("replays", name, replay["handle"]),
                    "by": link_to("checks", name, "check") if name in checks else words[0],
                    "passed": passed_of(replay),
                    "broken": ", ".join(sorted(broken[name])) or "-",
                    "max diff, nats": number(replay["max_abs"], 2),
                    "run": ", ".join(sorted(runs[name])) or "-",
                    "when": ago(replay["created_at"]),
                    "configuration": replay["configuration"],
                },
                {"replay": name, "passed": replay["passed"], "max diff, nats": replay["max_abs"], "when": replay["created_at"]},
                {"broken": broken[name], "run": runs[name]},
            )
        )
    return rows


def check_names(store: Store) -> list[str]:
    """Return the replays whose check has written its page."""
    return [path.stem.removeprefix("check-") for path in store.reports.glob("check-*.html")]


def check_page(store: Store, replay_id: str) -> str:
    """Return the page that a check of this user has written."""
    name = resolve(replay_id, check_names(store), "check", made_by="check")
    data, owner = read_with_owner(store.reports / f"check-{name}.html")
    if not is_own(owner):
        raise UsageError(f"{name_of(owner)} wrote this page", hint=f"actordbg report {name}")
    return data.decode()


def replay_report(store: Store, replay_id: str) -> str:
    """Render the page that `actordbg report` writes."""
    return _page(report_blocks(store, load(store, [replay_id])))


def matrices_page(store: Store, asked: Asked = NOTHING) -> str:
    """Render all matrices, newest first."""
    rows = []
    for name in reversed(matrix_names(store)):
        with contextlib.suppress(ActordbgError):  # a damaged file: `actordbg store fsck` names it
            record = load_matrix(store, name)
            word, whose = matrix_verdict(record).word, context_of(store, record).whose
            rows.append(
                Row(
                    {
                        "verdict": marked(word, whose),
                        "matrix": link_to("matrices", name),
                        "status": record.status,
                        "dumps": str(len(record.dump_ids)),
                        "command": record.command or "-",
                    },
                    {"dumps": len(record.dump_ids)},
                )
            )
    return _page([Heading("matrices", 1)], listing("matrices", asked, rows, ("verdict", "status"), {"dumps"}))


def matrix_page(store: Store, matrix_id: str) -> str:
    """Render the page that `actordbg matrix --show` writes."""
    record = load_matrix(store, matrix_id)
    return _page(matrix_document(record, context_of(store, record)))


def comparisons_page(store: Store, asked: Asked = NOTHING) -> str:
    """Render the newest comparison of each pair."""
    return _page([Heading("comparisons", 1)], _comparisons(store, asked))


def _comparisons(store: Store, asked: Asked, most: int | None = None) -> str:
    rows = []
    for each in query.comparisons(store)[:most]:
        kind = RECORDED if each.against_kind == GOLDEN else each.against_kind
        cells: dict[str, str | Link] = {
            "verdict": marked(word_of(each.verdict, each.against_kind), rests_on_others(store, each)),
            "comparison": link_to("comparisons", each.comparison_id),
            "A": link_to("replays", each.replay_id),
            "B": kind if kind == RECORDED else f"{kind} {each.against}",
            "dumps": f"{each.compared}/{each.dumps}",
            "largest, nats": number(each.max_abs, 3),
        }
        rows.append(Row(cells, {"dumps": each.compared, "largest, nats": each.max_abs}, {"B": {kind}}))
    facets = () if most else ("verdict", "B")
    return listing("comparisons", asked, rows, facets, {"dumps", "largest, nats"})


def comparison_report(store: Store, comparison_id: str) -> str:
    """Render the page that `actordbg compare` writes."""
    record = ComparisonRecord.named(store.comparisons, comparison_id, made_by="compare")
    charts = comparison_charts(store, record)
    return _page(comparison_page(record, 50, charts, rests_on_others(store, record)))


def error_page(error: ActordbgError) -> str:
    """Render an error and its hint."""
    return _page([Heading("not shown", 1), Paragraph(error.message), Paragraph(error.hint or "")])


def _page(blocks: Sequence[Block], below: str = "") -> str:
    bar = "".join(f"<span>{anchor(part, f'{part}/')}</span>" for part in _PARTS)
    return as_html(blocks, above=f'<nav class="bar" aria-label="Store">{bar}</nav>', below=below, forms=True)


def _quoted(name: str, text: str) -> str:
    """Write `text` as a value of a facet: ranks unchanged, everything else, such as a run named 2026, in quotes."""
    return text if name == "rank" and text.isdecimal() and len(text) < 10 else quoted(text)
