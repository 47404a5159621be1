"""The catalog's tables, as SQLModel classes; every column says what it holds.

The catalog is a cache: each row here is derived from a file of the store, and `actordbg index --rebuild` makes all of
them again. So nothing is kept here alone, and no column needs to be precious.

    run ──< dump              one row for each dump file whose header could be read
             └── last_result  the newest result of that dump, so that `--where "status='failed'"` needs no search
    replay ──< result         one row for each dump that a replay got to
           └──< comparison    how far a result is from something else (`golden`: what the training run itself recorded)
    comparison_run            one row for each file of `compare`; the newest of a pair has its dumps in `comparison`
    matrix ──< matrix_cell    the same inputs under many configurations; each cell is a replay
    noise_floor               how far a configuration moves by itself
    patch_event               what `patch` and `unpatch` did
    damaged_file              dump files that are not what they should be, with the reason
    scanned_folder, read_file bookkeeping: what need not be looked at again

A result does not require its dump to be there: pruning dumps does not erase what was learnt from them.

The migrations in `migrations/versions` spell the same tables as SQL with the same comments; a test holds them equal.
`docs/reference/catalog.md` is generated from here.

Example::

    from sqlmodel import Session, select
    with Session(make_engine(store.catalog_path)) as session:
        failed = session.exec(select(Result).where(Result.status == "failed")).all()
"""

# No `from __future__ import annotations`: SQLModel reads the annotations when the classes are made.

from typing import Any

from sqlalchemy import JSON, Column, Float, ForeignKey, Index, Integer, String, UniqueConstraint, text
from sqlmodel import Field, SQLModel

metadata = SQLModel.metadata


def _column(kind: Any, comment: str, *constraints: Any, **options: Any) -> Any:
    """A field whose column has a type, a comment, and, unless said otherwise, may be NULL."""
    options.setdefault("nullable", True)
    default = ... if not options["nullable"] and not options.get("autoincrement") else None
    return Field(default=default, sa_column=Column(kind, *constraints, comment=comment, **options))


def _integer(comment: str, *constraints: Any, **options: Any) -> Any:
    return _column(Integer(), comment, *constraints, **options)


def _text(comment: str, *constraints: Any, **options: Any) -> Any:
    return _column(String(), comment, *constraints, **options)


def _real(comment: str, **options: Any) -> Any:
    return _column(Float(), comment, **options)


def _flag(comment: str, **options: Any) -> Any:
    return _column(Integer(), f"{comment} (1 yes, 0 no)", **options)


def _json(comment: str, **options: Any) -> Any:
    return _column(JSON(), comment, **options)


class Run(SQLModel, table=True):
    """A training run, by the name of its folder under `dumps/`."""

    __tablename__ = "run"

    name: str = _text("name of the run: its folder under dumps/", primary_key=True, nullable=False)


