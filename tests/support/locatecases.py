"""Faults planted in small random models, and what the identity and the forced forward say of them. Run in a process of its own.

python locatecases.py SCENARIO MODEL_CACHE
"""

import contextlib
import functools
import gc
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import torch
from actorcases import ZERO3, main, opened
from amounts import WHOLE, first_or_all
from lawcases import FAMILIES, build_model, dump_of, model_of, positions_run_on, stay_in_step
from planted_table import gradient, output, rounded, weights

from actordbg.actor.models import once
from actordbg.actor.session import open_actor
from actordbg.config.replay_config import ReplayConfig
from actordbg.locate import clean_models, forced_forward, places
from actordbg.locate.forced_forward import Forcing
from actordbg.locate.identity import identities_of
from actordbg.locate.locate_run import LocateRun
from actordbg.locate.streaming import Streamed
from actordbg.locate.verdict import RIGHT, WRONG, lines_of, verdict_of
from actordbg.records.locate_record import GRADIENT, IDENTITY, LOCATED, VALUES
from actordbg.records.replay_record import PASSED, ResultRecord


def model_with(cache, family, **more):
    """A folder with a small random model of a family, with other settings."""

    folder = cache / "-".join([family, *(f"{name}{value}" for name, value in more.items())])
    return str(once(folder, lambda folder: build_model(folder, FAMILIES[family] | more)))


def three_layers(cache, family, **more):
    return model_with(cache, family, num_hidden_layers=3, **more)


def local(session, dump, backward=False, together=False):
    """The verdict that a result with this session's model gives, through JSON's types."""
    outcome = session.run(dump, backward=backward)
    located = asdict(LocateRun(session, dump, outcome, backward, together).run())
    extra = ResultRecord("r", "d", PASSED, extra={IDENTITY: identities_of(session, ran=True), LOCATED: located}).to_dict()[
        "extra"
    ]
    verdict = verdict_of([ResultRecord("r", "d", PASSED, extra=extra)])
    assert verdict is not None and verdict.located is not None
    return verdict


def times(name, factor):
    """A parameter times a factor."""
    return weights(name, lambda values: values * factor)


def attribute(module, name, change):
    def plant(model):
        holder = model.get_submodule(module)
        return patch.object(holder, name, change(getattr(holder, name)))

    return plant


def head_zeroed(values):
    values[:, :8] = 0


