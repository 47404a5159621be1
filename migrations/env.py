"""Alembic's environment: runs the migrations on the connection that `actordbg.catalog.migrate` hands over.

The connection is already in an immediate transaction, and `transactional_ddl` keeps alembic from committing after each
statement, so an upgrade happens whole or not at all.

A new revision: change `actordbg/catalog/tables.py`, copy the newest file of `versions/`, give it the next number, write
the change as SQL with a comment beside each new column, and set `HEAD` in `actordbg/catalog/migrate.py`. The tests
compare the outcome with the models, column by column and comment by comment.
"""

from __future__ import annotations

from alembic import context

from actordbg.catalog.sqlmodels import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
