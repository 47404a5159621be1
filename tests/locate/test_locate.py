"""Where a configuration goes wrong, asked of real models: planted faults are named in fp32 and in bf16, healthy models are right.

The asserts are in the scenarios (`locatecases`), which run in processes of their own.
"""

from __future__ import annotations

from pathlib import Path

import locatecases
import pytest
from actorcases import run_scenario

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", ["faults", "others", "healthy"])
def test_a_fault_is_named_by_its_module_and_a_healthy_model_is_right(tmp_path: Path, scenario: str) -> None:
    run_scenario(scenario, tmp_path, program=locatecases.__file__)


def test_ranks_that_compute_together_are_judged_alike_and_the_one_that_differs_is_named(tmp_path: Path) -> None:
    run_scenario("together", tmp_path, world=2, program=locatecases.__file__)
