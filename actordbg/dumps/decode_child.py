"""The process that touches untrusted bytes: it decodes one old pickle after another, and can do nothing else.

The decoder itself executes nothing (see `actordbg.dumps.pickle_machine`); this is the second wall, for what nobody thought
of. Before it reads the first byte the child

* gives up memory above `memory_bytes` (RLIMIT_AS), new files and sockets (RLIMIT_NOFILE 0), writing to files
  (RLIMIT_FSIZE 0) and core dumps;
* installs an audit hook under which *any* audited event, `import`, `open`, `exec`, `compile`, a subprocess, a socket, ends the
  process on the spot; decoding raises none;
* arms a CPU timer for each file (ITIMER_PROF, whose signal kills).

It gets bytes on stdin, not paths, and answers on stdout. A request is 8 bytes of length (little endian) and the file's
bytes; an answer is 4 bytes of length and JSON, `{"ok": {...}}` or `{"error": code, "message": text}`. The tensors do not
travel: the parent has the file's bytes, and the child answers with places in them. So even a child that was taken over could
only lie about offsets, and `answer_to_dump`, which runs in the parent, checks every one against the file's size.

It starts in isolated mode without site packages, so it has neither torch nor numpy, in about 30 ms. Started by
`actordbg.dumps.child_pool`, which adds the wall-clock limit. Standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from actordbg.base.errors import ActordbgError, CorruptDump, UnsafeInput
from actordbg.dumps.decode import (
    DTYPES,
    FLAGS,
    MAX_RANK,
    TENSORS,
    LegacyDump,
    LegacyTensor,
    check_shapes,
    check_tensor,
    checked_argument,
    decode,
    parse_stamp,
)
from actordbg.dumps.pickle_machine import corrupt, unsafe

MAX_ANSWER = 4 * 2**20
_SIZES = dict(DTYPES.values())
_ERRORS = {UnsafeInput.code: unsafe, CorruptDump.code: corrupt}

EXIT_AUDIT = 77
"""Exit status of a child that was about to do something."""
EXIT_MEMORY = 78
"""Exit status of a child that ran out of the memory it may have."""


def main(memory_bytes: int, cpu_seconds: float) -> None:
    """Serve requests until stdin ends; never returns to an interpreter that could do more."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:  # run every path once, so that nothing is imported lazily after the hook is in place
        decode(b"")
    except ActordbgError as error:
        error_to_answer(error)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.addaudithook(_refuse)
    while len(head := source.read(8)) == 8:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = _answer(source, int.from_bytes(head, "little"))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(len(answer).to_bytes(4, "little") + answer)
        sink.flush()
    os._exit(0)


def _refuse(event: str, arguments: object) -> None:
    os._exit(EXIT_AUDIT)


def _answer(source: BinaryIO, size: int) -> bytes:
    try:
        data = source.read(size)
        return dump_to_answer(decode(data)) if len(data) == size else b""
    except ActordbgError as error:
        return error_to_answer(error)
    except MemoryError:
        os._exit(EXIT_MEMORY)


def dump_to_answer(dump: LegacyDump) -> bytes:
    """Encode a decoded dump as JSON. Plain dicts by hand: `asdict` calls `id`, which the child's audit hook forbids."""
    tensors = {name: vars(tensor) for name, tensor in dump.tensors.items()}
    data = {"tensors": tensors, "arguments": dump.arguments, "rank": dump.rank, "stamp": dump.stamp}
    return json.dumps({"ok": data}).encode()


def error_to_answer(error: ActordbgError) -> bytes:
    """Encode a refusal as JSON."""
    return json.dumps({"error": error.code, "message": error.message[:500]}).encode()


def answer_to_dump(answer: bytes, size: int) -> LegacyDump:
    """Return the dump that an answer about a file of `size` bytes describes, with everything checked again.

    Raises the error that the child reported, or UnsafeInput if no sound child gives such an answer.
    """
    try:
        data = json.loads(answer)
        if "error" in data:
            raise _ERRORS[data["error"]](str(data["message"]))
        return _dump(data["ok"], size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise unsafe("the decoding process sent an invalid answer") from None


def _dump(data: dict[str, Any], size: int) -> LegacyDump:
    tensors = {key: _tensor(key, data["tensors"][key], size) for key in TENSORS if key in data["tensors"]}
    if not data["arguments"].keys() <= {*FLAGS, *TENSORS, "packed_seq_lens"}:
        raise ValueError("unknown argument")
    arguments = {key: checked_argument(key, value) for key, value in data["arguments"].items()}
    timestamp = parse_stamp(data["stamp"])
    if type(data["rank"]) is not int or not 0 <= data["rank"] < MAX_RANK or timestamp is None:
        raise ValueError(data["rank"])
    dump = LegacyDump(tensors, arguments, data["rank"], data["stamp"], timestamp)
    check_shapes(dump)
    return dump


def _tensor(key: str, data: dict[str, Any], size: int) -> LegacyTensor:
    numbers = (*data["shape"], *data["strides"], data["start"], data["stop"])
    if not all(type(n) is int for n in numbers):
        raise ValueError(key)
    tensor = LegacyTensor(
        str(data["dtype"]), _SIZES[data["dtype"]], tuple(data["shape"]), tuple(data["strides"]), data["start"], data["stop"]
    )
    check_tensor(key, tensor, size)
    return tensor
