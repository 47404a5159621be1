"""What makes a call worth keeping after it ran: `dump enable --on nan,exception,slow:3x`.

| trigger | keeps a call when |
|---|---|
| `nan` | what it returned (log-probs, entropy; else the sum of its logits) has a NaN or an infinity |
| `exception` | it raised; out-of-memory is told apart (`oom`), with allocated and reserved bytes |
| `oom` | it raised because memory ran out |
| `slow:3x` | it took more than 3 times the running median of calls of its kind (same gradient mode, like size) |
| `logprobs:-40:0` | a log-prob of a token under the action mask lies outside of -40 to 0 nats |

This module only knows the words; `actordbg.capture.trigger_verdicts` judges. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

NAN, EXCEPTION, OOM, SLOW, LOGPROBS, BEFORE = "nan", "exception", "oom", "slow", "logprobs", "before"
FORMS = "nan, exception, oom, slow:3x, logprobs:LOW:HIGH"

_NUMBER = r"-?\d+(?:\.\d+)?|-?inf"
_SLOW = re.compile(r"slow:(\d+(?:\.\d+)?)x?\Z")
_LOGPROBS = re.compile(rf"logprobs:({_NUMBER})(?::|\.\.)({_NUMBER})\Z")


@dataclass(frozen=True)
class Triggers:
    """The parsed words. `slow`: the multiple of the median; `logprobs`: lowest and highest, nats, both allowed."""

    nan: bool = False
    exception: bool = False
    oom: bool = False
    slow: float | None = None
    logprobs: tuple[float, float] | None = None

    @property
    def of_outputs(self) -> bool:
        """Whether a call's outputs have to be looked at."""
        return self.nan or self.logprobs is not None

    @property
    def after_the_call(self) -> bool:
        """Whether anything has to be looked at when a call returned well."""
        return self.of_outputs or self.slow is not None


def parse(words: Sequence[str]) -> Triggers:
    """`("nan", "slow:3x")` as Triggers. ValueError, with the word and what there is, for anything else."""
    found: dict[str, bool | float | tuple[float, float]] = {}
    for word in words:
        text = word.strip().lower()
        if text in (NAN, EXCEPTION, OOM):
            found[text] = True
        elif match := _SLOW.match(text):
            found[SLOW] = float(match[1])
        elif match := _LOGPROBS.match(text):
            found[LOGPROBS] = (float(match[1]), float(match[2]))
        else:
            raise ValueError(f"{word!r:.40} is not a trigger; there are {FORMS}")
    slow, logprobs = found.get(SLOW), found.get(LOGPROBS)
    if isinstance(slow, float) and not (slow > 1 and math.isfinite(slow)):
        raise ValueError("slow takes a multiple over 1, like slow:3x")
    if isinstance(logprobs, tuple) and not logprobs[0] < logprobs[1]:
        raise ValueError("logprobs takes the lowest and the highest, like logprobs:-40:0")
    return Triggers(**found)  # type: ignore[arg-type]
