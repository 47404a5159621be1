"""OpenRLHF's Actor on CUDA in a training step, recorded and not: stall and step time, and whether what was recorded is right.

Inputs lie on the GPU, so copies go into pinned memory on a side stream, and only the writer waits for them. Beside it, in turn
with steps that are not recorded: `pickle.dump`, `torch.save`, a copy to the host alone, and a copy and a thread. Then every dump
is compared with what the Actor was given, bit for bit, and memory of the GPU before and after recorded calls.

    python -m benchmarks.gpu.capture_on_gpu --json FILE [--stand-in]

`--stand-in`: no CUDA; a tiny model on the CPU, whose tensors say that they are on a GPU, and a device whose copies come later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from actordbg.actor.models import build_tiny
from actordbg.capture import snapshot
from actordbg.config.choices import Choices
from actordbg.store import payload
from actordbg.trainers.trainer import TRAINER
from benchmarks import real_step
from benchmarks.bench_capture import beside, ratio_of
from benchmarks.gpu.made_inputs import LARGE
from benchmarks.real_step import Training

WAYS = ("process", "pickle", "thread", "torch.save", "armed", "clone", "clone + thread")
CHECKED = 20


class StandInDevice:
    """A GPU made of the CPU: copies into it are made when somebody waits for them."""

    copies = 0

    def __init__(self, _: torch.device) -> None:
        self.pinned = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
        self.capturing = lambda: False

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Copies that come later see what was there now: nothing changes these inputs."""
        kept = [(host, source.clone()) for host, source in pairs]

        def wait() -> None:
            for host, source in kept:
                host.copy_(source)
            StandInDevice.copies += 1

        return wait

    def event(self) -> float:
        """A moment of the device's work."""
        return time.monotonic()

    def seconds_between(self, start: float, end: float) -> Callable[[], float]:
        """Between two moments."""
        return lambda: end - start


@contextlib.contextmanager
def on_a_stand_in(wanted: bool) -> Iterator[None]:
    """While it lasts, tensors say that they are on a GPU, and copies go through the stand-in."""
    if not wanted:
        yield
        return
    defaults = (StandInDevice, *snapshot.Copier.__init__.__defaults__[1:])  # type: ignore[index]
    with mock.patch.object(snapshot.Copier.__init__, "__defaults__", defaults):
        on_gpu = {"is_cuda": property(lambda self: True), "is_cpu": property(lambda self: False)}
        with mock.patch.multiple(torch.Tensor, **on_gpu), mock.patch.object(torch.cuda, "synchronize", lambda *_: None):
            yield


def build(folder: Path, cuda: bool) -> Any:
    """OpenRLHF's Actor of a random Llama, as a trainer has it, with marks around its forward."""
    TRAINER.prepare_process()
    TRAINER.support_cpu()
    path = build_tiny(folder / "model", **(LARGE if cuda else {}))
    choices = Choices(str(path), "bf16" if cuda else "fp32", "sdpa", packing=False, temperature=1.0, backward=True)
    actor = TRAINER.build_actor(str(path), choices).to("cuda" if cuda else "cpu")
    plain = type(actor).forward

    class Marked(type(actor)):  # type: ignore[misc]
        marks = (0.0, 0.0)

        def forward(
            self, sequences: torch.Tensor, action_mask: Any = None, attention_mask: Any = None, return_output: bool = False,
            allgather_logits: bool = False, return_logprobs: bool = False, ring_attn_group: Any = None,
            packed_seq_lens: Any = None, return_entropy: bool = False, **mm_inputs: Any,
        ) -> Any:  # fmt: skip
            began = time.perf_counter()
            found = plain(self, sequences, action_mask, attention_mask, return_output, return_logprobs=return_logprobs)
            self.marks = began, time.perf_counter()
            return found

    actor.__class__ = Marked
    return actor.train()


