"""What the calls of one caller share stands in a table of its own, and times of dumps are numbers.

Revision ID: 0009
Revises: 0008

The rows of dumps are derived from their files. They are made anew, and the next refresh reads them again; results stay. It lists
every folder again, and reads the files of the lab too: of an older catalog, 0008 has forgotten which of them are damaged.
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

STATEMENTS: tuple[str, ...] = (
    "DROP TABLE dump",
    "DELETE FROM run",
    "UPDATE scanned_folder SET mtime_ns = -1",
    "UPDATE read_file SET size = -1 WHERE replay_id = ''",
    """
    CREATE TABLE caller (
        id INTEGER NOT NULL,  -- number of the row
        run VARCHAR NOT NULL,  -- the training run
        rank INTEGER NOT NULL,  -- global rank of the process that captured it
        source VARCHAR NOT NULL,  -- capture, import or create
        trainer VARCHAR,  -- package of the trainer whose call it is; NULL of a made-up input
        adapter VARCHAR,  -- adapter that read the call; NULL where none was needed
        function VARCHAR,  -- function that was recorded, module:name; NULL of a made-up input
        role VARCHAR,  -- what the actor was: policy, reference, ema, sft, ...
        world_size INTEGER,  -- processes in the run
        local_rank INTEGER,  -- rank within its host
        host VARCHAR,  -- host name
        pid INTEGER,  -- process id
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
        pinned INTEGER NOT NULL,  -- whether rotation spares it (1 yes, 0 no)
        triggered VARCHAR,  -- the trigger that kept it: nan, exception, oom, slow, logprobs, before; NULL if none
        recovered VARCHAR,  -- in_flight or recent: out of the ring of a process that died; NULL otherwise
        with_rng INTEGER NOT NULL,  -- whether the generator states were recorded too (1 yes, 0 no)
        PRIMARY KEY (id),
        FOREIGN KEY(run) REFERENCES run (name)
    )
    """,
    "CREATE INDEX ix_caller_rank_run ON caller (rank, run)",
    """
    CREATE TABLE dump (
        dump_id VARCHAR NOT NULL,  -- unique name of the dump; begins with its time
        timestamp INTEGER NOT NULL,  -- UTC time of the call, 2025-06-19T05:26:08.430740Z, in microseconds since 1970
        batch_size INTEGER NOT NULL,  -- B of sequences [B, S]
        seq_len INTEGER NOT NULL,  -- S of sequences [B, S], padding included
        tokens INTEGER NOT NULL,  -- real tokens: sum of attention_mask, B*S without one
        padding INTEGER NOT NULL,  -- padded positions: B*S - tokens
        action_len INTEGER,  -- A of action_mask [B, A]; NULL without one
        step INTEGER,  -- global step of the DeepSpeed engine at the call
        call_index INTEGER,  -- how many calls this process had captured before
        bytes INTEGER NOT NULL,  -- size of the dump file in bytes; of a packed dump its share of the pack
        pack VARCHAR,  -- the pack file that holds it, below the store; NULL for a file of its own
        caller INTEGER NOT NULL,  -- whose call it is
        last_result INTEGER,  -- newest result of this dump
        PRIMARY KEY (dump_id),
        FOREIGN KEY(caller) REFERENCES caller (id),
        FOREIGN KEY(last_result) REFERENCES result (id) ON DELETE SET NULL
    )
    """,
    "CREATE INDEX ix_dump_caller_seq_len ON dump (caller, seq_len)",
    "CREATE INDEX ix_dump_caller_timestamp ON dump (caller, timestamp)",
    "CREATE INDEX ix_dump_last_result ON dump (last_result) WHERE last_result IS NOT NULL",
    "CREATE INDEX ix_dump_pack ON dump (pack) WHERE pack IS NOT NULL",
    "CREATE INDEX ix_dump_seq_len ON dump (seq_len, timestamp)",
    "CREATE INDEX ix_dump_step ON dump (step)",
    "CREATE INDEX ix_dump_timestamp ON dump (timestamp)",
    "CREATE INDEX ix_dump_tokens ON dump (tokens)",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.get_bind().exec_driver_sql(statement)
