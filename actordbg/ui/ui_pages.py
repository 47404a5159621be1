"""The pages of `actordbg ui`: lists with links around the documents that commands write. Reads the store, writes nothing.

Facets are turned into one `--where`, which is shown with the command to type, so that what was found here can be done there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from actordbg.base.errors import ActordbgError
from actordbg.base.foreign_text import in_html, in_shell
from actordbg.base.units import ago, human_bytes, plural, resolve
from actordbg.campaign.cell_outcomes import context_of
from actordbg.campaign.matrix_document import matrix_document
from actordbg.campaign.run_matrix import load as load_matrix
from actordbg.catalog import query
from actordbg.catalog.where import all_of, quoted
from actordbg.config.as_ran import as_ran, label
from actordbg.document.blocks import Block, Heading, Items, Paragraph, number, seconds
from actordbg.document.page import as_html, table, toned
from actordbg.judge.comparison_document import comparison_charts
from actordbg.judge.comparison_document import document as comparison_page
from actordbg.judge.load_replays import calls_of, dropped_of, floor_of, load, report_blocks
from actordbg.judge.replay_charts import run_timeline
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.store.layout import Store

SHOWN = 200
"""Rows of a list; the rest is counted."""
FACETS = ("run", "rank", "role", "status", "triggered", "source")
Asked = Mapping[str, str]
Link = tuple[str, str]
"""A text and where it leads: `PART/NAME`, as every page's own address below the server's token."""
_PARTS = ("store", "dumps", "replays", "matrices", "comparisons")


def store_page(store: Store) -> str:
    """What the store has, the newest first."""
    catalog = query.open_fresh(store)
    runs = query.frequent_values(catalog, "run")
    own, others = _own_and_others(catalog)
    blocks: list[Block] = [
        Heading(f"store {store.root}", 1),
        Paragraph(f"{plural(query.count_dumps(catalog), 'dump')}, {human_bytes(query.dump_bytes(catalog))}"),
    ]
    links = "".join(f"<li>{_a(*_to('runs', str(name)))}: {in_html(plural(count, 'dump'))}</li>" for name, count in runs)
    below = f"<h2>Runs</h2><ul>{links}</ul><h2>Newest replays</h2>{_replays((own or others)[:10], bool(own))}"
    return _page(blocks, below)


def dumps_page(store: Store, facets: Asked) -> str:
    """Dumps by facets, with the condition that they come to."""
    where = condition_of(facets)
    catalog = query.open_fresh(store, where)
    count = query.count_dumps(catalog, where)
    rows = query.select_dumps(catalog, where, order="newest", limit=SHOWN)
    words = ["actordbg", "replay", *(["--where", where] if where else ["--all"])]
    summary = f"{plural(count, 'dump')}" + (f", the newest {SHOWN} of them below" if count > SHOWN else "")
    blocks: list[Block] = [Heading("dumps", 1), Paragraph(summary), Items((f"command: {' '.join(map(in_shell, words))}",))]
    columns = ("dump", "run", "rank", "B", "S", "tokens", "role", "status", "kept for", "bytes", "when")
    cells = [
        (_to("dumps", row.dump_id), _to("runs", row.run), str(row.rank), str(row.batch_size), f"{row.seq_len:,}",
         f"{row.tokens:,}", row.role or "-", row.status or "not replayed", row.triggered or "-", human_bytes(row.bytes),
         ago(row.timestamp))
        for row in rows
    ]  # fmt: skip
    return _page(blocks, _form(catalog, facets) + linked_table(columns, cells, {"rank", "B", "S", "tokens", "bytes"}))


def condition_of(facets: Asked) -> str | None:
    """The `--where` of what was chosen; None where nothing was."""
    parts = [f"{name} = {_quoted(value)}" for name in FACETS if (value := facets.get(name, "").strip()) and value != "-"]
    parts += [f"{name} is null" for name in FACETS if facets.get(name) == "-"]
    for name, sign in (("shortest", ">="), ("longest", "<=")):
        if (value := facets.get(name, "").strip()).isdecimal():
            parts.append(f"seq_len {sign} {value}")
    more = facets.get("where", "").strip()
    parts += [all_of([more]) if parts else more] if more else []
    return " and ".join(parts) or None


def dump_page(store: Store, dump_id: str) -> str:
    """One dump: what its row says, and what every replay made of it."""
    catalog = query.open_fresh(store)
    row = query.get_dump(catalog, dump_id)
    fields = {name: value for name, value in vars(row).items() if value not in (None, "", {}) and name != "dump_id"}
    facts = (f"{name.replace('_', ' ')}: {_fact(name, value)}" for name, value in fields.items())
    command = f"command: actordbg replay --where {in_shell(f'dump_id={_quoted(row.dump_id)}')}"
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
    """A column's value for a reader."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("bytes", "peak_memory"):
        return human_bytes(value)
    if isinstance(value, float):
        return f"{seconds(value)} s" if name.endswith("_s") else number(value, 4)
    return f"{value:,}" if isinstance(value, int) else str(value)


