"""What the laws said of each dump in each replay.

Revision ID: 0004
Revises: 0003

Everything here is derived from the store's files. What was read of replays is forgotten, so that the next refresh reads it all
again and finds the answers.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

STATEMENTS: tuple[str, ...] = (
    "DELETE FROM read_file",
    """
    CREATE TABLE law_answer (
        replay_id VARCHAR NOT NULL,  -- the replay
        dump_id VARCHAR NOT NULL,  -- the dump
        law VARCHAR NOT NULL,  -- the law: rerun, neighbour, padding, ...
        verdict VARCHAR NOT NULL,  -- kept, within-rounding, broken, nondeterministic or not-checked
        size FLOAT,  -- largest change, nats; of a gradient relative; NULL if nothing changed
        row INTEGER,  -- row of the first change
        position INTEGER,  -- position of the first change in its row
        token INTEGER,  -- token id there
        count INTEGER,  -- values that changed
        looked_at INTEGER,  -- values that were looked at
        words VARCHAR,  -- what a broken law means, or why it was not checked
        PRIMARY KEY (replay_id, dump_id, law),
        FOREIGN KEY(replay_id) REFERENCES replay (replay_id) ON DELETE CASCADE
    )
    """,
    "CREATE INDEX ix_law_answer_dump ON law_answer (dump_id, verdict)",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.get_bind().exec_driver_sql(statement)
