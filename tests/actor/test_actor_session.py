"""Replaying on the Actor alone: the same numbers as OpenRLHF gives, for every kind of call, and nothing left behind.

Each scenario runs in a process of its own (`actorcases.run_scenario`), with the asserts in it.
"""

import math
import os
import sys

import pytest
import torch
from actorcases import VOCAB, failing, furthest, main, make_dump, numbers, opened, run_scenario

from actordbg.actor.models import ensure_tiny

pytestmark = pytest.mark.forked


def test_a_plain_actor_gives_openrlhfs_numbers_for_every_call_and_leaves_nothing_behind(tmp_path):
    # OpenRLHF compiles its entropy; without dynamo it is the same function, without half a minute of C++
    run_scenario("plain", tmp_path, program=__file__, TORCHDYNAMO_DISABLE="1")


def test_a_configuration_is_what_runs_and_compiled_all_lengths_are_one_graph(tmp_path):
    run_scenario("compiled,configurations", tmp_path, program=__file__, TORCHINDUCTOR_COMPILE_THREADS="1")


def plain(cache):
    """Use one plain actor in fp32 in every way that a record can ask for, beside OpenRLHF's Actor called directly."""
    with opened(cache, seed=7) as session:
        resolved = session.resolved
        expected = {
            "model": "tiny", "dtype": "fp32", "attn": "sdpa", "packing": False, "backend": "plain", "zero_stage": 0, "world_size": 1,
            "num_layers": 2, "device": "cpu", "seed": 7, "actor": "openrlhf.models.actor.Actor", "vocab_size": VOCAB,
        }  # fmt: skip
        assert {name: resolved[name] for name in expected} == expected and "through" not in resolved
        assert len(resolved["actor_sha256"]) == 64 and resolved["versions"]["torch"]
        assert (session.is_collective, os.environ["ACTORDBG_DISABLE"]) == (False, "1"), "nothing is recorded"

        from openrlhf.models import Actor  # which needs what the session has made of this process

        first, _, again = (session.run(make_dump(seed), backward=True) for seed in (0, 1, 0))
        actor = Actor(str(ensure_tiny(cache)), attn_implementation="sdpa", param_dtype="fp32")
        tensors = make_dump().tensors
        with torch.no_grad():
            direct = actor(tensors["sequences"], tensors["action_mask"], tensors["attention_mask"])
        assert numbers(first) == numbers(again) and numbers(first)["log_probs"] == direct.tolist() and first.grad_norm > 0.1
        assert (
            math.isclose(first.loss, -first.log_probs[first.mask].mean(), rel_tol=1e-6) and first.peak_memory_bytes > 50_000_000
        )
        assert not first.log_probs.requires_grad and all(one.grad is None for one in session.actor.parameters())
        packed = session.run(make_dump(packing_samples=True), backward=True)
        assert (first.packing, packed.packing) == (False, True) and math.isclose(packed.grad_norm, first.grad_norm, rel_tol=1e-5)
        assert furthest(numbers(packed)["log_probs"], numbers(first)["log_probs"]) < 1e-5

        for case, width, chosen, notes in CALLS:
            outcome = session.run(make_dump(3, **case), backward=False)
            assert outcome.log_probs.shape == outcome.mask.shape == (3, width) and int(outcome.mask.sum()) == chosen, case
            asked = case.get("arguments", {}).get("return_entropy")
            assert (None if outcome.entropy is None else outcome.entropy.shape) == ((3, width) if asked else None)
            assert bool(outcome.notes) == notes
            head = outcome.log_probs[2, -4:] if case is CALLS[0][0] else head  # noqa: F821
            assert torch.allclose(outcome.log_probs[2, -4:], head, atol=1e-3)

        for training, mode in ((True, True), (False, False), (None, False)):  # and it does not stay
            outcome = session.run(make_dump(training=training), backward=False)
            assert outcome.training is session.model.training is mode
        warm, cold = (session.run(make_dump(**fields), backward=False) for fields in ({"temperature": 0.5}, {}))
        assert [warm.temperature, cold.temperature] == [0.5, 1.0] and (warm.log_probs - first.log_probs).abs().max() > 0.5
        assert [session.backward_for(make_dump(grad_enabled=value).record) for value in (True, False, None)] == [
            True,
            False,
            False,
        ]
        assert sorted(session.run(make_dump(), backward=False, keep=True).tensors) == ["log_probs", "mask"]

        by_hand = make_dump(5, vocab=128_000)
        by_hand.tensors["sequences"] %= VOCAB
        large, small = (session.run(dump, backward=False) for dump in (make_dump(5, vocab=128_000), by_hand))
        assert (large.folded, small.folded) == (True, False) and torch.equal(large.log_probs, small.log_probs)
        fork = make_dump()
        fork.tensors["pos_ids"] = torch.zeros(3, 24)
        unreplayable = {
            "visual_inputs": make_dump(replayable=False, extra={"visual_inputs": "an argument of type dict"}),
            "num_actions": make_dump(arguments={"num_actions": 8}),
            "pos_ids": fork,
        }
        for off in (0, 1e-6, None):  # an argument of unknown type is left out where the recorded log-probs are the same bits
            dump = unreplayable["stack"] = make_dump(extra={"stack": "an argument of type m.Stack"})
            if off is not None:
                dump.tensors["output.action_log_probs"] = first.log_probs + off
            if off == 0:
                assert session.run(dump, backward=False).notes == ("stack, an argument of type m.Stack, is left out",)
            else:
                with pytest.raises(Exception, match=r"without stack \(an argument of type m.Stack\): (without it|no log-probs)"):
                    session.run(dump, backward=False)
        for name, dump in unreplayable.items():
            with pytest.raises(Exception, match=name):
                session.run(dump, backward=False)
        assert failing(session) == "ValueError" and not session.tainted
        assert numbers(session.run(make_dump(), backward=True)) == numbers(first)
        on_the_rows(session, cache)


