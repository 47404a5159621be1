"""What the laws said of a cell of a matrix, and which faults would have made it wrong.

Revision ID: 0006
Revises: 0005

Everything here is derived from the store's files. What was read of matrices is forgotten, so that the next refresh reads it all
again.
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

STATEMENTS: tuple[str, ...] = (
    "DELETE FROM read_file",
    "DROP TABLE matrix_cell",
    """
    CREATE TABLE matrix_cell (
        matrix_id VARCHAR NOT NULL,  -- the matrix
        cell INTEGER NOT NULL,  -- its number in the matrix, from 0
        name VARCHAR NOT NULL,  -- the combination in words
        status VARCHAR NOT NULL,  -- passed, failed, unavailable or not run
        verdict VARCHAR,  -- against the truth: match, within-noise, mismatch, not-compared; NULL if not asked for
        replay_id VARCHAR,  -- its replay; NULL if nothing was started
        reason VARCHAR,  -- why it is unavailable, was not run, is wrong, or was judged in part only
        signature VARCHAR,  -- signature of the first failure
        max_abs FLOAT,  -- largest difference of a log-prob from the truth, nats
        load_s FLOAT,  -- seconds to build the Actor; 0 if another cell's was used
        regressed VARCHAR,  -- what got worse than the baseline; NULL if nothing did
        settings JSON,  -- the combination by axis
        laws VARCHAR,  -- what the laws said, in a line; NULL if none was asked
        violations VARCHAR,  -- which laws are broken, and how it first showed; NULL if none is
        excludes JSON,  -- by fault, the smallest size that would have been WRONG
        PRIMARY KEY (matrix_id, cell),
        FOREIGN KEY(matrix_id) REFERENCES matrix (matrix_id) ON DELETE CASCADE
    )
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.get_bind().exec_driver_sql(statement)
