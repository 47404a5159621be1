"""Which dumps are of one call, and what --align makes of a plan: pure."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replaycases import PlannedRow

from actordbg.base.errors import UsageError
from actordbg.catalog.query import select_dumps
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps.importer import import_paths
from actordbg.replay.plan import make_plan, slots_for
from actordbg.replay.selection import APART, NOT_ON_EVERY_RANK, find_calls, in_slots
from actordbg.store.layout import Store

TOGETHER = ReplayConfig(backend="deepspeed", zero_stage=3, nproc=2, align="rank")


def row(call: int, rank: int, seconds: float | None = None, **values: Any) -> PlannedRow:
    """Call number `call` of a rank; an imported one (without a number) where its time is given."""
    moment = datetime(2025, 6, 19, tzinfo=timezone.utc) + timedelta(seconds=2 * call + 0.01 * rank)
    known: dict[str, Any] = {"call_index": call, "role": "policy"}
    if seconds is not None:
        moment = datetime(2025, 6, 19, tzinfo=timezone.utc) + timedelta(seconds=seconds)
        known = {"source": "import"}
    stamp = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return PlannedRow(f"c{call}r{rank}", f"dumps/c{call}r{rank}", rank, timestamp=stamp, **known | values)


def names(calls: list[list[PlannedRow]]) -> list[list[str]]:
    return [[one.dump_id for one in call] for call in calls]


def planned(rows: list[PlannedRow], config: ReplayConfig = TOGETHER, **options: Any) -> list[str]:
    return [one.dump_id for one in make_plan(rows, config, **options).spec.inputs]


@given(st.integers(0, 2**32))
def test_dumps_with_the_same_number_are_one_call_in_whatever_order_they_come(seed: int) -> None:
    rows = [row(call, rank) for call in range(4) for rank in range(2)]
    random.Random(seed).shuffle(rows)
    calls = find_calls(rows, 2)
    assert names(calls.whole) == [[f"c{call}r0", f"c{call}r1"] for call in range(4)]
    assert calls.left_out == {} and calls.how_matched() == ""


def test_a_call_that_one_rank_lacks_is_left_out_and_the_others_stay_as_they_are() -> None:
    rows = [row(call, rank) for call in range(4) for rank in range(2) if (call, rank) != (1, 0)]
    calls = find_calls(rows, 2)
    assert names(calls.whole) == [["c0r0", "c0r1"], ["c2r0", "c2r1"], ["c3r0", "c3r1"]]
    assert calls.left_out == {NOT_ON_EVERY_RANK: 1}


@pytest.mark.parametrize(
    "other", [{"step": 7}, {"role": "reference"}, {"run": "another"}, {"grad_enabled": True}, {"instance": "actor1-ff"}]
)
def test_dumps_of_another_step_role_run_or_kind_are_never_of_one_call(other: dict[str, Any]) -> None:
    calls = find_calls([row(0, 0), row(0, 1, **other), row(1, 0), row(1, 1)], 2)
    assert names(calls.whole) == [["c1r0", "c1r1"]]
    assert sum(calls.left_out.values()) == 2


def test_actors_of_two_processes_are_the_same_by_their_number_in_the_process() -> None:
    assert names(find_calls([row(0, 0, instance="actor0-aa"), row(0, 1, instance="actor0-bb")], 2).whole)


def test_dumps_without_numbers_go_by_their_times_and_a_missing_one_does_not_shift_the_others() -> None:
    rows = [row(call, rank, 3.0 * call + 0.4 * rank) for call in range(5) for rank in range(2) if (call, rank) != (1, 0)]
    calls = find_calls(rows, 2)
    assert names(calls.whole) == [[f"c{call}r0", f"c{call}r1"] for call in (0, 2, 3, 4)]
    assert calls.left_out == {NOT_ON_EVERY_RANK: 1}
    assert "4 calls were put together by their times" in calls.how_matched() and "at most 0.40 s" in calls.how_matched()


def test_what_a_condition_left_of_two_calls_is_not_taken_for_one() -> None:
    rows = [row(call, rank, 3.0 * call + 0.01 * rank) for call in range(4) for rank in range(2)]
    rows += [row(10, 0, 30.0), row(14, 1, 42.0)]
    calls = find_calls(rows, 2)
    assert [call[0].dump_id for call in calls.whole] == ["c0r0", "c1r0", "c2r0", "c3r0"]
    assert calls.left_out == {APART: 2} and max(calls.spreads) < 0.02


def test_passes_of_different_kinds_at_the_same_time_are_different_calls() -> None:
    rows = [row(0, 0, 0.0, batch_size=4), row(0, 1, 0.1, batch_size=2), row(1, 0, 0.2, batch_size=2)]
    assert names(find_calls(rows, 2).whole) == [["c1r0", "c0r1"]]


def test_a_run_that_was_started_again_counts_anew_and_its_calls_are_told_apart_by_time() -> None:
    first = [row(0, rank) for rank in range(2)]
    second = [PlannedRow(f"later{rank}", rank=rank, timestamp="2025-06-20T00:00:00.000000Z", role="policy", call_index=0)
              for rank in range(2)]  # fmt: skip
    assert names(find_calls(first + second, 2).whole) == [["c0r0", "c0r1"], ["later0", "later1"]]


def test_more_ranks_than_lanes_take_several_slots_and_uneven_ones_are_refused() -> None:
    rows = [row(call, rank) for call in range(2) for rank in range(4)]
    assert planned(rows)[:4] == ["c0r0", "c0r1", "c0r2", "c0r3"]
    call = find_calls([row(0, rank) for rank in (0, 1, 3, 6)], 2).whole[0]
    assert [one.rank % 2 for one in in_slots(call, 2)] == [0, 1, 0, 1]
    with pytest.raises(UsageError, match="do not fill 3 processes evenly") as caught:
        planned(rows, ReplayConfig(nproc=3, align="rank"))
    assert "8 left out" in caught.value.message and "--nproc" in caught.value.hint
    with pytest.raises(UsageError, match="no call is whole"):
        planned([row(0, 0), row(1, 0)])


def test_max_inputs_takes_whole_calls_and_says_when_it_is_less_than_one() -> None:
    rows = [row(call, rank) for call in range(3) for rank in range(2)]
    assert planned(rows, max_inputs=5) == ["c0r0", "c0r1", "c1r0", "c1r1"]
    with pytest.raises(UsageError, match="--max-inputs 1 is less than one call"):
        planned(rows, max_inputs=1)


def test_an_order_is_that_of_the_calls_and_a_call_stays_together() -> None:
    rows = [row(call, rank, seq_len=(50, 10 * (5 - call))[rank]) for call in range(3) for rank in range(2)]
    assert planned(rows, order="length")[0][:2] == "c0"
    rows = [row(call, rank, seq_len=10 * (5 - call) - rank) for call in range(3) for rank in range(2)]
    assert planned(rows, order="length") == ["c2r0", "c2r1", "c1r0", "c1r1", "c0r0", "c0r1"]
    shuffled = planned([row(call, rank) for call in range(20) for rank in range(2)], order="shuffle")
    assert shuffled != sorted(shuffled)
    assert all(a[:-2] == b[:-2] for a, b in zip(shuffled[::2], shuffled[1::2], strict=True))


def test_a_dump_that_cannot_be_replayed_takes_its_call_with_it() -> None:
    plan = make_plan([row(0, 0, replayable=False), row(0, 1), row(1, 0), row(1, 1)], TOGETHER)
    assert [one.dump_id for one in plan.spec.inputs] == ["c1r0", "c1r1"]
    assert plan.skipped == {"they cannot be replayed; `dump show` says why": 1, NOT_ON_EVERY_RANK: 1}


def test_when_one_input_of_a_call_is_gone_a_filler_keeps_its_place_and_no_other_call_moves_up() -> None:
    assert slots_for(TOGETHER, [0, 1], [0, 2, 3, 5], 6) == [(0, None), (2, 3), (None, 5)]
    free = ReplayConfig(backend="deepspeed", nproc=2)
    assert slots_for(free, [0, 1], [0, 2, 3, 5], 6) == [(0, 3), (2, 5)]


def test_shuffled_ranks_keep_their_own_inputs_and_nothing_fills_up_for_what_never_was() -> None:
    config = ReplayConfig(backend="deepspeed", nproc=2, align="shuffle")
    rows = [row(call, 0) for call in range(41)]
    plan = make_plan(rows, config, shuffle_seed=42)
    dumps = [one.dump_id for one in plan.spec.inputs]
    in_order = [one.dump_id for one in make_plan(rows, ReplayConfig(nproc=2)).spec.inputs]
    assert dumps[0::2] != in_order[0::2] and sorted(dumps[0::2]) == sorted(in_order[0::2])
    assert sorted(dumps[1::2]) == sorted(in_order[1::2])
    assert "21 and 20 inputs" in plan.notes[0]
    assert slots_for(config, [0, 1], [0, 1, 2], 3) == [(0, 1), (2,)]
    assert slots_for(config, [0, 1], [2], 3) == [(2,)]
    assert slots_for(config, [0, 1], [0, 3], 4) == [(0, None), (None, 3)]


def test_shuffling_takes_the_inputs_that_max_inputs_takes_without_it() -> None:
    rows = [row(call, 0) for call in range(10)]
    assert sorted(planned(rows, ReplayConfig(nproc=2, align="shuffle"), max_inputs=3)) == ["c0r0", "c1r0", "c2r0"]


@pytest.mark.parametrize("align", ["same", "rank", "shuffle"])
def test_one_process_has_nothing_to_align_and_the_plan_says_so(align: str) -> None:
    plan = make_plan([row(0, 0), row(1, 1)], ReplayConfig(align=align))
    assert len(plan.spec.inputs) == 2 and "aligns nothing" in plan.notes[0]


def test_calls_of_a_real_training_run_are_found_by_their_times(store: Store, shared_dumps: Path) -> None:
    """Ranks 1 to 3 of this run are within 0.04 s of each other in every one of 64 calls."""
    import_paths(store, sorted(shared_dumps.glob("actor_inputs_rank[123]_*.pkl")), run="real")
    calls = find_calls(select_dumps(store), 3)
    assert len(calls.whole) == 64 and calls.left_out == {} and max(calls.spreads) < 0.1
    assert all([one.rank for one in call] == [1, 2, 3] for call in calls.whole)
    assert all(len({one.batch_size for one in call}) == 1 for call in calls.whole)
