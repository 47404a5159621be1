"""Where the checkout and its tests lie: `ROOT` is the checkout, `SUPPORT` the folder of the helpers that tests import."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
