"""The columns and functions that `--where` may use: one list, from which the sandbox, the messages and the docs are made.

A column has a kind, and only like kinds compare: a number with a number, a text with a text, a time with an ISO time or
`now() - '2h'`. SQLite itself would compare anything with anything (every text is larger than every number), and a
mistyped query would then match every row, or none, in silence.
"""

from __future__ import annotations

from dataclasses import dataclass

NUMBER, TEXT, TIME, BOOL = "number", "text", "time", "yes/no"


@dataclass(frozen=True)
class WhereColumn:
    """One column: its name in `--where`, its kind, the SQL for it, and what it means."""

    name: str
    kind: str
    sql: str
    doc: str

    @property
    def of_result(self) -> bool:
        """Whether it belongs to the dump's last result, so that the result table must be joined."""
        return self.sql.startswith("r.")


def _compared(name: str, kind: str, doc: str) -> WhereColumn:
    """A column of the newest comparison that `compare` made of the dump, in whatever replay: a look-up in an index."""
    sql = f"(SELECT c.{name} FROM comparison AS c WHERE c.dump_id = d.dump_id AND c.comparison_id IS NOT NULL "
    return WhereColumn(name, kind, f"{sql}ORDER BY c.created_at DESC LIMIT 1)", f"last comparison: {doc}")


def _dump(name: str, kind: str, doc: str) -> WhereColumn:
    return WhereColumn(name, kind, f"d.{name}", doc)


COLUMNS: dict[str, WhereColumn] = {
    column.name: column
    for column in (
        _dump("dump_id", TEXT, "unique name of the dump"),
        _dump("run", TEXT, "name of the training run"),
        _dump("rank", NUMBER, "global rank of the process"),
        _dump("seq_len", NUMBER, "S of sequences [B, S], padding included"),
        _dump("timestamp", TIME, "UTC time of the call"),
        _dump("batch_size", NUMBER, "B of sequences [B, S]"),
        _dump("tokens", NUMBER, "real tokens: sum of attention_mask"),
        _dump("padding", NUMBER, "padded positions: batch_size * seq_len - tokens"),
        _dump("action_len", NUMBER, "A of action_mask [B, A]; null without one"),
        _dump("step", NUMBER, "global step of the DeepSpeed engine"),
        _dump("role", TEXT, "what the actor was: policy, reference, ema, sft"),
        _dump("source", TEXT, "capture, import or create"),
        _dump("world_size", NUMBER, "processes in the run"),
        _dump("local_rank", NUMBER, "rank within its host"),
        _dump("host", TEXT, "host name"),
        _dump("pid", NUMBER, "process id"),
        _dump("call_index", NUMBER, "calls that the process had captured before"),
        _dump("instance", TEXT, "tells several actors of one process apart"),
        _dump("training", BOOL, "the module was in training mode"),
        _dump("grad_enabled", BOOL, "gradients were enabled"),
        _dump("packing_samples", BOOL, "the actor packs samples"),
        _dump("autocast_dtype", TEXT, "dtype of the autocast context; null without one"),
        _dump("temperature", NUMBER, "the actor's temperature"),
        _dump("model_name", TEXT, "name or path of the model"),
        _dump("model_dtype", TEXT, "dtype of the model's parameters"),
        _dump("replayable", BOOL, "everything the call needs was stored"),
        _dump("return_output", BOOL, "the call's return_output"),
        _dump("return_logprobs", BOOL, "the call's return_logprobs"),
        _dump("return_entropy", BOOL, "the call's return_entropy"),
        _dump("allgather_logits", BOOL, "the call's allgather_logits"),
        _dump("with_outputs", BOOL, "the call's own outputs were recorded too"),
        _dump("openrlhf_version", TEXT, "version of openrlhf in the run"),
        _dump("torch_version", TEXT, "version of torch in the run"),
        _dump("transformers_version", TEXT, "version of transformers in the run"),
        _dump("deepspeed_version", TEXT, "version of deepspeed in the run"),
        _dump("bytes", NUMBER, "size of the dump file; of a packed dump its share of the pack"),
        _dump("pinned", BOOL, "rotation spares it"),
        _dump("triggered", TEXT, "the trigger that kept it: nan, exception, oom, slow, logprobs, before; null if none"),
        _dump("recovered", TEXT, "in_flight or recent: out of the ring of a process that died; null otherwise"),
        _dump("with_rng", BOOL, "the generator states were recorded too"),
        _dump("pack", TEXT, "the pack file that holds it, below the store; null for a file of its own"),
        WhereColumn("status", TEXT, "r.status", "last result: passed, failed, crashed or hung; null if never replayed"),
        WhereColumn("error", TEXT, "r.error_class", "last result: class of the exception"),
        WhereColumn("signature", TEXT, "r.signature", "last result: short name of the kind of failure"),
        WhereColumn("forward_s", NUMBER, "r.forward_s", "last result: seconds of the forward pass"),
        WhereColumn("backward_s", NUMBER, "r.backward_s", "last result: seconds of the backward pass"),
        WhereColumn("tokens_per_s", NUMBER, "r.tokens_per_s", "last result: tokens per second"),
        WhereColumn("peak_memory", NUMBER, "r.peak_memory_bytes", "last result: peak memory in bytes"),
        WhereColumn("logprob_mean", NUMBER, "r.logprob_mean", "last result: mean log-prob, nats"),
        WhereColumn("nonfinite", NUMBER, "r.nonfinite", "last result: log-probs that are NaN or infinite"),
        WhereColumn(
            "golden_max_abs", NUMBER, "r.golden_max_abs", "last result: largest difference from the run's own log-probs"
        ),
        WhereColumn(
            "golden_entropy_max_abs", NUMBER, "r.golden_entropy_max_abs", "last result: the same for entropies"
        ),
        WhereColumn("rng_match", BOOL, "r.rng_match", "last result: generators ended in the run's own states"),
        WhereColumn("replay", TEXT, "r.replay_id", "last result: the replay it came from"),
        WhereColumn("replayed_at", TIME, "r.finished_at", "last result: UTC time of its end"),
        _compared("verdict", TEXT, "match, within-noise, mismatch or not-compared; null if never compared"),
        _compared("against", TEXT, "golden, or the other replay's id"),
        _compared("max_abs", NUMBER, "largest difference of a log-prob, nats"),
        _compared("clip_share", NUMBER, "share of tokens whose ratio is outside 0.8 to 1.2"),
    )
}
"""What `--where` knows, by name."""

FUNCTIONS: dict[str, str] = {
    "abs": "abs(number): its absolute value",
    "coalesce": "coalesce(a, b, ...): the first that is not null (also ifnull)",
    "length": "length(text): its number of characters",
    "lower": "lower(text): in lower case (ASCII)",
    "now": "now(): this moment; now() - '2h' is two hours ago (units w, d, h, m, s)",
    "round": "round(number, digits): rounded; without digits to a whole number",
    "upper": "upper(text): in upper case (ASCII)",
}
"""The functions that `--where` knows, with their form."""

OPERATORS = "= == <> != < <= > >=  and or not  is [not] null  [not] in (...)  [not] between  [not] like  + - * / %"
