"""A list of `actordbg ui`: filtered by facets, sorted by a column's heading, paged; by links and one form, without a script."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode

from actordbg.base.foreign_text import in_html
from actordbg.base.units import with_handles
from actordbg.document.page import table, toned

SHOWN = 100
"""Rows of a page of a list."""

Asked = Mapping[str, str]
"""What an address asks of a list: its facets, `sort` (a column, "-" before it: the largest first) and `page`, from 1."""
NOTHING: Asked = MappingProxyType({})
Link = tuple[str, str]
"""A text and its target: `PART/NAME`, the address of a page below the server's token."""


@dataclass(frozen=True)
class Row:
    """A row of a list: its cells by column. keys: what it is sorted by, where that is not the cell's text. values: those of a
    facet that has several."""

    cells: Mapping[str, str | Link]
    keys: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Collection[str]] = field(default_factory=dict)

    def key(self, column: str) -> Any:
        """Return what the row is sorted by."""
        return self.keys[column] if column in self.keys else _text(self.cells[column])

    def has(self, facet: str) -> Collection[str]:
        """Return the row's values of a facet."""
        return self.values.get(facet, (_text(self.cells[facet]),))


def _text(cell: str | Link) -> str:
    return cell if isinstance(cell, str) else cell[0]


def listing(part: str, asked: Asked, rows: Sequence[Row], facets: Sequence[str], figures: Collection[str]) -> str:
    """Render a page of a list: the facets, the rows that they select in the address's order, links to other pages."""
    if not rows:
        return "<p>none yet</p>"
    columns = list(rows[0].cells)
    known = {facet: sorted({value for row in rows for value in row.has(facet)}) for facet in facets}
    chosen = {facet: value for facet in facets if (value := asked.get(facet, ""))}
    kept = [row for row in rows if all(value in row.has(facet) for facet, value in chosen.items())]
    sign, named = sort_of(asked, columns)
    if named:
        measured = [row for row in kept if row.key(named) is not None]
        measured.sort(key=lambda row: row.key(named), reverse=bool(sign))
        kept = measured + [row for row in kept if row.key(named) is None]
    first = first_of(asked)
    cells = [list(row.cells.values()) for row in kept[first : first + SHOWN]]
    form = facets_form(part, asked, known) if facets else ""
    heads = headings(part, asked, columns) if facets else {}
    return form + linked_table(columns, cells, figures, heads) + pager(part, asked, len(kept))


def sort_of(asked: Asked, columns: Collection[str]) -> tuple[str, str]:
    """Return "-" for the largest first, else "", and the column to sort by, "" for none."""
    named = asked.get("sort", "")
    sign = "-" if named.startswith("-") else ""
    return sign, named.removeprefix("-") if named.removeprefix("-") in columns else ""


def first_of(asked: Asked) -> int:
    """Return the index of the first row of the page that the address names."""
    page = asked.get("page", "1")
    return (int(page) - 1) * SHOWN if page.isdecimal() and 0 < len(page) < 10 and int(page) else 0


def _again(part: str, asked: Asked, **changed: str) -> str:
    """Return the address of the same list with something changed."""
    return f"{part}/?{urlencode({name: value for name, value in {**asked, **changed}.items() if value})}"


def headings(part: str, asked: Asked, columns: Iterable[str]) -> dict[str, str]:
    """Return headings that sort by their column: the smallest first, and then the largest."""
    now = asked.get("sort", "")
    arrows = {now.removeprefix("-"): " ▼" if now.startswith("-") else " ▲"}
    following = {name: f"-{name}" if name == now else name for name in columns}
    return {name: anchor(name, _again(part, asked, sort=way, page="")) + arrows.get(name, "") for name, way in following.items()}


def pager(part: str, asked: Asked, count: int) -> str:
    """Return which rows are shown, with links to the pages before and behind."""
    first = first_of(asked)
    if count <= SHOWN and not first:
        return ""
    number_of = first // SHOWN + 1
    before = anchor("previous", _again(part, asked, page=str(number_of - 1))) if first else ""
    behind = anchor("next", _again(part, asked, page=str(number_of + 1))) if first + SHOWN < count else ""
    return f"<p>{first + 1:,} to {min(first + SHOWN, count):,} of {count:,} {before} {behind}</p>"


def linked_table(
    columns: Iterable[str], rows: Iterable[Sequence[str | Link]], figures: Collection[str], heads: Asked = NOTHING
) -> str:
    """Render a table whose cells may link to other pages. figures: columns of numbers. heads: headings that are HTML."""
    cells = ([toned(cell) if isinstance(cell, str) else anchor(*cell) for cell in row] for row in rows)
    return table(columns, cells, set(columns) - set(figures), heads)


def link_to(part: str, name: str, shown: str | None = None) -> Link:
    return shown or name, f"{part}/{quote(name, safe='')}"


def facets_form(part: str, asked: Asked, known: Mapping[str, Iterable[Any]], typed: Iterable[tuple[str, str]] = ()) -> str:
    """Render the facets of a list. known: values of each; None: no value. typed: names and labels of what is written."""
    fields = ""
    for name, values in known.items():
        shown = [("", "any"), *(("-", "none") if value is None else (str(value), str(value)) for value in values)]
        options = ""
        for value, text in shown:
            chosen = " selected" if value == asked.get(name, "") else ""
            options += f'<option value="{in_html(value)}"{chosen}>{in_html(text)}</option>'
        fields += f'<label>{in_html(name)}<select name="{name}">{options}</select></label>'
    for name, says in typed:
        fields += f'<label>{says}<input name="{name}" value="{in_html(asked.get(name, ""))}" autocomplete="off"></label>'
    for name in ("sort", "all"):
        fields += f'<input type="hidden" name="{name}" value="{in_html(asked[name])}">' if asked.get(name) else ""
    button = '<button class="copy" type="submit">show</button>'
    return f'<form class="facets" method="get" action="../{part}/">{fields}{button}</form>'


def anchor(text: str, address: str) -> str:
    return f'<a href="../{in_html(address)}">{in_html(with_handles(text))}</a>'
