"""Several commands on a store, in a process of their own with a limit of memory, which is killed if it hangs.

The process is forked off one that imports this module and has no threads (`forkserver`): torch's threads do not survive a fork.

Each exit code and output is in ANSWERS as soon as the command has ended; at the end, under `contents`, what the store holds.
A word DUMP stands for a dump's id, OUT for a folder beside the store.
"""

import importlib
import json
import multiprocessing
import os
import pkgutil
import resource
import sys
from multiprocessing import forkserver
from unittest import mock

import pytest
import storecases
import torch
from typer.testing import CliRunner

import actordbg
from actordbg.base.errors import ActordbgError
from actordbg.cli.app import app
from actordbg.store.layout import Store

PATIENCE_S = 300.0
"""A command that hangs, hangs for ever; a case takes some seconds."""
MEMORY = 6 * 2**30
"""Address space: reading /dev/zero or a terabyte of holes fails in it at once."""


def run_commands(root, answers, lines):
    """Run commands on the store in the memory that this process may have, and write down exit code and output of each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    store, found = Store(root), {}
    dump_id = next(iter(storecases.contents(store)), "")
    for line in lines:
        words = [{"DUMP": dump_id, "OUT": str(root.parent / "out")}.get(word, word) for word in line.split()]
        result = CliRunner().invoke(
            app, ["--store", str(root), *words, *(["--json"] if line.startswith(("index", "store fsck")) else [])]
        )
        error = result.exception
        known = error is None or isinstance(error, SystemExit | ActordbgError)
        found[line] = result.exit_code if known else repr(error), result.stdout, result.stderr
        answers.write_text(json.dumps(found))
    found["contents"] = 0, json.dumps(storecases.contents(store)), ""
    answers.write_text(json.dumps(found))


def run_all(root, lines):
    """What every command answered; fails if one of them hangs."""
    answers = root.with_suffix(".answers")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # Python 3.11 does not hand it on
        forkserver.ensure_running()
    child = context.Process(target=run_commands, args=(root, answers, lines))
    child.start()
    child.join(PATIENCE_S)
    done = json.loads(answers.read_text()) if answers.exists() else {}
    if child.exitcode is None:
        child.kill()
        child.join()
        pytest.fail(f"hangs: {next(line for line in lines if line not in done)}")
    assert child.exitcode == 0, (child.exitcode, list(done))
    return done


def import_commands():
    """The command line imports a command when it is called; here all are, once."""
    for module in pkgutil.walk_packages(actordbg.__path__, "actordbg."):
        if module.name.split(".")[1] in ("cli", "catalog", "dumps", "report", "compare", "replay"):
            importlib.import_module(module.name)


import_commands()
