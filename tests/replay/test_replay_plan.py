"""Planning: rows to a work list, which dumps are of one call, and what each rank gets of it. Pure."""

import random
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, strategies as st
from replaycases import PlannedRow

from actordbg.base.errors import UsageError
from actordbg.catalog.query import select_dumps
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps.importer import import_paths
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.plan import make_plan, slots_for
from actordbg.replay.selection import APART, NOT_ON_EVERY_RANK, find_calls
from actordbg.replay.work_order import WorkOrder

TWO, SHUFFLED = ReplayConfig(nproc=2), ReplayConfig(backend="deepspeed", nproc=2, align="shuffle")
TOGETHER = ReplayConfig(backend="deepspeed", zero_stage=3, nproc=2, align="rank")


def row(call, rank=0, seconds=None, **values):
    """Call number `call` of a rank; an imported one (without a number) where its time is given."""
    known = {"call_index": call, "role": "policy"} if seconds is None else {"source": "import"}
    after = 2 * call + 0.01 * rank if seconds is None else seconds
    stamp = (datetime(2025, 6, 19, tzinfo=timezone.utc) + timedelta(seconds=after)).isoformat(timespec="microseconds")
    return PlannedRow(f"c{call}r{rank}", rank=rank, timestamp=stamp.replace("+00:00", "Z"), **known | values)


def of_ranks(calls, ranks=2, **values):
    return [row(call, rank, **values) for call in calls for rank in range(ranks)]


def timed(calls, apart, but=None):
    """Calls without numbers every three seconds, whose second rank is `apart` seconds behind."""
    return [row(call, rank, 3.0 * call + apart * rank) for call in range(calls) for rank in range(2) if (call, rank) != but]


def plan_of(rows, config=TOGETHER, **options):
    plan = make_plan(rows, config, **options)
    return [one.dump_id for one in plan.spec.inputs], plan


def ids(rows, config=TOGETHER, **options):
    return plan_of(rows, config, **options)[0]


LATER = {"timestamp": "2025-06-20T00:00:00.000000Z", "role": "policy", "call_index": 0}


@pytest.mark.parametrize(
    "rows, whole, left_out",
    [
        ([one for one in of_ranks(range(4)) if one.dump_id != "c1r0"], "c0r0 c0r1 c2r0 c2r1 c3r0 c3r1", {NOT_ON_EVERY_RANK: 1}),
        *[
            ([row(0), row(0, 1, **other), *of_ranks([1])], "c1r0 c1r1", None)
            for other in ({"step": 7}, {"role": "value"}, {"run": "b"}, {"grad_enabled": True}, {"instance": "actor1-ff"})
        ],
        ([row(0, instance="actor0-aa"), row(0, 1, instance="actor0-bb")], "c0r0 c0r1", {}),
        (timed(3, 0.4, but=(1, 0)), "c0r0 c0r1 c2r0 c2r1", {NOT_ON_EVERY_RANK: 1}),  # a missing one does not shift the others
        (
            [*timed(2, 0.01), row(10, 0, 30.0), row(14, 1, 42.0)],
            "c0r0 c0r1 c1r0 c1r1",
            {APART: 2},
        ),  # what a condition left of two
        ([row(0, 0, 0.0, batch_size=4), row(0, 1, 0.1), row(1, 0, 0.2)], "c1r0 c0r1", {NOT_ON_EVERY_RANK: 1}),
        # a run that was started again counts anew
        ([*of_ranks([0]), *(PlannedRow(f"later{rank}", rank=rank, **LATER) for rank in range(2))], "c0r0 c0r1 later0 later1", {}),
    ],
)
def test_dumps_are_of_one_call_by_their_numbers_or_else_by_their_times(rows, whole, left_out):
    random.Random(len(rows)).shuffle(rows)
    calls = find_calls(rows, 2)
    assert [one.dump_id for call in calls.whole for one in call] == whole.split()
    assert (left_out is None and sum(calls.left_out.values()) == 2) or calls.left_out == left_out
    said = f"{len(calls.whole)} calls were matched by time" if rows[0].source == "import" else ""
    assert said in calls.how_matched() if len(calls.spreads) else not calls.how_matched()


