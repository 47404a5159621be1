"""Planning: rows to a work list, pure."""

from __future__ import annotations

import re
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replaycases import PlannedRow

from actordbg.base.units import new_replay_id
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.plan import make_plan, owner, slots_for
from actordbg.replay.work_order import Duty, Task, WorkOrder


def rows(count: int) -> list[PlannedRow]:
    """Rows whose order by time is d0, d1, ... and by length the reverse; given in neither."""
    made = [
        PlannedRow(f"d{n}", f"dumps/d{n}", seq_len=100 - n, timestamp=f"2025-06-19T05:26:{n:02d}.000000Z") for n in range(count)
    ]
    return made[1::2] + made[::2]


def ids(spec: ReplaySpec) -> list[str]:
    return [one.dump_id for one in spec.inputs]


def test_inputs_come_in_the_order_of_capture_unless_told_otherwise() -> None:
    assert ids(make_plan(rows(4), ReplayConfig()).spec) == ["d0", "d1", "d2", "d3"]
    assert ids(make_plan(rows(4), ReplayConfig(), order="length").spec) == ["d3", "d2", "d1", "d0"]


def test_max_inputs_counts_all_workers_together() -> None:
    assert ids(make_plan(rows(6), ReplayConfig(nproc=4), max_inputs=3).spec) == ["d0", "d1", "d2"]


def test_shuffling_keeps_each_workers_own_inputs_and_depends_only_on_the_seed() -> None:
    config = ReplayConfig(nproc=2)
    plans = [ids(make_plan(rows(40), config, order="shuffle", shuffle_seed=seed).spec) for seed in (42, 42, 7)]
    assert plans[0] == plans[1] != plans[2]
    ordered = ids(make_plan(rows(40), config).spec)
    assert sorted(plans[0][0::2]) == sorted(ordered[0::2]) and plans[0][0::2] != ordered[0::2]
    positions = [[ordered[rank::2].index(dump) for dump in plans[0][rank::2]] for rank in (0, 1)]
    assert positions[0] != positions[1], "each worker has an order of its own"


def test_what_cannot_be_replayed_is_left_out_counted_and_does_not_use_up_max_inputs() -> None:
    mixed = [PlannedRow("d0", replayable=False), PlannedRow("d1"), PlannedRow("d2", replayable=False), PlannedRow("d3")]
    plan = make_plan(mixed, ReplayConfig(), max_inputs=2)
    assert ids(plan.spec) == ["d1", "d3"]
    assert list(plan.skipped.values()) == [2]


def test_a_plan_survives_its_json() -> None:
    spec = make_plan(rows(3), ReplayConfig(nproc=2, dtype="bf16"), where="rank=0", command="actordbg replay").spec
    assert ReplaySpec.from_json(spec.to_json()) == spec


def test_replay_ids_sort_by_time_and_do_not_repeat() -> None:
    moment = datetime(2025, 6, 19, 5, 26, 8, tzinfo=timezone.utc)
    assert re.fullmatch(r"20250619T052608-[0-9a-f]{6}", new_replay_id(moment))
    assert new_replay_id(moment) != new_replay_id(moment)


def test_an_unknown_order_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="alphabetical"):
        make_plan(rows(1), ReplayConfig(), order="alphabetical")


@given(st.integers(1, 5), st.sets(st.integers(0, 30)))
def test_slots_give_every_pending_input_once_to_its_owner_and_leave_no_slot_empty(nproc: int, left: set[int]) -> None:
    pending = sorted(left)
    slots = slots_for(ReplayConfig(nproc=nproc), range(nproc), pending, 31)
    placed = [(rank, index) for row in slots for rank, index in enumerate(row) if index is not None]
    assert sorted(index for _, index in placed) == pending
    assert all(owner(index, nproc) == rank for rank, index in placed)
    assert all(len(row) == nproc and any(index is not None for index in row) for row in slots)
    for rank in range(nproc):
        mine = [index for row in slots if (index := row[rank]) is not None]
        assert mine == sorted(mine)


def test_a_work_order_gives_a_rank_its_inputs_and_a_neighbours_where_it_has_none() -> None:
    order = WorkOrder(1, [0, 1], [[4, 5], [6, None], [None, 7]], (1, 1))
    assert WorkOrder.from_json(order.to_json()) == order
    lead, fill = Duty.LEAD, Duty.FILL
    assert order.inputs_of(0) == [Task(0, 4, lead), Task(1, 6, lead), Task(2, 7, fill)]
    assert order.inputs_of(1) == [Task(0, 5, lead), Task(1, 6, fill), Task(2, 7, lead)]
    assert order.mates(1) == [6] and order.ranks_in(1) == [0, 1]


def test_the_ranks_of_a_lane_get_the_same_input_and_only_the_first_one_records_it() -> None:
    order = WorkOrder(1, [0, 1, 2, 3], [[4, 5], [6, None]], (1, 1), width=2)
    parts = [[(task.index, task.duty.value) for task in order.inputs_of(rank)] for rank in range(4)]
    assert parts[0] == [(4, "lead"), (6, "lead")] and parts[1] == [(4, "follow"), (6, "follow")]
    assert parts[2] == [(5, "lead"), (6, "fill")] and parts[3] == [(5, "follow"), (6, "fill")]
    alone = WorkOrder(1, [2], [[0], [1]], (1, 1), width=3)
    assert alone.inputs_of(2) == [Task(0, 0, Duty.FOLLOW), Task(1, 1, Duty.FOLLOW)]


def test_lanes_beyond_the_end_of_a_slot_have_nothing_to_do_in_it() -> None:
    order = WorkOrder(1, [0, 1], [[0, 1], [2]], (1, 1))
    assert [task.index for task in order.inputs_of(1)] == [1]
    assert order.ranks_in(1) == [0]
