# ruff: noqa: UP045  (the signatures are OpenRLHF's own)
"""What the capture tests share: actors with OpenRLHF's signatures, a recorder that is on, and stores that misbehave."""

from __future__ import annotations

import os
import threading
from typing import Any, Optional
from unittest.mock import patch

import torch

from actordbg.capture import hook
from actordbg.capture.control import Control
from actordbg.capture.hook import Slot, wrap
from actordbg.capture.recorder import Recorder
from actordbg.capture.switch_file import write_control
from actordbg.capture.watch import Notices
from actordbg.capture.writer import Writer
from actordbg.store import payload
from actordbg.store.layout import Store
from actordbg.trainers import recorded_model
from actordbg.trainers.seam import Rows, Scores, Seam


def with_gpus(monkeypatch, generators, current):
    """Make this a process that has initialized CUDA, with the GPUs of these generators, one of them current."""
    for name, value in {"is_initialized": True, "is_current_stream_capturing": False, "current_device": current}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)


def ids(batch=2, seq=12, seed=0):
    """Token ids [batch, seq], int64."""
    return torch.randint(0, 128_000, (batch, seq), generator=torch.Generator().manual_seed(seed))


def padded_mask(batch=2, seq=12):
    """An attention mask [batch, seq], int64, with row i padded on the left by i + 1."""
    return (torch.arange(seq) > torch.arange(batch)[:, None]).long()


class TinyActor(torch.nn.Module):
    """An Actor of the newest signature with a real (tiny) model, dropout included, so that random state matters."""

    def __init__(self):
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

    def __init__(self, **values):
        super().__init__(values)
        self.__dict__.update(values)


class Empty(torch.nn.Module):
    """Base of actors that compute nothing."""


def actor_with(parameters):
    """An actor that computes nothing, whose forward has these parameters behind `self`."""
    scope = {}
    exec(
        f"class Actor(Empty):\n    def forward(self, sequences, {parameters}):\n        return sequences.float()",
        globals(),
        scope,
    )
    made = scope["Actor"]
    return made


_COUNTED = "num_actions: int = None, attention_mask: Optional[torch.Tensor] = None, return_output=False"
_MASKED = "action_mask=None, attention_mask=None, return_output=False, allgather_logits=False, return_logprobs=False, ring_attn_group=None, packed_seq_lens=None"
SIGNATURES = tuple(map(actor_with, (
    _COUNTED,
    f"{_COUNTED}, packing_samples=False",
    f"{_COUNTED}, ring_attn_group=None, packed_seq_lens: Optional[list[int]] = None",
    f"{_COUNTED.replace('int =', 'Optional[Union[int, list[int]]] =')}, ring_attn_group=None, packed_seq_lens=None",
    f"{_COUNTED.replace('int =', 'Optional[Union[int, List[int]]] =')}, ring_attn_group=None, logps_allgather=False, packed_seq_lens=None",
    _MASKED,
    f"{_MASKED}, return_entropy=False",
    f"{_MASKED}, return_entropy=False, **mm_inputs",
)))  # fmt: skip
"""The eight signatures that OpenRLHF's releases have had, the oldest first."""
SignatureA, SignatureD, SignatureH = SIGNATURES[0], SIGNATURES[3], SIGNATURES[7]
ForkWithTypingDefault = actor_with(
    "action_mask=None, attention_mask=None, pos_ids=None, return_output=False, prompt_len=Optional[int], return_squared_loss=False"
)
"""A fork: `pos_ids` in fourth place, and a default that is a typing object instead of an annotation."""
ForkWithVisualInputs = actor_with(
    "num_actions=None, attention_mask=None, return_output=False, ring_attn_group=None, packed_seq_lens=None, visual_inputs=None, *rest"
)
"""A fork: images are arguments of their own."""


