"""The process that touches untrusted bytes: it decodes one old pickle after another, and can do nothing else.

The decoder itself executes nothing (see `actordbg.legacy.pickle_machine`); this is the second wall, for what nobody thought
of. Before it reads the first byte the child

* gives up memory above `memory_bytes` (RLIMIT_AS), new files and sockets (RLIMIT_NOFILE 0), writing to files
  (RLIMIT_FSIZE 0) and core dumps;
* installs an audit hook under which *any* audited event, `import`, `open`, `exec`, `compile`, a subprocess, a socket, ends the
  process on the spot; decoding raises none;
* arms a CPU timer for each file (ITIMER_PROF, whose signal kills).

It gets bytes on stdin, not paths, and answers on stdout with the places of the tensors in those bytes (`wire`). It
starts in isolated mode without site packages, so it has neither torch nor numpy, in about 30 ms. Started by
`actordbg.legacy.child_pool`, which adds the wall-clock limit.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import BinaryIO

from actordbg.base.errors import ActordbgError
from actordbg.legacy import child_wire as wire
from actordbg.legacy.decode import decode

EXIT_AUDIT = 77
"""Exit status of a child that was about to do something."""
EXIT_MEMORY = 78
"""Exit status of a child that ran out of the memory it may have."""


def main(memory_bytes: int, cpu_seconds: float) -> None:
    """Serve requests until stdin ends; never returns to an interpreter that could do more."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _warm_up()
    _shut_in(memory_bytes)
    while _serve(source, sink, cpu_seconds):
        pass
    os._exit(0)


def _warm_up() -> None:
    """Run every path once, so that nothing is imported lazily after the hook is in place."""
    try:
        decode(b"")
    except ActordbgError as error:
        wire.error_to_answer(error)


def _shut_in(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: object) -> None:
    os._exit(EXIT_AUDIT)


def _serve(source: BinaryIO, sink: BinaryIO, cpu_seconds: float) -> bool:
    """Answer one request; False when there are no more."""
    head = source.read(8)
    if len(head) < 8:
        return False
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    answer = _answer(source, int.from_bytes(head, "little"))
    signal.setitimer(signal.ITIMER_PROF, 0)
    sink.write(len(answer).to_bytes(4, "little") + answer)
    sink.flush()
    return True


def _answer(source: BinaryIO, size: int) -> bytes:
    try:
        data = source.read(size)
        return wire.dump_to_answer(decode(data)) if len(data) == size else b""
    except ActordbgError as error:
        return wire.error_to_answer(error)
    except MemoryError:
        os._exit(EXIT_MEMORY)
