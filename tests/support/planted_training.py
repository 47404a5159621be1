"""Program: a worker of a training check with a fault in one of its cells; every other cell runs the product as it is.

PLANTED holds JSON: the fault of each cell, by the cell's index. Each fault is a real one: a ring whose ranks do not reduce
gradients is what OpenRLHF's FSDP2 branch does.
"""

import json
import os
import signal
from collections import Counter

from actordbg.campaign.train_engine import TrainEngine, step_of

AT = 3
"""The step in which a state, or a process, is lost."""


def ring_without_reduction():
    """Parameters are sharded, and gradients reduced, over dp alone."""
    from torch.distributed.device_mesh import init_device_mesh

    from actordbg.actor.backends import fsdp2

    original = fsdp2.Fsdp2Backend._shard

    def shard(self, dtype):
        whole, self._mesh = self._mesh, init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "sp"))
        original(self, dtype)
        self._mesh = whole

    fsdp2.Fsdp2Backend._shard = shard  # type: ignore[method-assign]


def state_of_one_shard_lost():
    """Rank 1 forgets what its optimizer knows, once."""
    from actordbg.actor.backends.training import AdamSteps

    original, counts = AdamSteps.step, Counter[int]()

    def step(self, total):
        counts[id(self)] += 1
        if (os.environ["RANK"], counts[id(self)]) == ("1", AT):
            self.optimizer.state.clear()
        return original(self, total)

    AdamSteps.step = step  # type: ignore[method-assign]


def no_zero_grad():
    """Gradients stay where they are after a step."""
    from actordbg.actor.backends.training import AdamSteps

    AdamSteps.clear = lambda self: None  # type: ignore[method-assign]


def killed_once():
    """Rank 1 is killed between steps, in its cell's first attempt."""


SOUND = {}
"""What the faults replace, as it was before the first."""


class FaultyEngine(TrainEngine):
    """The product's engine; the fault is planted when its cell is opened, and taken out when another one is."""

    def open(self):
        from actordbg.actor.backends.fsdp2 import Fsdp2Backend
        from actordbg.actor.backends.training import AdamSteps

        for place in ((Fsdp2Backend, "_shard"), (AdamSteps, "step"), (AdamSteps, "clear")):
            setattr(*place, SOUND.setdefault(place, getattr(*place)))
        self._fault = json.loads(os.environ["PLANTED"]).get(self.folder.stem.removeprefix("cell-"))
        if self._fault:
            globals()[self._fault]()
        return super().open()

    def run(self, item, loaded, **asked):
        dies = (self._fault, self.folder.suffix, os.environ["RANK"]) == ("killed_once", ".1", "1")
        if dies and step_of(item.dump_id) == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(item, loaded, **asked)


if __name__ == "__main__":
    from actordbg.replay.worker import main

    os._exit(main(FaultyEngine))
