"""The files that take longest, which the test processes begin with: else one of them might be left over for the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from roots import ROOT

TESTS = ROOT / "tests"
FILES = (
    "causes/test_causes.py", "cluster/test_ray_replay.py", "locate/test_locate.py", "install/test_run_ray.py",
    "campaign/test_matrix_distributed.py", "project/test_docs.py", "debug/test_stops_in_replays.py",
    "compare/test_engine_sides.py", "campaign/test_matrix_command.py", "project/test_examples.py", "api/test_pytest_plugin.py",
    "campaign/test_train_check.py", "judge/test_truth_end_to_end.py", "demo/test_demo_steps.py", "install/test_run.py",
    "reduce/test_reduce.py", "api/test_store_api.py", "capture/test_capture_deaths.py", "api/test_for_agents.py",
    "project/test_threads.py", "actor/test_actor_session.py", "catalog/test_odd_files.py", "trainers/test_made_up_trainer.py",
    "catalog/test_private_catalog.py", "actor/test_model_code.py", "trainers/test_lora.py", "install/test_patch_end_to_end.py",
    "replay/test_replay_command.py", "judge/test_check.py", "project/test_families.py", "trainers/test_weight_syncs.py",
    "capture/test_capture_ends.py", "trainers/test_built_in_adapters.py", "dumps/test_bundle.py", "cli/test_actor_init_cli.py",
    "project/test_benchmarks.py", "replay/test_replay_supervise.py", "api/test_notebook.py", "capture/test_capture_faults.py",
    "trainers/test_actor_cpu.py", "capture/test_capture_facts.py", "dumps/test_killed_anywhere.py", "cli/test_cli_app.py",
    "replay/test_replay_launch.py", "capture/test_capture_processes.py", "cli/test_foreign_text.py",
    "judge/test_foreign_evidence.py", "replay/test_replay_align_real.py", "cli/test_answers_to_nothing.py",
    "install/test_attach_sitecustomize.py", "trainers/test_own_classes.py", "project/test_habits.py", "api/test_check_model.py",
    "project/test_packaging.py", "replay/test_foreign_stores.py", "judge/test_explanation.py", "actor/test_find_trainer.py",
    "config/test_settings_table.py", "project/test_gpu_kit.py", "capture/test_capture_hook.py", "actor/test_actor_backends.py",
    "formats/test_dump_fuzz.py", "dumps/test_packs_cli.py", "trainers/test_late_imports.py", "laws/test_laws.py",
    "dumps/test_legacy_attacks.py",
)  # fmt: skip
"""Each takes ten seconds or more, the longest first. A name that is no more, or is missing here, costs half a minute at most."""


def first(items: list[pytest.Item]) -> None:
    """Put the tests of these files before all others, and leave the order as it is otherwise."""
    place = {TESTS / name: number for number, name in enumerate(FILES)}
    items.sort(key=lambda item: place.get(Path(item.path), len(place)))
