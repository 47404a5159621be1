"""Say which tokens of a comparison are wrong: the rule that covers them, and since which recorded input there are any.

A token is wrong if it is further from B than the dump's limit of the 99th percentile. Nearly no healthy token is: the limit is
twice what rounding moves the hundredth that it moves most. What is known of a token: whether it is the first or the last of an
answer, behind another row of the pack, behind an image; its row, position, S, rank, step and dump.
"""

import contextlib
import math
from collections.abc import Sequence

import numpy as np

from actordbg.base.errors import ActordbgError
from actordbg.catalog import query
from actordbg.compare.dump_figures import odd_values, unlike
from actordbg.compare.sides import RECORDED, ReplaySide, Side, Values, both_sides, recorded_arrays
from actordbg.document.specifications import thinned
from actordbg.formats.encoding import Array
from actordbg.locate.token_patterns import Pattern, pattern_of
from actordbg.records.comparison_record import MISMATCH, ComparisonRecord, DumpComparison
from actordbg.store.layout import Store

MOST_DUMPS = 24
"""How many dumps' tokens are read, from the worst to the best."""
_IMAGES = "mm_token_type_ids"


def wrong_tokens(store: Store, record: ComparisonRecord) -> Pattern | None:
    """Return the rule that covers the wrong tokens of a comparison; None if there is none, or the tensors are gone."""
    if not any(dump.log_probs for dump in record.mismatches):
        return None
    try:
        ours, theirs = both_sides(store, record.a.replay_id or "", record.b.replay_id or RECORDED)
    except ActordbgError:  # a side is gone: its figures are not
        return None
    dumps = [dump for dump in record.compared if dump.log_probs and dump.dump_id in ours.inputs]
    parts = [part for dump in thinned(dumps, MOST_DUMPS) if (part := _of_dump(ours, theirs, record, dump))]
    common = set.intersection(*(set(part) for part in parts)) if parts else set()
    if not common:
        return None
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name in common}
    return pattern_of(joined.pop("wrong"), joined)


def _of_dump(a: ReplaySide, b: Side, record: ComparisonRecord, dump: DumpComparison) -> dict[str, Array] | None:
    """Return which of a dump's selected tokens are wrong, and their features, each [N]; None without both sides' tensors."""
    ours, theirs = a.read(dump.dump_id), b.read(dump.dump_id)
    if isinstance(ours, str) or isinstance(theirs, str) or unlike(ours, theirs):
        return None
    limits = dump.limits or record.thresholds
    limit = next((limits[name] for name in ("p99_abs", "max_abs") if limits.get(name) is not None), math.inf)
    with np.errstate(invalid="ignore"):
        far = np.abs(ours.log_probs.astype(np.float64) - theirs.log_probs) > limit
    far |= odd_values(ours.log_probs, theirs.log_probs)
    given, result = a.inputs[dump.dump_id], a.results[dump.dump_id]
    rank = result.worker if a.spec.config.nproc > 1 else given.rank
    row, action = np.nonzero(ours.mask)
    same = {"seq_len": given.seq_len, "rank": rank, "dump": dump.dump_id}
    return {
        "wrong": far[row, action],
        **{name: values[row, action] for name, values in _marks(a, given.path, ours, given.seq_len).items()},
        "row": row,
        **{name: np.full(len(row), value) for name, value in same.items()},
    }


def _marks(a: ReplaySide, path: str, values: Values, length: int) -> dict[str, Array]:
    """Return what a dump's own tensors say of each log-prob, [B, A]. They are those of the last A tokens of [B, S]."""
    mask = values.mask
    beside = np.pad(mask, ((0, 0), (1, 1)))
    rows, actions = mask.shape
    positions = np.broadcast_to(np.arange(length - actions, length), mask.shape)
    known = {"first": mask & ~beside[:, :-2], "last": mask & ~beside[:, 2:]}
    if a.resolved.get("packing"):
        known["packed"] = np.broadcast_to(np.arange(rows)[:, None] > 0, mask.shape)
    tensors = recorded_arrays(a.store, path)
    fitting = {name: each[:, length - actions :] for name, each in tensors.items() if each.shape == (rows, length)}
    if (images := tensors.get(_IMAGES)) is not None and _IMAGES in fitting:
        known["image"] = (np.cumsum(images != 0, axis=1) > 0)[:, length - actions :]
    known["position"] = positions
    if "attention_mask" in fitting and not (real := tensors["attention_mask"] != 0).all():
        known["padded"] = np.broadcast_to(~real.all(axis=1, keepdims=True), mask.shape)
        known["unpadded"] = (np.cumsum(real, axis=1) - 1)[:, length - actions :]
    return known


def since(store: Store, dumps: Sequence[DumpComparison]) -> str:
    """Say from which recorded input on a comparison is wrong, and whether those before it are right; "" for fewer than two.

    Ids of dumps sort by the time of their call.
    """
    ordered = sorted(dumps, key=lambda dump: dump.dump_id)
    wrong = [dump.verdict == MISMATCH for dump in ordered]
    if len(wrong) < 2 or not any(wrong):
        return ""
    if all(wrong):
        return f"the first recorded input: all {len(wrong)} are wrong"
    at, after = wrong.index(True), wrong[wrong.index(True) :]
    step = None
    with contextlib.suppress(ActordbgError):  # pruned since
        step = query.get_dump(store, ordered[at].dump_id).step
    first = ordered[at].dump_id + (f", step {step}" if step is not None else "")
    are = "are" if at > 1 else "is"
    earlier = f"the {at} recorded before {are} right" if at else "none was recorded before"
    later = "all from there on are wrong" if all(after) else f"{sum(after)} of the {len(after)} from there on are wrong"
    return f"{first}: {earlier}, {later}"