def run_page(store: Store, run: str) -> str:
    """A training run over time, and its longest dumps."""
    catalog = query.open_fresh(store)
    rows = calls_of(catalog, run)
    chart = run_timeline(run, rows, dropped_of(store, run))
    blocks: list[Block] = [Heading(f"run {run}", 1), Paragraph(plural(len(rows), "dump")), *([chart] if chart else [])]
    return _page(blocks, f"<p>{_a('its dumps', 'dumps/?' + urlencode({'run': run}))}</p>")


def replays_page(store: Store) -> str:
    """All replays, the newest first: one's own with their handles, and behind them what other commands or users ran."""
    own, others = _own_and_others(query.open_fresh(store))
    below = _replays(own[:SHOWN], True)
    if others:
        title = "Truths, variations, matrix cells and other users' replays"
        below += f"<h2>{in_html(title)}</h2><p>{in_html(_counted(others))}</p>{_replays(others[:SHOWN], False)}"
    return _page([Heading("replays", 1), Paragraph(_counted(own))], below)


def _counted(rows: Sequence[query.ReplayRow]) -> str:
    return plural(len(rows), "replay") + (f", the newest {SHOWN} of them below" if len(rows) > SHOWN else "")


def _own_and_others(catalog: query.Catalog) -> tuple[list[query.ReplayRow], list[query.ReplayRow]]:
    own = query.list_own_replays(catalog)
    known = {row.replay_id for row in own}
    return own, [row for row in query.list_replays(catalog) if row.replay_id not in known]


def replay_report(store: Store, replay_id: str) -> str:
    """The page that `actordbg report` writes."""
    return _page(report_blocks(store, load(store, [replay_id])))


def matrices_page(store: Store) -> str:
    """All matrices, the newest first."""
    rows = query.table_rows(store, "matrix", f"1 ORDER BY created_at DESC LIMIT {SHOWN}")
    cells = [(_to("matrices", row.matrix_id), row.status, str(row.inputs), row.command or "-") for row in rows]
    return _page([Heading("matrices", 1)], linked_table(("matrix", "status", "dumps", "command"), cells, {"dumps"}))


def matrix_page(store: Store, matrix_id: str) -> str:
    """The page that `actordbg matrix --show` writes."""
    record = load_matrix(store, matrix_id)
    return _page(matrix_document(record, context_of(store, record)))


def comparisons_page(store: Store) -> str:
    """The newest comparison of each pair."""
    rows = query.comparisons(store)[:SHOWN]
    cells = [
        (_to("comparisons", row.comparison_id), _to("replays", row.replay_id),
         f"{row.against_kind} {row.against}", row.verdict, f"{row.compared}/{row.dumps}", number(row.max_abs, 3))
        for row in rows
    ]  # fmt: skip
    columns = ("comparison", "A", "B", "verdict", "dumps", "largest, nats")
    return _page([Heading("comparisons", 1)], linked_table(columns, cells, {"dumps", "largest, nats"}))


def comparison_report(store: Store, comparison_id: str) -> str:
    """The page that `actordbg compare` writes."""
    ids = [row.comparison_id for row in query.comparisons(store)]
    record = ComparisonRecord.from_file(
        store.comparisons / f"{resolve(comparison_id, ids, 'comparison', made_by='compare')}.json"
    )
    return _page(comparison_page(record, 50, comparison_charts(store, record, floor=floor_of(store, record))))


def error_page(error: ActordbgError) -> str:
    """What went wrong, and what to do next."""
    return _page([Heading("not shown", 1), Paragraph(error.message), Paragraph(error.hint or "")])


def linked_table(columns: Sequence[str], rows: Iterable[Sequence[str | Link]], figures: Collection[str] = ()) -> str:
    """A table whose cells may lead to other pages. figures: columns of numbers."""
    cells = ([toned(cell) if isinstance(cell, str) else _a(*cell) for cell in row] for row in rows)
    return table(columns, cells, set(columns) - set(figures))


def _replays(rows: Iterable[query.ReplayRow], handles: bool) -> str:
    """A table of replays; with the handles of one's own, which are all of them from the newest on."""
    cells: list[list[str | Link]] = [
        [*([f"@{number}"] if handles else []), _to("replays", row.replay_id), ago(row.created_at), row.status,
         f"{row.passed}/{row.inputs}", label(as_ran(row.config, row.resolved))]
        for number, row in enumerate(rows, 1)
    ]  # fmt: skip
    columns = (*(["handle"] if handles else []), "replay", "when", "status", "passed", "configuration")
    return linked_table(columns, cells, {"passed"})


def _to(part: str, name: str) -> Link:
    return name, f"{part}/{quote(name, safe='')}"


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
    return f'<a href="../{in_html(address)}">{in_html(text)}</a>'


def _quoted(text: str) -> str:
    """`text` as a value of a condition: a number as it is, everything else between quotes."""
    return text if text.isdecimal() and len(text) < 10 else quoted(text)
