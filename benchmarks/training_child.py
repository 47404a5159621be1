"""Child program of bench_training: OpenRLHF's own SFT command, with a meter around every call of its Actor.

    deepspeed --module benchmarks.training_child <arguments of openrlhf.cli.train_sft>

The meter takes the time between calls, which is a step (forward, backward, optimizer, logging, data), and at the end of each
block it changes the state of the hook: *bare* (uninstalled), *off* (installed, dumping disabled), *on* (recording every call),
*slow* (recording while every fsync of another thread takes 10 s). Steps until the switch was surely seen do not count.
BENCH_PLAN names a JSON file with the store, the states and the steps of a block; each block becomes one line of its `result`.
After the last block the training ends.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actordbg.capture import hook
from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.formats.dump_record import now_timestamp
from actordbg.store.layout import Store
from actordbg.trainers.openrlhf import demo_programs as driver

SETTLE_SECONDS = 0.8
"""The hook looks at its switch twice a second."""
SETTLE_STEPS = 3
WARM_UP_STEPS = 20
SLOW_SECONDS = 10.0


@dataclass(frozen=True)
class Plan:
    """What to measure: states in their order, `steps` of each, and where to write."""

    store: str
    result: str
    states: list[str]
    steps: int


class Meter:
    """Times steps and moves from state to state; called before every call of the Actor, in the thread that trains."""

    def __init__(self, plan: Plan, actor_cls: type) -> None:
        self._plan = plan
        self._actor_cls = actor_cls
        self._store = Store(plan.store).create()
        self._left = list(plan.states)
        self._state = ""
        self._since = float("inf")
        self._calls = 0
        self._last: float | None = None
        self._times: list[float] = []
        _slow_down(lambda: self._state == "slow")

    def tick(self) -> None:
        """A step ended, and the next begins."""
        now = time.perf_counter()
        self._calls += 1
        if self._calls == WARM_UP_STEPS:
            self._enter(self._left.pop(0))
            return
        if self._last is not None:
            self._times.append(now - self._last)
        settled = now - self._since > SETTLE_SECONDS and self._calls > SETTLE_STEPS + WARM_UP_STEPS
        self._last = now if settled else None
        if len(self._times) < self._plan.steps:
            return
        with Path(self._plan.result).open("a") as file:
            file.write(json.dumps({"state": self._state, "times": self._times}) + "\n")
        if not self._left:
            raise SystemExit(0)
        self._enter(self._left.pop(0))

    def _enter(self, state: str) -> None:
        self._state, self._times, self._last = state, [], None
        if state == "bare":
            self._actor_cls.forward = getattr(self._actor_cls.forward, hook.MARK, self._actor_cls.forward)
        else:
            hook.install(self._actor_cls, store=self._plan.store)
        control = Control(state in ("on", "slow", "armed"), "bench", now_timestamp(), free_floor_bytes=0)
        if state == "armed":
            control = replace(control, every=0, triggers=("nan", "exception", "slow:10x"), before=4)
        write_control(self._store, control)
        self._since = time.perf_counter()


def _slow_down(is_slow: Any) -> None:
    """Let every fsync of another thread than this one take 10 s while `is_slow()`."""
    real, trains = os.fsync, threading.get_ident()

    def fsync(descriptor: int) -> None:
        if threading.get_ident() != trains and is_slow():
            time.sleep(SLOW_SECONDS)
        real(descriptor)

    os.fsync = fsync


def main() -> None:
    """Run the training that the arguments describe, metered."""
    driver.support_cpu()
    from openrlhf.models import Actor

    meter = Meter(Plan(**json.loads(Path(os.environ["BENCH_PLAN"]).read_text())), Actor)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        meter.tick()
        return super(Actor, self).__call__(*args, **kwargs)

    Actor.__call__ = call
    module = "openrlhf.cli.train_sft"
    sys.argv[0] = module
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
