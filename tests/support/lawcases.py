"""Laws asked of small random models of several families, and of models and Actors with planted faults. Run in a process of its
own.

python lawcases.py SCENARIO MODEL_CACHE       prints what the scenario found, as JSON, on the last line
"""

import contextlib
import functools
import os
import random
from dataclasses import replace
from unittest.mock import patch

import torch
from actorcases import main, make_dump, opened
from amounts import WHOLE, first_or_all
from planted_table import log_probs_that, patched

from actordbg.actor import family_models
from actordbg.actor.family_models import VOCABULARY as VOCAB
from actordbg.actor.models import once
from actordbg.config.replay_config import ReplayConfig
from actordbg.judge.agreement import laws_of
from actordbg.laws.law_run import NO_ROOM, LawRun
from actordbg.records.replay_record import PASSED, LawAnswer, ResultRecord, in_words, violations
from actordbg.store.payload import Dump
from benchmarks.families import build_model

KNOWN = ("qwen2", "qwen3", "qwen3_5", "mistral", "mixtral", "gemma2", "gpt2", "llama")
FAMILIES = {name: known.config for name, known in family_models.FAMILIES.items()} | {
    "llama": family_models.Family("llama", "").config
}


def model_of(cache, family):
    """A folder with a random model of the family."""
    return once(cache / family, lambda folder: build_model(folder, FAMILIES[family]))


def laws_of_a_call(session, dump, outcome):
    """The laws' answers for a call that was run, by name."""
    return {answer.law: answer for answer in LawRun(session, dump, outcome, backward=False, together=False).run()}


def at_the_rerun(session, dump, outcome):
    """The answers of the laws that the first step asks, which are those of what a call brings along: images, recorded experts."""
    run = LawRun(session, dump, outcome, backward=False, together=False)
    run._rerun()
    return run.answers


def ask(session, dump, backward=False, together=False):
    """The laws' answers for one dump, by name."""
    outcome = session.run(dump, backward=backward)
    return {one.law: one.to_dict() for one in LawRun(session, dump, outcome, backward, together).run()}


def of_a_family(cache, family, dtype, packing, *dumps, backward=False, temperature=1.0):
    with opened(
        cache, model_of(cache, family), dtype=dtype, packing=packing, backward=backward, temperature=temperature
    ) as session:
        return [ask(session, dump, backward) for dump in dumps]


def dump_of(side="both", rows=3, length=24, actions=8, seed=0, **record):
    """A call with rows padded on the left, on the right or on both sides."""
    dump = make_dump(seed, length=length, actions=0, vocab=VOCAB, **record)
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    attention = torch.ones(rows, length, dtype=torch.int64)
    for row in range(rows):
        if side in ("left", "both"):
            attention[row, : (3 * row) % 7] = 0
        if side in ("right", "both"):
            attention[row, length - (5 * row) % 6 :] = 0
    tensors = {"sequences": ids.where(attention != 0, torch.zeros(())).long(), "attention_mask": attention}
    if actions:
        tensors["action_mask"] = attention[:, -actions:].bool()
    made = replace(dump.record, batch_size=rows, seq_len=length, tokens=int(attention.sum()))
    return Dump(made, tensors)


def healthy(cache):
    """Ask every family, packed and not, in fp32 and bf16, on dumps of every shape: no law failed."""
    no_rows = dump_of()
    no_rows.tensors["action_mask"][1] = False
    one_token = dump_of("left", rows=2)
    one_token.tensors["action_mask"] = torch.zeros(2, 8, dtype=torch.bool)
    one_token.tensors["action_mask"][:, -1] = True
    entropies = {"arguments": {"return_output": True, "return_entropy": False}}
    dumps = {
        "left": dump_of("left"),
        "right": dump_of("right", actions=0, arguments={"return_logprobs": True}),
        "both": dump_of(**entropies),
        "one token": one_token,
        "a row without": no_rows,
        "one row": dump_of("left", rows=1),
        "no padding": dump_of("none", rows=2),
    }
    for family, dtype, packing in HEALTHY:
        some = dumps if (family, dtype) == ("llama", "bf16") else {"both": dumps["both"]}
        answers = of_a_family(cache, family, dtype, packing, *some.values(), backward=family == "llama")
        for name, answer in zip(some, answers, strict=True):
            verdicts = {law: one["verdict"] for law, one in answer.items()}
            assert not set(BAD).intersection(verdicts.values()), (family, dtype, packing, name, answer)
            assert verdicts["jacobian"] == "kept" and (name != "one row" or verdicts["neighbour"] == "not-checked")
            if (family, dtype, packing, name) == ("llama", "bf16", True, "both"):
                assert set(verdicts.values()) <= {"kept", "within-rounding"}, "nothing is left unchecked here"
    with patch("torch.autograd.grad", side_effect=torch.OutOfMemoryError):
        (left,) = of_a_family(cache, *HEALTHY[0], dumps["both"])
    assert left["jacobian"]["words"] == NO_ROOM, "the checks' own memory is no fault of the run"
    assert {one["verdict"] for law, one in left.items() if law != "jacobian"} <= {"kept", "within-rounding", "not-checked"}
    assert not violations(LawAnswer.from_dict(one) for one in left.values())


