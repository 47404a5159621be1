"""The catalog's tables, declared once: SQLModel classes, with a description below each column.

The catalog is a cache: each row is derived from a file of the store, and `actordbg index --rebuild` rebuilds all of them.

    caller ──< dump           one row for each dump file with a readable header; `caller` has the columns that many calls share
                └── last_result  the newest result of that dump, so that `--where "status='failed'"` needs no search
                    verdict      its last verdict, from everything that judged it (`dump_verdicts`)
    replay ──< result         one row for each dump that a replay reached
           └──< comparison    distance of a result from another one, by `compare`
    comparison_run            one row for each file of `compare`; its dumps are in `comparison`
    law_answer                verdicts of the laws on a dump in a replay
    damaged_file              invalid dump files, with the reason
    scanned_folder, read_file bookkeeping: what need not be read again
    unjudged                  bookkeeping: dumps whose verdict is folded again at the end of a refresh

A result may outlive its dump: pruning dumps keeps their results. `comparison`, `comparison_run` and `law_answer` are in
`lab_models`. Files that no query asks for (matrices, noise floors, memory recordings) have no rows.

`make docs` writes from these classes the schema of a new catalog (`head.sql`), its page, and `columns.json`, from
which `tables` reads the columns: commands use plain sqlite3, since importing SQLModel takes longer than all of `dump ls`.
Tests check that they agree, and that each field of a dump's record and of a result has a column, and each column a field.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, create_model
from sqlalchemy import JSON, Index, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from actordbg.config.replay_config import SETTINGS


class Table(SQLModel):
    """Base of all tables: the text below a column is its description."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())  # type: ignore[assignment]


def json_field() -> Any:
    """Declare a JSON column, which may be NULL."""
    return Field(sa_type=JSON, nullable=True)


class CallerColumns(Table):
    """Columns that the calls of a caller share."""

    run: str
    """the training run"""
    rank: int
    """global rank of the process that captured it"""
    source: str
    """capture, import or create"""
    point: str
    """capture point: forward, the default of every selection, or loss (`dump enable --calls`)"""
    trainer: str | None
    """package of the trainer whose call it is; NULL for a synthetic input"""
    adapter: str | None
    """adapter that read the call; NULL if none was needed"""
    function: str | None
    """function that was recorded, module:name; NULL for a synthetic input"""
    role: str | None
    """what the actor was: policy, reference, ema, sft, ..."""
    world_size: int | None
    """processes in the run"""
    local_rank: int | None
    """rank within its host"""
    host: str | None
    """host name"""
    pid: int | None
    """process id"""
    instance: str | None
    """distinguishes several actors in one process"""
    training: bool | None
    """whether the module was in training mode"""
    grad_enabled: bool | None
    """whether gradients were enabled"""
    packing_samples: bool | None
    """whether the actor packs samples"""
    autocast_dtype: str | None
    """dtype of the autocast context; NULL without one"""
    temperature: float | None
    """the actor's sampling temperature"""
    model_name: str | None
    """name or path of the model"""
    model_dtype: str | None
    """dtype of the model's parameters"""
    replayable: bool
    """whether everything the call needs was stored"""
    return_output: bool | None
    """the call's return_output"""
    return_logprobs: bool | None
    """the call's return_logprobs"""
    return_entropy: bool | None
    """the call's return_entropy"""
    allgather_logits: bool | None
    """the call's allgather_logits"""
    with_outputs: bool
    """whether the call's outputs were also recorded"""
    openrlhf_version: str | None
    """version of openrlhf in the run"""
    torch_version: str | None
    """version of torch in the run"""
    transformers_version: str | None
    """version of transformers in the run"""
    deepspeed_version: str | None
    """version of deepspeed in the run"""
    pinned: bool
    """whether it is protected from rotation"""
    triggered: str | None
    """the trigger that kept it: nan, exception, oom, slow, logprobs, before; NULL if none"""
    recovered: str | None
    """in_flight or recent: recovered from the buffer of a process that died; NULL otherwise"""
    with_rng: bool
    """whether the RNG state was also recorded"""


class Caller(CallerColumns, table=True):
    """A caller of dumps: run, process, actor, arguments, versions. One row for each combination that dumps have.

    Most dumps of a rank share a caller. In each dump's row, these columns would take more space than all others.
    """

    __table_args__ = (Index("ix_caller_rank_run", "rank", "run"),)

    id: int | None = Field(default=None, primary_key=True)
    """number of the row"""


