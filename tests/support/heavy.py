"""The files that take longest, which the test processes begin with: else one of them might be left over for the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from roots import ROOT

TESTS = ROOT / "tests"
FILES = (
    "cluster/test_ray_replay.py", "demo/test_demo_steps.py", "campaign/test_train_check.py", "api/test_pytest_plugin.py",
    "campaign/test_matrix_distributed.py", "judge/test_truth_end_to_end.py", "locate/test_locate.py", "api/test_for_agents.py",
    "actor/test_actor_session.py", "trainers/test_weight_syncs.py", "debug/test_stops_in_replays.py", "project/test_docs.py",
    "install/test_run.py", "reduce/test_reduce.py", "laws/test_laws.py", "install/test_run_ray.py", "actor/test_golden_dropout.py",
    "campaign/test_matrix_command.py", "project/test_examples.py", "replay/test_replay_command.py", "formats/test_dump_fuzz.py",
    "judge/test_engine_sides.py", "capture/test_capture_faults.py", "trainers/test_made_up_trainer.py", "steps/test_step.py",
    "replay/test_replay_supervise.py", "actor/test_actor_parallel.py", "causes/test_causes.py", "project/test_families.py",
    "capture/test_capture_deaths.py", "capture/test_capture_ends.py", "project/test_threads.py", "catalog/test_odd_files.py",
    "actor/test_model_code.py", "trainers/test_lora.py", "trainers/test_built_in_adapters.py", "replay/test_replay_launch.py",
    "catalog/test_private_catalog.py", "replay/test_foreign_stores.py", "install/test_patch_end_to_end.py", "api/test_store_api.py",
    "project/test_benchmarks.py", "install/test_attach_sitecustomize.py", "judge/test_check.py", "api/test_notebook.py",
    "replay/test_replay_align_real.py", "api/test_check_model.py", "replay/test_replay_plain.py", "project/test_packaging.py",
    "trainers/test_actor_cpu.py", "actor/test_actor_deepspeed.py",
)  # fmt: skip
"""Each takes ten seconds or more, the longest first. A name that is no more, or is missing here, costs half a minute at most."""


def first(items: list[pytest.Item]) -> None:
    """Put the tests of these files before all others, and leave the order as it is otherwise."""
    place = {TESTS / name: number for number, name in enumerate(FILES)}
    items.sort(key=lambda item: place.get(Path(item.path), len(place)))
