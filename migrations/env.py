"""Alembic's environment. A new catalog is made from `head.sql`, and a test holds the two equal.

A changed table: change `actordbg/catalog/columns.py` or `lab_columns.py`, give `HEAD` in `actordbg/catalog/migrate.py` the next
number, and run `make docs`, which writes `head.sql`. Catalogs of revisions that no release had are made anew from the files.

After a release, its revision stays: copy its `head.sql` beside `versions/beginning.py`, which then executes the copy and has that
revision's number as a text. Add a script to `versions/` whose `down_revision` it is; `migrate.upgraded` runs that. Where it needs
values from the files, it empties `scanned_folder` and `read_file`, so that the next index reads them again.
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
