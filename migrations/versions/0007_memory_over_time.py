"""What `actordbg memory watch` found.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

STATEMENTS: tuple[str, ...] = (
    """
    CREATE TABLE memory_watch (
        memory_id VARCHAR NOT NULL,  -- its files under memory/
        created_at VARCHAR NOT NULL,  -- UTC time of its start
        finished_at VARCHAR,  -- UTC time of its end; NULL while it goes on, or if it was killed
        kind VARCHAR NOT NULL,  -- replay, run, processes or ray
        watched VARCHAR NOT NULL,  -- the replay, the run, the pids or the cluster
        replay_id VARCHAR,  -- the replay; NULL for anything else
        interval_s FLOAT NOT NULL,  -- seconds between two rounds
        processes INTEGER NOT NULL,  -- processes that were sampled
        samples INTEGER NOT NULL,  -- samples of all of them
        steps INTEGER NOT NULL,  -- steps of the process that had most; 0 where nobody counted
        peak_rss INTEGER,  -- largest RSS of a process
        peak_uss INTEGER,  -- largest USS of a process
        peak_cuda_used INTEGER,  -- largest CUDA memory in use of a process
        growth_per_step FLOAT,  -- fastest growth of a process that grows, by step; NULL if none does
        growth_per_second FLOAT,  -- the same where steps are not known
        notes VARCHAR,  -- what could not be sampled, and why
        PRIMARY KEY (memory_id)
    )
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.get_bind().exec_driver_sql(statement)
