"""Ranks that compute together give the plain actor's numbers: fully_shard, tensor parallelism, rings, ZeRO; on two processes.

Both ranks run `parallel` in processes of their own (`actorcases.run_scenario`), with the asserts in it.
"""

import os
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from actorcases import ZERO3, main, make_dump, numbers, opened, run_scenario
from amounts import first_or_all

from actordbg.actor.session import open_actor
from actordbg.config.replay_config import ReplayConfig

pytestmark = pytest.mark.forked

PARAMETERS = 21
"""Of the tiny model, as transformers names them."""


def test_ranks_that_compute_together_give_the_plain_actors_numbers(tmp_path):
    run_scenario("parallel", tmp_path, world=2, program=__file__, TORCHDYNAMO_DISABLE="1")


BACKENDS = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2, tp": {"backend": "fsdp2", "tp": 2},
    "fsdp2, ring": {"backend": "fsdp2", "ring": 2},
    "ZeRO 2": {"backend": "deepspeed", "zero_stage": 2},
    "ZeRO 3": ZERO3,
    "ZeRO 3, ring": ZERO3 | {"ring": 2, "dist_backend": "gloo"},
    "ZeRO 0": {"backend": "deepspeed"},
    "ZeRO 1": {"backend": "deepspeed", "zero_stage": 1},
    "ZeRO 0, ring": {"backend": "deepspeed", "ring": 2},
}


def parallel(cache):
    """Compute together on two processes in every way, each input beside what the plain actor gives for it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = {}
    with opened(cache, backward=True, keep_gradients=True, nproc=2) as session:
        for name, dump in dumps().items():
            plain[name] = session.run(dump, backward=True, keep=True)
        raises_at_once(session)
        session._backend.recover = {}.popitem  # raises KeyError, which hides nothing
        raises_at_once(session)
        assert session.tainted
    for name, settings in first_or_all([*BACKENDS.items()], 6):
        try:
            one_backend(cache, int(os.environ["RANK"]), settings, plain)
        except AssertionError as error:
            raise AssertionError(name) from error
    tied(cache)
    with_a_router_in_fp32(cache)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward, "a ring leaves nothing behind"


def dumps():
    """By name: the same call unpacked and packed, with a temperature, and two other calls."""
    return {
        "unpacked": make_dump(),
        "packed": make_dump(packing_samples=True, arguments={"return_output": True, "return_entropy": True}),
        "warm": make_dump(packing_samples=True, temperature=0.5),
        "left": make_dump(1, length=40, packing_samples=True),
        "right": make_dump(2, length=33, packing_samples=True),
    }


def of_a_ring_of_four():
    """A call that was recorded in a ring of four ranks."""
    dump = make_dump(packing_samples=True)
    groups = {"ring_attn_group": {"size": 4, "rank": 0}}
    return replace(dump, record=replace(dump.record, process_groups=groups))


def one_backend(cache, rank, settings, plain):

    config = ReplayConfig(nproc=2, packing=None, backward=True, keep_gradients=True, **settings)
    defaults, ring, fsdp2 = (
        make_dump(packing_samples=True, grad_enabled=True).record,
        config.ring > 1,
        config.backend == "fsdp2",
    )
    with open_actor(config, defaults=defaults, model_cache=cache) as session:
        said, packed = session.resolved, dumps()["packed"]
        assert (said["dist_backend"], session.is_collective) == ("gloo", True)
        assert said.get("ring_kernel") == ("gathered K/V (stand-in)" if ring else None)
        mesh = {"dp": 2 // (config.tp * config.ring), "sp": config.ring, "tp": config.tp}
        assert not fsdp2 or (said["mesh"], said["model_class"]) == (mesh, "LlamaForCausalLM")
        raises_at_once(session)
        first = None
        for name in ("packed", "warm") if ring else ("packed", "unpacked", "warm"):
            outcome = session.run(dumps()[name], backward=True, keep=True)
            first = first or numbers(outcome)
            is_beside(outcome, plain[name], kept=PARAMETERS if rank == 0 or config.lanes == 2 else 0)
        (note,) = session.run(of_a_ring_of_four(), backward=True).notes
        assert ("had 4 ranks when recorded, and has 2" if ring else "of 4 ranks left out") in note
        if config.lanes == 2:
            mine = session.run(dumps()[("left", "right")[rank]], backward=True, keep=True)
            is_averaged(mine, plain["left"], plain["right"], rank)
        assert numbers(session.run(packed, backward=True)) == first, "to the bit"
        if fsdp2:
            fails_in_a_layer(session)
            assert not session.tainted and numbers(session.run(packed, backward=True)) == first


def raises_at_once(session):
    """Let the first call of all raise in the Actor's own forward, before the model has run: that comes out of `run`."""
    right = session.actor.forward

    def forward(*_, **__):
        raise ValueError("boom")

    session.actor.forward = forward
    with pytest.raises(ValueError, match=r"^boom$"):
        session.run(dumps()["packed"], backward=True)
    session.actor.forward = right