def test_calls_of_a_real_training_run_are_found_by_their_times(store, shared_dumps):
    """Ranks 1 to 3 of this run are within 0.04 s of each other in every one of 64 calls."""
    import_paths(store, sorted(shared_dumps.glob("actor_inputs_rank[123]_*.pkl")), run="real")
    calls = find_calls(select_dumps(store), 3)
    assert len(calls.whole) == 64 and calls.left_out == {} and max(calls.spreads) < 0.1
    assert all([one.rank for one in call] == [1, 2, 3] and len({one.batch_size for one in call}) == 1 for call in calls.whole)


@pytest.mark.parametrize(
    "rows, config, options, expected",
    [
        ([row(n) for n in (2, 0, 1)], ReplayConfig(), {}, "c0r0 c1r0 c2r0"),
        ([row(n, seq_len=9 - n) for n in (2, 0, 1)], ReplayConfig(), {"order": "length"}, "c2r0 c1r0 c0r0"),
        ([row(n, replayable=n % 2 > 0) for n in range(6)], ReplayConfig(nproc=4), {"max_inputs": 2}, "c1r0 c3r0"),
        (of_ranks(range(3)), TOGETHER, {"max_inputs": 5}, "c0r0 c0r1 c1r0 c1r1"),
        (of_ranks([0], 4), TOGETHER, {}, "c0r0 c0r1 c0r2 c0r3"),  # several slots
        ([row(0, rank) for rank in (0, 1, 3, 6)], TOGETHER, {}, "c0r0 c0r1 c0r6 c0r3"),  # rank r in lane r % 2
        ([row(0, replayable=False), row(0, 1), *of_ranks([1])], TOGETHER, {}, "c1r0 c1r1"),
        (
            [row(call, rank, seq_len=10 * (5 - call) - rank) for call in range(2) for rank in range(2)],
            *(TOGETHER, {"order": "length"}, "c1r0 c1r1 c0r0 c0r1"),
        ),
    ],
)
def test_inputs_come_in_their_order_by_whole_calls_and_max_inputs_counts_all_workers_together(rows, config, options, expected):
    planned, plan = plan_of(rows, config, **options)
    assert planned == expected.split()
    lost = sum(not one.replayable for one in rows)
    assert plan.skipped.get("they cannot be replayed; `dump show` says why", 0) == lost
    assert ReplaySpec.from_json(plan.spec.to_json()) == plan.spec


@pytest.mark.parametrize(
    "rows, config, options, message",
    [
        (of_ranks(range(2), 4), ReplayConfig(nproc=3, align="rank"), {}, "do not fill 3 processes evenly"),
        ([row(0), row(1)], TOGETHER, {}, "no call is complete"),
        (of_ranks([0]), TOGETHER, {"max_inputs": 1}, "--max-inputs 1 is less than one call"),
    ],
)
def test_what_leaves_no_whole_call_is_refused(rows, config, options, message):
    with pytest.raises(UsageError, match=message):
        make_plan(rows, config, **options)


