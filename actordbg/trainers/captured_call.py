"""Repeat a captured call: match its arguments by name, and read log-probs from its result. All Actors are called this way.

The record holds the arguments of one `Actor.forward` by name, from any of its eight signatures; the installed version may
have another. Arguments are matched by name against the installed signature. An argument that this signature does not have is
dropped if it was off (None or False) and refused otherwise: `**mm_inputs` would swallow it silently.

What `forward` returns depends on its flags:

| action_mask | return_logprobs | return_output | returns |
|---|---|---|---|
| given | any | False / True | `action_log_probs [B, A]` / `(action_log_probs, output)` |
| None | True | False / True | `log_probs [B, S-1]` / `(log_probs, output)` |
| None | False | True | `output`: logits only |

The last kind is called with `return_logprobs=True`, which changes nothing that is computed before, so that every replay has
log-probs to compare; the result's notes say so. A ring attention group is the replay's, or none: each rank of a ring gets the
whole batch, so rings of any size, and a single process, compute the same log-probs. A different size of the recorded group is
noted.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import Unsupported
from actordbg.formats.dump_record import FORWARD, UNKNOWN_TYPE
from actordbg.formats.nested_values import CONTEXT
from actordbg.trainers.find_adapter import cannot_import
from actordbg.trainers.seam import IMAGES, Rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from actordbg.store.payload import Dump

_GROUP = "ring_attn_group"
TEXT_TENSORS = frozenset({"sequences", "attention_mask", "action_mask", "position_ids"})
TEXT_SCALARS = frozenset({"return_output", "allgather_logits", "return_logprobs", "return_entropy", "packed_seq_lens"})
"""Names of the arguments that the truth knows, beside those of images."""
_MULTIMODAL = (*IMAGES, "video_grid_thw", "second_per_grid_ts")
IMAGE_TENSORS = frozenset({"pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids"})
"""Names of the arguments of images whose rows can be told apart: not of videos, and not of images that were cut up."""


@dataclass(frozen=True)
class Signature:
    """The signature of an Actor's forward: argument names, and whether it has `**mm_inputs`."""

    names: frozenset[str]
    multimodal: bool

    @classmethod
    def of(cls, actor: Any) -> Signature:
        """Read the signature of a built Actor, through wrappers (`functools.wraps`)."""
        parameters = inspect.signature(type(actor).forward).parameters.values()
        named = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        return cls(named - {"self"}, any(p.kind is p.VAR_KEYWORD for p in parameters))


@dataclass
class ReplayedCall:
    """A call of forward, ready to run.

    arguments: by name, tensors on their device. mask: bool, [B, A] or [B, S-1], on the CPU: the log-probs that summaries cover.
    folded: token ids were wrapped (modulo) into the vocabulary. notes: differences between this call and the record.
    """

    arguments: dict[str, Any]
    mask: Tensor
    folded: bool
    notes: tuple[str, ...]


def make_call(signature: Signature, dump: Dump, vocab_size: int, device: torch.device, ring_group: Any = None) -> ReplayedCall:
    """Build the call that `dump` captured, for an Actor with this signature and vocabulary; tensors on `device`.

    `ring_group`: this rank's process group for ring attention, if the replay has rings.

    Masks keep their captured dtype. Raises Unsupported if the record cannot be replayed.
    """
    record, inputs = dump.record, dict(dump.inputs)
    if not record.replayable:
        reasons = "; ".join(f"{name}: {why}" for name, why in record.extra.items()) or "no reason recorded"
        raise Unsupported(f"the call could not be recorded whole ({reasons})", hint=_ANOTHER)
    if record.point != FORWARD:
        raise Unsupported(f"the dump is a {record.point}, and only forwards are replayed", hint=_ANOTHER)
    if "sequences" not in inputs:
        raise Unsupported("the dump holds no sequences", hint=_ANOTHER)
    from actordbg.formats.encoding import require_fit  # with numpy, which not every desk has

    require_fit(inputs, hint=_ANOTHER)
    arguments: dict[str, Any] = {}
    for name, value in record.arguments.items():
        if name == _GROUP or name.startswith(CONTEXT):
            continue
        if name in signature.names:
            arguments[name] = value
        elif value is not None and value is not False:
            raise _unknown(name)
    size = 1 if ring_group is None else ring_group.size()
    if ring_group is not None:
        arguments[_GROUP] = ring_group
    notes: tuple[str, ...] = ()
    for name, group in record.process_groups.items():
        recorded = (group or {}).get("size", 1)
        if recorded > 1 and size == 1:
            notes += (f"{name} of {recorded} ranks left out: one process computes the whole batch",)
        elif recorded > 1 and recorded != size:
            notes += (f"{name} had {recorded} ranks when recorded, and has {size} in this replay",)
    notes += tuple(f"{name}, {why}, is left out" if why.startswith(UNKNOWN_TYPE) else why for name, why in record.extra.items())
    ids = inputs["sequences"]
    folded = ids.numel() > 0 and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size)
    if folded:
        inputs["sequences"] = ids.remainder(vocab_size)
    for name, tensor in inputs.items():
        if name not in signature.names and not (signature.multimodal and name.startswith(_MULTIMODAL)):
            raise _unknown(name)
        arguments[name] = tensor.to(device)
    if arguments.get("action_mask") is None and not arguments.get("return_logprobs"):
        arguments["return_logprobs"] = True
        notes += ("called with return_logprobs=True: the recorded call returned logits only",)
    return ReplayedCall(arguments, summary_mask(inputs), folded, notes)


