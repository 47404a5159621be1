"""What the lab finds out: comparisons with a verdict, noise floors, matrices; and the settings of distributed replays.

Revision ID: 0003
Revises: 0002

Everything here is derived from the store's files: the tables that change are made anew, and what was read of replays is
forgotten, so that the next refresh reads it all again.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

STATEMENTS: tuple[str, ...] = (
    "DROP TABLE comparison",
    "DELETE FROM result",
    "DROP TABLE replay",
    "DROP TABLE read_file",
    """
    CREATE TABLE read_file (
        path VARCHAR NOT NULL,  -- path below the store
        replay_id VARCHAR NOT NULL,  -- its replay; empty for a file of the lab
        size INTEGER NOT NULL,  -- its size when it was read
        mtime_ns INTEGER NOT NULL,  -- its modification time when it was read; -1 if too fresh to rely on
        "offset" INTEGER NOT NULL,  -- bytes read so far: up to the last whole line
        PRIMARY KEY (path)
    )
    """,
    """
    CREATE TABLE replay (
        replay_id VARCHAR NOT NULL,  -- unique name of the replay: its folder under replays/
        created_at VARCHAR NOT NULL,  -- UTC time of its start
        finished_at VARCHAR,  -- UTC time of its end; NULL while it runs, or if it was killed
        status VARCHAR NOT NULL,  -- complete, interrupted, failed, or unfinished
        inputs INTEGER NOT NULL,  -- dumps that it was to replay
        selection VARCHAR,  -- the --where expression that selected them
        ordering VARCHAR,  -- their order: time, length or shuffled
        command VARCHAR,  -- the command line
        model VARCHAR,  -- model: tiny, a path or a hub name
        backend VARCHAR,  -- plain, deepspeed, ...
        dtype VARCHAR,  -- bf16, fp16 or fp32
        attn VARCHAR,  -- attention: flash_attention_2, sdpa or eager
        packing INTEGER,  -- whether samples were packed (1 yes, 0 no)
        compile INTEGER,  -- whether torch.compile was on (1 yes, 0 no)
        compile_backend VARCHAR,  -- what torch.compile was told to use: inductor, aot_eager or eager
        deepcompile INTEGER,  -- whether DeepSpeed's DeepCompile was on (1 yes, 0 no)
        zero_stage INTEGER,  -- ZeRO stage
        nproc INTEGER,  -- processes
        backward INTEGER,  -- whether backward ran too (1 yes, 0 no)
        num_layers INTEGER,  -- layers kept of the model; NULL for all
        temperature FLOAT,  -- temperature that logits were divided by
        seed INTEGER,  -- random seed
        timeout_s FLOAT,  -- seconds that one input might take
        keep_tensors INTEGER,  -- whether outputs were kept under tensors/ (1 yes, 0 no)
        keep_gradients INTEGER,  -- whether each parameter's gradient was kept there too (1 yes, 0 no)
        tp INTEGER,  -- ranks of a tensor-parallel group
        ring INTEGER,  -- ranks of a ring-attention group
        dist_backend VARCHAR,  -- gloo or nccl; NULL for what suits the device
        align VARCHAR,  -- which rank gets which input: same, rank or shuffle; NULL for each its share
        oracle VARCHAR,  -- dtype of the truth, fp32 or fp64; NULL for a replay that is not one
        vary VARCHAR,  -- how inputs were varied to measure noise; NULL if they were not
        config JSON,  -- the configuration as asked for
        resolved JSON,  -- the configuration as it ran, everything the workers said about it; NULL before they did
        versions JSON,  -- versions of the packages that ran it
        PRIMARY KEY (replay_id)
    )
    """,
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
        PRIMARY KEY (comparison_id)
    )
    """,
    """
    CREATE TABLE comparison (
        id INTEGER NOT NULL,  -- number of the row
        replay_id VARCHAR NOT NULL,  -- the replay
        dump_id VARCHAR NOT NULL,  -- the dump
        against VARCHAR NOT NULL,  -- golden: the run's own log-probs; golden-entropy: its entropies; else the other replay's id
        count INTEGER NOT NULL,  -- values compared
        max_abs FLOAT,  -- largest absolute difference, nats; NULL if not finite
        mean_abs FLOAT,  -- mean absolute difference, nats; NULL if not finite
        comparison_id VARCHAR,  -- its file under comparisons/; NULL if it came with the replay
        created_at VARCHAR,  -- UTC time of the comparison; NULL if it came with the replay
        verdict VARCHAR,  -- match, within-noise, mismatch or not-compared; NULL if none was asked for
        p95_abs FLOAT,  -- 95th percentile of the absolute differences, nats
        p99_abs FLOAT,  -- 99th percentile of the absolute differences, nats
        max_rel FLOAT,  -- largest relative difference
        p99_rel FLOAT,  -- 99th percentile of the relative differences
        cosine FLOAT,  -- cosine of the two vectors of log-probs
        kl_k1 FLOAT,  -- KL estimate k1, nats
        kl_k3 FLOAT,  -- KL estimate k3, nats
        clip_share FLOAT,  -- share of tokens whose ratio is outside 0.8 to 1.2
        max_ulp INTEGER,  -- largest distance in units of last place; NULL for unequal dtypes
        entropy_max_abs FLOAT,  -- largest absolute difference of an entropy, nats
        loss_abs FLOAT,  -- absolute difference of the losses
        grad_norm_rel FLOAT,  -- relative difference of the gradient norms
        gradient_cosine FLOAT,  -- cosine of the gradients of all parameters
        gradient_distance FLOAT,  -- |a - b| / |b| of the gradients of all parameters
        sequence_max_abs FLOAT,  -- largest absolute difference of a row's sum of log-probs, nats
        nonfinite INTEGER,  -- log-probs that are not finite on one side only
        reasons VARCHAR,  -- what made it a mismatch, or why it was not compared, in words
        PRIMARY KEY (id),
        FOREIGN KEY(replay_id) REFERENCES replay (replay_id) ON DELETE CASCADE
    )
    """,
    """
    CREATE UNIQUE INDEX uq_comparison_result ON comparison (replay_id, dump_id, against) WHERE comparison_id IS NULL
    """,
    """
    CREATE UNIQUE INDEX uq_comparison_file ON comparison (replay_id, dump_id, against) WHERE comparison_id IS NOT NULL
    """,
    "CREATE INDEX ix_comparison_file ON comparison (comparison_id) WHERE comparison_id IS NOT NULL",
    "CREATE INDEX ix_comparison_dump ON comparison (dump_id, created_at) WHERE comparison_id IS NOT NULL",
    """
    CREATE TABLE noise_floor (
        noise_id VARCHAR NOT NULL,  -- its file under noise/
        created_at VARCHAR NOT NULL,  -- UTC time
        replay_id VARCHAR NOT NULL,  -- the unchanged run
        label VARCHAR NOT NULL,  -- the configuration in words
        dtype VARCHAR,  -- bf16, fp16 or fp32
        inputs INTEGER NOT NULL,  -- dumps that it was measured on
        max_abs FLOAT,  -- largest movement of a log-prob, nats
        p99_abs FLOAT,  -- 99th percentile of the movements, largest over dumps, nats
        mean_abs FLOAT,  -- mean movement, largest over dumps, nats
        grad_norm_rel FLOAT,  -- largest relative movement of the gradient norm
        floor JSON,  -- every figure of the floor
        config JSON,  -- the configuration as asked for
        PRIMARY KEY (noise_id)
    )
    """,
    """
    CREATE TABLE matrix (
        matrix_id VARCHAR NOT NULL,  -- its file under matrices/
        created_at VARCHAR NOT NULL,  -- UTC time of its start
        finished_at VARCHAR,  -- UTC time of its end; NULL while it runs, or if it was killed
        status VARCHAR NOT NULL,  -- running, complete, interrupted or failed
        inputs INTEGER NOT NULL,  -- dumps that each cell replays
        loads INTEGER NOT NULL,  -- how often an Actor was built
        selection VARCHAR,  -- the --where expression that selected them
        command VARCHAR,  -- the command line
        truth_id VARCHAR,  -- the replay that computed the truth
        baseline VARCHAR,  -- the replay or matrix that cells were compared with
        axes JSON,  -- values by axis
        PRIMARY KEY (matrix_id)
    )
    """,
    """
    CREATE TABLE matrix_cell (
        matrix_id VARCHAR NOT NULL,  -- the matrix
        cell INTEGER NOT NULL,  -- its number in the matrix, from 0
        name VARCHAR NOT NULL,  -- the combination in words
        status VARCHAR NOT NULL,  -- passed, failed, unavailable or not run
        verdict VARCHAR,  -- against the truth: match, within-noise, mismatch, not-compared; NULL if not asked for
        replay_id VARCHAR,  -- its replay; NULL if nothing was started
        reason VARCHAR,  -- why it is unavailable, or was not run
        signature VARCHAR,  -- signature of the first failure
        max_abs FLOAT,  -- largest difference of a log-prob from the truth, nats
        load_s FLOAT,  -- seconds to build the Actor; 0 if another cell's was used
        regressed VARCHAR,  -- what got worse than the baseline; NULL if nothing did
        settings JSON,  -- the combination by axis
        PRIMARY KEY (matrix_id, cell),
        FOREIGN KEY(matrix_id) REFERENCES matrix (matrix_id) ON DELETE CASCADE
    )
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.get_bind().exec_driver_sql(statement)
