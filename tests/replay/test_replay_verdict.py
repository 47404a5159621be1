"""Who is to blame: the rules, on made-up observations."""

from __future__ import annotations

from actordbg.base.processes import GONE, STOPPED, ZOMBIE
from actordbg.replay.blame import Seen, culprits_of_death, culprits_of_hang, in_collective, overdue
from actordbg.replay.work_order import EXIT_RESTART

SIGKILL, SIGTERM = 9, 15

MODEL_STACK = """Current thread 0x00007f (most recent call first):
  File "/lib/transformers/models/llama/modeling_llama.py", line 312 in forward
  File "/lib/actordbg/replay/worker.py", line 170 in _run
"""
COLLECTIVE_STACK = """Current thread 0x00007f (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 4120 in all_gather_into_tensor
  File "/lib/deepspeed/comm/torch.py", line 217 in all_gather_into_tensor
  File "/lib/actordbg/replay/worker.py", line 170 in _run
"""
ZERO_WAIT_STACK = """Current thread 0x00007f (most recent call first):
  File "/lib/deepspeed/runtime/zero/partition_parameters.py", line 640 in wait
  File "/lib/deepspeed/runtime/zero/partitioned_param_coordinator.py", line 300 in fetch_sub_module
"""


def test_the_rank_that_died_of_its_own_is_blamed_not_the_one_that_its_launcher_ended() -> None:
    assert culprits_of_death([Seen(0, state=ZOMBIE, wait_status=SIGKILL), Seen(1, state=ZOMBIE, wait_status=SIGTERM)]) == [0]
    assert culprits_of_death([Seen(0), Seen(1, state=GONE)]) == [1]


def test_a_rank_that_left_because_its_peer_was_gone_is_not_blamed() -> None:
    left = Seen(1, state=ZOMBIE, wait_status=EXIT_RESTART << 8)
    assert culprits_of_death([Seen(0, state=ZOMBIE, wait_status=SIGKILL), left]) == [0]
    assert culprits_of_death([Seen(0, state=GONE, wait_status=SIGTERM), left]) == []
    assert culprits_of_death([Seen(0, state=GONE, wait_status=SIGTERM), Seen(1, state=GONE, wants_restart=True)]) == []


def test_sigterm_is_blamed_when_there_is_no_other_cause() -> None:
    assert culprits_of_death([Seen(0, state=ZOMBIE, wait_status=SIGTERM)]) == [0]


def test_a_rank_that_is_done_may_leave() -> None:
    assert culprits_of_death([Seen(0, state=GONE, done=True)]) == []


def test_an_independent_rank_is_overdue_by_its_own_clock() -> None:
    ranks = [Seen(0, slot=3, started=0.0), Seen(1, slot=3, started=8.0), Seen(2)]
    assert overdue(ranks, 10.5, 10.0, collective=False) == [0]


def test_the_clock_of_a_shared_slot_starts_when_the_last_rank_has_started_it() -> None:
    quick, slow = Seen(0, slot=1, started=0.0), Seen(1, slot=1, started=5.0)
    assert overdue([quick, slow], 12.0, 10.0, collective=True) == []
    assert overdue([quick, slow], 16.0, 10.0, collective=True) == [0, 1]


def test_a_quick_rank_that_waits_in_the_next_slot_is_not_overdue_before_the_slow_one() -> None:
    ahead, behind = Seen(0, slot=2, started=0.0, slots_finished=2), Seen(1, slot=1, started=0.0, slots_finished=1)
    assert overdue([ahead, behind], 100.0, 10.0, collective=True) == [1]
    between = Seen(1, slot=None, slots_finished=1)
    assert overdue([Seen(0, slot=1, started=0.0, slots_finished=1), between], 100.0, 10.0, collective=True) == []


def test_stacks_tell_who_waits_in_a_collective() -> None:
    assert in_collective(COLLECTIVE_STACK) and in_collective(ZERO_WAIT_STACK) and not in_collective(MODEL_STACK)
    ranks = [Seen(0, slot=1), Seen(1, slot=1)]
    assert culprits_of_hang(ranks, [0, 1], {0: COLLECTIVE_STACK, 1: MODEL_STACK}) == [1]


def test_a_stopped_process_is_the_culprit_whatever_the_others_do() -> None:
    ranks = [Seen(0, slot=1), Seen(1, slot=1, state=STOPPED)]
    assert culprits_of_hang(ranks, [0, 1], {0: MODEL_STACK}) == [1]


def test_where_nothing_distinguishes_the_ranks_all_are_blamed() -> None:
    ranks = [Seen(0, slot=1), Seen(1, slot=1)]
    assert culprits_of_hang(ranks, [0, 1], {0: COLLECTIVE_STACK, 1: COLLECTIVE_STACK}) == [0, 1]
    assert culprits_of_hang(ranks, [0, 1], {0: MODEL_STACK, 1: MODEL_STACK}) == [0, 1]
    assert culprits_of_hang(ranks, [0, 1], {}) == [0, 1]


def test_who_waits_for_a_rank_that_failed_in_the_slot_is_innocent() -> None:
    ranks = [Seen(0, slot=1), Seen(1, slot=None, failed_slot=1)]
    assert culprits_of_hang(ranks, [0], {0: COLLECTIVE_STACK}) == []
