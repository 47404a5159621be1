"""The page of the catalog: its tables with a comment for each column, and what `--where` knows. Read from the code."""

from __future__ import annotations

import inspect

from sqlalchemy import Column, Table

from actordbg.catalog import migrate
from actordbg.catalog.columns import COLUMNS, FUNCTIONS, OPERATORS
from actordbg.catalog.sqlmodels import table_of
from actordbg.catalog.tables import TABLES

INTRODUCTION = f"""\
# The catalog

`store/catalog.db` is a SQLite database (revision {migrate.HEAD}) that is derived from the store's files: `actordbg index` brings
it up to date, `actordbg index --rebuild` makes it again, and every command that reads dumps indexes what is new by itself.
The first index and `--rebuild` put a whole catalog in its place at once: one that is interrupted leaves what was there, and the
next one begins again.
Look at it with `sqlite3 -readonly store/catalog.db`.

The time of a dump is a number, microseconds since 1970, UTC; all other times are text, ISO 8601 in UTC with microseconds.
What the calls of a process share stands once, in `caller`. So a look at dumps joins two tables:

```sql
SELECT dump_id, strftime('%Y-%m-%d %H:%M:%f', timestamp / 1e6, 'unixepoch') AS at, run, rank, role, seq_len
FROM dump JOIN caller ON caller.id = dump.caller ORDER BY timestamp DESC LIMIT 20;
```
"""
WHERE = """\
## What `--where` knows

`--where` takes one SQL condition over the columns below, on every command that selects dumps. Columns of the *last result*
are those of a dump's newest result in whatever replay, and null for a dump that was never replayed.

```text
seq_len > 4096 and rank = 0
timestamp > now() - '2h' and role = 'policy'
status = 'failed' and signature like '%FakeTensor%'
run in ('ppo-1', 'ppo-2') and padding * 1.0 / (batch_size * seq_len) > 0.5
```
"""


def catalog_markdown() -> str:
    """The whole page."""
    lines = [INTRODUCTION, WHERE, "| Column | Type | Meaning |", "|---|---|---|"]
    lines += [f"| `{column.name}` | {column.kind} | {cell(column.doc)} |" for column in COLUMNS.values()]
    lines += ["", f"Operators: `{' '.join(OPERATORS.split())}`", "", "Functions:", ""]
    lines += [f"- `{text.partition(': ')[0]}`: {text.partition(': ')[2]}" for text in FUNCTIONS.values()]
    for row in TABLES:
        lines += ["", f"## {row.TABLE}", "", inspect.cleandoc(row.__doc__ or ""), "", *columns_of(table_of(row))]
    return "\n".join(lines).rstrip() + "\n"


def columns_of(table: Table) -> list[str]:
    """A table's columns with their comments, and its indexes."""
    lines = ["| Column | Type | Meaning |", "|---|---|---|"]
    lines += [f"| `{column.name}` | {kind(column)} | {cell(column.comment or '')}{target(column)} |" for column in table.columns]
    indexed = [", ".join(f"`{column.name}`" for column in index.columns) for index in sorted(table.indexes, key=lambda i: i.name)]
    return [*lines, "", "Indexed by: " + "; ".join(indexed) + "."] if indexed else lines


def kind(column: Column) -> str:
    """INTEGER, and whether it may be NULL."""
    return f"{column.type}{'' if column.nullable else ', not null'}{', primary key' if column.primary_key else ''}"


def target(column: Column) -> str:
    """The column that a foreign key points to."""
    return "".join(f" (`{key.target_fullname}`)" for key in column.foreign_keys)


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
