"""The process that touches untrusted bytes: it decodes one pickle after another, and can do nothing else.

The decoder itself executes nothing (see `actordbg.dumps.pickle_machine`); this is the second wall, for what nobody thought
of. Before it reads the first byte the child

* gives up memory above `memory_bytes` (RLIMIT_AS), new files and sockets (RLIMIT_NOFILE 0), writing to files
  (RLIMIT_FSIZE 0) and core dumps;
* installs an audit hook under which *any* audited event, `import`, `open`, `exec`, `compile`, a subprocess, a socket, ends the
  process on the spot; decoding raises none;
* arms a CPU timer for each file (ITIMER_PROF, whose signal kills).

It gets bytes on stdin, not paths, and answers on stdout. A request is 8 bytes of length (little endian) and the file's bytes;
an answer is 4 bytes of length and JSON, `{"ok": tree}` (`actordbg.dumps.pickle_tree`) or `{"error": code, "message": text}`.
Numbers do not travel: the parent has the file's bytes, and the child answers with places in them. So even a child that was
taken over could only lie about offsets, and the parent (`archives`) checks every one against the file's size. A large file
has a child of its own, whose stdin is that file: it maps it, and answers once.

It starts in isolated mode without site packages, so it has neither torch nor numpy, in about 30 ms. Started by
`actordbg.dumps.child_pool`, which adds the wall-clock limit. Standard library only.
"""

import json
import mmap
import os
import resource
import signal
import sys
from typing import BinaryIO

from actordbg.base.errors import ActordbgError
from actordbg.dumps.pickle_tree import tree

EXIT_AUDIT = 77
"""Exit status of a child that was about to do something."""
EXIT_MEMORY = 78
"""Exit status of a child that ran out of the memory it may have."""


def main(memory_bytes: int, cpu_seconds: float, start: int = 0, end: int = 0) -> None:
    """Serve requests until stdin ends; never returns to an interpreter that could do more.

    end: 0, or that of the pickle from `start` on in the file that stdin is, which is the only request.
    """
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    mapped = mmap.mmap(0, end, access=mmap.ACCESS_READ) if end else None
    try:  # run every path once, so that nothing is imported lazily after the hook is in place
        tree(b"")
    except ActordbgError as error:
        error_to_answer(error)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes + end, memory_bytes + end))
    sys.addaudithook(_refuse)
    while mapped or len(head := source.read(8)) == 8:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = _tree(mapped, start) if mapped else _answer(source, head)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(len(answer).to_bytes(4, "little") + answer)
        sink.flush()
        if mapped:
            break
    os._exit(0)


def _refuse(event: str, arguments: object) -> None:
    os._exit(EXIT_AUDIT)


def _answer(source: BinaryIO, head: bytes) -> bytes:
    """Return what `_tree` does of the next file; nothing if it did not come whole."""
    size = int.from_bytes(head, "little")
    try:
        data = source.read(size)
    except MemoryError:
        os._exit(EXIT_MEMORY)
    return _tree(data, 0) if len(data) == size else b""


def _tree(data: bytes | mmap.mmap, start: int) -> bytes:
    """Return the tree of a pickle, or its refusal, as JSON."""
    try:
        return json.dumps({"ok": tree(data, start)}).encode()
    except ActordbgError as error:
        return error_to_answer(error)
    except MemoryError:
        os._exit(EXIT_MEMORY)


def error_to_answer(error: ActordbgError) -> bytes:
    """Encode a refusal as JSON."""
    return json.dumps({"error": error.code, "message": error.message[:500]}).encode()
