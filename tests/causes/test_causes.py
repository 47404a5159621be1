"""Causes planted in real models are named from log-probs alone, and nothing is named in healthy ones.

The asserts are in the scenarios (`causecases`), which run in processes of their own.
"""

from __future__ import annotations

from pathlib import Path

import causecases
import pytest
from actorcases import run_scenario

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", ["planted", "others", "healthy"])
def test_a_cause_is_named_with_its_amount_and_a_healthy_model_has_none(tmp_path: Path, scenario: str) -> None:
    run_scenario(scenario, tmp_path, program=causecases.__file__, OMP_NUM_THREADS="1")
