"""The truth is what the model's formula says: each row alone, in fp32 and really in fp64, against a Llama of our own.

Both scenarios run in one process of its own (`actorcases.run_scenario`), with the asserts in it.
"""

import contextlib
import functools
import inspect
import math
import sys
from unittest.mock import patch

import pytest
import torch
from actorcases import main, make_dump, opened, run_scenario
from roots import read_json, write_json
from safetensors.torch import load_file, save_file

from actordbg.actor import truth_model, truth_session
from actordbg.actor.models import ensure_tiny
from actordbg.base.errors import Unsupported
from actordbg.config.replay_config import ReplayConfig

pytestmark = pytest.mark.forked

ONE_ULP = 2e-6
"""Of a log-prob between 8 and 16 in float32, which the results are kept in."""


def test_the_truth_is_the_formula_of_each_row_alone_and_refuses_what_has_none(tmp_path):
    run_scenario("formula,refusals,shared,kept_in_fp32", tmp_path, program=__file__)


def kept_in_fp32(cache):
    """What bf16 costs is measured with the router in fp32, where the model keeps it there in any dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0}
    config = AutoConfig.for_model("ernie4_5_moe", vocab_size=32, num_hidden_layers=1, **sizes, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(cache / "experts")
    for dtype in (torch.bfloat16, torch.float64):
        model = truth_model.load(str(cache / "experts"), weights="bfloat16", dtype=dtype, device=torch.device("cpu"))
        kept = torch.promote_types(dtype, torch.float32)
        assert (model.lm_head.weight.dtype, model.model.layers[0].mlp.gate.weight.dtype) == (dtype, kept)


def shared(cache):
    """Code that was put in the place of transformers' is named, as is an edited file: the truth runs it too."""
    from transformers import modeling_utils
    from transformers.models.llama import modeling_llama

    with opened(cache, truth="fp32", dtype="fp32", defaults=make_dump().record) as session:
        assert session.resolved["shared_code"] == ["transformers"]
        with patch.object(modeling_llama, "as since 5.21", modeling_utils.load_state_dict, create=True):
            assert truth_model.shared_code(session.model) == ["transformers"], "what loads a model does not compute it"
        masking, ropes = inspect.unwrap(modeling_llama.create_causal_mask).__globals__, modeling_llama.ROPE_INIT_FUNCTIONS
        for held, key in (
            (masking, "causal_mask_function"),
            (masking["ALL_MASK_ATTENTION_FUNCTIONS"], "eager"),
            (ropes, "linear"),
        ):
            right = held[key]
            held[key] = lambda *args, **more: None
            found = truth_model.code_of(session.model)
            held[key] = right
            named = "eager mask" if key == "eager" else key
            assert found == {"transformers": found["transformers"], "__main__": named}, found
        replaced = {
            "apply_rotary_pos_emb": (modeling_llama, lambda query, key, *angles: (query, key)),
            "forward": (modeling_llama.LlamaRMSNorm, lambda norm, hidden: 1.05 * hidden),
            "silu": (torch.nn.functional, lambda values, **_: 1.01 * values),
        }
        for name, (place, other) in replaced.items():
            with patch.object(place, name, other):
                assert truth_model.shared_code(session.model) == ["__main__", "transformers"], name
        right = modeling_llama.LlamaMLP.forward

        @functools.wraps(right)  # which has the name and the module of what it wraps
        def scaled(module, values):
            return 1.05 * right(module, values)

        with patch.object(modeling_llama.LlamaMLP, "forward", scaled):
            assert truth_model.code_of(session.model)["__main__"] == "LlamaMLP"
        with patch.object(truth_model, "_digest", lambda data: "of other bytes"):
            assert {"an edited modeling_llama.py", "an edited masking_utils.py"} <= {*truth_model.shared_code(session.model)}


HOLES = ((0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0), (1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1), (0,) * 12)
"""Padded on both sides with holes; a long hole; an empty row."""


