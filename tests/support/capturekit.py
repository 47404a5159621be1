# ruff: noqa: UP006, UP007, UP035, UP045, RUF013  (the signatures are OpenRLHF's own)
"""What the capture tests share: actors with OpenRLHF's signatures, a recorder that is on, and stores that misbehave."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, List, Optional, Union
from unittest.mock import patch

import torch

from actordbg.capture import hook
from actordbg.capture.control import Control, write_control
from actordbg.capture.hook import Slot, wrap
from actordbg.capture.ledger import Ledger
from actordbg.capture.recorder import Recorder
from actordbg.capture.snapshot import Copier
from actordbg.capture.watch import Notices
from actordbg.capture.writer import Writer
from actordbg.formats.dump_record import DumpRecord
from actordbg.store import payload
from actordbg.store.layout import Store
from actordbg.trainers import recorded_model
from actordbg.trainers.seam import Rows, Scores, Seam


def ids(batch: int = 2, seq: int = 12, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, seq], int64."""
    return torch.randint(0, 128_000, (batch, seq), generator=torch.Generator().manual_seed(seed))


def padded_mask(batch: int = 2, seq: int = 12) -> torch.Tensor:
    """An attention mask [batch, seq], int64, with row i padded on the left by i + 1."""
    return (torch.arange(seq) > torch.arange(batch)[:, None]).long()


class TinyActor(torch.nn.Module):
    """An Actor of the newest signature with a real (tiny) model, dropout included, so that random state matters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 64))
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.packing_samples = False
        self.temperature = 0.7

    def forward(
        self,
        sequences: torch.LongTensor,
        action_mask: Optional[torch.Tensor] = None,
        attention_mask: Optional[torch.Tensor] = None,
        return_output=False,
        allgather_logits=False,
        return_logprobs=False,
        ring_attn_group: Optional[Any] = None,
        packed_seq_lens: Optional[list[int]] = None,
        return_entropy=False,
        **mm_inputs,
    ) -> torch.Tensor:
        """Returns action log probs"""
        log_probs = torch.log_softmax(self.model(sequences % 64), dim=-1)
        picked = log_probs.gather(-1, (sequences % 64)[..., None]).squeeze(-1)[:, :-1]
        output = Output(logits=log_probs)
        if return_entropy:
            output.entropy = -(log_probs.exp() * log_probs).sum(-1)[:, :-1]
        if action_mask is None and not return_logprobs:
            return output
        if action_mask is not None:
            picked = picked[:, -action_mask.shape[1] :] * action_mask.float()
        return (picked, output) if return_output else picked


class Output(dict):
    """As transformers' ModelOutput: a dict with attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__.update(values)


class Empty(torch.nn.Module):
    """Base of actors that compute nothing."""


class SignatureA(Empty):
    """The first of eight signatures that OpenRLHF's releases have: a count of actions, no groups."""

    def forward(
        self,
        sequences: torch.LongTensor,
        num_actions: int = None,
        attention_mask: Optional[torch.Tensor] = None,
        return_output=False,
    ):
        return sequences.float()


class SignatureB(Empty):
    """`packing_samples` is an argument of the call."""

    def forward(self, sequences, num_actions: int = None, attention_mask=None, return_output=False, packing_samples=False):
        return sequences.float()


class SignatureC(Empty):
    """Ring attention; lengths of packed samples come with the call."""

    def forward(
        self,
        sequences,
        num_actions: int = None,
        attention_mask=None,
        return_output=False,
        ring_attn_group=None,
        packed_seq_lens: Optional[list[int]] = None,
    ):
        return sequences.float()


class SignatureD(Empty):
    """`num_actions` may be a list, one for each packed sample."""

    def forward(
        self,
        sequences,
        num_actions: Optional[Union[int, list[int]]] = None,
        attention_mask=None,
        return_output=False,
        ring_attn_group=None,
        packed_seq_lens=None,
    ):
        return sequences.float()