CALLS = [
    ({}, 8, 21, False),
    ({"arguments": {"return_output": True}}, 8, 21, False),
    ({"arguments": {"return_output": True, "return_entropy": True}}, 8, 21, False),
    ({"arguments": {"return_squared_loss": False}}, 8, 21, False),  # an old argument, off
    ({"actions": 0, "arguments": {"action_mask": None, "return_output": True, "return_logprobs": True}}, 23, 59, False),
    ({"actions": 0, "arguments": {"action_mask": None, "return_output": True}}, 23, 59, True),  # logits only
    (
        {
            "actions": 0,
            "arguments": {"action_mask": None, "return_output": True, "allgather_logits": True},
            "packing_samples": True,
        },
        *(23, 59, True),
    ),
]
"""A call, how many log-probs a row has, how many are selected in all, and whether the replay notes a difference."""


def on_the_rows(session, cache):
    """Give the calls to an Actor of ours: its log-probs and gradient norms are the trainer's to the bit."""
    entropies = {"return_output": True, "return_entropy": True}
    sft = {"actions": 0, "arguments": {"return_logprobs": True}}
    with opened(cache, seed=7, through="rows") as rows:
        assert (rows.resolved["actor"], rows.resolved["through"]) == ("actordbg.trainers.rows_actor.RowsActor", "rows")
        for call in ({"arguments": entropies}, {"packing_samples": True, "arguments": entropies}, {"temperature": 0.5}, sft):
            one, other = (each.run(make_dump(**call), backward=True) for each in (rows, session))
            assert one.log_probs.equal(other.log_probs) and one.grad_norm == other.grad_norm
            assert one.entropy is other.entropy is None or float((one.entropy - other.entropy).abs().max()) < 1e-5


def configurations(cache):
    """Run other configurations, and see which attention function really ran."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ran = []
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *args, **kwargs: ran.append("sdpa") or original(*args, **kwargs)

    def run(**fields):
        ran.clear()
        with opened(cache, **fields) as session:
            log_probs = numbers(session.run(make_dump(), backward=False))["log_probs"]
            return session.resolved | {"ran": set(ran)}, log_probs

    (usual, default), (eager, close), (one, shorter), (narrow, rounded) = (
        run(**fields) for fields in ({}, {"attn": "eager"}, {"num_layers": 1}, {"dtype": "bf16"})
    )
    assert (usual["attn"], usual["ran"], eager["attn"], eager["ran"]) == ("sdpa", {"sdpa"}, "eager", set())
    assert furthest(close, default) < 1e-4 and narrow["dtype"] == "bf16" and 1e-4 < furthest(rounded, default) < 0.5
    assert (one["num_layers"], usual["num_layers"]) == (1, 2), "the first ones"
    assert one["parameters"] < usual["parameters"] and shorter != default


def compiled(cache):
    """Compile an actor and run three lengths, forward only (a backward is as many minutes of C++). `locatecases` names a backend."""
    eager = []
    for asked, off in (({}, 0.0), ({"compile": True}, 1e-4)):
        with opened(cache, **asked, packing=True, num_layers=1) as session:
            runs = [session.run(make_dump(seed, length), backward=False) for seed, length in ((0, 24), (1, 40), (2, 33))]
            backend = session.resolved.get("compile_backend")
            assert (session.resolved["compile"], backend) == ((True, "inductor") if asked else (False, None))
        counted = [(1, 0), (0, 0), (0, 0)] if asked else [(None, None)] * 3
        assert [(run.graphs, run.graph_breaks) for run in runs] == counted, "all lengths are one graph"
        eager = eager or runs
        assert all(float((run.log_probs - one.log_probs).abs().max()) <= off for run, one in zip(runs, eager, strict=True))


if __name__ == "__main__":
    main(sys.argv[1:], globals())