def text_call(dump: Dump, vocab_size: int, device: torch.device) -> ReplayedCall:
    """Build the captured call for the truth, which computes it row by row without an Actor: tokens, masks and images.

    Raises Unsupported for videos and the like, and for rows that were packed before the Actor got them.
    """
    unknown = sorted(set(dump.inputs) - TEXT_TENSORS - IMAGE_TENSORS)
    if unknown:
        raise Unsupported(
            f"the truth takes text and images, not {', '.join(unknown)}",
            hint="compare two configurations on this dump with each other",
        )
    if dump.record.arguments.get("packed_seq_lens") is not None:
        raise Unsupported(
            "the rows of this call were packed before the Actor got them (packed_seq_lens)",
            hint="replay a dump of unpacked rows: newer trainers pack inside the Actor",
        )
    call = make_call(Signature(TEXT_TENSORS | TEXT_SCALARS, multimodal=True), dump, vocab_size, device)
    notes = tuple(note for note in call.notes if "return_logprobs" not in note)  # does not apply to the truth
    return replace(call, notes=notes)


def summary_mask(inputs: Mapping[str, Any]) -> Any:
    """Return which log-probs count: the action mask [B, A], or without one every real next token, [B, S-1].

    A next token is real if both it and the token that predicts it are attended. Takes torch tensors or numpy arrays; importing
    this module needs no torch, because the desk compares without it.
    """
    if "action_mask" in inputs:
        return inputs["action_mask"] != 0
    attention = inputs.get("attention_mask")
    if attention is None:
        following = inputs["sequences"][:, 1:]
        return following == following
    real = attention != 0
    return real[:, 1:] & real[:, :-1]


def require_inert(dump: Dump, log_probs: Tensor, mask: Tensor) -> None:
    """Check that leaving out the arguments of unknown type gives the recorded log-probs, bit for bit, at the actions.

    Raises Unsupported otherwise, with their names and types, and where no log-probs were recorded.
    """
    from torch import equal

    unknown = [f"{name} ({why})" for name, why in dump.record.extra.items() if why.startswith(UNKNOWN_TYPE)]
    if not unknown:
        return
    recorded = dump.outputs.get("action_log_probs", dump.outputs.get("log_probs"))
    which, same = ", ".join(unknown), False
    if recorded is not None and recorded.shape == log_probs.shape:
        counted = mask.cpu()
        ours = log_probs.detach().to(recorded.dtype).cpu()
        same = equal(ours[counted], recorded[counted])
    if not same:
        why = (
            "no log-probs were recorded"
            if recorded is None
            else "without it the log-probs are not the recorded ones, bit for bit"
        )
        raise Unsupported(
            f"the call cannot be replayed without {which}: {why}",
            hint="record --with-outputs, and replay with that step's weights through the trainer's own Actor",
        )


def read_result(result: Any, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (log_probs, entropy or None) from the result of forward, both shaped like `mask`, still on their device."""
    from torch import Tensor

    log_probs, output = result if isinstance(result, tuple) else (result, None)
    if not isinstance(log_probs, Tensor):
        raise Unsupported(f"the Actor returned {type(log_probs).__name__}, not log-probs", hint=_REPORT)
    if tuple(log_probs.shape) != tuple(mask.shape):
        raise Unsupported(f"log-probs are {tuple(log_probs.shape)}, the mask {tuple(mask.shape)}", hint=_REPORT)
    entropy = getattr(output, "entropy", None)
    return log_probs, None if entropy is None else entropy[:, -mask.shape[1] :]


_ANOTHER = "replay another dump of this run"
_REPORT = "this version's forward is new to actordbg: please report it with `actordbg doctor`"


def _unknown(name: str) -> Unsupported:
    return Unsupported(
        f"the dump was captured with the argument {name}, which the installed Actor.forward does not have",
        hint="replay with the trainer (or the fork) that it was captured with, or pass --through rows",
    )


def function(where: str) -> Any:
    """Return the function at `module:Class.method`, unwrapped from its decorators."""
    try:
        return inspect.unwrap(resolve_name(where))
    except (ImportError, AttributeError) as error:
        raise cannot_import(where, error) from error


def labelled(rows: Rows) -> dict[str, Any]:
    """Return the rows as arguments of a model with labels: -100 where no token counts; packed rows with their positions."""
    real = rows.sequences.new_ones(rows.sequences.shape) if rows.attention_mask is None else rows.attention_mask
    counted = (real[:, 1:] * real[:, :-1]) != 0
    if rows.action_mask is not None:
        counted = counted.new_zeros(counted.shape)
        counted[:, -rows.action_mask.shape[1] :] = rows.action_mask != 0
    labels = rows.sequences.new_full(rows.sequences.shape, -100)
    labels[:, 1:] = rows.sequences[:, 1:].where(counted, labels[:, 1:])
    places = {"position_ids": rows.positions} if rows.packed else {"attention_mask": real}
    return {"input_ids": rows.sequences, "labels": labels, **places}
