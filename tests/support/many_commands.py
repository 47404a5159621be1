"""Several commands on a store, in a process of their own with a limit of memory, which is killed if it hangs.

    python many_commands.py STORE ANSWERS COMMAND...

Each exit code and output is in ANSWERS as soon as the command has ended; at the end, under `contents`, what the store holds.
A word DUMP stands for a dump's id, OUT for a folder beside the store.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

import roots
import storecases
from commandline import run_here
from roots import read_json, write_json

from actordbg.base.errors import ActordbgError
from actordbg.store.layout import Store

PATIENCE_S = 300.0
"""A command that hangs, hangs for ever; a case takes some seconds."""
MEMORY = 6 * 2**30
"""Address space: reading /dev/zero or a terabyte of holes fails in it at once."""


def run_commands(root, answers, lines):
    """Run commands on the store in the memory that this process may have, and write down exit code and output of each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    store, found = Store(root), {}
    dump_id = next(iter(storecases.contents(store)), "")
    for line in lines:
        words = [{"DUMP": dump_id, "OUT": str(root.parent / "out")}.get(word, word) for word in line.split()]
        result = run_here("--store", root, *words, *(["--json"] if line.startswith(("index", "store fsck")) else []))
        error = result.exception
        known = error is None or isinstance(error, SystemExit | ActordbgError)
        found[line] = result.exit_code if known else repr(error), result.stdout, result.stderr
        write_json(answers, found)
    found["contents"] = 0, json.dumps(storecases.contents(store)), ""
    write_json(answers, found)


def run_all(root, lines):
    """What every command answered; fails if one of them hangs."""
    answers = root.with_suffix(".answers")
    with subprocess.Popen([sys.executable, __file__, root, answers, *lines], env=roots.environment()) as child:
        try:
            code = child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            code = "hangs"
    done = read_json(answers) if answers.exists() else {}
    assert code == 0, (code, next((line for line in lines if line not in done), "the store's contents"))
    return done


if __name__ == "__main__":
    run_commands(*map(Path, sys.argv[1:3]), sys.argv[3:])
