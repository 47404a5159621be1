"""DeepSpeed and inductor wait until they are used; what OpenRLHF's functions compute is the same."""

import json

import pytest
import torch
from runkit import clean_environment, python

from actordbg.trainers.openrlhf.build import compiling_at_the_first_call

PROBE = """
import json, os, sys
from types import SimpleNamespace as Some
from actordbg.actor.backends.training import Training
from actordbg.config.replay_config import ReplayConfig
from actordbg.trainers.trainer import TRAINER
TRAINER.prepare_process()
from actordbg.trainers.openrlhf.build import import_actor
import_actor()
facts = {"compiled": [name for name in ("torch._inductor.lowering", "deepspeed.runtime") if name in sys.modules]}
if not os.fork():
    TRAINER.strategy(Some(dtype="fp32", seed=0, attn="eager"), ReplayConfig(backend="deepspeed"), 1, Training(lr=0.0))
    late = ["datasets", "functorch.compile", "torch._inductor.lowering"]
    print([name for name in late if name in sys.modules], len(set(map(__import__, late))), flush=True)
    os._exit(0)
os.wait()
import torch._dynamo
torch._dynamo.config.disable = True
from openrlhf.models.utils import compute_entropy, deepspeed
logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
facts["off"] = float((compute_entropy(logits) - torch.distributions.Categorical(logits=logits).entropy()).abs().max())
facts["still"] = "deepspeed.runtime" in sys.modules
facts["version"], facts["now"] = deepspeed.__version__, "deepspeed.runtime" in sys.modules
from deepspeed.runtime import config
facts["whole"] = deepspeed.runtime.config is config
print(json.dumps(facts))
"""


@pytest.mark.slow
def test_an_actor_is_imported_without_deepspeed_an_engine_without_inductor_and_both_can_be_imported_afterwards():
    """The engine is that of a fork of the process that has imported the Actor."""
    *_, engine, last = python(PROBE, clean_environment(OMP_NUM_THREADS="1")).splitlines()
    facts = json.loads(last)
    assert engine == "[] 3"
    assert (facts["compiled"], facts["still"], facts["now"]) == ([], False, True)
    assert facts["off"] < 1e-12 and facts["version"][0].isdigit() and facts["whole"]


def test_a_function_is_compiled_once_by_its_first_call_with_the_options_it_was_given(monkeypatch):
    asked = []

    def compile_it(model, **options):
        asked.append((getattr(model, "__name__", type(model).__name__), options))
        return model

    monkeypatch.setattr(torch, "compile", compile_it)
    with compiling_at_the_first_call("actordbg"):

        @torch.compile
        def bare(value):
            return value + 1

        @torch.compile(dynamic=True)
        def chosen(value):
            return value * 2

        torch.compile(torch.nn.Identity())
    assert torch.compile is compile_it and asked == [("Identity", {})], "only functions wait"
    assert [bare(1), bare(2), chosen(4)] == [2, 3, 8]
    assert asked[1:] == [("bare", {}), ("chosen", {"dynamic": True})]