def rows_see_each_other(_model):
    """transformers does not find where packed rows begin."""
    return patch("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)


L1, L2 = "model.layers.1", "model.layers.2"
NORM, SCALE = f"{L2}.post_attention_layernorm", f"{L1}.self_attn"
FAULTS = {
    "down_proj x1.01": (times(f"{L1}.mlp.down_proj.weight", 1.01), f"{L1}.mlp.down_proj", "times the checkpoint's"),
    "head zeroed": (
        weights(f"{L2}.self_attn.o_proj.weight", head_zeroed),
        f"{L2}.self_attn.o_proj",
        "is 0 in 256 of 1,024 elements",
    ),
    "epsilon": (attribute(NORM, "variance_epsilon", lambda _: 1e-3), NORM, "variance_epsilon is 0.001; transformers'"),
    "scale x1.01": (attribute(SCALE, "scaling", lambda scale: scale * 1.01), f"the attention of {SCALE}", f"{SCALE}.scaling is"),
    "inv_freq": (attribute("model.rotary_emb", "inv_freq", rounded), "model.rotary_emb", "inv_freq was rounded to bf16"),
    "code": (output(f"{L1}.input_layernorm", lambda values: values * 1.01), f"{L1}.input_layernorm", ""),
    "rows": (rows_see_each_other, "the attention of model.layers.", ""),
}
"""Each fault: how it is planted, the place with the largest excess, and a part of the difference in what the model is."""


def cut(forward):
    """A forward whose output has no graph."""
    return lambda values: forward(values).detach()


def cut_off(forward):
    """A forward whose input gets no gradient."""
    return lambda values: forward(values.detach())


BACKWARD = {
    "flipped": (gradient(f"{SCALE}.k_proj.weight", lambda g: -g), (f"{SCALE}.k_proj.weight's gradient is -1 times the truth's",)),
    "scaled": (gradient(f"{L1}.mlp.up_proj.weight", lambda g: g * 1.02), (f"{L1}.mlp.up_proj.weight's gradient is 1.02 times",)),
    "lost": (gradient(f"{L2}.input_layernorm.weight", torch.zeros_like), (f"no gradient reaches {L2}.input_layernorm.weight",)),
    "detached": (
        attribute(f"{SCALE}.v_proj", "forward", cut),
        (f"no gradient reaches {SCALE}.v_proj.weight", f"no gradient goes back through {SCALE}.v_proj"),
    ),
    "an MLP's input": (attribute(f"{L2}.mlp", "forward", cut_off), (f"no gradient goes back through {L2}.mlp",)),
}
"""Each fault of the backward, and everything that is said of it."""


def backward(cache):
    """Every fault of the backward is named and nothing else, with checkpointed layers too; a frozen model needs no gradient."""
    for dtype, packing in first_or_all((("bf16", True), ("fp32", False))):
        with opened(cache, three_layers(cache, "llama"), dtype=dtype, packing=packing, through="rows", backward=True) as session:
            for number, (name, (plant, expected)) in enumerate(BACKWARD.items()):
                with plant(session.model):
                    found = local(session, dump_of(length=64), backward=True)
                said = sorted(lines_of(found))
                assert found.word == WRONG and len(said) == len(expected), (dtype, packing, name, said)
                assert all(line.startswith(words) for line, words in zip(said, sorted(expected), strict=True)), (name, said)
                if number == 0:
                    session.model.gradient_checkpointing_enable({"use_reentrant": False})
            session.model.gradient_checkpointing_enable({"use_reentrant": True})
            session.model.enable_input_require_grads()
            for name, parameter in session.model.named_parameters():
                parameter.requires_grad_("up_proj" in name)  # as with an adapter: most of the model is frozen
            found = local(session, dump_of(length=64), backward=True)
            assert found.word == RIGHT and found.located.gradients > 40 and not found.unchecked, found
            with BACKWARD["scaled"][0](session.model):
                found = local(session, dump_of(length=64), backward=True)
            assert "up_proj.weight's gradient is 1.02 times" in found.said and found.located.count == 1, found


def other_choice(forward):
    """A router whose first choice is the next expert."""

    def route(values):
        logits, scores, chosen = forward(values)
        return logits, scores, (chosen + 1) % 4

    return route


def an_expert_scaled(values):
    values[1] *= 1.01


def without_expert(grad):
    return grad * torch.tensor([1.0, 0.0, 1.0, 1.0]).to(grad).view(4, 1, 1)


SHARED_GATE = (
    times("model.layers.1.mlp.shared_expert_gate.weight", 1.05), "model.layers.1.mlp.shared_expert_gate.weight is 1.0", "shared",
)  # fmt: skip
"""A linear layer of one output, called with the tokens of all rows in one dimension."""
EXPERTS, ROUTER = "model.layers.1.mlp.experts", "model.layers.1.mlp.gate"
ROUTED = {
    "an expert x1.01": (weights(f"{EXPERTS}.down_proj", an_expert_scaled), f"{EXPERTS}.down_proj[1] is 1.0", "experts"),
    "an expert's gradient": (
        gradient(f"{EXPERTS}.down_proj", without_expert), f"no gradient reaches expert 1 of {EXPERTS}.down_proj", "experts",
    ),
    "the choice": (attribute(ROUTER, "forward", other_choice), f"the routing of {ROUTER} is not the truth's (an overlap of ", "gate"),
}  # fmt: skip
"""Each fault, how what is said of it begins, and the only module that is red."""


def routing(cache):
    """The truth's routing is forced: a fault of one expert, or of the choice, is red at this layer's experts or router alone."""
    for family, dtype in first_or_all((("qwen2_moe", "bf16"), ("mixtral", "fp32"), ("mixtral", "bf16"))):
        shared = {"the gate of the shared expert": SHARED_GATE} if family == "qwen2_moe" else {}
        with opened(cache, model_with(cache, family), dtype=dtype, packing=True, through="rows", backward=True) as session:
            for name, (plant, said, module) in (ROUTED | shared).items():
                with plant(session.model):
                    found = local(session, dump_of(length=64), backward=True)
                assert found.said.startswith(said) and not found.unchecked, (family, dtype, name, found.said)
                assert all(f"layers.1.mlp.{module}" in place.module for place in found.located.wrong), (family, name, found)
            found = local(session, dump_of(length=64), backward=True)
            assert found.word == RIGHT and not found.unchecked, (family, dtype, found)


def odd_shapes(cache):
    """Families are judged too whose modules change a value in place, take masks as values, or run without gradients: indexers, whose
    choice of tokens is another number in a padded row."""
    one, sparse = dump_of(rows=1), {"model_type": "glm_moe_dsa", "index_topk": 8}
    for family, more, dump in (("falcon", {}, one), ("opt", {}, one), ("llama4", {}, one), ("deepseek_v3", sparse, dump_of())):
        with opened(
            cache,
            model_with(cache, family, **more),
            dtype="bf16",
            attn="eager",
            packing=family == "opt",
            through="rows",
            backward=True,
        ) as session:
            found = local(session, dump, backward=True)
            assert found.word == RIGHT and found.located.places > 30 < found.located.gradients, (family, found)
            assert "gradient" not in str(found.unchecked), family
            with times(next(name for name, _ in session.model.named_parameters() if ".1." in name), 1.01)(session.model):
                found = local(session, dump, backward=True)
            assert found.word == WRONG and "times the checkpoint's" in found.said, (family, found)


def faults(cache):
    """Every fault is named: its module, its rows, its cause; and nothing else is above its limit."""
    for family, dtype in first_or_all((("llama", "bf16"), ("llama", "fp32"), ("qwen3", "bf16"))):
        with opened(cache, three_layers(cache, family), dtype=dtype, packing=True, through="rows") as session:
            for name, (plant, where, cause) in FAULTS.items():
                with plant(session.model):
                    found = local(session, dump_of(length=64))
                case, wrong = (family, dtype, name, found.said), found.located.wrong
                assert found.word == WRONG and found.located.places > 70, case
                assert [cause in each for each in found.differences] == [True] * bool(cause), case
                assert wrong or (name, dtype) == ("epsilon", "bf16"), case  # 1.004 times there: the attribute shows it
                assert all(place.what.startswith(where) for place in wrong), case
                assert len(wrong) == 3 if name == "rows" else len(wrong) <= 1, case
                if name == "rows":
                    assert wrong[0].rows == (1, 2) and "queries see keys of other rows" in found.said, case
                    assert wrong[0].pattern.startswith("behind another row of the pack: "), case
                    assert min(row for row, *_ in found.located.fields) == 0, case
                if wrong:
                    layer = max(found.located.heat, key=lambda name: max(found.located.heat[name]))
                    assert any(place.module.startswith(layer) for place in wrong), case
                    assert len(found.located.heat[layer]) == len(found.located.fields), case
                if name == "code":
                    assert f"the code of {L1}.input_layernorm: with mul added" in found.said, case


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
"""Frequencies that transformers changes in a forward of more than 32 tokens."""


def others(cache):
    """An untied head, positions that run on, another dump's tokens; and what has no clean counterpart is named, never right."""
    tied = three_layers(cache, "llama", tie_word_embeddings=True)
    with opened(cache, tied, dtype="bf16", through="rows") as session:
        assert local(session, dump_of()).word == RIGHT
        session.model.lm_head.weight = torch.nn.Parameter(session.model.lm_head.weight.clone())
        assert local(session, dump_of()).differences == (
            "lm_head.weight is not tied to model.embed_tokens.weight, as it is in transformers' model",
        )
        session.model.model.layers[1].train()
        of_a_layer = "model.layers.1 is in training mode, the model in evaluation mode"
        assert of_a_layer in [each["said"] for each in identities_of(session)[0]["differences"]]
    following = three_layers(cache, "llama", rope_parameters=DYNAMIC, max_position_embeddings=32)
    with opened(cache, following, dtype="bf16", through="rows") as session:
        found = local(session, dump_of(length=64))
        assert found.word == RIGHT and any("sets it anew for each length" in why for why in found.unchecked), found
        session.model.model.rotary_emb.original_inv_freq.mul_(1.01)
        assert [each.name for each in local(session, dump_of(length=64)).findings] == ["model.rotary_emb.original_inv_freq"]
    with opened(cache, three_layers(cache, "llama"), dtype="fp32", through="rows") as session:
        weight = session.model.get_parameter(f"{L1}.mlp.up_proj.weight")
        weight.data.mul_(1 + 1e-3 * torch.randn(weight.shape))  # as between two steps: no factor explains it
        (finding,) = local(session, dump_of()).findings
        assert (finding.kind, finding.factor) == (VALUES, None), finding
        session.model.lm_head.weight = session.model.model.embed_tokens.weight  # as ZeRO-3 does if the configuration says so
        tied = "lm_head.weight is tied to model.embed_tokens.weight, and the checkpoint has another value for it"
        assert tied in local(session, dump_of()).differences
    with opened(cache, three_layers(cache, "llama"), dtype="bf16", packing=True) as session:
        with positions_run_on():
            found = local(session, dump_of())
        assert re.match(r"the attention mask of model\.layers\.\d\.self_attn: queries see keys of other rows", found.said), (
            found.said
        )
        assert any("each row's positions are shifted by a constant" in why for why in found.unchecked), found
        own = dump_of(arguments={"packed_seq_lens": [1]})
        outcome = session.run(dump_of(), backward=False)
        (why,) = LocateRun(session, own, outcome, False, False).run().unchecked
        assert why == "everything: the rows were packed before the Actor got them"
        session.model.model.layers[1].mlp = Fused(session.model.model.layers[1].mlp)
        found = local(session, dump_of())
        assert any("layers.1.mlp.down_proj" in each for each in found.unchecked) and found.word == RIGHT, found


def compiled(cache):
    """A fault of a compiled graph alone shows at the model's border: inside, the model runs eagerly."""
    model = str(model_of(cache, "llama"))
    with opened(cache, model, dtype="bf16", packing=True, through="rows", compile=True, compile_backend="eager") as session:
        found = local(session, dump_of(length=40))
        assert found.word == RIGHT and "the log-probs; all other places ran eagerly" in found.located.notes[0], found
        assert session.resolved["compile_backend"] == "eager"
        graph = session.model._compiled_call_impl

        def wrong(*args, **kwargs):
            output = graph(*args, **kwargs)
            output["logits"] = output["logits"] * 1.05
            return output

        with patch.object(session.model, "_compiled_call_impl", wrong):
            found = local(session, dump_of(length=40))
        assert [place.what for place in found.located.wrong] == ["the compiled model"] and not found.unchecked, found.said


def eager_in_place_of_sdpa(_sdpa, module, query, key, value, mask, **more):
    """The formula of transformers' eager attention, which a mask of None or of booleans means nothing to."""
    seen = mask if mask is not None else torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, scaling=module.scaling, dropout=0.0)