def fails_in_a_layer(session):
    """Raise in the second layer on every rank, when the first one's weights are gone and its own are gathered."""

    def fail(*_):
        raise ArithmeticError("in the middle")

    hook = session._backend.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="in the middle"):
        session.run(dumps()["packed"], backward=True)
    hook.remove()


def is_beside(found, expected, kept):
    """Hold an outcome against the plain actor's; gradients only where this rank keeps them."""
    assert float((found.log_probs - expected.log_probs)[expected.mask].abs().max()) < 1e-4
    assert expected.entropy is None or float((found.entropy - expected.entropy)[expected.mask].abs().max()) < 1e-4
    assert abs(found.grad_norm - expected.grad_norm) < 1e-3 * expected.grad_norm
    assert found.gradient_over == () and len(found.gradients) == kept
    assert not kept or sorted(found.gradients) == sorted(expected.gradients)
    gradients_are(found, expected.gradients, expected.tensors)


def gradients_are(found, facts, tensors):

    for name, about in found.gradients.items():
        pair = (found.tensors["grad/" + name].double(), tensors["grad/" + name].double())
        assert float(F.cosine_similarity(*pair, dim=0)) > 0.9999, name
        assert abs(about["norm"] - facts[name]["norm"]) < 1e-3 * facts[name]["norm"], name


def is_averaged(found, left, right, rank):
    """Two inputs at the same time: log-probs are each its own, the gradient is the mean of both, and the result says so."""
    own = (left, right)[rank]
    mean = {name: (left.tensors[name] + right.tensors[name]) / 2 for name in left.tensors if name.startswith("grad/")}
    facts = {name: {"norm": float(torch.linalg.vector_norm(mean["grad/" + name]))} for name in left.gradients}
    # of the others the norm of the whole mean is not known here
    found.gradients = {name: about for name, about in found.gradients.items() if about["numel"] <= 65_536}
    assert float((found.log_probs - own.log_probs)[own.mask].abs().max()) < 1e-4
    assert found.gradient_over == ("dump-1", "dump-2")
    gradients_are(found, facts, mean)


def tied(cache):
    """Split a model whose head shares the embedding's weight, and with norms of single heads, over two ranks."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    folder = cache / "tied"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # rank 0 alone writes
    dist.barrier()
    outcomes = []
    for settings in ({}, {"backend": "fsdp2", "tp": 2}):
        with opened(cache, folder, dtype="fp32", nproc=2, backward=True, keep_gradients=True, **settings) as session:
            outcomes.append(session.run(make_dump(vocab=512), backward=True, keep=True))
    is_beside(outcomes[1], outcomes[0], kept=0 if os.environ["RANK"] == "1" else len(outcomes[0].gradients))


def with_a_router_in_fp32(cache):
    """Shard layers in bf16 whose router the model keeps in fp32: FSDP2 wants one dtype for each of its groups."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("ernie4_5_moe", vocab_size=512, **sizes, **experts))
    model.save_pretrained(cache / "router")  # rank 0 alone writes
    dist.barrier()
    log_probs = []
    for backend in ("plain", "fsdp2"):
        with opened(cache, cache / "router", dtype="bf16", nproc=2, backward=True, backend=backend) as session:
            log_probs.append(session.run(make_dump(vocab=512), backward=True, keep=True).log_probs)
            assert session.model.model.layers[0].mlp.gate.weight.dtype == torch.float32
    assert torch.allclose(*log_probs, atol=0.02), "FSDP2 rounds what a layer is given"


if __name__ == "__main__":
    main(sys.argv[1:], globals())