@pytest.mark.parametrize("how", [{"order": "shuffle"}, {"align": "shuffle"}])
def test_shuffling_keeps_each_lanes_own_inputs_and_depends_only_on_the_seed(how):
    config = SHUFFLED if "align" in how else TWO
    order = {"order": how.get("order", "time")}
    rows = [row(call) for call in range(41)]
    plans = [plan_of(rows, config, shuffle_seed=seed, **order) for seed in (42, 42, 7)]
    shuffled, in_order = plans[0][0], ids(rows, TWO)
    assert shuffled == plans[1][0] != plans[2][0]
    for lane in (0, 1):
        assert sorted(shuffled[lane::2]) == sorted(in_order[lane::2]) and shuffled[lane::2] != in_order[lane::2]
    places = [[in_order[lane::2].index(dump) for dump in shuffled[lane::2]] for lane in (0, 1)]
    assert places[0] != places[1], "each lane has an order of its own"
    assert "21 and 20 inputs" in " ".join(plans[0][1].notes) or "order" in how
    assert sorted(ids(rows, SHUFFLED, max_inputs=3)) == in_order[:3]
    calls = ids(of_ranks(range(20)), order="shuffle")
    assert calls != sorted(calls) and all(a[:-2] == b[:-2] for a, b in zip(calls[::2], calls[1::2], strict=True))


@pytest.mark.parametrize("align", ["same", "rank", "shuffle"])
def test_one_process_has_nothing_to_align_and_the_plan_says_so(align):
    planned, plan = plan_of(of_ranks([0]), ReplayConfig(align=align))
    assert len(planned) == 2 and "aligns nothing" in plan.notes[0]


@given(st.integers(1, 5), st.sets(st.integers(0, 30)))
def test_slots_give_every_pending_input_once_to_its_lane_and_leave_no_slot_empty(nproc, left):
    slots = slots_for(ReplayConfig(nproc=nproc), range(nproc), sorted(left), 31)
    placed = [(rank, index) for row in slots for rank, index in enumerate(row) if index is not None]
    assert sorted(index for _, index in placed) == sorted(left) and all(index % nproc == rank for rank, index in placed)
    assert all(len(row) == nproc and any(index is not None for index in row) for row in slots)
    for rank in range(nproc):
        mine = [index for row in slots if (index := row[rank]) is not None]
        assert mine == sorted(mine)


@pytest.mark.parametrize(
    "config, pending, total, slots",
    [
        (TOGETHER, [0, 2, 3, 5], 6, [(0, None), (2, 3), (None, 5)]),  # a filler keeps the place, and no other call moves up
        (ReplayConfig(backend="deepspeed", nproc=2), [0, 2, 3, 5], 6, [(0, 3), (2, 5)]),
        (SHUFFLED, [0, 1, 2], 3, [(0, 1), (2,)]),  # nothing fills up for what never was
        (SHUFFLED, [0, 3], 4, [(0, None), (None, 3)]),
    ],
)
def test_slots_of_a_rest_are_the_plans_where_the_alignment_says_which_inputs_meet(config, pending, total, slots):
    assert slots_for(config, [0, 1], pending, total) == slots


@pytest.mark.parametrize(
    "ranks, width, slots, tasks",
    [
        ([0, 1], 1, [[4, 5], [6, None], [None, 7]], {0: "lead 4, lead 6, fill 7", 1: "lead 5, fill 6, lead 7"}),
        ([0, 1], 1, [[0, 1], [2]], {0: "lead 0, lead 2", 1: "lead 1"}),  # a lane beyond the end of a slot has nothing to do
        (
            *([0, 1, 2, 3], 2, [[4, 5], [6, None]]),
            {0: "lead 4, lead 6", 1: "follow 4, follow 6", 2: "lead 5, fill 6", 3: "follow 5, fill 6"},
        ),
        ([2], 3, [[0], [1]], {2: "follow 0, follow 1"}),
    ],
)
def test_a_work_order_gives_a_lanes_ranks_its_input_or_a_neighbours_and_only_the_first_records_it(ranks, width, slots, tasks):
    order = WorkOrder(1, ranks, slots, width)
    assert WorkOrder.from_json(order.to_json()) == order
    told = {rank: ", ".join(f"{task.duty.value} {task.index}" for task in order.inputs_of(rank)) for rank in ranks}
    assert told == tasks
    busy = [rank for rank in ranks if any(task.slot == 1 for task in order.inputs_of(rank))]
    assert order.ranks_in(1) == busy
    assert order.mates(1) == [index for index in slots[1] if index is not None]
