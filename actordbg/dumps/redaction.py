"""Dumps without their token ids: what `actordbg bundle --redact` packs.

What a redacted dump *keeps* is listed, so that nothing new slips through: token ids after a secret permutation, masks and
positions, flags, and facts such as sizes, the time, the rank and the step. Special tokens, padding and chosen ids stay the same.
Names of runs, models, hosts and functions, texts, outputs, images, RNG states and the dump's id are left out. If the forward
needs any of these, the dump says so and is not replayable.

    redaction = Redaction(paths, keep=[7], model="meta-llama/Llama-3.1-8B")
    record, tensors = redaction.of(*load_plain(path))
"""

import secrets
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from actordbg.actor.hub_model import find_model
from actordbg.base.errors import Unsupported, UsageError
from actordbg.formats.dump_record import OUTPUT_PREFIX, RNG_PREFIX, DumpRecord, make_dump_id
from actordbg.formats.encoding import Array, PlainTensor
from actordbg.formats.nested_values import CONTEXT
from actordbg.store.payload import load_plain
from actordbg.trainers.captured_call import TEXT_SCALARS, TEXT_TENSORS

_IDS = "sequences"
_MOST_ID = 2**24
"""Token ids below this can be permuted."""
_FACTS = (
    "rank", "timestamp", "batch_size", "seq_len", "tokens", "point", "world_size", "local_rank", "call_index", "action_len",
    "step", "training", "grad_enabled", "autocast_dtype", "packing_samples", "temperature", "model_dtype", "replayable",
)  # fmt: skip
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class Redaction:
    """A permutation of token ids that is drawn once and never written: equal ids stay equal, in all these dumps.

    keep: ids that stay themselves, beside padding and the special tokens of `model`'s configuration ("": of no model). Padding is
    the most frequent id that is not attended. Raises Unsupported for ids from 2**24 on and ids that are not integers, UsageError
    for a model without special tokens, and what `find_model` raises.
    """

    def __init__(self, places: Iterable[Path], keep: Collection[int], model: str) -> None:
        fixed, top, padding = {*keep, *(_special_ids(model) if model else ())}, 0, Counter[int]()
        for place in places:
            _, tensors = load_plain(place)
            ids, mask = _ids_of(tensors), tensors.get("attention_mask")
            top = max(top, int(ids.max(initial=0)))
            if mask is not None and mask.values.shape == ids.shape:
                padding.update(ids[mask.values == 0].tolist())
        if top >= _MOST_ID:
            raise Unsupported(f"token ids up to {top} cannot be permuted", hint="bundle dumps whose ids are of a vocabulary")
        fixed |= {token for token, _ in padding.most_common(1)}
        self._map = np.arange(top + 1)
        free = np.setdiff1d(self._map, [*fixed])
        self._map[free] = np.random.Generator(np.random.PCG64(secrets.randbits(128))).permutation(free)

    def of(self, record: DumpRecord, tensors: dict[str, PlainTensor]) -> tuple[DumpRecord, dict[str, PlainTensor]]:
        """Return the redacted dump, under a new id."""
        kept = {name: tensors[name] for name in TEXT_TENSORS & tensors.keys()}
        if (ids := _ids_of(tensors)).size:
            kept[_IDS] = replace(kept[_IDS], values=np.where(ids < 0, ids, self._map[np.maximum(ids, 0)]))
        given = {name: value for name, value in record.arguments.items() if value is not None and value is not False}
        flags = {name: record.arguments[name] for name in TEXT_SCALARS & record.arguments.keys()}
        flags = {name: value for name, value in flags.items() if value is None or isinstance(value, bool)}
        left = {*tensors, *given, *record.extra} - kept.keys() - flags.keys()
        left = {name for name in left if not name.startswith((OUTPUT_PREFIX, RNG_PREFIX, CONTEXT))}
        extra = {"redacted": f"--redact left {len(left)} of its arguments out"} if left else {}
        facts = {name: getattr(record, name) for name in _FACTS} | ({"replayable": False} if left else {})
        dump_id = make_dump_id(record.timestamp, record.call_index, 0, secrets.token_hex(4))
        return DumpRecord(dump_id=dump_id, run="redacted", arguments=flags, extra=extra, **facts), kept


def _ids_of(tensors: dict[str, PlainTensor]) -> Array:
    """Return the token ids of a dump, [B, S]; an empty array if it has none."""
    tensor = tensors.get(_IDS)
    if tensor is not None and tensor.dtype not in ("int64", "int32"):
        raise Unsupported(f"token ids of {tensor.dtype} cannot be permuted", hint="bundle other dumps")
    return np.empty(0, np.int64) if tensor is None else tensor.values


def _special_ids(model: str) -> set[int]:
    config = find_model(model) or {}
    values = [part.get(name) for part in (config, config.get("text_config") or {}) for name in _SPECIAL]
    ids = {token for value in values for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    if not ids:
        raise UsageError(f"the configuration of {model} names no special tokens", hint="name them with --keep-ids")
    return ids
