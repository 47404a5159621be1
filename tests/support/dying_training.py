"""Programs: a training check whose ranks are killed with SIGKILL where DYING says, and the ranks themselves.

    python dying_training.py STORE RECORD INPUTS      runs (or continues with) the check in the file RECORD

DYING holds JSON, for a cell's first attempt: {"<cell>": {"step": 3, "where": "checkpoint" | "step", "rank": 0, "command": false}}.
"checkpoint" dies when its tensors are half written, "step" in the middle of the step's last micro-batch; with "command" the process
that runs the check is killed first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from actordbg.campaign.train_engine import TrainEngine, step_of


class DyingEngine(TrainEngine):
    """The product's engine, killed once."""

    def _death(self, where: str, step: int):
        index, _, attempt = self.folder.name.removeprefix("cell-").partition(".")
        told = json.loads(os.environ["DYING"]).get(index)
        if told and attempt == "1" and (told["where"], told["step"], told["rank"]) == (where, step, self.rank):
            if told["command"]:
                os.kill(int(os.environ["COMMAND"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, item: Any, loaded: Any, **how: Any) -> dict[str, Any]:
        original = self._session.step

        def step() -> Any:
            self._death("step", step_of(item.dump_id))
            return original()

        with mock.patch.object(self._session, "step", step):
            return super().run(item, loaded, **how)

    def _save(self, step: int):
        from torch.distributed.checkpoint import FileSystemWriter

        original = FileSystemWriter.write_data

        def write_data(writer: Any, plan: Any, planner: Any) -> Any:
            done = original(writer, plan, planner)
            self._death("checkpoint", step)
            return done

        with mock.patch.object(FileSystemWriter, "write_data", write_data):
            super()._save(step)


def main(store: Path, record: Path, inputs: Path):
    """Run the check, its ranks with this module."""
    from supervised import fake_launcher

    from actordbg.campaign.run_train_check import TrainRun
    from actordbg.records.matrix_record import TrainCheckRecord
    from actordbg.records.replay_record import ReplayInput
    from actordbg.replay.group_engine import WarmGroups
    from actordbg.store.layout import Store

    os.environ["COMMAND"] = str(os.getpid())
    chosen = [ReplayInput(**one) for one in json.loads(inputs.read_text())]
    warm = WarmGroups(fake_launcher([], "dying_training"))
    TrainRun(Store(store), TrainCheckRecord.from_file(record), chosen, warm=warm).run()


if __name__ == "__main__":
    if "--work" in sys.argv:
        from actordbg.replay.worker import main as worker

        os._exit(worker(DyingEngine))
    main(*map(Path, sys.argv[1:]))
