"""Batches of a matrix side by side, each runner with groups of its own, where the engine has several.

A thread runs one batch after another with an engine of its own (`GroupEngine.parts`), so each Actor is loaded once per group
and key. What a runner tells goes through a queue to the caller's thread, which alone touches the terminal and the catalog. A
Ctrl-C there, or an error of a runner, stops every runner at its next tick.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from actordbg.replay.group_engine import GroupEngine, using

T = TypeVar("T")
Call = Callable[[], None]


class CellRunners:
    """Runs jobs on several engines. `tell` hands a call to the caller's thread; `tick` ends a runner that has to stop."""

    def __init__(self, engines: Sequence[GroupEngine]) -> None:
        self._engines: queue.SimpleQueue[GroupEngine] = queue.SimpleQueue()
        for engine in engines:
            self._engines.put(engine)
        self._count = len(engines)
        self._told: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def tell(self, call: Call) -> None:
        """Have it called in the caller's thread."""
        self._told.put(call)

    def tick(self) -> None:
        """A runner calls this often; raises KeyboardInterrupt when all are to stop."""
        if self._stopped.is_set():
            raise KeyboardInterrupt

    def run(self, jobs: Sequence[T], work: Callable[[T], None], on_tick: Call) -> None:
        """Run every job, and raise the first error of any. `on_tick` is called in this thread, about 20 times a second."""

        def on_an_engine(job: T) -> None:
            engine = self._engines.get()
            try:
                with using(engine):
                    work(job)
            finally:
                self._engines.put(engine)

        with ThreadPoolExecutor(self._count, thread_name_prefix="cells") as pool:
            futures = [pool.submit(on_an_engine, job) for job in jobs]
            try:
                while not all(future.done() for future in futures) and not any(map(_error, futures)):
                    self._listen(0.05)
                    on_tick()
            finally:
                self._stopped.set()
                for future in futures:
                    future.cancel()
        self._listen(0)
        errors = filter(None, map(_error, futures))
        for error in sorted(errors, key=lambda error: isinstance(error, KeyboardInterrupt)):
            raise error  # what went wrong, before what was stopped for it

    def _listen(self, patience_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._told.get(timeout=patience_s or None, block=bool(patience_s))()
            while True:
                self._told.get_nowait()()


def _error(future: Future[Any]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None