def scaled_by(factor):
    def attend(sdpa, module, *given, scaling, **more):
        return sdpa(module, *given, scaling=factor * scaling, **more)

    return attend


@contextlib.contextmanager
def registered(attend):
    """Register another sdpa in the whole process, as a fused kernel does: transformers' own model has it, too."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", functools.partial(attend, sdpa))
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)


def foreign(cache):
    """A healthy kernel of another's is right though it rounds like eager attention; one that scales wrongly is not. Both are named."""
    for family in first_or_all(("llama", "qwen3")):
        for dtype, factor in first_or_all((("bf16", 1.01), ("fp16", 1.01), ("fp32", 1.0001))):
            for attend, word in ((eager_in_place_of_sdpa, RIGHT), (scaled_by(factor), WRONG)):
                model = three_layers(cache, family)
                with registered(attend), opened(cache, model, dtype=dtype, attn="sdpa", through="rows", packing=True) as session:
                    found = local(session, dump_of(length=64), backward=dtype != "fp16")
                    assert [*session.resolved["foreign_code"].values()] == ["sdpa attention"], session.resolved
                said = found.said, [place.what for place in found.located.wrong]
                assert found.word == word and not found.differences, (family, dtype, said)
                assert word == RIGHT or said[1][0].startswith("the attention of"), said


