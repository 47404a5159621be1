"""The writer process: encodes and publishes the calls of one training process, so that these do not take its interpreter.

The writer thread (`actordbg.capture.writer`) starts it as a fresh interpreter without torch: about 30 MB and 0.15 s of CPU, once.
It maps the flight recorder's ring and reads the inputs from there, so that a request is a few numbers. The thread keeps the
books and decides everything: this process only turns a slot into a dump file. The thread writes, or counts as lost, whatever
this process fails to write.

    thread   {"ring": PATH, "store": ROOT, "versions": {...}, "slots": [[SLOT, SEQUENCE], ...]}
    process  [[PATH, BYTES], null, ...]                     one entry per slot; null: not written

Invariants:

- A slot that was freed, or taken by another call, while it was read is not published. So a thread that gave up waiting may
  continue.
- It dies with the training process, whatever it is doing: unpublished calls are in the ring, and `dump recover` saves them.
- It ignores signals that end a job (Ctrl-C, SIGTERM, SIGHUP): the training process may still write its queue.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from actordbg.base.fault import describe
from actordbg.formats.ringfile import DATA, FREE, SLOT, SLOT_SIZE, SLOTS_AT, head_bytes
from actordbg.formats.store_files import StoreFiles, open_regular

ANSWER_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from actordbg.capture.writer_process import main; main()"


class Scribe:
    """The thread's handle of the writer process: a request and its answer are a line of JSON each.

    The thread waits for an answer while the process lives, but not past its own deadline.
    """

    def __init__(self) -> None:
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-I", "-c", _MAIN, str(os.getpid()), json.dumps(sys.path)]
        self._process = subprocess.Popen(
            command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._said = b""
        self._ready = False

    def ask(self, request: dict[str, Any], is_over: Callable[[], bool]) -> Any:
        """Send a request and return its answer. OSError if the process is gone, refuses it, or the time is over."""
        self._ready = self._ready or self._listen(is_over) == "ready"
        self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
        answer = self._listen(is_over)
        if not isinstance(answer, list):
            raise OSError(f"the writer process answered {answer!s:.200}")
        return answer

    def stop(self) -> None:
        """Kill the process, even if it does not respond, and wait at most a second for its end."""
        try:
            self._process.kill()
        finally:
            self._process.stdin.close(), self._process.stdout.close()  # type: ignore[union-attr]
            until = time.monotonic() + 1  # it may be blocked on a disk
            while self._process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)

    def _listen(self, is_over: Callable[[], bool]) -> Any:
        out: Any = self._process.stdout
        ear = select.poll()
        ear.register(out, select.POLLIN)
        while not self._said.endswith(b"\n"):
            more = out.read(65_536) if ear.poll(1000 * ANSWER_SECONDS) else None
            if more == b"" or is_over():
                raise OSError("the writer process ended" if more == b"" else "there is no time left")
            self._said += more or b""
        line, self._said = self._said, b""
        return json.loads(line)


class SlotWriter:
    """Turns slots of one ring into dump files."""

    def __init__(self, ring: str) -> None:
        from actordbg.formats import encoding  # with numpy, which the training process does without

        descriptor = open_regular(ring)
        try:
            self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._encoding = encoding
        self._kinds: dict[tuple[int, int], dict[str, Any]] = {}

    def answer(self, request: dict[str, Any]) -> list[list[Any] | None]:
        """Publish the calls of a request. Returns the path and the size of each file."""
        return [self._publish(request, *slot) for slot in request["slots"]]

    def _publish(self, request: dict[str, Any], slot: int, sequence: int) -> list[Any] | None:
        at, encoding = SLOTS_AT + slot * SLOT_SIZE, self._encoding
        try:
            if not self._has(at, sequence):
                return None
            *_, offset, _, kind_at, length, count, _ = SLOT.unpack_from(self._memory, at)
            kind, numbers = self._kind(kind_at, length), struct.unpack_from(f"<{count}q", self._memory, offset)
            tensors = encoding.tensors_in(self._memory, offset + head_bytes(count), numbers, kind["tensors"])
            record = encoding.record_of(kind["fields"], numbers, tensors, request["versions"])
            record, payload = encoding.serialize(record, tensors)
            blob = encoding.pack(record, payload)
            if not self._has(at, sequence):
                return None
            return [str(StoreFiles(request["store"]).publish_dump(record, blob)), len(blob)]
        except Exception:  # noqa: BLE001  # the thread retries it, and reports the error
            return None

    def _has(self, at: int, sequence: int) -> bool:
        """Check whether a slot holds the call of this number."""
        state, _, _, _, held, *_ = SLOT.unpack_from(self._memory, at)
        return bool(state != FREE and held == sequence)

    def _kind(self, at: int, length: int) -> dict[str, Any]:
        known = self._kinds.get((at, length)) or dict(json.loads(self._memory[at : at + length - 8]))
        if at < DATA:  # shared and written once; a kind in a call's own extent is only that call's
            self._kinds[at, length] = known
        return known


def main() -> None:
    """Answer requests until the training process is gone. The first line says that this process is ready."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() != parent:  # it died before prctl
        return
    writers: dict[str, SlotWriter] = {}
    _say("ready")
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            if request["ring"] not in writers:
                writers = {request["ring"]: SlotWriter(request["ring"])}
            answer: Any = writers[request["ring"]].answer(request)
        except (OSError, ValueError) as error:  # the ring cannot be mapped: the thread writes instead
            answer = describe(error)
        _say(answer)


def _say(answer: Any) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")
