"""Variables of the trainer's backend test suite, for `train-check`: `NUM_GPUS=4 SKIP_RING=1 actordbg train-check`.

No other command reads them: `MODEL` in somebody's shell must not change a replay. A flag wins. Each that is set is told, with
what it did, or why it does nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.config.sources import FSDP_OFF

NUMBERS = {"NUM_GPUS": "nproc", "MAX_SAMPLES": "max_inputs", "TP_SIZE": "tp", "RING_SIZE": "ring", "MAX_LEN": "max_len"}
TEXTS = {"MODEL": "model", "LOG_DIR": "log_dir", "DATASET": "dataset"}
Skip = tuple[str, bool | None, bool | None]
"""A backend, and whether it has several ranks in tp and in a ring; None: either."""
SKIPS: dict[str, Skip] = {
    "SKIP_DEEPSPEED": ("deepspeed", None, None),
    "SKIP_FSDP2": ("fsdp2", False, False),
    "SKIP_FSDP2_TP": ("fsdp2", True, False),
    "SKIP_RING": ("fsdp2", False, True),
    "SKIP_COMBINED": ("fsdp2", True, True),
    FSDP_OFF: ("fsdp2", None, None),
}
IDLE = {"OUTPUT_DIR": "no checkpoint outlives a check (--log-dir is for logs)"}
WITHOUT_ROWS = {"DATASET": "inputs come from the store (--store, --where); --trainer sft takes it"}


@dataclass(frozen=True)
class AncestorNames:
    """values: by our names. skips: cells to leave out. took: variables with an effect. idle: the others, and why."""

    values: dict[str, Any] = field(default_factory=dict)
    skips: tuple[Skip, ...] = ()
    took: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)


def read_names(environment: Mapping[str, str], given: set[str], *, trains_on_rows: bool = False) -> AncestorNames:
    """What they come to, where `given` are the names that flags gave. UsageError for a number that is none.

    trains_on_rows: the trainer's own program runs too.
    """
    without = IDLE if trains_on_rows else IDLE | WITHOUT_ROWS
    values: dict[str, Any] = {}
    skips, took, idle = [], {}, {}
    for name, text in ((name, environment.get(name, "")) for name in (*NUMBERS, *TEXTS, *SKIPS, *IDLE)):
        ours = NUMBERS.get(name) or TEXTS.get(name)
        if not text:
            continue
        if name in without:
            idle[name] = without[name]
        elif ours in given:
            idle[name] = f"--{str(ours).replace('_', '-')} was given"
        elif ours:
            values[ours] = _number(name, text) if name in NUMBERS else text
            took[name] = text
        elif text == "1":
            skips.append(SKIPS[name])
            took[name] = text
        else:
            idle[name] = "only 1 skips, as in the test suite"
    return AncestorNames(values, tuple(skips), took, idle)


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 10**9:
        raise UsageError(f"{name}={text!r:.40} is no number of 1 or more", hint=f"unset {name}, or give the flag")
    return int(text)