def llama(weights, config, ids):
    """Logits [n, V] of one row of ids [n], float64 throughout: embeddings, RoPE, causal attention, SwiGLU, RMS norms."""
    w = {name: tensor if tensor.requires_grad else tensor.double() for name, tensor in weights.items()}
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * w[name]

    place = torch.arange(len(ids), dtype=torch.float64)
    angle = place[:, None] / 10000.0 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def turn(x):
        half = size // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = ((h @ w[f"{at}self_attn.{name}_proj.weight"].T).view(len(ids), -1, size).transpose(0, 1) for name in "qkv")
        k, v = (one.repeat_interleave(heads // kv, 0) for one in (turn(k), v))
        scores = turn(q) @ k.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), -1)
        x = x + mixed @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up, down = (w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(h @ gate) * (h @ up)) @ down
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def expected(weights, config, dump):
    """Log-probs and entropies of every next token [B, S-1], fp64: attended rows alone, labels from the layout."""
    ids, attended = dump.tensors["sequences"], dump.tensors["attention_mask"] != 0
    rows, length = ids.shape
    log_probs, entropy = (torch.zeros(rows, length - 1, dtype=torch.float64) for _ in range(2))
    for row in range(rows):
        columns = attended[row].nonzero().squeeze(-1)
        if not len(columns):
            continue
        found = (llama(weights, config, ids[row, columns]) / (dump.record.temperature or 1.0)).log_softmax(-1)
        for place, column in enumerate(columns.tolist()):
            if column < length - 1:
                log_probs[row, column] = found[place, ids[row, column + 1]]
                entropy[row, column] = -(found[place].exp() * found[place]).sum()
    return log_probs, entropy


def model_of(cache):
    """A tiny model whose weights are not bf16 numbers, its weights and its configuration."""
    tiny, own = ensure_tiny(cache), cache / "unrounded"
    weights = {name: tensor.float() * 1.0037 for name, tensor in load_file(tiny / "model.safetensors").items()}
    if not own.exists():
        own.mkdir()
        save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
        (own / "config.json").write_text((tiny / "config.json").read_text())
    return own, weights, read_json(own / "config.json")


def holes(actions=0, **record):
    """Rows of 12 tokens with the masks of HOLES; of the actions those that have a predecessor."""
    dump = make_dump(length=12, actions=0, **record)
    attention = torch.tensor(HOLES)
    dump.tensors["attention_mask"] = attention
    if actions:
        dump.tensors["action_mask"] = ((attention[:, 1:] != 0) & (attention[:, :-1] != 0))[:, -actions:]
    return dump


