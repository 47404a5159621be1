"""Replaying in OpenRLHF's DeepSpeed strategy: every ZeRO stage gives the plain Actor's numbers, and inputs stay independent.

Here in one process, with the asserts in it; `test_actor_parallel.py` has the stages on two.
"""

import math
import sys

import pytest
from actorcases import failing, furthest, main, make_dump, numbers, opened, run_scenario

from actordbg.base.errors import UsageError

pytestmark = pytest.mark.forked


def test_every_stage_gives_the_plain_actors_numbers_and_the_same_bits_whatever_ran_between(tmp_path):
    run_scenario("stages", tmp_path, program=__file__)


def stages(cache):

    with opened(cache, backward=True) as session:
        plain, parameters = numbers(session.run(make_dump(), backward=True)), session.resolved["parameters"]
        cut = without_a_gradient(session)
    for stage in range(4):
        with opened(cache, backend="deepspeed", zero_stage=stage, backward=True, keep_gradients=True) as session:
            said = [session.resolved[name] for name in ("zero_stage", "world_size", "engine")]
            assert said == [stage, 1, "training"] and not session.is_collective
            first, other, again = (numbers(session.run(make_dump(seed), backward=True)) for seed in (0, 1, 0))
            assert first == again and other["grad_norm"] != first["grad_norm"]
            for found in (first, numbers(session.run(make_dump(packing_samples=True), backward=True))):
                assert furthest(found["log_probs"], plain["log_probs"]) < 1e-5
                assert math.isclose(found["grad_norm"], plain["grad_norm"], rel_tol=1e-5)
            assert math.isclose(first["loss"], plain["loss"], rel_tol=1e-5)
            spoiled = session.run(make_dump(temperature=math.nan), backward=True)
            assert math.isnan(spoiled.grad_norm) and numbers(session.run(make_dump(), backward=True)) == first, (
                "no weight changed"
            )
            lost = without_a_gradient(session)
            assert math.isclose(lost.grad_norm, cut.grad_norm, rel_tol=1e-5), "a gradient of the input before is left"
            assert not lost.gradients.get(CUT + ".weight", {"norm": 0.0})["norm"]
    for stage in (0, 3):
        with opened(cache, backend="deepspeed", zero_stage=stage) as session:
            evaluates(session, stage, plain, parameters)


CUT = "model.layers.0.mlp.down_proj"


def without_a_gradient(session):
    """Run an input whose backward does not reach the module `CUT`."""
    hook = session.model.get_submodule(CUT).register_forward_hook(lambda _module, _inputs, output: output.detach())
    try:
        return session.run(make_dump(1), backward=True)
    finally:
        hook.remove()


def evaluates(session, stage, plain, parameters):
    """Run forwards alone, in the engine that a reference model has. One that fails spoils ZeRO 3 and no other stage."""
    assert (session.resolved["engine"], session.resolved["parameters"]) == ("evaluation", parameters)
    found = numbers(session.run(make_dump(), backward=False))
    assert found["loss"] is found["grad_norm"] is None and furthest(found["log_probs"], plain["log_probs"]) < 1e-5
    with pytest.raises(UsageError):
        session.run(make_dump(), backward=True)
    assert not session.tainted and failing(session) != "ran" and session.tainted == (stage == 3)


if __name__ == "__main__":
    main(sys.argv[1:], globals())
