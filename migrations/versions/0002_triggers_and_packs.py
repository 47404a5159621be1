"""What kept a dump (triggers, pins, recovery), where it lies (packs), and goldens beyond log-probs.

Revision ID: 0002
Revises: 0001

SQLite cannot add a column with a comment of its own, and everything here is derived from the store's files: so the tables that
change are made anew, and what was read is forgotten, so that the next refresh reads it all again.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

STATEMENTS: tuple[str, ...] = (
    "DROP TABLE comparison",
    "DROP TABLE dump",
    "DROP TABLE result",
    "DELETE FROM run",
    "DELETE FROM replay",
    "DELETE FROM damaged_file",
    "DELETE FROM scanned_folder",
    "DELETE FROM read_file",
    """
    CREATE TABLE result (
        id INTEGER NOT NULL,  -- number of the row
        replay_id VARCHAR NOT NULL,  -- the replay
        dump_id VARCHAR NOT NULL,  -- the dump, which may have been pruned since
        status VARCHAR NOT NULL,  -- passed, failed, crashed or hung
        attempt INTEGER NOT NULL,  -- which start of the workers it was, from 1
        worker INTEGER NOT NULL,  -- rank of the worker
        slot INTEGER NOT NULL,  -- position in the worker's list
        started_at VARCHAR NOT NULL,  -- UTC time of its start
        finished_at VARCHAR NOT NULL,  -- UTC time of its end
        error_class VARCHAR,  -- class of the exception
        error VARCHAR,  -- message of the exception
        signature VARCHAR,  -- short name of a kind of failure, the same for every dump that fails so
        log_excerpt VARCHAR,  -- last lines of the worker's log
        load_s FLOAT,  -- seconds to read and decompress the dump
        forward_s FLOAT,  -- seconds of the forward pass
        backward_s FLOAT,  -- seconds of the backward pass
        tokens INTEGER,  -- real tokens of the input
        tokens_per_s FLOAT,  -- tokens / (forward_s + backward_s)
        peak_memory_bytes INTEGER,  -- peak memory of the worker while it ran, in bytes
        logprob_count INTEGER,  -- log-probs that the figures are over
        logprob_mean FLOAT,  -- mean log-prob, nats
        logprob_std FLOAT,  -- standard deviation of the log-probs, nats
        logprob_min FLOAT,  -- smallest log-prob, nats
        logprob_max FLOAT,  -- largest log-prob, nats
        nonfinite INTEGER,  -- log-probs that are NaN or infinite
        entropy_mean FLOAT,  -- mean entropy, nats
        loss FLOAT,  -- loss; NULL without backward
        grad_norm FLOAT,  -- gradient norm; NULL without backward
        output_digest VARCHAR,  -- SHA-256 of the log-probs' bytes in float32
        graphs INTEGER,  -- graphs that torch.compile made for this input
        graph_breaks INTEGER,  -- graph breaks for this input
        folded_ids INTEGER,  -- whether token ids were folded into a smaller vocabulary (1 yes, 0 no)
        golden_count INTEGER,  -- log-probs compared with those that the run recorded
        golden_max_abs FLOAT,  -- largest absolute difference from them, nats
        golden_mean_abs FLOAT,  -- mean absolute difference from them, nats
        golden_entropy_count INTEGER,  -- entropies compared with those that the run recorded
        golden_entropy_max_abs FLOAT,  -- largest absolute difference from them, nats
        golden_entropy_mean_abs FLOAT,  -- mean absolute difference from them, nats
        rng_match INTEGER,  -- whether the generators ended in the run's own states; NULL if not comparable (1 yes, 0 no)
        extra JSON,  -- what has no column
        PRIMARY KEY (id),
        CONSTRAINT uq_result UNIQUE (replay_id, dump_id),
        FOREIGN KEY(replay_id) REFERENCES replay (replay_id) ON DELETE CASCADE
    )
    """,
    "CREATE INDEX ix_result_dump ON result (dump_id, finished_at)",
    "CREATE INDEX ix_result_status ON result (status)",
    """
    CREATE TABLE dump (
        dump_id VARCHAR NOT NULL,  -- unique name of the dump; begins with its time
        run VARCHAR NOT NULL,  -- the training run
        rank INTEGER NOT NULL,  -- global rank of the process that captured it
        timestamp VARCHAR NOT NULL,  -- UTC time of the call, 2025-06-19T05:26:08.430740Z
        batch_size INTEGER NOT NULL,  -- B of sequences [B, S]
        seq_len INTEGER NOT NULL,  -- S of sequences [B, S], padding included
        tokens INTEGER NOT NULL,  -- real tokens: sum of attention_mask, B*S without one
        padding INTEGER NOT NULL,  -- padded positions: B*S - tokens
        action_len INTEGER,  -- A of action_mask [B, A]; NULL without one
        source VARCHAR NOT NULL,  -- capture, import or create
        role VARCHAR,  -- what the actor was: policy, reference, ema, sft, ...
        step INTEGER,  -- global step of the DeepSpeed engine at the call
        world_size INTEGER,  -- processes in the run
        local_rank INTEGER,  -- rank within its host
        host VARCHAR,  -- host name
        pid INTEGER,  -- process id
        call_index INTEGER,  -- how many calls this process had captured before
        instance VARCHAR,  -- tells several actors in one process apart
        training INTEGER,  -- whether the module was in training mode (1 yes, 0 no)
        grad_enabled INTEGER,  -- whether gradients were enabled (1 yes, 0 no)
        packing_samples INTEGER,  -- whether the actor packs samples (1 yes, 0 no)
        autocast_dtype VARCHAR,  -- dtype of the autocast context; NULL without one
        temperature FLOAT,  -- the actor's sampling temperature
        model_name VARCHAR,  -- name or path of the model
        model_dtype VARCHAR,  -- dtype of the model's parameters
        replayable INTEGER NOT NULL,  -- whether everything the call needs was stored (1 yes, 0 no)
        return_output INTEGER,  -- the call's return_output (1 yes, 0 no)
        return_logprobs INTEGER,  -- the call's return_logprobs (1 yes, 0 no)
        return_entropy INTEGER,  -- the call's return_entropy (1 yes, 0 no)
        allgather_logits INTEGER,  -- the call's allgather_logits (1 yes, 0 no)
        with_outputs INTEGER NOT NULL,  -- whether the call's own outputs were recorded too (1 yes, 0 no)
        openrlhf_version VARCHAR,  -- version of openrlhf in the run
        torch_version VARCHAR,  -- version of torch in the run
        transformers_version VARCHAR,  -- version of transformers in the run
        deepspeed_version VARCHAR,  -- version of deepspeed in the run
        bytes INTEGER NOT NULL,  -- size of the dump file in bytes; of a packed dump its share of the pack
        pinned INTEGER NOT NULL,  -- whether rotation spares it (1 yes, 0 no)
        triggered VARCHAR,  -- the trigger that kept it: nan, exception, oom, slow, logprobs, before; NULL if none
        recovered VARCHAR,  -- in_flight or recent: out of the ring of a process that died; NULL otherwise
        with_rng INTEGER NOT NULL,  -- whether the generator states were recorded too (1 yes, 0 no)
        pack VARCHAR,  -- the pack file that holds it, below the store; NULL for a file of its own
        last_result INTEGER,  -- newest result of this dump
        PRIMARY KEY (dump_id),
        FOREIGN KEY(run) REFERENCES run (name),
        FOREIGN KEY(last_result) REFERENCES result (id) ON DELETE SET NULL
    )
    """,
    "CREATE INDEX ix_dump_last_result ON dump (last_result) WHERE last_result IS NOT NULL",
    "CREATE INDEX ix_dump_pack ON dump (pack) WHERE pack IS NOT NULL",
    "CREATE INDEX ix_dump_rank_seq_len ON dump (rank, seq_len)",
    "CREATE INDEX ix_dump_rank_timestamp ON dump (rank, timestamp)",
    "CREATE INDEX ix_dump_run_rank ON dump (run, rank)",
    "CREATE INDEX ix_dump_seq_len ON dump (seq_len, timestamp)",
    "CREATE INDEX ix_dump_step ON dump (step)",
    "CREATE INDEX ix_dump_timestamp ON dump (timestamp)",
    "CREATE INDEX ix_dump_tokens ON dump (tokens)",
    """
    CREATE TABLE comparison (
        id INTEGER NOT NULL,  -- number of the row
        replay_id VARCHAR NOT NULL,  -- the replay
        dump_id VARCHAR NOT NULL,  -- the dump
        against VARCHAR NOT NULL,  -- golden: the run's own log-probs; golden-entropy: its entropies
        count INTEGER NOT NULL,  -- values compared
        max_abs FLOAT,  -- largest absolute difference; NULL if not finite
        mean_abs FLOAT,  -- mean absolute difference; NULL if not finite
        PRIMARY KEY (id),
        CONSTRAINT uq_comparison UNIQUE (replay_id, dump_id, against),
        FOREIGN KEY(replay_id) REFERENCES replay (replay_id) ON DELETE CASCADE
    )
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.get_bind().exec_driver_sql(statement)