class Dump(SQLModel, table=True):
    """One captured `Actor.forward` call; its tensors lie in `dumps/<run>/rank<rank, 4 digits>/<dump_id>.safetensors.zst`."""

    __tablename__ = "dump"
    model_config = {"protected_namespaces": ()}
    __table_args__ = (
        Index("ix_dump_timestamp", "timestamp"),
        Index("ix_dump_rank_timestamp", "rank", "timestamp"),
        Index("ix_dump_rank_seq_len", "rank", "seq_len"),
        Index("ix_dump_seq_len", "seq_len", "timestamp"),
        Index("ix_dump_tokens", "tokens"),
        Index("ix_dump_step", "step"),
        Index("ix_dump_run_rank", "run", "rank"),
        Index("ix_dump_pack", "pack", sqlite_where=text("pack IS NOT NULL")),
        Index("ix_dump_last_result", "last_result", sqlite_where=text("last_result IS NOT NULL")),
    )

    dump_id: str = _text("unique name of the dump; begins with its time", primary_key=True, nullable=False)
    run: str = _text("the training run", ForeignKey("run.name"), nullable=False)
    rank: int = _integer("global rank of the process that captured it", nullable=False)
    timestamp: str = _text("UTC time of the call, 2025-06-19T05:26:08.430740Z", nullable=False)
    batch_size: int = _integer("B of sequences [B, S]", nullable=False)
    seq_len: int = _integer("S of sequences [B, S], padding included", nullable=False)
    tokens: int = _integer("real tokens: sum of attention_mask, B*S without one", nullable=False)
    padding: int = _integer("padded positions: B*S - tokens", nullable=False)
    action_len: int | None = _integer("A of action_mask [B, A]; NULL without one")
    source: str = _text("capture, import or create", nullable=False)
    role: str | None = _text("what the actor was: policy, reference, ema, sft, ...")
    step: int | None = _integer("global step of the DeepSpeed engine at the call")
    world_size: int | None = _integer("processes in the run")
    local_rank: int | None = _integer("rank within its host")
    host: str | None = _text("host name")
    pid: int | None = _integer("process id")
    call_index: int | None = _integer("how many calls this process had captured before")
    instance: str | None = _text("tells several actors in one process apart")
    training: int | None = _flag("whether the module was in training mode")
    grad_enabled: int | None = _flag("whether gradients were enabled")
    packing_samples: int | None = _flag("whether the actor packs samples")
    autocast_dtype: str | None = _text("dtype of the autocast context; NULL without one")
    temperature: float | None = _real("the actor's sampling temperature")
    model_name: str | None = _text("name or path of the model")
    model_dtype: str | None = _text("dtype of the model's parameters")
    replayable: int = _flag("whether everything the call needs was stored", nullable=False)
    return_output: int | None = _flag("the call's return_output")
    return_logprobs: int | None = _flag("the call's return_logprobs")
    return_entropy: int | None = _flag("the call's return_entropy")
    allgather_logits: int | None = _flag("the call's allgather_logits")
    with_outputs: int = _flag("whether the call's own outputs were recorded too", nullable=False)
    openrlhf_version: str | None = _text("version of openrlhf in the run")
    torch_version: str | None = _text("version of torch in the run")
    transformers_version: str | None = _text("version of transformers in the run")
    deepspeed_version: str | None = _text("version of deepspeed in the run")
    bytes: int = _integer("size of the dump file in bytes; of a packed dump its share of the pack", nullable=False)
    pinned: int = _flag("whether rotation spares it", nullable=False)
    triggered: str | None = _text("the trigger that kept it: nan, exception, oom, slow, logprobs, before; NULL if none")
    recovered: str | None = _text("in_flight or recent: out of the ring of a process that died; NULL otherwise")
    with_rng: int = _flag("whether the generator states were recorded too", nullable=False)
    pack: str | None = _text("the pack file that holds it, below the store; NULL for a file of its own")
    last_result: int | None = _integer("newest result of this dump", ForeignKey("result.id", ondelete="SET NULL"))


class Replay(SQLModel, table=True):
    """One replay; its settings are the resolved ones where its workers said them, else those asked for."""

    __tablename__ = "replay"

    replay_id: str = _text("unique name of the replay: its folder under replays/", primary_key=True, nullable=False)
    created_at: str = _text("UTC time of its start", nullable=False)
    finished_at: str | None = _text("UTC time of its end; NULL while it runs, or if it was killed")
    status: str = _text("complete, interrupted, failed, or unfinished", nullable=False)
    inputs: int = _integer("dumps that it was to replay", nullable=False)
    selection: str | None = _text("the --where expression that selected them")
    ordering: str | None = _text("their order: time, length or shuffled")
    command: str | None = _text("the command line")
    model: str | None = _text("model: tiny, a path or a hub name")
    backend: str | None = _text("plain, deepspeed, ...")
    dtype: str | None = _text("bf16, fp16 or fp32")
    attn: str | None = _text("attention: flash_attention_2, sdpa or eager")
    packing: int | None = _flag("whether samples were packed")
    compile: int | None = _flag("whether torch.compile was on")
    compile_backend: str | None = _text("what torch.compile was told to use: inductor, aot_eager or eager")
    deepcompile: int | None = _flag("whether DeepSpeed's DeepCompile was on")
    zero_stage: int | None = _integer("ZeRO stage")
    nproc: int | None = _integer("processes")
    backward: int | None = _flag("whether backward ran too")
    num_layers: int | None = _integer("layers kept of the model; NULL for all")
    temperature: float | None = _real("temperature that logits were divided by")
    seed: int | None = _integer("random seed")
    timeout_s: float | None = _real("seconds that one input might take")
    keep_tensors: int | None = _flag("whether outputs were kept under tensors/")
    keep_gradients: int | None = _flag("whether each parameter's gradient was kept there too")
    tp: int | None = _integer("ranks of a tensor-parallel group")
    ring: int | None = _integer("ranks of a ring-attention group")
    dist_backend: str | None = _text("gloo or nccl; NULL for what suits the device")
    align: str | None = _text("which rank gets which input: same, rank or shuffle; NULL for each its share")
    oracle: str | None = _text("dtype of the truth, fp32 or fp64; NULL for a replay that is not one")
    vary: str | None = _text("how inputs were varied to measure noise; NULL if they were not")
    config: Any = _json("the configuration as asked for")
    resolved: Any = _json("the configuration as it ran, everything the workers said about it; NULL before they did")
    versions: Any = _json("versions of the packages that ran it")


