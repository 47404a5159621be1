"""The beginning: all of `head.sql`, which `make docs` writes from the tables' declarations.

Revision ID: that of `head.sql`.
Revises: nothing. A catalog of an earlier revision is made anew from the store's files, since it holds nothing of its own.
"""

from __future__ import annotations

from alembic import op

from actordbg.catalog import migrate

revision = migrate.HEAD
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    for statement in migrate.SCRIPT.read_text().split(migrate.STATEMENT_END)[:-1]:
        if "alembic_version" not in statement:  # alembic's own table
            op.get_bind().exec_driver_sql(statement)
