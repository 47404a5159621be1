"""The catalog's tables, declared once: SQLModel classes, and below each column what it holds.

The catalog is a cache: each row is derived from a file of the store, and `actordbg index --rebuild` makes all of
them again. So nothing is kept here alone, and no column needs to be precious.

    run ──< caller ──< dump   one row for each dump file whose header could be read; what many calls share stands in `caller`
                        └── last_result  the newest result of that dump, so that `--where "status='failed'"` needs no search
    replay ──< result         one row for each dump that a replay got to
           └──< comparison    how far a result is from something else, by a `compare` of the two
    comparison_run            one row for each file of `compare`; its dumps are in `comparison`
    matrix ──< matrix_cell    the same inputs under many configurations; each cell is a replay
    law_answer                what the laws said of a dump in a replay
    memory_watch              what `memory watch` found
    noise_floor               how far a configuration moves on its own
    patch_event               what `patch` and `unpatch` did
    damaged_file              dump files that are not what they should be, with the reason
    scanned_folder, read_file bookkeeping: what need not be looked at again

A result does not require its dump to be there: pruning dumps does not erase what was learned from them. Tables from
`comparison_run` to `patch_event` stand in `lab_models`.

`make docs` writes from these classes the schema of a new catalog (`head.sql`), its page, and `columns.json`, from
which `tables` knows the columns: commands read and write with plain sqlite3, since importing SQLModel takes longer than all of
`dump ls`. Tests hold them equal. Another test names the field of a dump's record or of a result that has no column, and
the column that has no field.

Example::

    from sqlmodel import Session, create_engine, select
    with Session(create_engine(f"sqlite:///{store.catalog_path}")) as session:
        failed = session.exec(select(Result).where(Result.status == "failed")).all()
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, create_model
from sqlalchemy import JSON, Index, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from actordbg.config.replay_config import SETTINGS


class Table(SQLModel):
    """What every table has: the text below a column is its description."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())  # type: ignore[assignment]


def json_field() -> Any:
    """A column of JSON, which may be NULL."""
    return Field(sa_type=JSON, nullable=True)


class Run(Table, table=True):
    """A training run, by the name of its folder under `dumps/`."""

    name: str = Field(primary_key=True)
    """name of the run: its folder under dumps/"""


class CallerColumns(Table):
    """What calls of one caller share."""

    run: str = Field(foreign_key="run.name")
    """the training run"""
    rank: int
    """global rank of the process that captured it"""
    source: str
    """capture, import or create"""
    trainer: str | None
    """package of the trainer whose call it is; NULL of a made-up input"""
    adapter: str | None
    """adapter that read the call; NULL where none was needed"""
    function: str | None
    """function that was recorded, module:name; NULL of a made-up input"""
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
    """tells several actors in one process apart"""
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
    """whether the call's own outputs were recorded too"""
    openrlhf_version: str | None
    """version of openrlhf in the run"""
    torch_version: str | None
    """version of torch in the run"""
    transformers_version: str | None
    """version of transformers in the run"""
    deepspeed_version: str | None
    """version of deepspeed in the run"""
    pinned: bool
    """whether rotation spares it"""
    triggered: str | None
    """the trigger that kept it: nan, exception, oom, slow, logprobs, before; NULL if none"""
    recovered: str | None
    """in_flight or recent: out of the ring of a process that died; NULL otherwise"""
    with_rng: bool
    """whether the generator states were recorded too"""


class Caller(CallerColumns, table=True):
    """What calls share: run, process, actor, the way of calling, versions. A row for each such combination that dumps have.

    Most dumps of a rank have the same one. In each dump's row these columns would take more room than all others.
    """

    __table_args__ = (Index("ix_caller_rank_run", "rank", "run"),)

    id: int | None = Field(default=None, primary_key=True)
    """number of the row"""


