"""The files that take longest, which the test processes begin with: else one of them might be left over for the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from roots import ROOT

TESTS = ROOT / "tests"
FILES = (
    "cluster/test_ray_replay.py", "demo/test_demo_steps.py", "install/test_run_ray.py", "locate/test_locate.py",
    "actor/test_actor_session.py", "project/test_docs.py", "capture/test_capture_deaths.py", "install/test_run.py",
    "campaign/test_train_check.py", "campaign/test_matrix_distributed.py", "project/test_examples.py",
    "campaign/test_matrix_command.py", "trainers/test_made_up_trainer.py", "laws/test_laws.py", "judge/test_truth_end_to_end.py",
    "trainers/test_lora.py", "campaign/test_families.py", "project/test_benchmarks.py", "debug/test_stops_in_replays.py",
    "causes/test_causes.py", "capture/test_capture_faults.py", "replay/test_replay_launch.py", "actor/test_model_code.py", "project/test_threads.py",
    "replay/test_replay_plain.py", "catalog/test_private_catalog.py", "actor/test_actor_parallel.py",
    "actor/test_golden_dropout.py", "replay/test_replay_align_real.py", "dumps/test_killed_anywhere.py", "fuzz/test_fuzz.py",
    "laws/test_laws_command.py", "reduce/test_reduce.py", "api/test_for_agents.py", "api/test_store_api.py", "judge/test_check.py",
)  # fmt: skip
"""Each takes ten seconds or more, the longest first. A name that is no more, or is missing here, costs half a minute at most."""


def first(items: list[pytest.Item]) -> None:
    """Put the tests of these files before all others, and leave the order as it is otherwise."""
    place = {TESTS / name: number for number, name in enumerate(FILES)}
    items.sort(key=lambda item: place.get(Path(item.path), len(place)))