class SignatureE(Empty):
    """`logps_allgather`."""

    def forward(
        self,
        sequences,
        num_actions: Optional[Union[int, List[int]]] = None,
        attention_mask=None,
        return_output=False,
        ring_attn_group=None,
        logps_allgather=False,
        packed_seq_lens=None,
    ):
        return sequences.float()


class SignatureF(Empty):
    """An action mask takes the place of the count; log-probs on request."""

    def forward(
        self,
        sequences,
        action_mask=None,
        attention_mask=None,
        return_output=False,
        allgather_logits=False,
        return_logprobs=False,
        ring_attn_group=None,
        packed_seq_lens=None,
    ):
        return sequences.float()


class SignatureG(Empty):
    """Entropy on request."""

    def forward(
        self,
        sequences,
        action_mask=None,
        attention_mask=None,
        return_output=False,
        allgather_logits=False,
        return_logprobs=False,
        ring_attn_group=None,
        packed_seq_lens=None,
        return_entropy=False,
    ):
        return sequences.float()


class SignatureH(Empty):
    """The newest: `**mm_inputs` takes what a vision model needs."""

    def forward(
        self,
        sequences,
        action_mask=None,
        attention_mask=None,
        return_output=False,
        allgather_logits=False,
        return_logprobs=False,
        ring_attn_group=None,
        packed_seq_lens=None,
        return_entropy=False,
        **mm_inputs,
    ):
        return sequences.float()


class ForkWithTypingDefault(Empty):
    """A fork: `pos_ids` in fourth place, and a default that is a typing object instead of an annotation."""

    def forward(
        self,
        sequences,
        action_mask=None,
        attention_mask=None,
        pos_ids=None,
        return_output=False,
        prompt_len=Optional[int],
        return_squared_loss=False,
    ):
        return sequences.float()


class ForkWithVisualInputs(Empty):
    """A fork: images are arguments of their own."""

    def forward(
        self,
        sequences,
        num_actions=None,
        attention_mask=None,
        return_output=False,
        ring_attn_group=None,
        packed_seq_lens=None,
        visual_inputs: Optional[dict] = None,
        *rest,
    ):
        return sequences.float()


SIGNATURES = (SignatureA, SignatureB, SignatureC, SignatureD, SignatureE, SignatureF, SignatureG, SignatureH)


