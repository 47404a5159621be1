"""The writer process: encodes and publishes the calls of one training process, which thereby keeps its interpreter for itself.

Started by the writer thread (`actordbg.capture.writer`), a fresh interpreter without torch: about 30 MB and 0.15 s of CPU, once.
It maps the flight recorder's ring and reads the inputs from there, so that a request is a few numbers. The thread keeps the
books and decides everything: this process only turns a slot into a dump file. What it cannot write, for whatever reason, the
thread writes, or counts as lost.

    thread   {"ring": PATH, "store": ROOT, "level": 3, "versions": {...}, "slots": [[PLACE, SEQUENCE], ...]}
    process  [[PATH, BYTES], null, ...]                     one for each slot; null: not written

Invariants:

- A slot that was freed, or taken by another call, while it was read is not published. So a thread that gave up waiting may go on.
- It dies with the training process, whatever it is doing: what was not published is in the ring, and `dump recover` brings it.
- Signals that end a job (Ctrl-C, SIGTERM, SIGHUP) are for the training process, which may want to write what is queued.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
from typing import Any

from actordbg.base.fault import describe
from actordbg.formats.encoding import compressor, pack, record_of, serialize, tensors_in
from actordbg.formats.ringfile import DATA, FREE, SLOT, SLOT_SIZE, SLOTS_AT, head_bytes
from actordbg.formats.store_files import StoreFiles, open_regular

_PR_SET_PDEATHSIG = 1


class RingReader:
    """The slots of one ring, as its process writes them."""

    def __init__(self, path: str) -> None:
        descriptor = open_regular(path)
        try:
            self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._kinds: dict[tuple[int, int], dict[str, Any]] = {}

    def has(self, place: int, sequence: int) -> bool:
        """Whether a slot holds the call of this number."""
        state, _, _, _, found, *_ = SLOT.unpack_from(self._memory, SLOTS_AT + place * SLOT_SIZE)
        return bool(state != FREE and found == sequence)

    def dump(self, place: int, versions: dict[str, str]) -> tuple[Any, bytes]:
        """The record and the payload of the call in a slot."""
        _, _, _, _, _, offset, _, at, length, count, _ = SLOT.unpack_from(self._memory, SLOTS_AT + place * SLOT_SIZE)
        kind, numbers = self._kind(at, length), struct.unpack_from(f"<{count}q", self._memory, offset)
        tensors = tensors_in(self._memory, offset + head_bytes(count), numbers, kind["tensors"])
        return serialize(record_of(kind["fields"], numbers, tensors, versions), tensors)

    def _kind(self, at: int, length: int) -> dict[str, Any]:
        known: dict[str, Any] | None = self._kinds.get((at, length))
        if known is None:
            known = dict(json.loads(self._memory[at : at + length - 8]))
            if at < DATA:  # written once; what lies in a call's own extent is that call's
                self._kinds[at, length] = known
        return known


class SlotWriter:
    """Answers requests; see the module."""

    def __init__(self) -> None:
        self._path = ""
        self._ring: RingReader | None = None
        self._compressors: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> list[list[Any] | None]:
        """Publish the calls of a request; the path and the size of each file."""
        if self._ring is None or self._path != request["ring"]:
            self._path, self._ring = request["ring"], RingReader(request["ring"])
        return [self._publish(self._ring, request, *slot) for slot in request["slots"]]

    def _publish(self, ring: RingReader, request: dict[str, Any], place: int, sequence: int) -> list[Any] | None:
        try:
            if not ring.has(place, sequence):
                return None
            record, payload = ring.dump(place, request["versions"])
            blob = pack(record, payload, self._compressor(request["level"]))
            if not ring.has(place, sequence):
                return None
            return [str(StoreFiles(request["store"]).publish_dump(record, blob)), len(blob)]
        except Exception:  # noqa: BLE001  # the thread tries it again, and says what is wrong
            return None

    def _compressor(self, level: int) -> Any:
        if level not in self._compressors:
            self._compressors[level] = compressor(level)
        return self._compressors[level]


def main() -> None:
    """Answer until the training process is gone. The first line says that we are there."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() != parent:  # it died before we could ask to die with it
        return
    writer = SlotWriter()
    _say("ready")
    for line in sys.stdin.buffer:
        try:
            answer: Any = writer.answer(json.loads(line))
        except (OSError, ValueError) as error:  # the ring cannot be mapped: the thread does without us
            answer = describe(error)
        _say(answer)


def _say(answer: Any) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")