class RememberingWriter(Writer):
    """A writer that knows all ledgers it ever watched. Guarantees: it forgets them as a real one does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.met = []

    def watch(self, ledger):
        if ledger not in self.met:
            self.met.append(ledger)
        super().watch(ledger)


class Recording:
    """A store with recording on, and `forward`s that record into it. Like `install`, without the class and the environment."""

    def __init__(
        self,
        store,
        *,
        capacity=2**26,
        copier=None,
        **limits,
    ):
        self.store = store
        self.generation = 0
        self.set(**limits)
        self.slot = Slot(store, None)
        notices = Notices()
        writer = RememberingWriter(store, notices, capacity=capacity)
        recorder = Recorder(store, writer=writer, copier=copier, notices=notices, on_change=self.slot._follow)
        self.slot._use(recorder)
        recorder.look()

    @property
    def recorder(self):
        return self.slot.recorder

    @property
    def ledgers(self):
        writer = self.recorder.writer  # a forked child has one of its own
        return writer.met if isinstance(writer, RememberingWriter) else writer.watched()

    @property
    def ledger(self):
        """The books of the only actor and run."""
        (ledger,) = self.ledgers
        return ledger

    @property
    def ring(self):
        assert self.recorder.ring is not None
        return self.recorder.ring

    def dump(self):
        """Close, and read back the only dump."""
        (dump,) = self.dumps()
        return dump

    def set(self, *, enabled=True, run="r", **limits):
        """Replace the switch; the recorder looks at once."""
        self.generation += 1
        limits.setdefault("free_floor_bytes", 0)
        write_control(self.store, Control(enabled, run, "2026-11-20T12:00:00.000000Z", self.generation, **limits))
        if hasattr(self, "slot"):
            self.recorder.look()

    def forward(self, actor, *args, **kwargs):
        """`actor.forward(...)`, hooked."""
        return wrap(type(actor).forward, self.slot)(actor, *args, **kwargs)

    def close(self, timeout=60.0):
        """Longer than a trainer waits: no test fails because the machine is slow."""
        return self.recorder.close(timeout)

    def dumps(self):
        """Close, however busy the machine is, and read back everything that was recorded, in order of its calls."""
        assert self.close()
        return sorted((payload.load(path) for path in self.store.iter_dumps()), key=lambda d: d.record.monotonic_ns)


class ActorAdapter:
    """Reads an Actor's forward as if it were another trainer's function."""

    name, package, tried = "kit", "kit", ()

    @staticmethod
    def rows(call):
        actor, entropy = call["self"], bool(call.get("return_entropy"))
        temperature = getattr(actor, "temperature", 1.0)
        return Rows(actor, call["sequences"], call.get("attention_mask"), call.get("action_mask"), temperature, entropy)

    @staticmethod
    def result(output):
        return Scores(output[0], getattr(output[1], "entropy", None)) if isinstance(output, tuple) else Scores(output)

    seams = (Seam("kit:forward", rows.__func__, result.__func__),)


def adapted(forward, root, slot=None):
    """This forward of a class, recorded through an adapter; whatever a test before has left in the environment."""
    with patch.dict(os.environ, ACTORDBG_DISABLE="", ACTORDBG_STORE=""):
        with patch.object(hook, "_slot", hook._slot if slot is None else lambda root: slot):
            return recorded_model.recorded(forward, ActorAdapter.seams[0], ActorAdapter, str(root), {})


class AdaptedRecording(Recording):
    """A Recording whose calls go through an adapter."""

    def forward(self, actor, *args, **kwargs):
        made = vars(self).setdefault("made", {})
        if type(actor) not in made:
            made[type(actor)] = adapted(type(actor).forward, self.store.root, self.slot)
        return made[type(actor)](actor, *args, **kwargs)


def balanced(ledger):
    """The invariant of the books, with nothing left in the queue."""
    return ledger.pending == 0 and ledger.calls == ledger.captured + sum(ledger.dropped.values()) + sum(
        ledger.sampled_out.values()
    )


class StuckStore(Store):
    """A store whose disk hangs until `free` is set. Guarantees: no publication ends before that."""

    def __init__(self, root):
        super().__init__(root)
        self.free = threading.Event()
        self.entered = threading.Event()

    def publish_dump(self, record, blob):
        self.entered.set()
        assert self.free.wait(300)
        return super().publish_dump(record, blob)


class LaterDevice:
    """A device whose copies happen only when somebody waits for them. Guarantees: `copies` counts those that happened."""

    def __init__(self):
        self.copies = 0
        self.graph = False
        self.lost_after = -1

    def pinned(self, nbytes):
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def capturing(self):
        return self.graph

    def copy(self, pairs):
        pairs = [(host, source) for host, source in pairs]

        def wait():
            for host, source in pairs:
                assert source.is_contiguous() and source.dim() == 1, "a device-side copy would be needed"
                host.copy_(source)
                self.copies += 1
                if self.lost_after == self.copies:
                    raise RuntimeError("CUDA error: device-side assert triggered")

        return wait

    def event(self):
        return 0.0

    def seconds_between(self, start, end):
        return lambda: 0.25
