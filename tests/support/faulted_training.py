"""A small training that records itself with an actordbg whose calls can be made to fail (`faults`).

A run makes a store and an Actor class, installs the hook as the trailer does, trains (dropout, log-prob passes, backward passes, optimizer
steps, a forward that raises, the switch turned off and on again under another run's name), and ends as a process ends. `faulted_checks`
says what has to hold of it, `faulted_runs` makes the runs.

The recorder's clocks run a few hundred times faster here (`hasten`), so that a run takes some milliseconds.
"""

import functools
import importlib.metadata
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults

faults.instrument("actordbg")

import torch  # noqa: E402

from actordbg.capture import hook, ledger, recorded_call, watch, writer  # noqa: E402
from actordbg.capture.control import Control  # noqa: E402
from actordbg.capture.ledger import Ledger  # noqa: E402
from actordbg.capture.switch_file import control_text  # noqa: E402
from actordbg.formats.ringfile import CLOSED  # noqa: E402

STARTS_IN_S = 25.0
"""On a busy machine a writer process takes longer to start than a training waits at its end; its calls would stay in the ring."""


def hasten():
    """The recorder's clock runs a few hundred times faster, so that a run takes milliseconds and passes every periodic task."""
    watch.POLL_SECONDS, watch.FIRST_SECONDS = 0.001, 0.5
    writer.LOOK_SECONDS, writer.IDLE_SECONDS, writer.PUBLISH_SECONDS = 0.001, 0.001, 0.002
    writer.HEARTBEAT_SECONDS, writer._FLOOR_SECONDS, ledger.COUNT_SECONDS = 0.004, 0, -1
    recorded_call.MEDIAN_FROM = 2
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # type: ignore[assignment]
    sys.setswitchinterval(0.05)  # threads change hands where they wait, not anywhere


class Broken(ValueError):
    """What the training's own forward raises."""


def actor_class():
    """A new Actor class: a real model with dropout."""

    class Actor(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 64))
            self.model.global_steps = 0  # as an engine has: so the weights of each step are recorded too

        def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, mood="good", sizes=None):
            if mood == "broken":
                raise Broken("CUDA out of memory, they say")
            log_probs = torch.log_softmax(self.model(sequences % 64), dim=-1)
            picked = log_probs.gather(-1, (sequences % 64)[..., None]).squeeze(-1)[:, 1:]
            if mood == "nan":
                picked = picked * float("nan")
            if mood == "slow":
                time.sleep(0.003)
            return picked * 100 if mood == "far" else picked

    return Actor


def train(cls, switch, call):
    """All that a training computes: outputs, gradients, weights, random states. `call` calls the actor; `switch` flips the switch."""
    torch.manual_seed(7)
    actor = cls()
    ids = torch.arange(6 * 40).view(6, 40) * 7919 % 50_000
    mask = torch.ones(2, 12, dtype=torch.int64)
    seen = []

    def look(rows, **more):
        with torch.no_grad():
            seen.append(call(actor, rows, **more))

    def learn(rows, **more):
        actor.zero_grad()
        output = call(actor, rows, **more)
        output.square().mean().backward()
        seen.extend([output.detach(), *(p.grad.clone() for p in actor.parameters())])
        with torch.no_grad():  # one step of SGD: torch's own class takes longer to make than all of this
            for parameter in actor.parameters():
                parameter -= 0.1 * parameter.grad
        actor.model.global_steps += 1

    look(ids[:2, :12], attention_mask=mask, action_mask=mask[:, 1:].bool())
    learn(ids[:3, :20].contiguous(), return_output=False, mood="far")
    look(ids[:2, :14], sizes=[3, {"a": 1.5}], mood="slow")
    look(ids[:2, :14], mood="nan")
    try:
        look(ids[:2, :12], mood="broken")
    except Broken as error:
        seen.append(str(error))
    switch(False, "r")
    look(ids[:1, :9])
    switch(True, "r2")
    for _ in range(3):
        look(ids[:2, :12].contiguous(), attention_mask=mask)
    learn(ids[:3, :20])
    look(ids[:2, :30], attention_mask=torch.ones(2, 30)[:1].expand(2, 30))
    return [*seen, *(p.detach().clone() for p in actor.parameters()), torch.get_rng_state()]


def same(left, right):
    """Bit for bit."""
    return len(left) == len(right) and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


def closed(books):
    """Whether nothing is pending; asks nothing that could be failing now."""
    calls, captured, _, *closed = books.counts[:CLOSED]
    return calls == captured + sum(closed)


class Log(logging.Handler):
    """What the recorder says. Guarantees: keeps every warning, with the kind of trouble that it is about."""

    def __init__(self):
        super().__init__()
        self.said = []
        self._about = threading.local()

    def emit(self, record):
        self.said.append((getattr(self._about, "kind", ""), record.getMessage()))

    def listen(self, said):
        warn = said.warn

        def noted(kind, message):
            self._about.kind = kind
            warn(kind, message)

        said.warn = noted  # type: ignore[method-assign]


