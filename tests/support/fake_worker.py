"""A replay worker with the real loop and journal around a scripted engine, so that supervision is tested in seconds.

`script.json` in the replay's folder says what each input does, by dump id:

    "kill"   the process kills itself with SIGKILL         "fail"     it raises
    "hang"   it never returns                              "exit"     it leaves with exit code 0
    "stop"   it stops itself with SIGSTOP                  "break"    it comes to a breakpoint()
    "kill-host"  it kills its host on a node of a cluster
    "unreadable"  loading raises                           "tainted"  it raises and leaves the engine unusable
    "full"   its disk is full until the store has a file called "room"
    "late-fail"   it fails without taking part in the collective    "differ"  other ranks come to other log-probs

`"d1@0"` is only for rank 0.

`"open"` in the script makes opening the actor do that, `"open again"` opening it a second time. `"collective": true` makes every input end in a barrier of all ranks:
like a real one, it is left only when every rank has come, and its frame has the file name of torch's collectives.
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

from actordbg.records.replay_record import PASSED
from actordbg.replay.worker import main

_BARRIER = """
def barrier(folder, name, rank, world):
    import os, time
    (folder / f"{name}-{rank}").touch()
    for other in range(world):
        there = f"{folder}/{name}-{other}"
        while not os.access(there, os.F_OK):  # while it waits, no frame of Python's but this one is on its stack
            time.sleep(0.01)
"""
_namespace = {}
exec(compile(_BARRIER, "/lib/torch/distributed/distributed_c10d.py", "exec"), _namespace)


MODEL = {"model_class": "Fake", "num_layers": 1, "vocab_size": 9, "parameters": 9, "dtype": "fp32", "attn": "sdpa"}
"""What a loaded model says of itself."""


class ScriptedEngine:
    """An engine that does what `script.json` says. Guarantees: everything but the script is the real worker's."""

    def __init__(self, folder, spec, rank):
        self.folder, self.rank = folder, rank
        self.script = json.loads((folder / "script.json").read_text())
        self.collective = bool(self.script.get("collective"))
        self.tainted, self.out_of_step = False, ""
        self._calls = 0
        self._loaded_for = spec.replay_id

    def open(self):
        opened = self.folder / f"opened-{self.rank}"
        self._act(self.script.get("open again" if opened.exists() else "open", ""))
        opened.touch()
        return {"model": "fake", "pid": os.getpid(), "load_s": 1.0} | MODEL

    def switch(self, folder, spec):
        self._calls, self.folder = 0, folder
        self.script = json.loads((folder / "script.json").read_text())
        self._act(self.script.get("switch", ""))
        return {"model": "fake", "pid": os.getpid(), "load_s": 0.0, "load_shared_with": self._loaded_for}

    def load(self, item):
        if self.script.get(item.dump_id) == "unreadable":
            raise ValueError("this dump cannot be read")
        return item.path

    def run(self, item, loaded, *, recorded, **_):
        action = self.script.get(f"{item.dump_id}@{self.rank}", self.script.get(item.dump_id, ""))
        self._calls += 1
        (self.folder / f"ran-{item.dump_id}-{self.rank}-{recorded}").touch()
        if action == "late-fail":
            self._act("fail")
        if action not in ("", "fail", "differ", "break"):
            self._act(action)
        if self.collective:
            world = int(os.environ["WORLD_SIZE"])
            attempt = Path(sys.argv[-1]).stem.rpartition("-")[2]  # of the work order
            _namespace["barrier"](self.folder, f"barrier-{attempt}-{self._calls}", self.rank, world)
        self._act(action)
        time.sleep(self.script.get("takes", 0))
        digest = f"{item.dump_id} on {self.rank}" if action == "differ" else item.dump_id
        extra = {"laws": self.script["laws"]} if "laws" in self.script else {}
        return {"status": PASSED, "forward_s": self.script.get("forward_s", 0.01), "output_digest": digest, "extra": extra}

    def close(self):
        pass

    def _act(self, action):
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "break":
            breakpoint()
        elif action == "kill-host":
            os.kill(int(sys.argv[sys.argv.index("--supervisor") + 1]), signal.SIGKILL)
            time.sleep(600)
        elif action == "hang":
            time.sleep(600)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "exit":
            os._exit(0)
        elif action == "full" and not (self.folder.parents[1] / "room").exists():
            raise RuntimeError("[enforce fail at writer] cannot write") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif action in ("fail", "tainted"):
            self.tainted = action == "tainted"
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


if __name__ == "__main__":
    os._exit(main(ScriptedEngine))
