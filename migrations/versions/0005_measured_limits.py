"""What a comparison's limits were measured with, and what its verdict excludes.

Revision ID: 0005
Revises: 0004

Everything here is derived from the store's files. What was read of them is forgotten, so that the next
refresh reads it all again.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

STATEMENTS: tuple[str, ...] = (
    "DELETE FROM read_file",
    "DROP TABLE comparison_run",
    """
    CREATE TABLE comparison_run (
        comparison_id VARCHAR NOT NULL,  -- its file under comparisons/
        created_at VARCHAR NOT NULL,  -- UTC time
        replay_id VARCHAR NOT NULL,  -- A, the replay that was judged; it may be gone
        against VARCHAR NOT NULL,  -- B: golden, or the other replay's id; it may be gone
        against_kind VARCHAR NOT NULL,  -- what B is: replay, truth or golden
        current INTEGER NOT NULL,  -- whether its dumps are in `comparison`: newest of its pair, replays there (1 yes, 0 no)
        verdict VARCHAR NOT NULL,  -- match, within-noise, mismatch or not-compared
        dumps INTEGER NOT NULL,  -- dumps of either side
        compared INTEGER NOT NULL,  -- dumps that were compared
        mismatches INTEGER NOT NULL,  -- dumps that are a mismatch
        within_noise INTEGER NOT NULL,  -- dumps that are outside the thresholds and inside the noise
        worst_dump VARCHAR,  -- the worst dump; NULL if none was compared
        max_abs FLOAT,  -- largest absolute difference of a log-prob, nats; NULL if not finite
        mean_abs FLOAT,  -- mean absolute difference over all tokens, nats; NULL if not finite
        clip_share FLOAT,  -- share of all tokens whose ratio is outside 0.8 to 1.2
        grad_norm_rel FLOAT,  -- largest relative difference of a gradient norm
        label VARCHAR,  -- A's configuration in words
        against_label VARCHAR,  -- B's configuration in words
        thresholds_from VARCHAR,  -- where the thresholds are from
        thresholds JSON,  -- the thresholds by measure
        noise_id VARCHAR,  -- the noise floor that was applied; NULL without one
        reasons VARCHAR,  -- what was said about the whole, in words
        rounding_id VARCHAR,  -- the replay whose rounding set the limits; NULL for flat ones
        excludes JSON,  -- by fault, the smallest size that would have been a mismatch
        PRIMARY KEY (comparison_id)
    )
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.get_bind().exec_driver_sql(statement)