class Result(SQLModel, table=True):
    """What became of one dump in one replay: times in seconds, memory in bytes, log-probs in nats."""

    __tablename__ = "result"
    __table_args__ = (
        UniqueConstraint("replay_id", "dump_id", name="uq_result"),
        Index("ix_result_dump", "dump_id", "finished_at"),
        Index("ix_result_status", "status"),
    )

    id: int | None = _integer("number of the row", primary_key=True, autoincrement=True, nullable=False)
    replay_id: str = _text("the replay", ForeignKey("replay.replay_id", ondelete="CASCADE"), nullable=False)
    dump_id: str = _text("the dump, which may have been pruned since", nullable=False)
    status: str = _text("passed, failed, crashed or hung", nullable=False)
    attempt: int = _integer("which start of the workers it was, from 1", nullable=False)
    worker: int = _integer("rank of the worker", nullable=False)
    slot: int = _integer("position in the worker's list", nullable=False)
    started_at: str = _text("UTC time of its start", nullable=False)
    finished_at: str = _text("UTC time of its end", nullable=False)
    error_class: str | None = _text("class of the exception")
    error: str | None = _text("message of the exception")
    signature: str | None = _text("short name of a kind of failure, the same for every dump that fails so")
    log_excerpt: str | None = _text("last lines of the worker's log")
    load_s: float | None = _real("seconds to read and decompress the dump")
    forward_s: float | None = _real("seconds of the forward pass")
    backward_s: float | None = _real("seconds of the backward pass")
    tokens: int | None = _integer("real tokens of the input")
    tokens_per_s: float | None = _real("tokens / (forward_s + backward_s)")
    peak_memory_bytes: int | None = _integer("peak memory of the worker while it ran, in bytes")
    logprob_count: int | None = _integer("log-probs that the figures are over")
    logprob_mean: float | None = _real("mean log-prob, nats")
    logprob_std: float | None = _real("standard deviation of the log-probs, nats")
    logprob_min: float | None = _real("smallest log-prob, nats")
    logprob_max: float | None = _real("largest log-prob, nats")
    nonfinite: int | None = _integer("log-probs that are NaN or infinite")
    entropy_mean: float | None = _real("mean entropy, nats")
    loss: float | None = _real("loss; NULL without backward")
    grad_norm: float | None = _real("gradient norm; NULL without backward")
    output_digest: str | None = _text("SHA-256 of the log-probs' bytes in float32")
    graphs: int | None = _integer("graphs that torch.compile made for this input")
    graph_breaks: int | None = _integer("graph breaks for this input")
    folded_ids: int | None = _flag("whether token ids were folded into a smaller vocabulary")
    golden_count: int | None = _integer("log-probs compared with those that the run recorded")
    golden_max_abs: float | None = _real("largest absolute difference from them, nats")
    golden_mean_abs: float | None = _real("mean absolute difference from them, nats")
    golden_entropy_count: int | None = _integer("entropies compared with those that the run recorded")
    golden_entropy_max_abs: float | None = _real("largest absolute difference from them, nats")
    golden_entropy_mean_abs: float | None = _real("mean absolute difference from them, nats")
    rng_match: int | None = _flag("whether the generators ended in the run's own states; NULL if not comparable")
    extra: Any = _json("what has no column")