class DumpColumns(Table):
    """Columns that differ from dump to dump."""

    dump_id: str = Field(primary_key=True)
    """unique name of the dump; begins with its time"""
    timestamp: int
    """UTC time of the call, 2025-06-19T05:26:08.430740Z, in microseconds since 1970"""
    batch_size: int
    """B of sequences [B, S]"""
    seq_len: int
    """S of sequences [B, S], padding included"""
    tokens: int
    """real tokens: sum of attention_mask, B*S without one"""
    padding: int
    """padded positions: B*S - tokens"""
    action_len: int | None
    """A of action_mask [B, A]; NULL without one"""
    step: int | None
    """global step of the DeepSpeed engine at the call"""
    call_index: int | None
    """number of calls that this process captured before"""
    bytes: int
    """size of the dump file in bytes; for a packed dump, its share of the pack"""
    pack: str | None
    """the pack file that holds it, below the store; NULL for a dump file"""


class Dump(DumpColumns, table=True):
    """A captured `Actor.forward` call; its tensors lie in `dumps/<run>/rank<rank, 4 digits>/<dump_id>.safetensors.zst`.

    The other columns are those of its `caller`.
    """

    __table_args__ = (
        Index("ix_dump_timestamp", "timestamp"),
        Index("ix_dump_caller_timestamp", "caller", "timestamp"),
        Index("ix_dump_caller_seq_len", "caller", "seq_len"),
        Index("ix_dump_seq_len", "seq_len", "timestamp"),
        Index("ix_dump_tokens", "tokens"),
        Index("ix_dump_step", "step"),
        Index("ix_dump_pack", "pack", sqlite_where=text("pack IS NOT NULL")),
        Index("ix_dump_last_result", "last_result", sqlite_where=text("last_result IS NOT NULL")),
        Index("ix_dump_verdict", "verdict", sqlite_where=text("verdict IS NOT NULL")),
    )

    caller: int = Field(foreign_key="caller.id")
    """the caller, which has the shared columns"""
    last_result: int | None = Field(foreign_key="result.id", ondelete="SET NULL")
    """newest result of this dump; that of a truth or a variation only if there is no other"""
    verdict: str | None
    """last verdict: RIGHT, WRONG, FAILED or NOT CHECKED; NULL if nothing judged it"""
    broken: str | None
    """what made it WRONG or FAILED: laws, identity, local, ranks, truth, recorded, failed, crashed, hung; NULL otherwise"""
    theirs: str | None
    """last verdict by imported or downloaded replays, which do not count for `verdict`; NULL without any"""


class ReplayColumns(Table):
    """Columns of a replay besides its settings."""

    replay_id: str = Field(primary_key=True)
    """unique name of the replay: its folder under replays/"""
    created_at: str
    """UTC time of its start"""
    finished_at: str | None
    """UTC time of its end; NULL while it runs, or if it was killed"""
    status: str
    """complete, interrupted, failed, or unfinished"""
    inputs: int
    """dumps to replay"""
    selection: str | None
    """the --where expression that selected them"""
    ordering: str | None
    """their order: time, length or shuffled"""
    command: str | None
    """the command line"""
    origin: str | None
    """who wrote it, if it was imported or downloaded; NULL if it was made in this store"""
    configuration: str | None
    """digest of the settings that change its numbers, as they ran; NULL for truths and variations, which judge nothing"""
    config: dict[str, Any] = json_field()
    """the configuration as requested"""
    resolved: dict[str, Any] | None = json_field()
    """the configuration as the workers reported it; NULL before that"""
    versions: dict[str, Any] = json_field()
    """versions of the packages that ran it"""


_settings: Any = {setting.stored: (setting.kind | None, Field(description=setting.column)) for setting in SETTINGS.values()}
SettingColumns: Any = create_model("SettingColumns", __base__=Table, **_settings)
"""A column for each setting. A catalog that lacks one is rebuilt (`actordbg.catalog.migrate`)."""


class Replay(SettingColumns, ReplayColumns, table=True):  # type: ignore[misc, unused-ignore]
    """A replay, with a column for each setting: the value that its workers reported, else the requested value."""