class RememberingWriter(Writer):
    """A writer that knows all ledgers it ever watched. Guarantees: it forgets them as a real one does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.met: list[Ledger] = []

    def watch(self, ledger: Ledger) -> None:
        if ledger not in self.met:
            self.met.append(ledger)
        super().watch(ledger)


class Recording:
    """A store with recording on, and `forward`s that record into it. Like `install`, without the class and the environment."""

    def __init__(
        self,
        store: Store,
        *,
        publisher: Store | None = None,
        capacity: int = 2**26,
        copier: Copier | None = None,
        **limits: Any,
    ) -> None:
        self.store = store
        self.generation = 0
        self.set(**limits)
        self.slot = Slot(store, None)
        notices = Notices()
        writer = RememberingWriter(store, notices, publisher=publisher, capacity=capacity)
        recorder = Recorder(store, writer=writer, copier=copier, notices=notices, on_change=self.slot._follow)
        self.slot._use(recorder)
        recorder.look()

    @property
    def recorder(self) -> Recorder:
        return self.slot.recorder

    @property
    def ledgers(self) -> list[Any]:
        writer = self.recorder.writer  # a forked child has one of its own
        return writer.met if isinstance(writer, RememberingWriter) else writer.watched()

    def set(self, *, enabled: bool = True, run: str = "r", **limits: Any) -> None:
        """Replace the switch; the recorder looks at once."""
        self.generation += 1
        limits.setdefault("free_floor_bytes", 0)
        write_control(self.store, Control(enabled, run, "2026-11-20T12:00:00.000000Z", self.generation, **limits))
        if hasattr(self, "slot"):
            self.recorder.look()

    def forward(self, actor: Any, *args: Any, **kwargs: Any) -> Any:
        """`actor.forward(...)`, hooked."""
        return wrap(type(actor).forward, self.slot)(actor, *args, **kwargs)

    def close(self, timeout: float = 60.0) -> bool:
        """Longer than a trainer waits: no test fails because the machine is slow."""
        return self.recorder.close(timeout)

    def dumps(self) -> list[payload.Dump]:
        """Close, however busy the machine is, and read back everything that was recorded, in order of its calls."""
        assert self.close()
        return sorted((payload.load(path) for path in self.store.iter_dumps()), key=lambda d: d.record.monotonic_ns)


class ActorAdapter:
    """Reads an Actor's forward as if it were another trainer's function."""

    name, package, tried = "kit", "kit", ()

    @staticmethod
    def rows(call: Mapping[str, Any]) -> Rows:
        actor, entropy = call["self"], bool(call.get("return_entropy"))
        temperature = getattr(actor, "temperature", 1.0)
        return Rows(actor, call["sequences"], call.get("attention_mask"), call.get("action_mask"), temperature, entropy)

    @staticmethod
    def result(output: Any) -> Scores:
        return Scores(output[0], getattr(output[1], "entropy", None)) if isinstance(output, tuple) else Scores(output)

    seams = (Seam("kit:forward", rows.__func__, result.__func__),)


def adapted(forward: Callable[..., Any], root: Path, slot: Slot | None = None) -> Callable[..., Any]:
    """This forward of a class, recorded through an adapter; whatever a test before has left in the environment."""
    with patch.dict(os.environ, ACTORDBG_DISABLE="", ACTORDBG_STORE=""):
        with patch.object(hook, "_slot", hook._slot if slot is None else lambda root: slot):
            return recorded_model.recorded(forward, ActorAdapter.seams[0], ActorAdapter, str(root), {})


class AdaptedRecording(Recording):
    """A Recording whose calls go through an adapter."""

    def forward(self, actor: Any, *args: Any, **kwargs: Any) -> Any:
        made = vars(self).setdefault("made", {})
        if type(actor) not in made:
            made[type(actor)] = adapted(type(actor).forward, self.store.root, self.slot)
        return made[type(actor)](actor, *args, **kwargs)


def balanced(ledger: Any) -> bool:
    """The invariant of the books, with nothing left in the queue."""
    return ledger.pending == 0 and ledger.calls == ledger.captured + sum(ledger.dropped.values()) + sum(
        ledger.sampled_out.values()
    )


class StuckStore(Store):
    """A store whose disk hangs until `free` is set. Guarantees: no publication ends before that."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.free = threading.Event()
        self.entered = threading.Event()

    def publish_dump(self, record: DumpRecord, blob: bytes) -> Path:
        self.entered.set()
        assert self.free.wait(300)
        return super().publish_dump(record, blob)


class FailingStore(Store):
    """A store whose publications raise `error` from the `first`-th on, `count` times. Guarantees: nothing is written then."""

    def __init__(self, root: Path, error: BaseException, first: int = 0, count: int = 10**9) -> None:
        super().__init__(root)
        self.error, self.first, self.last, self.seen = error, first, first + count, 0

    def publish_dump(self, record: DumpRecord, blob: bytes) -> Path:
        self.seen += 1
        if self.first < self.seen <= self.last:
            raise self.error
        return super().publish_dump(record, blob)


class LaterDevice:
    """A device whose copies happen only when somebody waits for them. Guarantees: `copies` counts those that happened."""

    def __init__(self) -> None:
        self.copies = 0
        self.allocated = 0
        self.graph = False
        self.lost_after = -1

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.allocated += nbytes
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def capturing(self) -> bool:
        return self.graph

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        pairs = [(host, source) for host, source in pairs]

        def wait() -> None:
            for host, source in pairs:
                assert source.is_contiguous() and source.dim() == 1, "a device-side copy would be needed"
                host.copy_(source)
                self.copies += 1
                if self.lost_after == self.copies:
                    raise RuntimeError("CUDA error: device-side assert triggered")

        return wait

    def event(self) -> float:
        return 0.0

    def seconds_between(self, start: float, end: float) -> Callable[[], float]:
        return lambda: 0.25