class ComparisonRun(SQLModel, table=True):
    """One `actordbg compare A B`: its file under comparisons/, and what came of it over all dumps."""

    __tablename__ = "comparison_run"

    comparison_id: str = _text("its file under comparisons/", primary_key=True, nullable=False)
    created_at: str = _text("UTC time", nullable=False)
    replay_id: str = _text("A, the replay that was judged; it may be gone", nullable=False)
    against: str = _text("B: golden, or the other replay's id; it may be gone", nullable=False)
    against_kind: str = _text("what B is: replay, truth or golden", nullable=False)
    current: int = _flag("whether its dumps are in `comparison`: newest of its pair, replays there", nullable=False)
    verdict: str = _text("match, within-noise, mismatch or not-compared", nullable=False)
    dumps: int = _integer("dumps of either side", nullable=False)
    compared: int = _integer("dumps that were compared", nullable=False)
    mismatches: int = _integer("dumps that are a mismatch", nullable=False)
    within_noise: int = _integer("dumps that are outside the thresholds and inside the noise", nullable=False)
    worst_dump: str | None = _text("the worst dump; NULL if none was compared")
    max_abs: float | None = _real("largest absolute difference of a log-prob, nats; NULL if not finite")
    mean_abs: float | None = _real("mean absolute difference over all tokens, nats; NULL if not finite")
    clip_share: float | None = _real("share of all tokens whose ratio is outside 0.8 to 1.2")
    grad_norm_rel: float | None = _real("largest relative difference of a gradient norm")
    label: str | None = _text("A's configuration in words")
    against_label: str | None = _text("B's configuration in words")
    thresholds_from: str | None = _text("where the thresholds are from")
    thresholds: Any = _json("the thresholds by measure")
    noise_id: str | None = _text("the noise floor that was applied; NULL without one")
    reasons: str | None = _text("what was said about the whole, in words")


class Comparison(SQLModel, table=True):
    """How far one result is from something else: by `compare`, or with every replay from what the run recorded (golden)."""

    __tablename__ = "comparison"
    __table_args__ = (
        Index(
            "uq_comparison_result",
            "replay_id",
            "dump_id",
            "against",
            unique=True,
            sqlite_where=text("comparison_id IS NULL"),
        ),
        Index(
            "uq_comparison_file",
            "replay_id",
            "dump_id",
            "against",
            unique=True,
            sqlite_where=text("comparison_id IS NOT NULL"),
        ),
        Index("ix_comparison_file", "comparison_id", sqlite_where=text("comparison_id IS NOT NULL")),
        Index("ix_comparison_dump", "dump_id", "created_at", sqlite_where=text("comparison_id IS NOT NULL")),
    )

    id: int | None = _integer("number of the row", primary_key=True, autoincrement=True, nullable=False)
    replay_id: str = _text("the replay", ForeignKey("replay.replay_id", ondelete="CASCADE"), nullable=False)
    dump_id: str = _text("the dump", nullable=False)
    against: str = _text(
        "golden: the run's own log-probs; golden-entropy: its entropies; else the other replay's id", nullable=False
    )
    count: int = _integer("values compared", nullable=False)
    max_abs: float | None = _real("largest absolute difference, nats; NULL if not finite")
    mean_abs: float | None = _real("mean absolute difference, nats; NULL if not finite")
    comparison_id: str | None = _text("its file under comparisons/; NULL if it came with the replay")
    created_at: str | None = _text("UTC time of the comparison; NULL if it came with the replay")
    verdict: str | None = _text("match, within-noise, mismatch or not-compared; NULL if none was asked for")
    p95_abs: float | None = _real("95th percentile of the absolute differences, nats")
    p99_abs: float | None = _real("99th percentile of the absolute differences, nats")
    max_rel: float | None = _real("largest relative difference")
    p99_rel: float | None = _real("99th percentile of the relative differences")
    cosine: float | None = _real("cosine of the two vectors of log-probs")
    kl_k1: float | None = _real("KL estimate k1, nats")
    kl_k3: float | None = _real("KL estimate k3, nats")
    clip_share: float | None = _real("share of tokens whose ratio is outside 0.8 to 1.2")
    max_ulp: int | None = _integer("largest distance in units of last place; NULL for unequal dtypes")
    entropy_max_abs: float | None = _real("largest absolute difference of an entropy, nats")
    loss_abs: float | None = _real("absolute difference of the losses")
    grad_norm_rel: float | None = _real("relative difference of the gradient norms")
    gradient_cosine: float | None = _real("cosine of the gradients of all parameters")
    gradient_distance: float | None = _real("|a - b| / |b| of the gradients of all parameters")
    sequence_max_abs: float | None = _real("largest absolute difference of a row's sum of log-probs, nats")
    nonfinite: int | None = _integer("log-probs that are not finite on one side only")
    reasons: str | None = _text("what made it a mismatch, or why it was not compared, in words")


class NoiseFloor(SQLModel, table=True):
    """How far one configuration moves by itself (`actordbg noise`)."""

    __tablename__ = "noise_floor"

    noise_id: str = _text("its file under noise/", primary_key=True, nullable=False)
    created_at: str = _text("UTC time", nullable=False)
    replay_id: str = _text("the unchanged run", nullable=False)
    label: str = _text("the configuration in words", nullable=False)
    dtype: str | None = _text("bf16, fp16 or fp32")
    inputs: int = _integer("dumps that it was measured on", nullable=False)
    max_abs: float | None = _real("largest movement of a log-prob, nats")
    p99_abs: float | None = _real("99th percentile of the movements, largest over dumps, nats")
    mean_abs: float | None = _real("mean movement, largest over dumps, nats")
    grad_norm_rel: float | None = _real("largest relative movement of the gradient norm")
    floor: Any = _json("every figure of the floor")
    config: Any = _json("the configuration as asked for")