def second_tokens(cache):
    """Where only second tokens are judged, whose first token sees itself alone, gradients of queries and keys are only rounding."""
    from judged import Truths, judge

    dump = dump_of("none", actions=23)
    dump.tensors["action_mask"][:, 1:] = False
    for family in first_or_all(("llama", "qwen2")):
        model = three_layers(cache, family)
        against = Truths(cache / f"second-{family}", model, "fp32", backward=True).of(dump, cache)
        with opened(cache, model, dtype="fp32", backward=True, keep_gradients=True, packing=True, through="rows") as session:
            healthy = judge(session, dump, against, cache / "kept")
            assert healthy.word == RIGHT and healthy.truth.parameter_distance, healthy.lines
            with gradient("model.layers.1.self_attn.v_proj.weight", lambda given: 0.999 * given)(session.model):
                faulty = judge(session, dump, against, cache / "kept")
        assert faulty.truth.verdict == "mismatch" and "v_proj" in faulty.truth.reasons[0], faulty.lines


def kernels(cache):
    """sdpa leaves out Gemma2's soft cap, as transformers' own model in sdpa does to 5.20; later ones refuse it: eager is healthy."""
    from transformers import Gemma2PreTrainedModel

    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    model = three_layers(cache, "gemma2", layer_types=layers, attn_logit_softcapping=0.05)
    cells = [("sdpa", WRONG)] * Gemma2PreTrainedModel._supports_sdpa + [("eager", RIGHT)]
    for dtype in first_or_all(("bf16", "fp32")):
        for attn, word in cells:
            with opened(cache, model, dtype=dtype, attn=attn, through="rows") as session:
                found = local(session, dump_of(length=64))
            said = found.said, [place.what for place in found.located.wrong]
            assert found.word == word and not found.differences, (dtype, said)
            if word == WRONG:
                assert "sdpa ignores the soft cap of the attention logits (attn_logit_softcapping 0.05)" in found.said, said
                assert {name.partition(" model.")[0] for name in said[1]} == {"the attention of"} and len(said[1]) == 3, said


