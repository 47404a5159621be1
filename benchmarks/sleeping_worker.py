"""A replay's worker whose inputs take a fixed time and compute nothing, so that many of them fit a small machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from actordbg.records.replay_record import PASSED, ReplayInput, ReplaySpec
from actordbg.replay.worker import main

TAKES = "BENCH_INPUT_TAKES"
"""The variable that says how many seconds an input takes."""


class SleepingEngine:
    """Everything but the forward is the real worker's."""

    collective, tainted, out_of_step = False, False, ""

    def __init__(self, folder: Path, spec: ReplaySpec, rank: int) -> None:
        self._takes = float(os.environ[TAKES])

    def open(self) -> dict[str, Any]:
        return {}

    def switch(self, folder: Path, spec: ReplaySpec) -> dict[str, Any]:
        return {}

    def load(self, item: ReplayInput) -> str:
        return item.path

    def run(self, item: ReplayInput, loaded: Any, **_asked: Any) -> dict[str, Any]:
        time.sleep(self._takes)
        return {"status": PASSED, "forward_s": self._takes}

    def close(self) -> None:
        pass


if __name__ == "__main__":
    os._exit(main(SleepingEngine))
