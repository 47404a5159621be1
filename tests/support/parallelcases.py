"""Scenarios of ranks that compute together, each compared in its own process with the plain actor. See `actorcases.run_scenario`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorcases import main, make_dump, numbers

BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2, tp": {"backend": "fsdp2", "tp": 2},
    "fsdp2, ring": {"backend": "fsdp2", "ring": 2},
    "ZeRO 0": {"backend": "deepspeed"},
    "ZeRO 1": {"backend": "deepspeed", "zero_stage": 1},
    "ZeRO 2": {"backend": "deepspeed", "zero_stage": 2},
    "ZeRO 3": {"backend": "deepspeed", "zero_stage": 3},
    "ZeRO 0, ring": {"backend": "deepspeed", "ring": 2},
    "ZeRO 3, ring": {"backend": "deepspeed", "zero_stage": 3, "ring": 2, "dist_backend": "gloo"},
}
SAID = ("backend", "world_size", "dist_backend", "mesh", "ring_kernel", "model_class", "tp", "ring")


def parallel(cache: Path) -> dict[str, Any]:
    """Every way of computing together on two processes, each input beside what the plain actor gives for it."""
    from actordbg.actor.session import open_actor
    from actordbg.config.replay_config import ReplayConfig

    rank = int(os.environ["RANK"])
    plain: dict[str, Any] = {}
    with open_actor(ReplayConfig(backward=True, keep_gradients=True, nproc=2), model_cache=cache) as session:
        for name, dump in dumps().items():
            plain[name] = session.run(dump, backward=True, keep=True)
        alone = {"raised at once": raising_at_once(session)}
        session._backend.recover = {}.popitem  # raises KeyError
        alone["recovery fails"] = [raising_at_once(session), session.tainted]
    facts: dict[str, Any] = {name: one_backend(cache, rank, settings, plain) for name, settings in BACKENDS.items()}
    facts["plain"] = alone
    facts["tied weights"] = tied(cache)
    facts["ring attention"] = ring_attention()
    facts["left behind"] = sdpa_is_transformers_own()
    return facts


def dumps() -> dict[str, Any]:
    """By name: the same call unpacked and packed, with a temperature, and two other calls."""
    return {
        "unpacked": make_dump(0),
        "packed": make_dump(0, packing_samples=True, arguments={"return_output": True, "return_entropy": True}),
        "warm": make_dump(0, packing_samples=True, temperature=0.5),
        "left": make_dump(1, length=40, packing_samples=True),
        "right": make_dump(2, length=33, packing_samples=True),
    }


def of_a_ring_of_four() -> Any:
    """A call that was recorded in a ring of four ranks."""
    dump = make_dump(0, packing_samples=True)
    groups = {"ring_attn_group": {"size": 4, "rank": 0}}
    return replace(dump, record=replace(dump.record, process_groups=groups))


def one_backend(cache: Path, rank: int, settings: dict[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    from actordbg.actor.session import open_actor
    from actordbg.config.replay_config import ReplayConfig

    config = ReplayConfig(nproc=2, packing=None, backward=True, keep_gradients=True, **settings)
    facts: dict[str, Any] = {}
    defaults = make_dump(0, packing_samples=True, grad_enabled=True).record
    with open_actor(config, defaults=defaults, model_cache=cache) as session:
        facts["said"] = {name: session.resolved.get(name) for name in SAID}
        facts["collective"] = session.is_collective
        facts["raised at once"] = raising_at_once(session)
        names = ("packed", "warm") if config.ring > 1 else ("unpacked", "packed", "warm")
        runs = {name: session.run(dumps()[name], backward=True, keep=True) for name in names}
        first = numbers(runs["packed"])
        facts |= {name: beside(run, plain[name]) for name, run in runs.items()}
        facts["notes"] = list(session.run(of_a_ring_of_four(), backward=True).notes)
        if config.lanes == 2:
            mine = session.run(dumps()[("left", "right")[rank]], backward=True, keep=True)
            facts["two inputs"] = averaged(mine, plain["left"], plain["right"], rank)
        facts["again"] = numbers(session.run(dumps()["packed"], backward=True)) == first
        if config.backend == "fsdp2":
            before = numbers(session.run(dumps()["packed"], backward=True))
            facts["failed"] = failing_in_a_layer(session)
            facts["after a failure"] = [
                session.tainted,
                numbers(session.run(dumps()["packed"], backward=True)) == before,
            ]
            session.save(cache / "saved")
            facts["saved"] = (cache / "saved" / "config.json").read_text() if rank == 0 else ""
    return facts


def raising_at_once(session: Any) -> list[str]:
    """The first call of all raises in the Actor's own forward, before the model has run once: what comes out of `run`."""
    right = session.actor.forward

    def forward(*_: Any, **__: Any) -> None:
        raise ValueError("boom")

    session.actor.forward = forward
    try:
        session.run(dumps()["packed"], backward=True)
    except Exception as error:  # noqa: BLE001
        return [type(error).__name__, str(error)]
    finally:
        session.actor.forward = right
    return ["ran"]


