"""Where the checkout and its tests lie (`ROOT`; `SUPPORT` is the folder of the helpers that tests import), and what programs need."""

import json
import os
import subprocess
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
FORKED = SUPPORT / "forked"
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where thousands of small files may lie for a while: in memory, or, with None, where temporary files are made."""


def script(path, text):
    """Write a program of the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def environment(**more):
    """This process's, for a program that imports this checkout and the helpers of the tests, and more."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT, FORKED))), "OMP_NUM_THREADS": "1"} | more


def run_program(words, **how):
    """The end of a program, with what it wrote as texts."""
    return subprocess.run(words, **{"capture_output": True, "text": True} | how)


def json_of(done):
    """What a program, or a command in this process, wrote as JSON."""
    return json.loads(done.stdout)


def read_json(path):
    return json.loads(path.read_bytes())


def write_json(path, value):
    path.write_text(json.dumps(value))
