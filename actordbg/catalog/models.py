"""The catalog's tables as SQLModel classes, for `Session` and `select`, with what SQLite has besides columns: its indexes.

Columns are declared in `columns` and `lab_columns`; here each table becomes a class of SQLModel. `make docs` writes the schema of
a new catalog (`head.sql`) from these. Commands use plain sqlite3 and never import this module.

Example::

    with Session(create_engine("sqlite:///store/catalog.db")) as session:
        rows = session.exec(select(DumpAndCaller).where(DumpAndCaller.rank == 0, DumpAndCaller.seq_len > 4096)).all()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import JSON, Index, MetaData, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from actordbg.catalog import columns, lab_columns
from actordbg.catalog.columns import RowType


def _model(row: type[RowType], rules: Sequence[Any] = (), **more: Any) -> type[RowType]:
    """Make the SQLModel class of a table. mypy sees the row's class, whose attributes have the same types.

    rules: its indexes. more: attributes of the class.
    """
    made: dict[str, Any] = {
        "__tablename__": row.table,
        "__table_args__": tuple(rules),
        "__doc__": row.__doc__,
        "__module__": __name__,
        **more,
    }
    texts, kinds = row.meanings(), made.setdefault("__annotations__", {})
    for name, column in row.columns.items():
        stored: dict[str, Any] = {"sa_type": JSON, "nullable": True} if column.type is dict else {}
        if column.references:
            stored["foreign_key"], stored["ondelete"] = column.references
        kinds[name] = column.type | None if column.optional else column.type
        made[name] = Field(
            None if column.key and column.optional else ..., primary_key=column.key, description=texts[name], **stored
        )
    metaclass: Any = type(SQLModel)
    model: type[RowType] = metaclass(row.__name__, (SQLModel,), made, table=True, protected_namespaces=())
    return model


Caller = _model(columns.Caller, [Index("ix_caller_rank_run", "rank", "run")])
Dump = _model(columns.Dump, [
    Index("ix_dump_timestamp", "timestamp"),
    Index("ix_dump_caller_timestamp", "caller", "timestamp"),
    Index("ix_dump_caller_seq_len", "caller", "seq_len"),
    Index("ix_dump_seq_len", "seq_len", "timestamp"),
    Index("ix_dump_tokens", "tokens"),
    Index("ix_dump_step", "step"),
    Index("ix_dump_pack", "pack", sqlite_where=text("pack IS NOT NULL")),
    Index("ix_dump_last_result", "last_result", sqlite_where=text("last_result IS NOT NULL")),
    Index("ix_dump_verdict", "verdict", sqlite_where=text("verdict IS NOT NULL")),
])  # fmt: skip
DumpAndCaller = _model(columns.DumpAndCaller, metadata=MetaData())
"""A view, so it is left out of `SQLModel.metadata`, which alembic compares with the tables."""
Replay: Any = _model(lab_columns.Replay)
"""mypy does not know its columns of settings."""
Result = _model(lab_columns.Result, [
    UniqueConstraint("replay_id", "dump_id", name="uq_result"),
    Index("ix_result_dump", "dump_id", "finished_at"),
    Index("ix_result_status", "status"),
])  # fmt: skip
ComparisonRun = _model(lab_columns.ComparisonRun)
Comparison = _model(lab_columns.Comparison, [Index("ix_comparison_dump", "dump_id", "created_at")])
LawAnswer = _model(lab_columns.LawAnswer, [
    Index("ix_law_answer_dump", "dump_id", "verdict"),
    Index("ix_law_answer_identity", "replay_id", "verdict", sqlite_where=text("law = 'identity'")),
])  # fmt: skip
LintAnswer = _model(lab_columns.LintAnswer, [Index("ix_lint_answer_dump", "dump_id", "created_at")])
DamagedFile = _model(lab_columns.DamagedFile)
ScannedFolder = _model(lab_columns.ScannedFolder)
ReadFile = _model(lab_columns.ReadFile)
Unjudged = _model(lab_columns.Unjudged)

TABLES: tuple[Any, ...] = (
    Caller, Dump, Replay, Result, ComparisonRun, Comparison, LawAnswer, LintAnswer, DamagedFile, ScannedFolder, ReadFile,
    Unjudged,
)  # fmt: skip
"""Every table, in the order of its page and of `head.sql`."""