class DumpColumns(Table):
    """What each dump has of its own."""

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
    """how many calls this process had captured before"""
    bytes: int
    """size of the dump file in bytes; of a packed dump its share of the pack"""
    pack: str | None
    """the pack file that holds it, below the store; NULL for a file of its own"""


class Dump(DumpColumns, table=True):
    """One captured `Actor.forward` call; its tensors lie in `dumps/<run>/rank<rank, 4 digits>/<dump_id>.safetensors.zst`.

    The rest of what is known of it stands in its `caller`.
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
    )

    caller: int = Field(foreign_key="caller.id")
    """whose call it is"""
    last_result: int | None = Field(foreign_key="result.id", ondelete="SET NULL")
    """newest result of this dump"""


class ReplayColumns(Table):
    """What is known of a replay beside its settings."""

    replay_id: str = Field(primary_key=True)
    """unique name of the replay: its folder under replays/"""
    created_at: str
    """UTC time of its start"""
    finished_at: str | None
    """UTC time of its end; NULL while it runs, or if it was killed"""
    status: str
    """complete, interrupted, failed, or unfinished"""
    inputs: int
    """dumps that it was to replay"""
    selection: str | None
    """the --where expression that selected them"""
    ordering: str | None
    """their order: time, length or shuffled"""
    command: str | None
    """the command line"""
    config: dict[str, Any] = json_field()
    """the configuration as asked for"""
    resolved: dict[str, Any] | None = json_field()
    """the configuration as it ran, everything the workers said about it; NULL before they did"""
    versions: dict[str, Any] = json_field()
    """versions of the packages that ran it"""


_settings: Any = {setting.stored: (setting.kind | None, Field(description=setting.column)) for setting in SETTINGS.values()}
SettingColumns: Any = create_model("SettingColumns", __base__=Table, **_settings)
"""A column for each setting. A catalog that lacks one is made anew (`actordbg.catalog.migrate`)."""


class Replay(SettingColumns, ReplayColumns, table=True):  # type: ignore[misc, unused-ignore]
    """One replay, with a column for each setting: the resolved value where its workers said it, else the one asked for."""


class Result(Table, table=True):
    """What became of one dump in one replay: times in seconds, memory in bytes, log-probs in nats."""

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
    """which start of the workers it was, from 1"""
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
    """short name of a kind of failure, the same for every dump that fails so"""
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
    """log-probs that the figures are over"""
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
    """whether token ids were folded into a smaller vocabulary"""
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
    """whether the generators ended in the run's own states; NULL if not comparable"""
    extra: dict[str, Any] = json_field()
    """what has no column"""


class DamagedFile(Table, table=True):
    """A file of the store that could not be indexed. Code `odd-file`: a link, a FIFO, a name that no file of ours has.

    Read again when its folder changes; each time if it is newer or unreadable.
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


class ReadFile(Table, table=True):
    """A file of a replay, a comparison, a noise floor or a matrix, and what it was when it was read."""

    __tablename__ = "read_file"

    path: str = Field(primary_key=True)
    """path below the store"""
    replay_id: str
    """its replay; empty for a file of the lab"""
    size: int
    """its size when it was read"""
    mtime_ns: int
    """its modification time when it was read; -1 if too fresh to rely on"""
    offset: int
    """where a journal is read on: behind its last whole line"""


class DumpRow(CallerColumns, DumpColumns):
    """One dump as `query` returns it, with its last result, if any: `status` to `replay`. path: its place below the store.

    timestamp: UTC. bytes: size of the file, or the share of the pack. forward_s, backward_s: seconds. peak_memory: bytes.
    """

    timestamp: str  # type: ignore[assignment]
    status: str | None
    error: str | None
    signature: str | None
    forward_s: float | None
    backward_s: float | None
    peak_memory: int | None
    replay: str | None
    path: str


class ReplayRow(ReplayColumns):
    """One replay as `query` returns it, and how many of its inputs came out how. `config` and `resolved` hold its settings."""

    passed: int
    failed: int
    crashed: int
    hung: int
