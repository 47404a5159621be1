"""The truth's modules against the formulas of their papers. The asserts are in `formulacases`, which runs in a process of its own."""

import formulacases
import pytest
from actorcases import run_scenario

pytestmark = pytest.mark.forked


def test_transformers_own_modules_are_held_against_the_papers(tmp_path):
    run_scenario("healthy,patched", tmp_path, program=formulacases.__file__)