class Matrix(SQLModel, table=True):
    """One `actordbg matrix`: the same inputs under the combinations of some settings."""

    __tablename__ = "matrix"

    matrix_id: str = _text("its file under matrices/", primary_key=True, nullable=False)
    created_at: str = _text("UTC time of its start", nullable=False)
    finished_at: str | None = _text("UTC time of its end; NULL while it runs, or if it was killed")
    status: str = _text("running, complete, interrupted or failed", nullable=False)
    inputs: int = _integer("dumps that each cell replays", nullable=False)
    loads: int = _integer("how often an Actor was built", nullable=False)
    selection: str | None = _text("the --where expression that selected them")
    command: str | None = _text("the command line")
    truth_id: str | None = _text("the replay that computed the truth")
    baseline: str | None = _text("the replay or matrix that cells were compared with")
    axes: Any = _json("values by axis")


class MatrixCell(SQLModel, table=True):
    """One combination of a matrix."""

    __tablename__ = "matrix_cell"

    matrix_id: str = _text(
        "the matrix", ForeignKey("matrix.matrix_id", ondelete="CASCADE"), primary_key=True, nullable=False
    )
    cell: int = _integer("its number in the matrix, from 0", primary_key=True, nullable=False)
    name: str = _text("the combination in words", nullable=False)
    status: str = _text("passed, failed, unavailable or not run", nullable=False)
    verdict: str | None = _text("against the truth: match, within-noise, mismatch, not-compared; NULL if not asked for")
    replay_id: str | None = _text("its replay; NULL if nothing was started")
    reason: str | None = _text("why it is unavailable, or was not run")
    signature: str | None = _text("signature of the first failure")
    max_abs: float | None = _real("largest difference of a log-prob from the truth, nats")
    load_s: float | None = _real("seconds to build the Actor; 0 if another cell's was used")
    regressed: str | None = _text("what got worse than the baseline; NULL if nothing did")
    settings: Any = _json("the combination by axis")


class PatchEvent(SQLModel, table=True):
    """One `patch` or `unpatch` of an `actor.py`."""

    __tablename__ = "patch_event"

    name: str = _text("name of the event's file under events/", primary_key=True, nullable=False)
    event: str = _text("patch or unpatch", nullable=False)
    timestamp: str | None = _text("UTC time")
    target: str | None = _text("path of the file")
    sha256_before: str | None = _text("SHA-256 of the file before")
    sha256_after: str | None = _text("SHA-256 of the file after")
    python: str | None = _text("interpreter whose environment the file belongs to")
    openrlhf_version: str | None = _text("version of openrlhf there")
    actordbg_version: str | None = _text("version of actordbg that did it")


class DamagedFile(SQLModel, table=True):
    """A file of the store that could not be indexed.

    Read again when its folder changes; each time if it is newer or unreadable.
    """

    __tablename__ = "damaged_file"

    path: str = _text("path below the store", primary_key=True, nullable=False)
    folder: str = _text("its folder below the store", nullable=False)
    code: str = _text("corrupt-dump: broken; newer-format; store: unreadable, or in the wrong place", nullable=False)
    reason: str = _text("what is wrong with it", nullable=False)


class ScannedFolder(SQLModel, table=True):
    """A folder whose listing is known; it is listed again when its modification time differs."""

    __tablename__ = "scanned_folder"

    path: str = _text("path below the store", primary_key=True, nullable=False)
    mtime_ns: int = _integer("its modification time when it was listed; -1 if too fresh to rely on", nullable=False)


class ReadFile(SQLModel, table=True):
    """A file of a replay, a comparison, a noise floor or a matrix, and how far it has been read."""

    __tablename__ = "read_file"

    path: str = _text("path below the store", primary_key=True, nullable=False)
    replay_id: str = _text("its replay; empty for a file of the lab", nullable=False)
    size: int = _integer("its size when it was read", nullable=False)
    mtime_ns: int = _integer("its modification time when it was read; -1 if too fresh to rely on", nullable=False)
    offset: int = _integer("bytes read so far: up to the last whole line", nullable=False)