STREAMED = {
    "llama": ({}, {"dtype": "fp32"}),
    "mixtral": ({}, {"packing": True}),
    "gemma2": ({"layer_types": ["sliding_attention", "full_attention"] * 2}, {}),
    "qwen3_5": ({"layer_types": [*["linear_attention"] * 3, "full_attention"]}, {"packing": True}),
}
"""Families of four layers, with the settings of each."""


def real_layers(model):
    """Count the decoder layers that have a parameter that is in memory."""
    kept = ([weight.untyped_storage().nbytes() >= weight.nbytes for weight in layer.parameters()] for layer in model.model.layers)
    return sum(map(any, kept))


@contextlib.contextmanager
def small():
    """No model is small enough to lie whole, no value to stay in memory, and no place to be compared at once."""
    with patch.object(clean_models, "WHOLE_BYTES", 0), patch.object(places, "MOST_BYTES", 0):
        with patch.object(forced_forward, "_MOST_AT_ONCE", 500):
            yield


def streamed(cache):
    """A truth of which one layer is in memory, and whose values lie in a file, gives the answer of a whole one to the bit."""
    most, put = [0], Streamed._put

    def counted(self, tensors):
        put(self, tensors)
        most[0] = max(most[0], real_layers(self.model))

    folder = once(cache / "spilled", lambda folder: (folder / "config.json").touch())
    tempfile.tempdir = str(folder)
    for family, (shape, settings) in first_or_all([*STREAMED.items()], 2):
        with opened(
            cache, model_with(cache, family, num_hidden_layers=4, **shape), **{"dtype": "bf16", "through": "rows"} | settings
        ) as session:
            ran = Counter()
            session.model.register_forward_hook(lambda *_, ran=ran: ran.update(["forward"]))
            session.model.lm_head.weight.register_hook(lambda _, ran=ran: ran.update(["backward"]))
            for backward in (True, False) if WHOLE and family == "llama" else (True,):
                whole = local(session, dump_of(length=64), backward=backward)
                assert most == [0], most
                ran.clear()
                with small(), patch.object(Streamed, "_put", counted):
                    found = local(session, dump_of(length=64), backward=backward)
                own = found.located
                assert most == [1] and ran["forward"] <= 3 and ran["backward"] <= 2, (family, most, ran)
                assert own.spilled_bytes > 0 and own.resident_bytes < whole.located.resident_bytes, own
                assert any("one of 4 decoder layers" in note for note in own.notes), own.notes
                same = {name: getattr(whole.located, name) for name in ("notes", "resident_bytes", "spilled_bytes", "seconds")}
                assert replace(own, **same) == whole.located and found.identities == whole.identities, (family, backward)
                most[0] = 0
            if family == "llama":
                outcome = session.run(dump_of(), backward=False)
                with small(), patch.object(Forcing, "take", side_effect=RuntimeError("planted")):
                    (why,) = LocateRun(session, dump_of(), outcome, False, False).run().unchecked
                assert why == "everything: RuntimeError: planted"
            gc.collect()
            assert os.listdir(folder) == ["config.json"]
            assert not any(str(folder) in os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()), family


