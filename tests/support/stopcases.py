"""Commands at a terminal of their own (pexpect), and jobs that stop: what the user types, what is shown, which processes are left.

Patience is far longer than anything takes: a test that fails says what was shown last.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pexpect
from roots import FORKED, ROOT, run_program

from actordbg.base.processes import state_of
from actordbg.records.journal import SUPERVISOR, read_events, read_results

PROMPT = r"\(rank (\d+)\) $"
PATIENCE_S = 240

FAULT = """
def change(module):
    right = module.Actor.forward
    import functools
    @functools.wraps(right)
    def forward(self, sequences, *args, **kwargs):
        if sequences.shape[1] == 33:
            raise ValueError("boom")
        marked = sequences.shape[1]
        if marked == 40:
            breakpoint()
        return right(self, sequences, *args, **kwargs)
    module.Actor.forward = forward

MODULE = "openrlhf.models.actor"
"""
"""An Actor with a `breakpoint()` for inputs of 40 tokens, and an error for those of 33."""


def environment(extra=None):
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    path = os.pathsep.join(part for part in ((extra or {}).get("PYTHONPATH", ""), str(FORKED), str(ROOT)) if part)
    return kept | {"TERM": "dumb"} | (extra or {}) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class AtTerminal:
    """`actordbg` in a terminal of 80 columns. `shown` is everything since the last prompt."""

    def __init__(self, store, *arguments, **extra):
        command = ["-m", "actordbg", "--store", str(store.root), *arguments]
        self.child = pexpect.spawn(
            sys.executable, command, env=environment(extra), encoding="utf-8", timeout=PATIENCE_S, dimensions=(40, 80)
        )
        self.child.delaybeforesend = 0

    def prompt(self):
        """Wait for a prompt; what was shown before it."""
        self.child.expect(PROMPT)
        return str(self.child.before)

    @property
    def rank(self):
        """Whose prompt it was."""
        return int(self.child.match.group(1))

    def type(self, line):
        """Type a line at the prompt and wait for the next one; what was shown between."""
        self.child.sendline(line)
        return self.prompt()

    def leave(self, line=None):
        """Type a last line; the exit code, and what was shown at the end."""
        if line is not None:
            self.child.sendline(line)
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus), str(self.child.before)

    def hang_up(self):
        """Close the terminal, as a lost connection does; whether the command then ended."""
        process = self.child.ptyproc
        process.fileobj.close()
        process.closed = self.child.closed = True
        deadline = time.monotonic() + PATIENCE_S
        while os.waitpid(process.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def newest(store):
    return max(store.replays.iterdir(), key=lambda path: path.name)


def results(folder):
    return read_results(folder)


def figures(folder):
    """What must be the same to the bit, by dump."""
    return {name: (one.status, one.output_digest, one.loss, one.grad_norm) for name, one in results(folder).items()}


def events(folder, kind):
    return [event for path in sorted(folder.glob("rank*.jsonl")) for event in read_events(path) if event["event"] == kind]


def status(folder):
    return next((e["status"] for e in reversed(read_events(folder / SUPERVISOR)) if e["event"] == "finished"), "none")


def nobody_is_left(folder):
    """Whether all workers of a replay are gone, waiting for that with patience."""
    deadline = time.monotonic() + PATIENCE_S
    workers = [(event["pid"], event["ticks"]) for event in events(folder, "boot")]
    while any(state_of(*one)[0] in ("alive", "stopped") for one in workers):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return bool(workers)


def actordbg(store, *arguments, **extra):
    """A command without a terminal."""
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), *arguments]
    return run_program(command, stdin=subprocess.DEVNULL, env=environment(extra), timeout=400)


JOB = """
import os, sys, time
from actordbg.debug import breakpoint
rank, steps = int(os.environ["RANK"]), int(sys.argv[1])
for step in range(steps):
    secret = 10 * rank + step
    if not (os.environ.get("MISSES") == f"{rank}"):
        breakpoint(rank=0, timeout=float(os.environ.get("PATIENCE", "200")))
    print(f"rank {rank} did step {step}", flush=True)
assert "torch" not in sys.modules
print(f"rank {rank} ends with {sorted(name for name in sys.modules if name.startswith('actordbg'))}", flush=True)
"""


@contextmanager
def live_job(folder, ranks, steps, **extra):
    """A job of `ranks` processes that reaches a breakpoint in each of its steps; nobody is left of it afterwards."""
    program = folder / "train.py"
    program.write_text(JOB)
    shared = environment(extra) | {"WORLD_SIZE": str(ranks), "MASTER_PORT": "29555", "ACTORDBG_STOP_DIR": str(folder)}
    command = [sys.executable, str(program), str(steps)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}, **pipes) for rank in range(ranks)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()
