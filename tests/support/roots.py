"""Where the checkout and its tests lie: `ROOT` is the checkout, `SUPPORT` the folder of the helpers that tests import."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where thousands of small files may lie for a while: in memory, or, with None, where temporary files are made."""


def environment(**more: str) -> dict[str, str]:
    """This process's, for a program that imports this checkout and the helpers of the tests, and more."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}", "OMP_NUM_THREADS": "1"} | more
