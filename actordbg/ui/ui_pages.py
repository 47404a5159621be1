"""The pages of `actordbg ui`: lists with links to the documents that commands write. Reads the store, writes nothing.

The chosen filters (facets) become a `--where`, shown with the command to type, so that a selection can be replayed in a terminal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from actordbg.base.errors import ActordbgError
from actordbg.base.foreign_text import in_html, in_shell
from actordbg.base.units import ago, human_bytes, passed_of, plural, resolve, with_handles
from actordbg.campaign.cell_outcomes import context_of
from actordbg.campaign.matrix_document import matrix_document, matrix_verdict
from actordbg.campaign.run_matrix import load as load_matrix
from actordbg.campaign.run_matrix import names as matrix_names
from actordbg.catalog import query
from actordbg.catalog.selections import verdict_of
from actordbg.catalog.where import all_of, quoted
from actordbg.document.blocks import Block, Heading, Items, Paragraph, number, seconds
from actordbg.document.page import as_html, table, toned
from actordbg.judge.comparison_document import comparison_charts
from actordbg.judge.comparison_document import document as comparison_page
from actordbg.judge.load_replays import calls_of, dropped_of, floor_of, load, report_blocks
from actordbg.judge.replay_charts import run_timeline
from actordbg.judge.replay_list import listed, shown_verdict
from actordbg.judge.sides import rests_on_others
from actordbg.judge.verdicts import selecting
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.store.layout import Store

SHOWN = 200
"""Maximum number of rows of a list; the rest are counted."""
FACETS = ("run", "rank", "role", "verdict", "triggered", "source")
Asked = Mapping[str, str]
Link = tuple[str, str]
"""A text and its target: `PART/NAME`, the address of a page below the server's token."""
_PARTS = ("store", "dumps", "replays", "matrices", "comparisons")


def store_page(store: Store) -> str:
    """Render the start page: the store's size, runs and newest replays."""
    catalog = query.open_fresh(store)
    runs = query.frequent_values(catalog, "run")
    blocks: list[Block] = [
        Heading(f"store {store.root}", 1),
        Paragraph(f"{plural(query.count_dumps(catalog), 'dump')}, {human_bytes(query.dump_bytes(catalog))}"),
    ]
    links = "".join(f"<li>{_a(*_to('runs', str(name)))}: {in_html(plural(count, 'dump'))}</li>" for name, count in runs)
    below = f"<h2>Runs</h2><ul>{links}</ul><h2>Newest replays</h2>{_replays(listed(catalog)[:10])}"
    return _page(blocks, below)


def dumps_page(store: Store, facets: Asked) -> str:
    """Render the dumps that the facets select, with the command that selects them."""
    where = condition_of(facets)
    catalog = query.open_fresh(store, where)
    count = query.count_dumps(catalog, where)
    rows = query.select_dumps(catalog, where, order="newest", limit=SHOWN)
    words = ["actordbg", "replay", *(["--where", where] if where else ["--all"])]
    summary = f"{plural(count, 'dump')}" + (f", the newest {SHOWN} below" if count > SHOWN else "")
    blocks: list[Block] = [Heading("dumps", 1), Paragraph(summary), Items((f"command: {' '.join(map(in_shell, words))}",))]
    columns = ("dump", "run", "rank", "B", "S", "tokens", "role", "verdict", "trigger", "bytes", "when")
    cells = [
        (_to("dumps", row.dump_id), _to("runs", row.run), str(row.rank), str(row.batch_size), f"{row.seq_len:,}",
         f"{row.tokens:,}", row.role or "-", verdict_of(row) or "not replayed", row.triggered or "-", human_bytes(row.bytes),
         ago(row.timestamp))
        for row in rows
    ]  # fmt: skip
    return _page(blocks, _form(catalog, facets) + linked_table(columns, cells, {"rank", "B", "S", "tokens", "bytes"}))


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
            _to("replays", result.replay_id),
            result.status,
            seconds(result.forward_s),
            human_bytes(result.peak_memory_bytes),
            result.signature or "-",
        )
        for result in query.results_of_dump(catalog, row.dump_id)[:SHOWN]
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
    rows = calls_of(catalog, run)
    chart = run_timeline(run, rows, dropped_of(store, run))
    blocks: list[Block] = [Heading(f"run {run}", 1), Paragraph(plural(len(rows), "dump")), *([chart] if chart else [])]
    return _page(blocks, f"<p>{_a('its dumps', 'dumps/?' + urlencode({'run': run}))}</p>")


def replays_page(store: Store) -> str:
    """Render all replays, newest first: this user's with their handles, then those of other commands and users."""
    replays = listed(query.open_fresh(store), everything=True)
    own, others = ([replay for replay in replays if bool(replay["handle"]) is mine] for mine in (True, False))
    below = _replays(own[:SHOWN])
    if others:
        title = "Truths, variations, matrix cells and other users' replays"
        below += f"<h2>{in_html(title)}</h2><p>{in_html(_counted(others))}</p>{_replays(others[:SHOWN])}"
    return _page([Heading("replays", 1), Paragraph(_counted(own))], below)


