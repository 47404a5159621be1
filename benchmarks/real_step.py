"""A training step of some 40 ms around an Actor with 135 kB of inputs, in which ways of recording take turns.

Each block of steps has one *way* (see `WAYS`), and between any two blocks is one with the hook installed and off, so that each
block has such neighbours. Of each step: its time; the *stall*, which is what the call takes beside its forward; and the CPU time
of the process's other threads. Caches are cold when a call comes, as they are in training and in no loop over calls.

    python -m benchmarks.real_step survive WAY FOLDER CALLS      calls until it is killed on its own, inside of the last one
"""

from __future__ import annotations

import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actordbg.capture.control import Control
from actordbg.capture.hook import Slot, wrap
from actordbg.capture.switch_file import write_control
from actordbg.formats.dump_record import now_timestamp
from actordbg.store.layout import Store

Forward = Callable[..., Any]
SETTLE_SECONDS = 0.7
"""The hook looks at its switch twice a second."""
OURS: dict[str, dict[str, Any]] = {
    "process": {"writer": "process"},
    "thread": {"writer": "thread"},
    "armed": {"every": 0, "triggers": ("nan", "exception", "slow:10x"), "before": 4, "writer": "process"},
}
"""Our ways, and their switches. `armed`: nothing is kept."""


class Actor(torch.nn.Module):
    """OpenRLHF's signature around a small transformer. `marks`: when the last forward began and ended."""

    def __init__(self, vocabulary: int = 4096, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        made = [torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
        head = torch.nn.Linear(width, vocabulary)
        self.model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), *made, head)
        self.packing_samples, self.temperature, self.vocabulary = False, 1.0, vocabulary
        self.marks = (0.0, 0.0)

    def forward(
        self, sequences: torch.Tensor, action_mask: Any = None, attention_mask: Any = None, return_output: bool = False,
        allgather_logits: bool = False, return_logprobs: bool = False, ring_attn_group: Any = None,
        packed_seq_lens: Any = None, return_entropy: bool = False, **mm_inputs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Log-probs of the first 32 tokens."""
        began = time.perf_counter()
        ids = sequences[:, :32] % self.vocabulary
        found = torch.log_softmax(self.model(ids), -1).gather(-1, ids[..., None]).squeeze(-1)[:, :-1]
        self.marks = began, time.perf_counter()
        return found


def batches(count: int) -> Iterator[dict[str, Any]]:
    """Arguments of calls: sequences [4, 2048] and attention_mask int64, action_mask [4, 1024] bool."""
    made = torch.Generator().manual_seed(0)
    for number in range(count):
        mask = torch.ones(4, 2048, dtype=torch.int64)
        mask[0, : number % 50 + 1] = 0
        ids = torch.randint(0, 128_000, (4, 2048), generator=made)
        yield {
            "sequences": ids,
            "action_mask": torch.ones(4, 1024, dtype=torch.bool),
            "attention_mask": mask,
            "return_logprobs": True,
        }


class Peers:
    """What one would write by hand: at the end of each forward, into one file for each call under `folder`."""

    def __init__(self, folder: Path, bare: Forward) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._number, self._bare = folder, 0, bare
        self._queue: queue.SimpleQueue[tuple[Path, dict[str, Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self.ways: dict[str, Forward] = {
            "clone": self._around(lambda path, tensors: None),
            "clone + thread": self._around(lambda path, tensors: self._queue.put((path, tensors))),
            "pickle": self._around(self._pickle),
            "pickle + fsync": self._around(lambda path, tensors: self._pickle(path, tensors, flush=True)),
            "torch.save": self._around(lambda path, tensors: torch.save(tensors, path)),
            "safetensors": self._around(self._safetensors),
        }

    def _around(self, write: Callable[[Path, dict[str, Any]], object]) -> Forward:
        def forward(actor: Actor, **arguments: Any) -> Any:
            output = self._bare(actor, **arguments)
            copies = {
                name: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()
            }
            self._number += 1
            write(self._folder / f"{self._number:06d}", copies)
            return output

        return forward

    def _drain(self) -> None:
        while True:
            self._pickle(*self._queue.get())

    def start(self) -> None:
        """Start the thread of `clone + thread`."""
        self._thread.start()

    @staticmethod
    def _pickle(path: Path, tensors: dict[str, Any], flush: bool = False) -> None:
        with path.open("wb") as file:
            pickle.dump(tensors, file)
            if flush:
                file.flush()
                os.fsync(file.fileno())

    @staticmethod
    def _safetensors(path: Path, tensors: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        save_file({name: v for name, v in tensors.items() if isinstance(v, torch.Tensor)}, path)


@dataclass(frozen=True)
class Block:
    """Seconds of each step of one way: the step, the stall, the CPU time of the training thread, and of the other threads."""

    way: str
    steps: list[float]
    stalls: list[float]
    own: list[float]
    others: list[float]

    @property
    def cpu(self) -> list[float]:
        """CPU time of each step, all threads together; a writer process is not of them."""
        others = sum(self.others) / len(self.others)
        return [own + others for own in self.own]


class Training:
    """One process that trains an actor, and goes from way to way. Its actor's class keeps `marks`, as `Actor` does."""

    def __init__(self, folder: Path, actor: Any = None, given: list[dict[str, Any]] | None = None) -> None:
        self.store = Store(folder / "store").create()
        self._actor = actor or Actor()
        self._class: Any = type(self._actor)
        self._bare = self._class.forward
        self.peers = Peers(folder / "peers", self._bare)
        self.peers.start()
        self.slot = Slot(self.store, None)
        self._hooked = wrap(self._bare, self.slot)
        self._generation = 0
        self._optimizer = torch.optim.AdamW(self._actor.parameters(), foreach=False)
        self._batches = given or list(batches(40))
        self._calls = 0

    def block(self, way: str, steps: int) -> Block:
        """Steps of one way, after those that it takes until the switch was surely seen."""
        self.switch(way)
        until, found = time.perf_counter() + SETTLE_SECONDS, Block(way, [], [], [], [])
        while len(found.steps) < steps:
            began, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
            stall = self.step()
            ended = time.perf_counter()
            if began > until:
                mine = time.thread_time() - own
                found.steps.append(ended - began)
                found.stalls.append(stall)
                found.own.append(mine)
                found.others.append(time.process_time() - cpu - mine)
        return found

    def turns(self, ours: str, peers: Sequence[str], each: int) -> list[tuple[str, float]]:
        """Seconds of single steps: one of ours or of a peer, in an order drawn anew each round, between any two that are off.

        The switch says `ours` all the while, and the hook is told before a step whether it is on. A step and its neighbours have
        the machine's drift in common.
        """
        drawn = random.Random(0)
        self.switch(ours)
        until = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < until:
            self.step()
        on, found = self.slot.enter, []
        assert on is not None
        for _ in range(each):
            for way in drawn.sample((ours, *peers), 1 + len(peers)):
                for which in ("off", way):
                    self._class.forward = self.peers.ways.get(which, self._hooked)
                    self.slot.enter = on if which == ours else None
                    began = time.perf_counter()
                    self.step()
                    found.append((which, time.perf_counter() - began))
        self.slot.enter = on
        return found

    def step(self) -> float:
        """Forward, backward, optimizer, and the device's end of them; the stall."""
        arguments = self._batches[self._calls % len(self._batches)]
        self._calls += 1
        began = time.perf_counter()
        output = self._actor(**arguments)
        ended = time.perf_counter()
        inside, outside = self._actor.marks
        (-output.mean()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if output.is_cuda:
            torch.cuda.synchronize()
        return inside - began + ended - outside

    def switch(self, way: str) -> None:
        """Record this way from now on."""
        self._class.forward = self.peers.ways.get(way, self._hooked)
        self._generation += 1
        limits = OURS.get(way, {})
        control = Control(way in OURS, "bench", now_timestamp(), self._generation, free_floor_bytes=0, **limits)
        write_control(self.store, control)

    def close(self) -> None:
        """Write what is queued."""
        self.slot.recorder.close(60)
        self._class.forward = self._bare


def survive(way: str, folder: Path, calls: int) -> None:
    """Calls of one way; the process kills itself inside of the last one, if they come so far."""
    torch.set_num_threads(1)
    training = Training(folder)
    training.switch(way)
    for _ in range(calls):
        training.step()
        time.sleep(0.01)
        print("call", flush=True)
    inner = training._actor.model
    inner.forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    training.step()


if __name__ == "__main__":
    survive(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