BAD = ("broken", "nondeterministic")
ALL = [(family, "bf16", packing) for family in KNOWN for packing in (False, True) if (family, packing) != ("qwen3_5", True)]
HEALTHY = first_or_all(
    [("llama", "bf16", True), ("qwen3_5", "bf16", False), ("mixtral", "fp32", False), ("llama", "fp32", True), *ALL], 3
)


def broken(cache):
    """Plant faults that have to be seen in every dtype, by the laws that they violate."""
    found = {}
    for name, (family, packing, fault, settings, laws) in first_or_all([*FAULTS.items()], 15):
        for dtype in ("fp32", "bf16") if name in IN_BOTH and WHOLE else ("bf16",):
            with fault():
                found[name] = answers = of_a_family(cache, family, dtype, packing, dump_of(), **settings)[0]
            red = {law for law, one in answers.items() if one["verdict"] in BAD}
            assert red == set(laws) if name in ALONE else red >= set(laws), (name, dtype, answers)
            if name == "qwen3.5 packed":
                assert (
                    "row 2 depends on row 0 (24 of 24 tokens); row 2 depends on row 1 (16 of 16 tokens)"
                    in answers["jacobian"]["words"]
                )
                assert answers["neighbour"]["words"] == "row 1 depends on row 0" and answers["rerun"]["verdict"] == "kept"
    assert "an auxiliary loss" in found["another loss"]["jacobian"]["words"]
    for name, words in MASKED.items():
        assert found[name]["mask"]["words"] == words and found[name]["rerun"]["verdict"] == "kept", (name, found[name])
    stays = found["state stays"]
    assert next(iter(stays)) == "state" and stays["state"]["words"] == "the result depends on the call before it"
    assert {stays[law]["verdict"] for law in ("rerun", "neighbour", "future", "order")} == {"not-checked"}, stays
    a_failed_law_forbids_a_green_verdict(list(found["fails again"].values()))


MASKED = {
    "mask shifted": "log-probs outside the action mask are not 0: it is not applied, or to other tokens",
    "no mask": "log-probs outside the action mask are not 0: it is not applied, or to other tokens",
    "mask scales": "selected log-probs are other numbers with the action mask than without it",
}


def a_failed_law_forbids_a_green_verdict(told):
    answers = [LawAnswer.from_dict(one) for one in told]
    (failed,) = violations(answers)
    assert in_words(failed) == "rerun failed: RuntimeError: no kernel"
    assert {one.words for one in answers if one is not failed} >= {"rerun failed"}
    summary = laws_of([ResultRecord("r", "d", PASSED, extra={"laws": told})], ReplayConfig(laws=1))
    assert summary is not None and not summary.good and not summary.broken and "FAILED rerun" in summary.headline


def stay_in_step(session, own, name):
    """Ask the laws of ranks that compute together, healthy and with positions that run on."""
    healthy = {law: one["verdict"] for law, one in ask(session, own, backward=True, together=True).items()}
    assert not set(BAD).intersection(healthy.values()) and healthy["jacobian"] == "kept", (name, healthy)
    rank = int(os.environ["RANK"])
    assert rank or healthy["additivity"] == "within-rounding", (name, healthy)
    assert (healthy["neighbour"] == "not-checked") == (len(own.tensors["sequences"]) == 1), (name, healthy)
    if "ring" not in name and "experts" not in name:
        with positions_run_on():
            found = ask(session, own, backward=True, together=True)
        assert rank or found["neighbour"]["verdict"] == found["jacobian"]["verdict"] == "broken", (name, found)


def positions_run_on():
    def make(original):
        def unpad(*args):
            ids, positions, *others = original(*args)
            return (ids, torch.arange(positions.shape[1])[None], *others)

        return unpad

    return patched("unpad_and_slice_tensor", make)


def noisy():
    generator = random.Random(0)

    def log_probs(original, logits, labels, **named):
        found = original(logits, labels, **named)
        rows, columns = found.shape
        return found + 0.2 * found.new_tensor([[generator.gauss(0, 1) for _ in range(columns)] for _ in range(rows)])

    return log_probs_that(log_probs)


