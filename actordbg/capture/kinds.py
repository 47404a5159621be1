"""What many calls have in common, put together once: the constant part of their records.

Of a call's record, only its number, times, step, and shapes are its own; the rest is that of every other call of the same
actor with the same arguments. So a call refers to its Kind: the writer builds records from it, and the ring holds it once as
JSON, so that a call in flight is described without the training thread writing a word.

    numbers(...)     what is the call's own, as integers: see NUMBERS
    Kind.record(...) the record, from both
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from actordbg.capture.binding import Bound
from actordbg.capture.facts import ActorFacts, CallFacts, Rank
from actordbg.capture.ledger import Ledger
from actordbg.formats.encoding import dtype_name
from actordbg.formats.ringfile import sealed

if TYPE_CHECKING:
    from actordbg.capture.ring import Ring

NO_STEP = -1
MOST_KINDS = 512
"""Kinds that are remembered; with more than these, arguments are different for each call."""


@dataclass(slots=True)
class Kind:
    """`fields`: of the record, equal for all calls of this kind. `tensors`: (name, dtype) of each, in order.

    `shared`: other calls refer to it, too. `ring`, `at`: where a ring holds
    `text`; (0, 0): the call's own extent has to.
    """

    fields: dict[str, Any]
    tensors: tuple[tuple[str, str], ...]
    text: bytes
    shared: bool = False
    ring: Ring | None = None
    at: tuple[int, int] = (0, 0)

    def place_in(self, ring: Ring) -> tuple[int, int]:
        """Where this ring holds the text, written there the first time; (0, 0) if it has no room, or is not shared."""
        if self.ring is not ring:
            self.ring, self.at = ring, ring.add_kind(self.text) if self.shared else (0, 0)
        return self.at


@dataclass
class Kinds:
    """The kinds of one process, by what tells them apart."""

    known: dict[Any, Kind] = field(default_factory=dict)

    def of(self, ledger: Ledger, instance: Any, call: CallFacts, bound: Bound, dtypes: tuple[torch.dtype, ...]) -> Kind:
        """The kind of a call. `instance`: its actor (`actordbg.capture.recorder.Instance`)."""
        if bound.extra or any(bound.groups.values()):
            return self._make(ledger, instance, call, bound, dtypes)
        arguments = bound.arguments
        key = (
            ledger.serial, instance.role, call.training, call.grad_enabled, call.autocast_dtype, call.packing_samples,
            call.temperature, *bound.tensors, dtypes, *bound.groups, *arguments, *arguments.values(),
            *map(type, arguments.values()),
        )  # fmt: skip
        try:
            kind = self.known.get(key)
        except TypeError:  # an argument is a list or a dict
            return self._make(ledger, instance, call, bound, dtypes)
        if kind is None:
            kind = self._make(ledger, instance, call, bound, dtypes)
            if len(self.known) < MOST_KINDS:
                kind.shared = True
                self.known[key] = kind
        return kind

    def _make(
        self, ledger: Ledger, instance: Any, call: CallFacts, bound: Bound, dtypes: tuple[torch.dtype, ...]
    ) -> Kind:
        who, rank, about = ledger.identity, instance.rank, instance.about
        fields = _fields(who, rank, instance.role, call, bound, about)
        tensors = tuple((name, dtype_name(dtype)) for name, dtype in zip(bound.tensors, dtypes, strict=True))
        return Kind(fields, tensors, sealed({"fields": fields, "tensors": tensors}))


def _fields(who: Any, rank: Rank, role: str | None, call: CallFacts, bound: Bound, about: ActorFacts) -> dict[str, Any]:
    return {
        "run": who.run,
        "rank": rank.rank,
        "world_size": rank.world_size,
        "local_rank": rank.local_rank,
        "host": who.host,
        "pid": who.pid,
        "instance": who.instance,
        "role": role,
        "training": call.training,
        "grad_enabled": call.grad_enabled,
        "autocast_dtype": call.autocast_dtype,
        "packing_samples": call.packing_samples,
        "temperature": call.temperature,
        "arguments": bound.arguments,
        "process_groups": bound.groups,
        "extra": bound.extra,
        "model_name": about.model_name,
        "model_dtype": about.model_dtype,
        "actor": about.facts,
    }


def numbers(
    call: CallFacts, number: int, token: int, shape: tuple[int, int], tensors: Sequence[int]
) -> tuple[int, ...]:
    """What is one call's own: number, time (ns), monotonic time (ns), step, token of its dump id, B, S, then for each tensor
    its count of dimensions, shape, strides, offset in the extent, bytes.
    """
    step = NO_STEP if call.step is None else call.step
    return (number, call.time_ns, call.monotonic_ns, step, token, *shape, *tensors)
