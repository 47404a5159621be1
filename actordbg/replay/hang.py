"""A hang in words: where each rank stands, what follows from that, and every rank's stack.

rank 0 waits in broadcast (deepspeed/runtime/zero/utils.py) since 20 s; rank 1 has no input left (1 of 1 done): ranks ran 2
and 1 inputs; it did not finish within 20 s (--timeout)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actordbg.base.processes import STOPPED
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.blame import Seen
from actordbg.replay.plan import owner
from actordbg.replay.rank_view import RankView
from actordbg.replay.worker_logs import Stack, read_stack

MAX_RANKS = 8
"""How many ranks' stacks are shown in full, the blamed ranks first."""
_HEAD = "--- "
_RANK = _HEAD + "rank "


@dataclass(frozen=True)
class Standing:
    """One rank when the time was up. `stack`: None if it did not answer. `doing`: its input, "" between inputs.

    since_s: seconds in this input. share, done: how many inputs the plan has for it, and how many have a result.
    seq_len, batch_size: of this input.
    """

    seen: Seen
    stack: Stack | None = None
    doing: str = ""
    since_s: float = 0.0
    share: int = 0
    done: int = 0
    batch_size: int = 0
    seq_len: int = 0

    @property
    def rank(self) -> int:
        return self.seen.rank

    @property
    def finished(self) -> bool:
        """Whether it has nothing left to do."""
        return self.seen.done

    @property
    def waits(self) -> bool:
        """Whether it waits in a collective inside an input."""
        return not self.finished and self.stack is not None and self.stack.collective is not None

    def words(self) -> str:
        """Where it stands, in words."""
        if self.seen.state == STOPPED:
            return f"rank {self.rank} was stopped by a signal"
        if self.finished:
            return f"rank {self.rank} has no input left ({self.done} of {self.share} done)"
        if not self.doing:
            return f"rank {self.rank} is between two inputs"
        since = f"since {self.since_s:.0f} s"
        if self.stack is None:
            return f"rank {self.rank} has been busy {since} and gave no stack"
        if self.waits:
            return f"rank {self.rank} waits in {self.stack.waits_in} {since}"
        return f"rank {self.rank} is in {_place(self.stack)}, outside of any collective, {since}"


def standing_of(view: RankView, seen: Seen, stacks: str, spec: ReplaySpec, pending: Sequence[int]) -> Standing:
    """Where a rank stands now. `stacks`: faulthandler's text, "" without; `pending`: inputs of its group without a result."""
    config = spec.config
    lane = seen.rank // config.lane_width
    share = sum(owner(index, config.lanes) == lane for index in range(len(spec.inputs)))
    left = sum(owner(index, config.lanes) == lane for index in pending)
    standing = Standing(seen, read_stack(stacks), share=share, done=share - left)
    if view.doing is None:
        return standing
    item = next(item for item in spec.inputs if item.dump_id == view.doing["dump_id"])
    return replace(
        standing,
        doing=item.dump_id,
        since_s=time.monotonic() - view.since,
        batch_size=item.batch_size,
        seq_len=item.seq_len,
    )


def describe(ranks: Sequence[Standing], timeout_s: float) -> str:
    """The error text of an input that hung: every rank, and the conclusion that the evidence allows."""
    standings = "; ".join(one.words() for one in ranks)
    conclusion = _conclusion(ranks)
    return f"{standings}{conclusion and ': '}{conclusion}; it did not finish within {timeout_s:g} s (--timeout)"


def excerpt(ranks: Sequence[Standing], blamed: Sequence[int], log: str = "") -> str:
    """Every rank's stack under its name, the blamed ranks first; before them the end of the blamed rank's log."""
    ordered = sorted(ranks, key=lambda one: (one.rank not in blamed, one.rank))
    parts = [f"{log.rstrip()}\n"] if log.strip() else []
    for one in ordered[:MAX_RANKS]:
        parts.append(f"{_HEAD}{one.words()}")
        model = one.stack.model_frame if one.stack and one.waits else None
        parts += [f"  called by the model's {model}"] if model else []
        parts.append(one.stack.text() if one.stack else "  (no stack)")
    if len(ordered) > MAX_RANKS:
        parts += [f"{_HEAD}{one.words()}" for one in ordered[MAX_RANKS:]]
    return "\n".join(parts)


def in_brief(log_excerpt: str, frames: int = 8) -> str:
    """An `excerpt` with the most recent frames of each rank only; "" for any other text."""
    lines: list[str] = []
    for line in log_excerpt.splitlines():
        if line.startswith(_RANK):
            shown = 0
            lines.append(line)
        elif lines and shown < frames:
            shown += 1
            lines.append(line)
    return "\n".join(lines)


def _conclusion(ranks: Sequence[Standing]) -> str:
    busy = [one for one in ranks if not one.finished]
    waiting = [one for one in busy if one.waits]
    if not waiting or len(ranks) == 1:
        return ""
    silent = [one for one in busy if one.stack is None and one.seen.state != STOPPED]
    if len(waiting) < len(busy) - len(silent):
        others = _listed([f"rank {one.rank}" for one in busy if not one.waits])
        return f"the others wait for {others}"
    if len(busy) < len(ranks):
        return f"ranks ran {_listed([str(one.done + bool(one.doing)) for one in ranks])} inputs"
    if silent:
        return ""
    words = "every rank waits in a collective that not all of them came to"
    if len({one.seen.slot for one in waiting}) > 1:
        words += ", and they are in different slots"
    shapes = [f"[{one.batch_size}, {one.seq_len}]" for one in waiting]
    return f"{words}; their inputs are {_listed(shapes)}" if len(set(shapes)) > 1 else words


def _place(stack: Stack) -> str:
    frame = stack.caller
    return f"{frame.function} ({frame.path}:{frame.line})" if frame else "an unknown place"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