def formula(cache):
    """Hold the truth of odd and of usual inputs, in every dtype, against the page above."""
    path, weights, config = model_of(cache)
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    entropies = {"arguments": {"return_output": True, "return_entropy": True}}
    cases = (
        (make_dump(1, **entropies), 21),
        (make_dump(2, actions=0, temperature=0.7, arguments={"return_logprobs": True}), 59),
        (holes(**entropies), 3 + 7),
        (holes(5), 1 + 5),
    )
    for truth, dtype in (("fp64", "fp32"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp64", "bf16")):
        given = rounded if dtype == "bf16" else weights  # weights are rounded first
        three = patch.object(truth_session, "_MOST_AT_ONCE", 3 * 4096 if truth == "fp64" else 2**22)
        with (
            three,
            opened(cache, path, truth=truth, dtype=dtype, backward=True) as session,
        ):
            said = session.resolved
            assert (said["dtype"], said["oracle"], said["attn"]) == (dtype, truth, "eager")
            for dump, selected in cases:
                outcome = session.run(dump, backward=False)
                mask = outcome.mask
                assert int(mask.sum()) == selected and float(outcome.log_probs[~mask].abs().sum()) == 0.0
                assert outcome.notes == (), "in fp64 every operation is"
                for found, ours in zip((outcome.log_probs, outcome.entropy), expected(given, config, dump), strict=True):
                    off = 0.0 if found is None else (found.double() - ours[:, -mask.shape[1] :])[mask].abs().max()
                    assert float(off) < (ONE_ULP if truth == "fp64" else 2e-5)
            if (truth, dtype) == ("fp64", "fp32"):
                ids = torch.randint(0, 4096, (200,), generator=torch.Generator().manual_seed(3))
                with torch.no_grad():
                    exact = session._logits(ids, torch.arange(200))
                assert exact.dtype is torch.float64 and float((exact - llama(weights, config, ids)).abs().max()) < 1e-11
                gradient(session, weights, config, cases[0][0])


def gradient(session, weights, config, dump):
    """Hold loss and gradient norm of the whole batch against autograd through the page above."""
    outcome = session.run(dump, backward=True)
    mask = dump.tensors["action_mask"]
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    loss = -expected(leaves, config, dump)[0][:, -mask.shape[1] :][mask].mean()
    loss.backward()
    norm = math.hypot(*(float(tensor.grad.norm()) for tensor in leaves.values()))
    assert math.isclose(outcome.loss, float(loss), rel_tol=1e-12) and math.isclose(outcome.grad_norm, norm, rel_tol=1e-12)
    assert all(parameter.grad is None for parameter in session.model.parameters())


def refusals(cache):
    """Ask for what has no truth, keep gradients, and replay a recorded training pass of a model with dropout."""
    orphan, numbered, fork = make_dump(), make_dump(), make_dump()
    orphan.tensors["action_mask"] = torch.ones(3, 22, dtype=torch.bool)
    numbered.tensors["attention_mask"] = numbered.tensors["attention_mask"] * 2
    fork.tensors["pixel_values"] = torch.zeros(3, 2)
    packed = make_dump(arguments={"packed_seq_lens": [4, 5]})
    refused = {"no model predicts it": orphan, "0 and 1": numbered, "pixel_values": fork, "packed_seq_lens": packed}
    with opened(cache, truth="fp64", keep_gradients=True) as session:
        for why, dump in refused.items():
            with pytest.raises(Unsupported, match=why):
                session.run(dump, backward=False)
        kept = session.run(make_dump(), backward=True, keep=True)
        assert {"log_probs", "mask", "grad/lm_head.weight"} <= set(kept.tensors)
        assert {tensor.dtype for tensor in kept.tensors.values()} == {torch.bool, torch.float32}
        assert kept.gradients["lm_head.weight"]["numel"] == 4096 * 64 and kept.tensors["grad/lm_head.weight"].numel() == 65_536
        assert math.isclose(math.hypot(*(one["norm"] for one in kept.gradients.values())), kept.grad_norm, rel_tol=1e-12)
        with truth_model.Narrowed(torch.float64) as narrowed, torch.no_grad():
            session.model(torch.ones(1, 4, dtype=torch.long), use_cache=False)
        assert sum(narrowed.counts.values()) > 10, "the check of fp64 would see it"
        with patch.object(truth_model, "in_double", lambda _: contextlib.nullcontext()):
            assert any("in float32" in note for note in session.run(make_dump(), backward=False).notes)

    path, _, config = model_of(cache)
    (dropping := cache / "dropping").mkdir()
    (dropping / "model.safetensors").symlink_to(path / "model.safetensors")
    write_json(dropping / "config.json", config | {"attention_dropout": 0.25})
    with opened(cache, dropping, truth="fp32") as session:
        one, other, still = (session.run(make_dump(training=mode), backward=False) for mode in (True, True, False))
        assert "dropout 0.25" in one.notes[0] and still.notes == () and one.training is False
        assert one.log_probs.equal(other.log_probs) and one.log_probs.equal(still.log_probs)


def test_the_first_cosine_of_a_session_is_not_shared_by_threads(tmp_path, monkeypatch):
    """As rotary positions are, which then may be 1.5e-4 off: a replay differed from the same call again."""
    seen, original = [], torch.Tensor.cos
    monkeypatch.setenv("ACTORDBG_DISABLE", "")
    monkeypatch.setattr(torch.Tensor, "cos", lambda values: seen.append(values.numel()) or original(values))
    truth_session.Decided().decide(ReplayConfig(truth="fp32"), None, tmp_path)
    assert seen == [8], "torch shares 32,768 elements and more"


if __name__ == "__main__":
    main(sys.argv[1:], globals())