def failing_in_a_layer(session: Any) -> str:
    """Something in the second layer raises on every rank, when the first one's weights are gone and its own are gathered."""

    def fail(*_: Any) -> None:
        raise ArithmeticError("in the middle")

    hook = session._backend.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    try:
        session.run(dumps()["packed"], backward=True)
    except ArithmeticError as error:
        return str(error)
    finally:
        hook.remove()
    return "ran"


def beside(found: Any, expected: Any) -> dict[str, Any]:
    """How far an outcome is from the plain actor's; gradients only where this rank keeps them."""
    apart = (found.log_probs - expected.log_probs)[expected.mask].abs().max()
    entropy = 0.0 if expected.entropy is None else (found.entropy - expected.entropy)[expected.mask].abs().max()
    facts = {
        "log_probs": float(apart),
        "entropy": float(entropy),
        "norm": abs(found.grad_norm - expected.grad_norm) / expected.grad_norm,
        "over": list(found.gradient_over),
        "names": sorted(found.gradients) == sorted(expected.gradients),
        "kept": len(found.gradients),
    }
    return facts | gradients_beside(found, expected.gradients, expected.tensors)


def gradients_beside(found: Any, facts: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    from torch.nn.functional import cosine_similarity

    pairs = [(found.tensors["grad/" + name].double(), tensors["grad/" + name].double()) for name in found.gradients]
    norms = [abs(about["norm"] - facts[name]["norm"]) / facts[name]["norm"] for name, about in found.gradients.items()]
    cosine = min((float(cosine_similarity(one, other, dim=0)) for one, other in pairs), default=None)
    return {"cosine": cosine, "parameter norms": max(norms, default=None)}


def averaged(found: Any, left: Any, right: Any, rank: int) -> dict[str, Any]:
    """Two inputs at the same time: log-probs are each its own, the gradient is the mean of both."""
    import torch

    own = (left, right)[rank]
    mean = {name: (left.tensors[name] + right.tensors[name]) / 2 for name in left.tensors if name.startswith("grad/")}
    facts = {name: {"norm": float(torch.linalg.vector_norm(mean["grad/" + name]))} for name in left.gradients}
    small = {name: about for name, about in found.gradients.items() if about["numel"] <= 65_536}
    found.gradients = small  # of the others the norm of the whole mean is not known here
    apart = float((found.log_probs - own.log_probs)[own.mask].abs().max())
    return {"log_probs": apart, "over": list(found.gradient_over)} | gradients_beside(found, facts, mean)


def tied(cache: Path) -> dict[str, Any]:
    """A model whose head shares the embedding's weight, and with norms of single heads, split over two ranks."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from actordbg.actor.session import open_actor
    from actordbg.config.replay_config import ReplayConfig

    folder = cache / "tied"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # rank 0 alone writes
    torch.distributed.barrier()
    outcomes = []
    for settings in ({}, {"backend": "fsdp2", "tp": 2}):
        asked = ReplayConfig(model=str(folder), dtype="fp32", nproc=2, backward=True, keep_gradients=True, **settings)
        with open_actor(asked, model_cache=cache) as session:
            outcomes.append(session.run(make_dump(0, vocab=512), backward=True, keep=True))
    return beside(outcomes[1], outcomes[0])


def ring_attention() -> dict[str, Any]:
    """The stand-in alone against attention over the whole, forward and gradients; three rows, the last with the padding."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from actordbg.trainers.openrlhf import strategy

    rank, total = dist.get_rank(), 12
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, total, 8), (1, 2, total, 8), (1, 2, total, 8))
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weights = torch.randn(1, total, 4, 8, generator=generator)
    borders = torch.tensor([0, 5, 7, 12], dtype=torch.int32)
    rows = torch.tensor([0] * 5 + [1] * 2 + [2] * 5)
    mask = (rows[:, None] == rows) & torch.ones(total, total, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    (expected * weights).sum().backward()

    part = slice(rank * total // 2, (rank + 1) * total // 2)
    own = [tensor.detach()[:, :, part].clone().requires_grad_() for tensor in whole]
    strategy.substitute_hf_flash_attn(dist.group.WORLD, 1)
    strategy.update_ring_flash_attn_params(borders, dist.group.WORLD)
    found, _ = strategy.ring_attention(None, *own)
    (found * weights[:, part]).sum().backward()
    strategy.close_ring()
    grads = [(mine.grad - all_.grad[:, :, part]).abs().max() for mine, all_ in zip(own, whole, strict=True)]
    return {"forward": float((found - expected[:, part]).detach().abs().max()), "gradients": float(max(grads))}


def sdpa_is_transformers_own() -> bool:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


if __name__ == "__main__":
    main(sys.argv[1:], globals())