def log_softmax_in_bf16():
    return log_probs_that(lambda original, logits, labels, **named: original(logits.bfloat16(), labels, **named).float())


def wrong_temperature():
    return log_probs_that(lambda original, logits, labels, **named: original(logits / 1.01, labels, **named))


@contextlib.contextmanager
def attention_that(change):
    """transformers' sdpa with changed arguments."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *args, **named: change(original, *args, **named)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original


def rows_leak():
    """A hundredth of the first row's values is in every row's attention."""
    return attention_that(
        lambda original, module, query, key, value, *more, **named: original(
            module, query, key, value + 1e-2 * value[:1], *more, **named
        )
    )


def fails_again():
    """It raises in every forward but the first."""

    def attend(original, *given, **named):
        seen.append(1)
        if len(seen) > 2:  # the input's own forward has two layers
            raise RuntimeError("no kernel\nfor this")
        return original(*given, **named)

    seen = []
    return attention_that(attend)


def padding_is_seen(causal=True):
    def attend(original, module, query, key, value, mask, **named):
        return original(module, query, key, value, None, **(named | {"is_causal": causal}))

    return attention_that(attend)


def gradients_left_over():
    """Gradients are not cleared after an input."""
    return patch.object(torch.nn.Module, "zero_grad", lambda *args, **named: None)


def mask_that(change):
    """The Actor with a changed action mask."""
    import openrlhf.models.actor as module

    original = module.Actor.forward

    @functools.wraps(original)
    def forward(self, sequences, action_mask=None, *args, **kwargs):
        changed = None if action_mask is None else change(action_mask)
        return original(self, sequences, changed, *args, **kwargs)

    return patch.object(module.Actor, "forward", forward)


class OtherLoss(torch.autograd.Function):
    """Adds the gradient of another loss in the backward, as an auxiliary loss of a router does."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1e-2


def other_loss():
    return attention_that(
        lambda original, module, query, key, value, *more, **named: original(
            module, query, key, OtherLoss.apply(value), *more, **named
        )
    )


def state_stays():
    """A tenth of the last token's values in the attention before is in all values, also across calls: a state that is not reset."""
    last = [0.0]

    def attend(original, module, query, key, value, *more, **named):
        before, last[0] = last[0], 0.1 * value.detach()[:1, :, -1:]
        return original(module, query, key, value + before, *more, **named)

    return attention_that(attend)


FAULTS = {
    "qwen3.5 packed": ("qwen3_5", True, contextlib.nullcontext, {}, ["neighbour", "jacobian"]),
    "positions run on, llama": ("llama", True, positions_run_on, {}, ["neighbour", "jacobian"]),
    "noise": ("llama", True, noisy, {}, ["rerun", "normalisation"]),
    "log-softmax in bf16": ("llama", False, log_softmax_in_bf16, {}, ["normalisation"]),
    "temperature": ("llama", True, wrong_temperature, {"temperature": 0.7}, ["normalisation"]),
    "rows leak": ("llama", False, rows_leak, {}, ["neighbour", "jacobian"]),
    "padding": ("llama", False, padding_is_seen, {}, ["padding", "jacobian"]),
    "future": ("llama", False, functools.partial(padding_is_seen, causal=False), {}, ["future", "jacobian"]),
    "gradients left over": ("llama", False, gradients_left_over, {"backward": True}, ["additivity"]),
    "another loss": ("llama", False, other_loss, {"backward": True}, ["jacobian", "additivity"]),
    "mask shifted": ("llama", True, lambda: mask_that(lambda mask: mask.roll(1, 1)), {}, ["mask"]),
    "no mask": ("llama", True, lambda: mask_that(torch.ones_like), {}, ["mask"]),
    "mask scales": ("llama", True, lambda: mask_that(lambda mask: 1.5 * mask), {}, ["mask"]),
    "state stays": ("llama", True, state_stays, {}, ["state"]),
    "fails again": ("llama", False, fails_again, {}, []),
    "positions run on, mistral": ("mistral", True, positions_run_on, {}, ["neighbour", "jacobian"]),
}
"""The family, whether it is packed, the fault, further settings, and the laws that it breaks."""
ALONE = (
    "another loss",
    "log-softmax in bf16",
    "temperature",
    "gradients left over",
    "mask shifted",
    "no mask",
    "mask scales",
    "state stays",
)
"""Faults that break no law beside those."""
IN_BOTH = (
    "qwen3.5 packed",
    "positions run on, llama",
    "positions run on, mistral",
    "log-softmax in bf16",
    "no mask",
    "state stays",
)
"""Faults that are planted in fp32 too, with WHOLE=1."""

if __name__ == "__main__":
    import sys

    main(sys.argv[1:], globals())