@dataclass
class Run:
    """One training with a recorder, and all that is known of it afterwards."""

    folder: Path
    limits: dict[str, Any]
    log: Log = field(default_factory=Log)
    calls: int = 0
    computed: list[Any] = field(default_factory=list)
    raised: str | None = None
    ledgers: list[Ledger] = field(default_factory=list)
    """All that its recorder ever had; it forgets those of an actor that is gone."""
    seconds: float = 0.0
    patience: float = 0.012
    """Longest time, in seconds, that the training waits for the recorder to see its switch."""

    @property
    def store(self):
        return self.folder / "store"

    @property
    def recorder(self):
        return next((slot.recorder for slot in hook._slots.values()), None)

    def prepare(self):
        self.store.mkdir()
        (self.store / "FORMAT").write_text('{"format": 1}\n')
        os.environ["ACTORDBG_RING_DIR"] = str(self.folder / "rings")
        self._generation = 0
        self._texts = {
            (on, run): control_text(Control(on, run, "2026-11-20T12:00:00.000000Z", number, free_floor_bytes=0, **self.limits))
            for number, (on, run) in enumerate([(True, "r"), (False, "r"), (True, "r2")], 1)
        }

    def write_switch(self, on, run):
        self._generation += 1
        temporary = self.store / "control.new"
        temporary.write_text(self._texts[on, run])
        temporary.replace(self.store / "control.json")

    def switch(self, on, run):
        """Flip the switch, and wait for a while until the recorder has seen it; it may be too broken for that."""
        self.write_switch(on, run)
        until = time.monotonic() + self.patience
        while time.monotonic() < until and not self._follows(on):
            time.sleep(0.001)

    def call(self, actor, *args, **kwargs):
        """One call of the actor; counts it, if it is made while recording is on."""
        found = self.recorder
        if found is None:
            return actor(*args, **kwargs)
        (slot,) = hook._slots.values()
        arrives = slot.enter == slot._arrive
        on = slot.enter is not None and not arrives and found.control is not None and found.ring is not None
        before = self.booked()
        try:
            return actor(*args, **kwargs)
        finally:
            if arrives:
                on = self.booked() > before
            self.calls += on

    def booked(self):
        """Calls in the books."""
        found = self.recorder
        return 0 if found is None else found.stray - found._strays_booked + sum(ledger.counts[0] for ledger in self.ledgers)

    def go(self):
        logger = logging.getLogger("actordbg")
        logger.addHandler(self.log)
        hook._slots.clear()
        cls = actor_class()
        began = time.monotonic()
        try:
            self._install(cls)
            self.computed = train(cls, self.switch, self.call)
            time.sleep(0.004)
            hook._at_exit()
            self._settle()
        except Exception as error:  # noqa: BLE001  # whatever it is, it should not have got here
            self.raised = f"{type(error).__name__}: {error}"
        finally:
            self.seconds = time.monotonic() - began
            logger.removeHandler(self.log)

    def _install(self, cls):
        self.write_switch(True, "r")
        try:
            hook.install(cls, store=str(self.store))
            for slot in hook._slots.values():
                self.log.listen(slot.recorder.notices)
                self._remember(slot.recorder.writer)
                if self.limits.get("writer") == "process":
                    slot.recorder.close = functools.partial(slot.recorder.close, STARTS_IN_S)
        except Exception:  # noqa: BLE001  # as the trailer does
            hook._slots.clear()

    def _remember(self, of):
        watch = of.watch

        def remembered(books):
            watch(books)
            if books not in self.ledgers:
                self.ledgers.append(books)

        of.watch = remembered  # type: ignore[method-assign]

    def _settle(self):
        """Let the threads end. One that could not be told to (the fault is in telling it) continues until its process is gone."""
        found = self.recorder
        threads = [t for t in (found.watch._thread, found.writer._thread) if t is not None] if found is not None else []
        until = time.monotonic() + 10
        while found is not None and time.monotonic() < until and not all(map(closed, self.ledgers)):
            time.sleep(0.001)
        for thread in threads:
            thread.join(0.05 if thread.is_alive() else None)

    def end_threads(self):
        """Now that nothing fails any more: threads of this run must not be there in the next one."""
        hook._at_exit()
        found = self.recorder
        for thread in (found.watch._thread, found.writer._thread) if found is not None else ():
            if thread is not None:
                thread.join(5)
                assert not thread.is_alive()

    def _follows(self, on):
        found = self.recorder
        control = found.control if found is not None else None
        return control is None if not on else control is not None and control.run == "r2"
