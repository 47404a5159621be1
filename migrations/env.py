"""Alembic's environment, for tools that know alembic: actordbg itself executes the catalog's `head.sql`, and a test holds the two
equal.

A changed table: change `actordbg/catalog/columns.py` or `lab_columns.py`, run `make docs`, which writes `head.sql`, and give
`HEAD` in `actordbg/catalog/migrate.py` the next number. Older catalogs are made anew from the store's files.
"""

from __future__ import annotations

from alembic import context

from actordbg.catalog.models import SQLModel

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SQLModel.metadata,
    transactional_ddl=True,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