def given(cuda: bool, count: int = 8) -> list[dict[str, Any]]:
    """Arguments of calls, on the GPU: sequences and attention_mask [4, 2048] int64, action_mask [4, 1024] bool."""
    made, device = torch.Generator().manual_seed(0), "cuda" if cuda else "cpu"
    rows, length = (4, 2048) if cuda else (2, 64)
    found = []
    for number in range(count):
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, : number + 1] = 0
        ids = torch.randint(0, 4000, (rows, length), generator=made)
        action = torch.ones(rows, length // 2, dtype=torch.bool)
        tensors = {"sequences": ids, "action_mask": action, "attention_mask": mask}
        found.append({name: tensor.to(device) for name, tensor in tensors.items()} | {"return_logprobs": True})
    return found


def measured(training: Training, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Stall and step time of each way, against the steps beside it that are not recorded."""
    order = [way for _ in range(rounds) for one in WAYS for way in ("off", one)] + ["off"]
    training.block("off", steps)  # kernels are chosen and compiled in the first steps
    blocks = [training.block(way, steps) for way in order]
    rows = []
    for way in ("off", *WAYS):
        times, error = ratio_of(blocks, way, "steps")
        row = {"way": way, "step_ratio": times, "error": error, "stall_us": 1e6 * beside(blocks, way, "stalls")[0]}
        rows.append(row | {"others_ms": 1e3 * beside(blocks, way, "others")[0], "step_ms": 1e3 * steps_of(blocks, way)})
    return rows


def steps_of(blocks: list[Any], way: str) -> float:
    """Median seconds of a step."""
    found = sorted(seconds for block in blocks if block.way == way for seconds in block.steps)
    return found[len(found) // 2]


def checked(training: Training, inputs: list[dict[str, Any]], cuda: bool) -> dict[str, Any]:
    """Record some calls more, and hold every dump against what was given."""
    training.switch("process")
    time.sleep(real_step.SETTLE_SECONDS)
    training.step()
    before = torch.cuda.memory_allocated() if cuda else 0
    for _ in range(CHECKED):
        training.step()
    grown = (torch.cuda.memory_allocated() if cuda else 0) - before
    training.close()
    ledger = training.slot.recorder.writer.watched()[0]
    wanted = [{name: value.cpu() for name, value in call.items() if isinstance(value, torch.Tensor)} for call in inputs]
    paths = list(training.store.iter_dumps())
    right = sum(any(same(payload.load(path).inputs, call) for call in wanted) for path in paths)
    books = {"calls": ledger.calls, "captured": ledger.captured, "dropped": ledger.dropped, "pending": ledger.pending}
    return {"dumps": len(paths), "right": right, "gpu_bytes_more": grown, **books}


def same(found: dict[str, torch.Tensor], call: dict[str, torch.Tensor]) -> bool:
    """Whether a dump holds this call's tensors, bit for bit."""
    return found.keys() == call.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in call.items()
    )


def text_of(answer: dict[str, Any]) -> str:
    """The answer as a table."""
    rows, found = answer["rows"], answer["check"]
    size = answer["bytes_of_a_call"] / 1e3
    lines = [f"{answer['device']}; step without recording {rows[0]['step_ms']:.2f} ms, {size:.0f} kB a call"]
    lines.append(f"{'way':<16} {'step ms':>9} {'of off':>8} {'+-':>7} {'stall us':>9} {'other threads ms':>17}")
    for row in rows:
        cost = f"{row['stall_us']:>9.0f} {row['others_ms']:>17.3f}"
        lines.append(f"{row['way']:<16} {row['step_ms']:>9.2f} {row['step_ratio']:>8.4f} {row['error']:>7.4f} {cost}")
    right = f"{found['right']} of {found['dumps']} dumps are what the Actor was given"
    lines.append(f"{right}; {found['captured']} captured, {found['dropped'] or 'none'} dropped")
    lines.append(f"memory of the GPU after {CHECKED} recorded calls: {found['gpu_bytes_more']:+d} bytes")
    return "\n".join(lines)


def run(stand_in: bool, rounds: int = 3, steps: int = 12) -> dict[str, Any]:
    """Measure and check. AssertionError if a dump is wrong, or if the books are."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, on_a_stand_in(stand_in):
        inputs = given(not stand_in)
        training = Training(Path(folder), build(Path(folder), not stand_in), inputs)
        rows = measured(training, rounds, steps)
        check = checked(training, inputs, not stand_in)
    assert check["right"] == check["dumps"] == check["captured"] and check["pending"] == 0, check
    name = "a stand-in made of CPU tensors" if stand_in else torch.cuda.get_device_name(0)
    size = sum(value.nbytes for value in inputs[0].values() if isinstance(value, torch.Tensor))
    copies = StandInDevice.copies if stand_in else None
    answer = {"device": name, "rows": rows, "check": check, "bytes_of_a_call": size, "copies_of_the_stand_in": copies}
    return answer | {"text": text_of(answer)}


def main() -> None:
    """Print the table, and keep it as JSON."""
    parser = argparse.ArgumentParser(description="What recording costs on a GPU.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    words = parser.parse_args()
    answer = run(words.stand_in, words.rounds, words.steps)
    print(answer["text"])
    if words.json is not None:
        words.json.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
