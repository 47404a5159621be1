"""Recorded experts of tiny mixtures, as a rollout engine gives them: forced in replays and in the truth, and faults planted in them.

python routingcases.py judged MODEL_CACHE       in a process of its own; the asserts are here
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from actorcases import apart, main, make_dump, opened
from amounts import first_or_all
from lawcases import at_the_rerun, laws_of_a_call

from actordbg.actor import family_models, routing
from actordbg.actor.changes import vary
from actordbg.actor.models import once
from actordbg.actor.session import open_actor
from actordbg.base.errors import Unsupported
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.finding import BROKEN, KEPT
from actordbg.store.payload import Dump
from benchmarks.families import build_model

CELLS = (
    ("mixtral", "bf16"), ("qwen3_moe", "fp32"), ("olmoe", "bf16"), ("mixtral", "fp32"), ("qwen3_moe", "bf16"), ("olmoe", "fp32"),
)  # fmt: skip
LIMITS = {"fp32": 1e-5, "bf16": 0.2}


def model_of(cache, kind):
    config = dict(family_models.FAMILIES[kind].config)
    config |= {"norm_topk_prob": True} if kind == "qwen3_moe" else {}
    return str(once(cache / kind, lambda folder: build_model(folder, config)))


def chosen_by(session, dump):
    """The experts that the model itself chooses, [B, S, L, K]."""
    rows, length = dump.tensors["sequences"].shape
    nothing = torch.full((rows * length, len(routing.blocks_of(session.model)), 2), -1)
    with torch.no_grad(), routing.routed(session.model, nothing, force=False) as seen:
        session.actor(**session.call_of(dump).arguments)
    return torch.stack([seen.free[layer] for layer in sorted(seen.free)], 1).view(rows, length, -1, 2)


def rolled_out(experts):
    """The experts of an engine: one in twenty is another, the last token has none, and ids are as narrow as an engine's."""
    chance = torch.Generator().manual_seed(5)
    other = torch.rand(experts.shape[:3], generator=chance) < 0.05
    noisy = experts.clone()
    noisy[..., 1] = torch.where(other, (noisy[..., 1] + 1) % 4, noisy[..., 1])
    noisy[:, -1] = -1
    return noisy.to(torch.int16)


def _moved(experts):
    experts[:, :, 1] = experts[:, :, 1].roll(1, 1)
    return experts


def _each_alone(attended, _sampled, _size):
    """Arrange rows as the truth does: one forward of each."""
    for row in range(len(attended)):
        tokens = torch.zeros_like(attended)
        tokens[row] = attended[row]
        yield tokens, tokens.cumsum(1) - 1, tokens


@contextmanager
def _plain_gates(session):
    """Routers that leave out the renormalization: their gates are those of the softmax over all experts."""

    def gates(_router, _args, output):
        logits, weights, ids = output
        return logits, logits.float().softmax(-1).gather(-1, ids).to(weights.dtype), ids

    hooks = [block.gate.register_forward_hook(gates) for block in routing.blocks_of(session.model).values()]
    yield
    for hook in hooks:
        hook.remove()


FAULTS = {
    "by a token": (_moved, nullcontext, "in layer 1 .* if they are shifted by .1 token"),
    "by a layer": (lambda experts: experts.roll(1, 2), nullcontext, "in layer 0 .* if they are those of layer 1"),
    "renumbered": (lambda experts: torch.where(experts < 0, experts, experts ^ 1), nullcontext, "numbered otherwise"),
    "another row's": (lambda experts: experts.roll(1, 0), nullcontext, "those of the row 1 further"),
    "top-1": (lambda experts: experts[..., :1].expand(experts.shape), nullcontext, "the same expert more than once"),
    "gates": (lambda experts: experts, _plain_gates, "they were not renormalized"),
}
"""What is wrong with the recorded experts, or with the model, and what the law says."""


def judged(cache):
    """Recorded experts are forced in each layout, and right in it; each fault is named."""
    for kind, dtype in first_or_all(CELLS, 3):
        limit = LIMITS[dtype]
        plain = make_dump(vocab=256, length=48)
        settings = {"model": model_of(cache, kind), "dtype": dtype, "backend": "plain", "backward": True}
        with opened(cache, **settings, packing=False, through="rows") as session:
            own = chosen_by(session, plain)
            as_plain = session.run(plain, backward=False).log_probs
            same = session.run(with_experts(plain, own), backward=False)
        assert torch.equal(same.log_probs, as_plain) and set(same.overlap) == {1.0}
        dump = with_experts(plain, rolled_out(own))
        truths = {}
        for how in (None, "free"):
            with opened(cache, **settings, truth="fp32", routing=how) as truth:
                truths[how] = truth.run(dump, backward=True)
                far = truth.arranged(dump, _each_alone, 1.0) - truths[how].log_probs
                assert far[truths[how].mask].abs().max() < 1e-5, "causes of `explain` are routed as the truth is"
        assert apart(truths[None], truths["free"]) > 0.05
        for packing, through, how in ((False, "trainer", None), (True, "rows", None), (False, "rows", "free")):
            asked = ReplayConfig(**settings, packing=packing, through=through, attn="sdpa", routing=how)
            with open_actor(asked, defaults=dump.record, model_cache=cache) as session:
                outcome = session.run(dump, backward=True)
                if how is None or dtype == "fp32":  # a router in bf16 sends some tokens elsewhere than the truth does
                    assert apart(outcome, truths[how]) < limit, (kind, dtype, asked)
                    assert abs(outcome.grad_norm / truths[how].grad_norm - 1) < limit, (kind, dtype, asked)
                assert len(outcome.overlap) == 2 and 0.85 < min(outcome.overlap) < 1 and "experts" in outcome.notes[-1]
                laws = laws_of_a_call(session, dump, outcome)
                assert laws["routing"].verdict == KEPT, laws["routing"]
                assert not [law for law, answer in laws.items() if answer.verdict == BROKEN or answer.raised], laws
                if through == "trainer":
                    varied, undo = vary(dump, "repad")
                    again = undo(session.run(varied, backward=False).log_probs)
                    assert float((again - outcome.log_probs)[outcome.mask].abs().max()) < limit
                    _faulted(session, kind, dump)
    return "done"


def with_experts(dump, experts):
    return Dump(dump.record, dump.tensors | {routing.EXPERTS: experts})


def _faulted(session, kind, dump):
    for fault, (change, planted, said) in FAULTS.items():
        if fault == "gates" and kind == "olmoe":  # its gates are those of the softmax
            continue
        wrong = with_experts(dump, change(dump.tensors[routing.EXPERTS].clone()))
        with planted(session):
            answer = at_the_rerun(session, wrong, session.run(wrong, backward=False))["routing"]
        assert answer.verdict == BROKEN, (kind, fault, answer)
        with pytest.raises(ValueError, match=said):
            raise ValueError(answer.words)
    own = dump.tensors[routing.EXPERTS]
    refused = {
        "1 experts of each": own[..., :1],
        "not .B, S,": own[:, :5],
        "expert 9 ": own + 6,
        "of 1 layers": own[:, :, :1],
    }
    for why, experts in refused.items():
        with pytest.raises(Unsupported, match=why):
            session.run(with_experts(dump, experts), backward=False)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:], globals())
