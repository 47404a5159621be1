"""Which ranks caused it when a replay's workers die or hang. Pure: what was seen in, culprits out.

Only the culprits' inputs are lost; every other input in flight runs again. So the rules blame as few ranks as the evidence
allows, and at least one where an input was running. Otherwise the same crash would come again for ever.

**A death.** The culprit is the rank that died *first* of its own. Launchers then end the other ranks with SIGTERM, and a rank
that lost its peers leaves with EXIT_RESTART: both are consequences.

**A hang.** The clock of an input starts when every rank with an input in the same slot has started it, because a quick rank
waits in its first collective for slow ones. A rank that has nothing left to do is not waited for: with `--align shuffle`,
ranks may have different numbers of inputs. When the time is up, the stacks (faulthandler) show who sits in a collective:

* a rank is the culprit if it is stopped (SIGSTOP), or outside of any collective while another rank is inside one;
* if another rank failed in this slot, ranks that wait for it in a collective are innocent;
* otherwise nothing tells the ranks apart, and every input of the slot is blamed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actordbg.base.processes import GONE, STOPPED, ZOMBIE
from actordbg.replay.work_order import EXIT_BROKEN, EXIT_RESTART
from actordbg.replay.worker_logs import read_stack


@dataclass(frozen=True)
class Seen:
    """One rank at one moment. `slot`: where it is, None between inputs. `slots_finished`: passed or failed.

    `started`: when the supervisor saw the start (monotonic seconds). `failed_slot`: the last slot in which it failed.
    `state` and `wait_status`: from /proc. `why`: in words, where somebody else ended it and said so. `done`: it has nothing left
    to do. `wants_restart`: it wrote that it cannot go on.
    """

    rank: int
    slot: int | None = None
    started: float = 0.0
    slots_finished: int = 0
    failed_slot: int | None = None
    state: str = "alive"
    wait_status: int | None = None
    done: bool = False
    wants_restart: bool = False
    why: str = ""

    @property
    def dead(self) -> bool:
        """It died while it still had work."""
        return self.state in (ZOMBIE, GONE) and not self.done


def culprits_of_death(ranks: Sequence[Seen]) -> list[int]:
    """The ranks that died of their own, not because another rank died or asked for a restart."""
    dead = [seen for seen in ranks if seen.dead and not _left_on_purpose(seen)]
    of_their_own = [seen for seen in dead if not _was_terminated(seen)]
    if not of_their_own and any(_left_on_purpose(seen) for seen in ranks):
        return []
    return [seen.rank for seen in of_their_own or dead]


def overdue(ranks: Sequence[Seen], now: float, timeout_s: float, *, collective: bool) -> list[int]:
    """The ranks whose input has taken too long. In a collective group, only the slot that is furthest behind counts."""
    running = [seen for seen in ranks if seen.slot is not None and not seen.dead]
    if not collective:
        return [seen.rank for seen in running if now - seen.started > timeout_s]
    if not running:
        return []
    behind = min(seen.slot for seen in running if seen.slot is not None)
    if any(seen.slot is None and not seen.done and seen.slots_finished <= behind for seen in ranks):
        return []
    in_slot = [seen for seen in running if seen.slot == behind]
    return [seen.rank for seen in in_slot] if now - max(seen.started for seen in in_slot) > timeout_s else []


def culprits_of_hang(ranks: Sequence[Seen], late: Sequence[int], stacks: Mapping[int, str]) -> list[int]:
    """Which of the `late` ranks caused the hang; may be none. `stacks`: faulthandler's text by rank, where a rank answered."""
    seen_late = [seen for seen in ranks if seen.rank in late]
    stopped = [seen.rank for seen in seen_late if seen.state == STOPPED]
    if stopped:
        return stopped
    waiting = {rank for rank in late if in_collective(stacks.get(rank, ""))}
    outside = [rank for rank in late if rank not in waiting]
    if outside and waiting:
        return outside
    slots = {seen.slot for seen in seen_late}
    if waiting and any(seen.failed_slot in slots for seen in ranks if seen.rank not in late):
        return []
    return list(late)


def in_collective(stacks: str) -> bool:
    """Whether one of the threads in faulthandler's text is inside a collective operation."""
    stack = read_stack(stacks)
    return stack is not None and stack.collective is not None


def _left_on_purpose(seen: Seen) -> bool:
    status = seen.wait_status
    code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
    return seen.wants_restart or code in (EXIT_RESTART, EXIT_BROKEN)


def _was_terminated(seen: Seen) -> bool:
    status = seen.wait_status
    return status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
