"""Files that take long, which the test processes begin with: else one of them might be left over for the end."""

from pathlib import Path

from roots import ROOT

TESTS = ROOT / "tests"
FILES = (
    "locate/test_locate.py", "trainers/test_own_classes.py", "install/test_run_ray.py", "install/test_run.py",
    "trainers/test_made_up_trainer.py", "reduce/test_reduce.py", "project/test_packaging.py", "trainers/test_weight_syncs.py",
    "trainers/test_built_in_adapters.py", "project/test_families.py", "judge/test_truth_end_to_end.py",
    "trainers/test_late_imports.py", "trainers/test_actor_cpu.py", "trainers/test_lora.py",
)  # fmt: skip
"""Each takes twenty seconds of a core or more, and is in the second half of the alphabet: the files of the first begin early as it is."""


def first(items):
    """Put the tests of these files before all others, and leave the order as it is otherwise."""
    place = {TESTS / name: number for number, name in enumerate(FILES)}
    items.sort(key=lambda item: place.get(Path(item.path), len(place)))
