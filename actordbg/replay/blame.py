"""Find the ranks that caused it when a replay's workers die or hang, and describe a hang. Pure: observations in, culprits out.

Only the culprits' inputs are lost; every other input in flight runs again. So the rules blame as few ranks as the evidence
allows, and at least one if an input was running. Otherwise the same crash would repeat forever.

**A crash.** The culprit is the rank that died *first* without being killed by its launcher. Launchers then end the other ranks
with SIGTERM, and a rank that lost its peers leaves with EXIT_RESTART: both are consequences.

**A hang.** The clock of an input starts when every rank with an input in the same slot has started it, because a quick rank
waits in its first collective for slow ones. It does not wait for a rank that has nothing left to do: with `--align shuffle`,
ranks may have different numbers of inputs. When the time is up, the stacks (faulthandler) show which ranks are in a collective:

* a rank is the culprit if it is stopped (SIGSTOP), or outside of any collective while another rank is inside one;
* if another rank failed in this slot, ranks that wait for it in a collective are innocent;
* otherwise nothing distinguishes the ranks, and every input of the slot is blamed.

**The description** of a hang says where each rank is, what follows from that, and shows every rank's stack:

    rank 0 waits in broadcast (deepspeed/runtime/zero/utils.py) since 20 s; rank 1 has no input left (1 of 1 done): ranks ran 2
    and 1 inputs; it did not finish within 20 s (--timeout)
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actordbg.base.processes import STOPPED, TERMINATED
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.rank_view import RankView
from actordbg.replay.work_order import EXIT_BROKEN, EXIT_RESTART
from actordbg.replay.worker_logs import Stack, read_stack

MAX_RANKS = 8
"""How many ranks' stacks are shown in full, the blamed ranks first."""
_HEAD = "--- "
_RANK = _HEAD + "rank "


def culprits_of_death(ranks: Sequence[RankView]) -> list[int]:
    """Return the ranks that died, except those that died because another rank died or requested a restart."""
    dead = [view for view in ranks if view.dead and not _left_on_purpose(view)]
    of_their_own = [view for view in dead if view.wait_status != TERMINATED]
    if not of_their_own and any(_left_on_purpose(view) for view in ranks):
        return []
    return [view.rank for view in of_their_own or dead]


def overdue(ranks: Sequence[RankView], now: float, timeout_s: float, *, collective: bool) -> list[int]:
    """Return the ranks whose input has taken too long. In a collective group, only the slot that is furthest behind counts."""
    running = [view for view in ranks if view.slot is not None and not view.dead]
    if not collective:
        return [view.rank for view in running if now - view.since > timeout_s]
    behind = min((view.slot for view in running if view.slot is not None), default=0)
    if any(view.slot is None and not view.done and view.slots_finished <= behind for view in ranks):
        return []
    in_slot = [view for view in running if view.slot == behind]
    return [view.rank for view in in_slot if now - max(peer.since for peer in in_slot) > timeout_s]


def culprits_of_hang(ranks: Sequence[RankView], late: Sequence[int], stacks: Mapping[int, str]) -> list[int]:
    """Return those of the `late` ranks that caused the hang, if any. `stacks`: faulthandler's text of each rank that answered."""
    stopped = [view.rank for view in ranks if view.rank in late and view.state == STOPPED]
    if stopped:
        return stopped
    waiting = [rank for rank in late if (stack := read_stack(stacks.get(rank, ""))) is not None and stack.collective]
    outside = [rank for rank in late if rank not in waiting]
    if outside and waiting:
        return outside
    slots = {view.slot for view in ranks if view.rank in late}
    if waiting and any(view.failed_slot in slots for view in ranks if view.rank not in late):
        return []
    return list(late)


def _left_on_purpose(view: RankView) -> bool:
    status = view.wait_status
    code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
    return bool(view.restart) or code in (EXIT_RESTART, EXIT_BROKEN)