def _counted(replays: Sequence[Mapping[str, Any]]) -> str:
    return plural(len(replays), "replay") + (f", the newest {SHOWN} below" if len(replays) > SHOWN else "")


def replay_report(store: Store, replay_id: str) -> str:
    """Render the page that `actordbg report` writes."""
    return _page(report_blocks(store, load(store, [replay_id])))


def matrices_page(store: Store) -> str:
    """Render all matrices, newest first."""
    cells: list[list[str | Link]] = []
    for name in reversed(matrix_names(store)[-SHOWN:]):
        with contextlib.suppress(ActordbgError):  # a damaged file: `actordbg store fsck` names it
            record = load_matrix(store, name)
            about = (record.status, str(len(record.dump_ids)), record.command or "-")
            others = "theirs: " * bool(context_of(store, record).whose)
            cells.append([others + matrix_verdict(record).word, _to("matrices", name), *about])
    return _page([Heading("matrices", 1)], linked_table(("verdict", "matrix", "status", "dumps", "command"), cells, {"dumps"}))


def matrix_page(store: Store, matrix_id: str) -> str:
    """Render the page that `actordbg matrix --show` writes."""
    record = load_matrix(store, matrix_id)
    return _page(matrix_document(record, context_of(store, record)))


def comparisons_page(store: Store) -> str:
    """Render the newest comparison of each pair."""
    rows = query.comparisons(store)[:SHOWN]
    cells = [
        (_to("comparisons", row.comparison_id), _to("replays", row.replay_id),
         f"{row.against_kind} {row.against}",
         "theirs: " * bool(rests_on_others(store, row)) + row.verdict, f"{row.compared}/{row.dumps}", number(row.max_abs, 3))
        for row in rows
    ]  # fmt: skip
    columns = ("comparison", "A", "B", "verdict", "dumps", "largest, nats")
    return _page([Heading("comparisons", 1)], linked_table(columns, cells, {"dumps", "largest, nats"}))


def comparison_report(store: Store, comparison_id: str) -> str:
    """Render the page that `actordbg compare` writes."""
    ids = [row.comparison_id for row in query.comparisons(store)]
    record = ComparisonRecord.from_file(
        store.comparisons / f"{resolve(comparison_id, ids, 'comparison', made_by='compare')}.json"
    )
    charts = comparison_charts(store, record, floor=floor_of(store, record))
    return _page(comparison_page(record, 50, charts, rests_on_others(store, record)))


def error_page(error: ActordbgError) -> str:
    """Render an error and its hint."""
    return _page([Heading("not shown", 1), Paragraph(error.message), Paragraph(error.hint or "")])


def linked_table(columns: Sequence[str], rows: Iterable[Sequence[str | Link]], figures: Collection[str] = ()) -> str:
    """Render a table whose cells may link to other pages. figures: columns of numbers."""
    cells = ([toned(cell) if isinstance(cell, str) else _a(*cell) for cell in row] for row in rows)
    return table(columns, cells, set(columns) - set(figures))


def _replays(replays: Iterable[Mapping[str, Any]]) -> str:
    """Render a table of replays."""
    cells: list[list[str | Link]] = [
        [shown_verdict(replay), _to("replays", replay["replay_id"], replay["handle"]), passed_of(replay),
         number(replay["max_abs"], 2), ago(replay["created_at"]), replay["configuration"]]
        for replay in replays
    ]  # fmt: skip
    return linked_table(("verdict", "replay", "passed", "max diff", "when", "configuration"), cells, {"max diff"})


def _to(part: str, name: str, shown: str | None = None) -> Link:
    return shown or name, f"{part}/{quote(name, safe='')}"


def _form(catalog: query.Catalog, facets: Asked) -> str:
    fields = ""
    for name in FACETS:
        known = [("-", "none") if value is None else (str(value),) * 2 for value, _ in query.frequent_values(catalog, name)]
        options = "".join(
            f'<option value="{in_html(value)}"{" selected" * (value == facets.get(name, ""))}>{in_html(text)}</option>'
            for value, text in (("", "any"), *known)
        )
        fields += f'<label>{in_html(name)}<select name="{name}">{options}</select></label>'
    for name, says in (("shortest", "S from"), ("longest", "S to"), ("where", "and")):
        fields += f'<label>{says}<input name="{name}" value="{in_html(facets.get(name, ""))}" autocomplete="off"></label>'
    return f'<form class="facets" method="get" action="../dumps/">{fields}<button class="copy" type="submit">show</button></form>'


def _page(blocks: Sequence[Block], below: str = "") -> str:
    bar = "".join(f"<span>{_a(part, f'{part}/')}</span>" for part in _PARTS)
    return as_html(blocks, above=f'<nav class="bar" aria-label="Store">{bar}</nav>', below=below, forms=True)


def _a(text: str, address: str) -> str:
    return f'<a href="../{in_html(address)}">{in_html(with_handles(text))}</a>'


def _quoted(name: str, text: str) -> str:
    """Write `text` as a value of a facet: ranks unchanged, everything else, such as a run named 2026, in quotes."""
    return text if name == "rank" and text.isdecimal() and len(text) < 10 else quoted(text)