class Result(Table, table=True):
    """Result of a dump in a replay: times in seconds, memory in bytes, log-probs in nats."""

    __table_args__ = (
        UniqueConstraint("replay_id", "dump_id", name="uq_result"),
        Index("ix_result_dump", "dump_id", "finished_at"),
        Index("ix_result_status", "status"),
    )

    id: int | None = Field(default=None, primary_key=True)
    """number of the row"""
    replay_id: str = Field(foreign_key="replay.replay_id", ondelete="CASCADE")
    """the replay"""
    dump_id: str
    """the dump, which may have been pruned since"""
    status: str
    """passed, failed, crashed or hung"""
    attempt: int
    """number of the workers' start, from 1"""
    worker: int
    """rank of the worker"""
    slot: int
    """position in the worker's list"""
    started_at: str
    """UTC time of its start"""
    finished_at: str
    """UTC time of its end"""
    error_class: str | None
    """class of the exception"""
    error: str | None
    """message of the exception"""
    signature: str | None
    """short name of the kind of failure, equal for dumps that fail alike"""
    log_excerpt: str | None
    """last lines of the worker's log"""
    load_s: float | None
    """seconds to read and decompress the dump"""
    forward_s: float | None
    """seconds of the forward pass"""
    backward_s: float | None
    """seconds of the backward pass"""
    tokens: int | None
    """real tokens of the input"""
    tokens_per_s: float | None
    """tokens / (forward_s + backward_s)"""
    peak_memory_bytes: int | None
    """peak memory of the worker while it ran, in bytes"""
    logprob_count: int | None
    """log-probs that the statistics cover"""
    logprob_mean: float | None
    """mean log-prob, nats"""
    logprob_std: float | None
    """standard deviation of the log-probs, nats"""
    logprob_min: float | None
    """smallest log-prob, nats"""
    logprob_max: float | None
    """largest log-prob, nats"""
    nonfinite: int | None
    """log-probs that are NaN or infinite"""
    entropy_mean: float | None
    """mean entropy, nats"""
    loss: float | None
    """loss; NULL without backward"""
    grad_norm: float | None
    """gradient norm; NULL without backward"""
    output_digest: str | None
    """SHA-256 of the log-probs' bytes in float32"""
    graphs: int | None
    """graphs that torch.compile made for this input"""
    graph_breaks: int | None
    """graph breaks for this input"""
    folded_ids: bool | None
    """whether token ids were wrapped (modulo) into a smaller vocabulary"""
    golden_count: int | None
    """log-probs compared with those that the run recorded"""
    golden_max_abs: float | None
    """largest absolute difference from them, nats"""
    golden_mean_abs: float | None
    """mean absolute difference from them, nats"""
    golden_entropy_count: int | None
    """entropies compared with those that the run recorded"""
    golden_entropy_max_abs: float | None
    """largest absolute difference from them, nats"""
    golden_entropy_mean_abs: float | None
    """mean absolute difference from them, nats"""
    rng_match: bool | None
    """whether the RNG ended in the run's recorded state; NULL if not comparable"""
    extra: dict[str, Any] = json_field()
    """values without a column"""


class DamagedFile(Table, table=True):
    """A file of the store that could not be indexed. Code `odd-file`: a link, a FIFO, an invalid name.

    Read again when its folder changes; on every refresh if it has a newer format or is unreadable.
    """

    __tablename__ = "damaged_file"

    path: str = Field(primary_key=True)
    """path below the store"""
    code: str
    """corrupt-dump: broken; newer-format; store: unreadable, or in the wrong place"""
    reason: str
    """what is wrong with it"""
    folder: str
    """its folder below the store"""


class ScannedFolder(Table, table=True):
    """A folder whose listing is known; it is listed again when its modification time differs."""

    __tablename__ = "scanned_folder"

    path: str = Field(primary_key=True)
    """path below the store"""
    mtime_ns: int
    """its modification time when it was listed; -1 if too fresh to rely on"""


class Unjudged(Table, table=True):
    """A dump with news since its verdict was folded."""

    dump_id: str = Field(primary_key=True)
    """the dump"""


class ReadFile(Table, table=True):
    """A file of a replay, a comparison, a noise floor or a matrix, and its state when it was read."""

    __tablename__ = "read_file"

    path: str = Field(primary_key=True)
    """path below the store"""
    replay_id: str
    """its replay; empty for other files"""
    size: int
    """its size when it was read"""
    mtime_ns: int
    """its modification time when it was read; -1 if too fresh to rely on"""
    offset: int
    """where reading of a journal continues: after its last whole line"""


class DumpRow(CallerColumns, DumpColumns):
    """A dump as `query` returns it, with its last result, if any: `status` to `replay`. path: its place below the store.

    timestamp: UTC. bytes: size of the file, or its share of the pack. forward_s, backward_s: seconds. peak_memory: bytes.
    """

    timestamp: str  # type: ignore[assignment]
    verdict: str | None
    broken: str | None
    theirs: str | None
    status: str | None
    error: str | None
    signature: str | None
    forward_s: float | None
    backward_s: float | None
    peak_memory: int | None
    replay: str | None
    model: str | None
    path: str


class ReplayRow(ReplayColumns):
    """A replay as `query` returns it, with its inputs counted by result. `config` and `resolved` hold its settings."""

    passed: int
    failed: int
    crashed: int
    hung: int