@dataclass(frozen=True)
class Standing:
    """A rank when the time was up. `stack`: None if it did not answer. `item`: its input, None between inputs.

    since_s: seconds in this input. share, done: how many inputs the plan has for it, and how many have a result.
    """

    view: RankView
    stack: Stack | None = None
    item: ReplayInput | None = None
    since_s: float = 0.0
    share: int = 0
    done: int = 0

    @property
    def waits(self) -> bool:
        """Check whether the rank waits in a collective inside an input."""
        return not self.view.done and self.stack is not None and self.stack.collective is not None

    def words(self) -> str:
        """Describe where the rank is."""
        rank, since, stack = f"rank {self.view.rank}", f"since {self.since_s:.0f} s", self.stack
        if self.view.state == STOPPED:
            return f"{rank} was stopped by a signal"
        if self.view.done:
            return f"{rank} has no input left ({self.done} of {self.share} done)"
        if self.item is None:
            return f"{rank} is between two inputs"
        if stack is None:
            return f"{rank} has been busy {since} and gave no stack"
        if self.waits:
            return f"{rank} waits in {stack.waits_in} {since}"
        frame = stack.caller
        place = f"{frame.function} ({frame.path}:{frame.line})" if frame else "an unknown place"
        return f"{rank} is in {place}, outside of any collective, {since}"


def standing_of(view: RankView, stacks: str, spec: ReplaySpec, pending: Sequence[int]) -> Standing:
    """Return where a rank is now. `stacks`: faulthandler's text or ""; `pending`: inputs of its group without a result."""
    config = spec.config
    share, left = (
        sum(index % config.lanes == view.rank // config.lane_width for index in indices)
        for indices in (range(len(spec.inputs)), pending)
    )
    doing = view.doing
    item = next(item for item in spec.inputs if item.dump_id == doing["dump_id"]) if doing else None
    return Standing(view, read_stack(stacks), item, time.monotonic() - view.since, share, share - left)


def describe(ranks: Sequence[Standing], timeout_s: float) -> str:
    """Return the error text of an input that hung: every rank's position, and the conclusion that the evidence allows."""
    positions = "; ".join(rank.words() for rank in ranks)
    words = ": ".join(filter(None, (positions, _conclusion(ranks))))
    return f"{words}; it did not finish within {timeout_s:g} s (--timeout)"


def excerpt(ranks: Sequence[Standing], blamed: Sequence[int], log: str = "") -> str:
    """Return the end of the blamed rank's log, then every rank's stack under its name, the blamed ranks first."""
    ordered = sorted(ranks, key=lambda standing: (standing.view.rank not in blamed, standing.view.rank))
    parts = [f"{log.rstrip()}\n"] if log.strip() else []
    for number, rank in enumerate(ordered):
        parts.append(f"{_HEAD}{rank.words()}")
        if number < MAX_RANKS:
            model = rank.stack.model_frame if rank.stack and rank.waits else None
            parts += [f"  called by the model's {model}"] if model else []
            parts.append(rank.stack.text() if rank.stack else "  (no stack)")
    return "\n".join(parts)


def in_brief(log_excerpt: str, frames: int = 8) -> str:
    """Shorten an `excerpt` to the most recent frames of each rank; "" for any other text."""
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
    busy = [rank for rank in ranks if not rank.view.done]
    waiting = [rank for rank in busy if rank.waits]
    if not waiting or len(ranks) == 1:
        return ""
    silent = [rank for rank in busy if rank.stack is None and rank.view.state != STOPPED]
    if len(waiting) < len(busy) - len(silent):
        return f"the others wait for {_listed([f'rank {rank.view.rank}' for rank in busy if not rank.waits])}"
    if len(busy) < len(ranks):
        return f"ranks ran {_listed([str(rank.done + bool(rank.item)) for rank in ranks])} inputs"
    if silent:
        return ""
    words = "every rank waits in a collective that not all reached"
    if len({rank.view.slot for rank in waiting}) > 1:
        words += ", in different rounds"
    shapes = [f"[{rank.item.batch_size}, {rank.item.seq_len}]" for rank in waiting if rank.item]
    return f"{words}; their inputs are {_listed(shapes)}" if len(set(shapes)) > 1 else words


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
