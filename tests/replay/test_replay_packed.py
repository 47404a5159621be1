"""Replays of packed dumps for real: the same results as of files, also when dumps move between plan and run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replaycases import publish

from actordbg.base.units import new_replay_id
from actordbg.catalog import query
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps import packing
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.plan import make_plan
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


def digests(store: Store, inputs: tuple[ReplayInput, ...]) -> dict[str, str | None]:
    """What every input's log-probs were; all have to pass."""
    outcome = run_replay(store, ReplaySpec(new_replay_id(), now_timestamp(), ReplayConfig(), inputs))
    assert outcome.all_passed and len(outcome.results) == len(inputs)
    return {dump_id: record.output_digest for dump_id, record in outcome.results.items()}


def test_packed_dumps_replay_like_files_and_a_plan_survives_that_they_move(store: Store):
    planned_as_files = tuple(publish(store, 8, batch=2, length=128))
    packing.pack_dumps(store)
    rows = query.select_dumps(store)
    assert all(row.pack for row in rows)
    planned_as_packed = make_plan(rows, ReplayConfig()).spec.inputs
    half = {item.dump_id for item in planned_as_files[:4]}
    mixed = (*planned_as_files[:4], *(item for item in planned_as_packed if item.dump_id not in half))
    assert len(mixed) == 8
    from_the_pack = digests(store, mixed)  # the files of half of this plan are in a pack now
    packing.unpack_dumps(store, "rank = 0")
    assert digests(store, planned_as_packed) == from_the_pack, "the pack of this plan is gone: these are files"