class Fused(torch.nn.Module):
    """An MLP in one module: transformers' has no such place."""

    def __init__(self, mlp):
        super().__init__()
        self.__dict__["whole"] = mlp

    def forward(self, values):
        return self.whole(values)


TOGETHER = {
    "ZeRO 2": {"backend": "deepspeed", "zero_stage": 2},
    "ZeRO 3, experts": ZERO3,
    "fsdp2, tp": {"backend": "fsdp2", "tp": 2},
    "fsdp2, ring": {"backend": "fsdp2", "ring": 2},
    "ZeRO 3": ZERO3 | {"dtype": "fp32"},
    "fsdp2": {"backend": "fsdp2"},
}


def together(cache):
    """Two ranks that compute together; lanes have inputs with and without a second row. The laws, then the model: healthy, and
    with another scale on rank 1, whose rank is named."""
    rank = int(os.environ["RANK"])
    dense, experts = (str(model_of(cache, family)) for family in ("llama", "mixtral"))  # before ZeRO 3 takes what is built
    for name, settings in first_or_all([*TOGETHER.items()], 5):
        model = experts if "experts" in name else dense
        config = ReplayConfig(**({"model": model, "dtype": "bf16", "nproc": 2, "packing": True, "backward": True} | settings))
        own = dump_of() if config.lanes == 1 else (dump_of("left"), dump_of("right", rows=1))[rank]
        with open_actor(config, defaults=own.record, model_cache=cache) as session:
            if config.dtype == "bf16":
                stay_in_step(session, own, name)
            if name in ("fsdp2, tp", "fsdp2, ring", "ZeRO 3") or (WHOLE and model == dense):
                differ_on_rank_1(session, own, name)
            assert not session.tainted


def differ_on_rank_1(session, own, name):
    rank = int(os.environ["RANK"])
    found = local(session, own, backward=True, together=session.is_collective)
    assert found.word == RIGHT and found.looked_at > 100 and len(found.identities) == 2, (name, found)
    if name.startswith("ZeRO"):  # FSDP2 calls no hooks of parameters
        with gradient("model.layers.1.mlp.up_proj.weight", lambda g: g * (1 + rank))(session.model):
            found = local(session, own, backward=True, together=session.is_collective)
        assert "up_proj.weight's gradient is 1." in found.said and found.located.count == 1, (name, found)
        with attribute("model.layers.1.mlp.up_proj", "forward", cut)(session.model):
            found = local(session, own, backward=True, together=session.is_collective)
        lost = {place.module for place in found.located.wrong if place.kind == GRADIENT}
        assert lost == {"model.layers.1.mlp.up_proj.weight"}, (name, found)
    session.model.model.layers[1].self_attn.scaling *= 1 + 0.05 * rank
    found = local(session, own, backward=True, together=session.is_collective)
    assert found.differences[0].endswith("(on rank 1 of 2)") and not found.located.kernel, (name, found)
    operation = found.located.operation
    if "ring" in name:
        assert operation and operation.said == "a ring's attention is not made of torch's functions", (name, operation)
    else:
        assert operation is None if rank == 0 else operation.word == "softmax scale", (name, operation)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:], globals())
