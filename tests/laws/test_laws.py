"""Laws asked of real models through OpenRLHF's Actor: healthy families stay green, planted faults are red in fp32 and in bf16.

The asserts are in the scenarios (`lawcases`), which run in processes of their own.
"""

import imagecases
import lawcases
import pytest
import routingcases
from actorcases import run_scenario

pytestmark = pytest.mark.forked


def test_healthy_models_keep_every_law(tmp_path):
    run_scenario("healthy", tmp_path, program=lawcases.__file__)


def test_a_fault_breaks_the_laws_that_it_violates_in_bf16_as_in_fp32(tmp_path):
    run_scenario("broken", tmp_path, program=lawcases.__file__)


def test_a_call_with_images_is_replayed_and_judged_and_six_faults_of_its_path_are_named(tmp_path):
    run_scenario("judged", tmp_path, program=imagecases.__file__)


def test_recorded_experts_are_forced_and_judged_and_six_faults_of_them_are_named(tmp_path):
    run_scenario("judged", tmp_path, program=routingcases.__file__)
