"""What the truth comes to, beside a Llama written down once more in a page, in fp64. Each scenario runs in a process of its own.

python truthcases.py SCENARIO MODEL_CACHE       prints what the scenario found, as JSON, on the last line
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from actorcases import make_dump

HOLES = ((0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0), (1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1), (0,) * 12)
"""Padded on both sides with holes; a long hole; an empty row."""


def llama(weights: dict[str, Any], config: dict[str, Any], ids: Any) -> Any:
    """Logits [n, V] of one row of ids [n], float64 throughout: embeddings, RoPE, causal attention, SwiGLU, RMS norms."""
    import torch

    w = {name: tensor if tensor.requires_grad else tensor.double() for name, tensor in weights.items()}
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def norm(x: Any, name: str) -> Any:
        return x * (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * w[name]

    place = torch.arange(len(ids), dtype=torch.float64)
    angle = place[:, None] / 10000.0 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def turn(x: Any) -> Any:
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


def expected(weights: dict[str, Any], config: dict[str, Any], dump: Any, temperature: float = 1.0) -> tuple[Any, Any]:
    """Log-probs and entropies of every next token [B, S-1], fp64: attended rows alone, labels from the layout."""
    import torch

    ids, attended = dump.tensors["sequences"], dump.tensors["attention_mask"] != 0
    rows, length = ids.shape
    log_probs, entropy = (torch.zeros(rows, length - 1, dtype=torch.float64) for _ in range(2))
    for row in range(rows):
        columns = attended[row].nonzero().squeeze(-1)
        if not len(columns):
            continue
        found = (llama(weights, config, ids[row, columns]) / temperature).log_softmax(-1)
        for place, column in enumerate(columns.tolist()):
            if column < length - 1:
                log_probs[row, column] = found[place, ids[row, column + 1]]
                entropy[row, column] = -(found[place].exp() * found[place]).sum()
    return log_probs, entropy


def model_of(cache: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A tiny model whose weights are no bf16 numbers, its weights and its configuration."""
    from safetensors.torch import load_file, save_file

    from actordbg.actor.models import ensure_tiny

    tiny, own = ensure_tiny(cache), cache / "unrounded"
    weights = {name: tensor.float() * 1.0037 for name, tensor in load_file(tiny / "model.safetensors").items()}
    if not own.exists():
        own.mkdir()
        save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
        (own / "config.json").write_text((tiny / "config.json").read_text())
    return own, weights, json.loads((own / "config.json").read_text())


def holes(actions: int = 0, **record: Any) -> Any:
    """Rows of 12 tokens with the masks of HOLES; of the actions those that have a predecessor."""
    import torch

    dump = make_dump(0, length=12, actions=0, **record)
    attention = torch.tensor(HOLES)
    dump.tensors["attention_mask"] = attention
    if actions:
        dump.tensors["action_mask"] = ((attention[:, 1:] != 0) & (attention[:, :-1] != 0))[:, -actions:]
    return dump


def truth(cache: Path) -> dict[str, Any]:
    """The truth of odd and of usual inputs, in every dtype, against the page above."""
    import torch

    from actordbg.actor.session import open_actor
    from actordbg.config.replay_config import ReplayConfig

    path, weights, config = model_of(cache)
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    facts: dict[str, Any] = {"errors": {}, "notes": {}}
    entropies = {"arguments": {"return_output": True, "return_entropy": True}}
    cases = {
        "actions": make_dump(1, **entropies),
        "next tokens": make_dump(2, actions=0, temperature=0.7, arguments={"return_logprobs": True}),
        "holes": holes(**entropies),
        "actions in holes": holes(5),
    }
    for name, given, dtype in (
        ("fp64", weights, None), ("fp32", weights, None), ("fp32 of bf16", rounded, "bf16"), ("fp64 of bf16", rounded, "bf16"),
    ):  # fmt: skip
        asked = ReplayConfig(model=str(path), truth=name[:4], dtype=dtype or "fp32", backward=True)
        with open_actor(asked, model_cache=cache) as session:
            facts.setdefault("resolved", {})[name] = dict(session.resolved)
            for case, dump in cases.items():
                outcome = session.run(dump, backward=False)
                ours, entropy = expected(given, config, dump, dump.record.temperature or 1.0)
                width = outcome.mask.shape[1]
                apart = (outcome.log_probs.double() - ours[:, -width:])[outcome.mask].abs().max()
                facts["errors"][f"{name}: {case}"] = float(apart)
                facts["notes"][f"{name}: {case}"] = list(outcome.notes)
                if outcome.entropy is not None:
                    apart = (outcome.entropy.double() - entropy[:, -width:])[outcome.mask].abs().max()
                    facts["errors"][f"{name}: {case}, entropy"] = float(apart)
                facts.setdefault("outside", []).append(float(outcome.log_probs[~outcome.mask].abs().sum()))
                facts.setdefault("selected", {})[case] = int(outcome.mask.sum())
            if name == "fp64":
                ids = torch.randint(0, 4096, (200,), generator=torch.Generator().manual_seed(3))
                with torch.no_grad():
                    exact = session._logits(ids, torch.arange(200))
                facts["logits"] = float((exact - llama(weights, config, ids)).abs().max())
                facts["logits' dtype"] = str(exact.dtype)
                facts["gradient"] = gradient(session, weights, config, cases["actions"])
    return facts


def gradient(session: Any, weights: dict[str, Any], config: dict[str, Any], dump: Any) -> dict[str, Any]:
    """Loss and gradients of the whole batch, of the truth and by autograd through the page above."""
    outcome = session.run(dump, backward=True)
    mask = dump.tensors["action_mask"]
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    loss = -expected(leaves, config, dump)[0][:, -mask.shape[1] :][mask].mean()
    loss.backward()
    norm = sum(float(tensor.grad.norm()) ** 2 for tensor in leaves.values()) ** 0.5
    return {"loss": [outcome.loss, float(loss)], "norm": [outcome.grad_norm, norm], "left": left(session)}


def left(session: Any) -> int:
    """How many parameters still have a gradient."""
    return sum(parameter.grad is not None for parameter in session._model.parameters())


def session_facts(cache: Path) -> dict[str, Any]:
    """Refusals, dropout, kept tensors, and what falls back to fp32 without the block that prevents it."""
    import torch

    from actordbg.actor import truth_model
    from actordbg.actor.session import open_actor
    from actordbg.base.errors import Unsupported
    from actordbg.config.replay_config import ReplayConfig

    facts: dict[str, Any] = {"refused": {}}
    orphan, numbered, fork = make_dump(0), make_dump(0), make_dump(0)
    orphan.tensors["action_mask"] = torch.ones(3, 22, dtype=torch.bool)
    numbered.tensors["attention_mask"] = numbered.tensors["attention_mask"] * 2
    fork.tensors["pixel_values"] = torch.zeros(3, 2)
    packed = make_dump(0, arguments={"packed_seq_lens": [4, 5]})
    with open_actor(ReplayConfig(truth="fp64", keep_gradients=True), model_cache=cache) as session:
        for name, dump in (("orphan", orphan), ("numbered", numbered), ("images", fork), ("packed", packed)):
            try:
                session.run(dump, backward=False)
                facts["refused"][name] = "ran"
            except Unsupported as error:
                facts["refused"][name] = error.message
        kept = session.run(make_dump(0), backward=True, keep=True)
        facts["kept"] = sorted(kept.tensors)
        facts["dtypes"] = sorted({str(tensor.dtype) for tensor in kept.tensors.values()})
        facts["facts"] = kept.gradients["lm_head.weight"] | {"kept": kept.tensors["grad/lm_head.weight"].numel()}
        facts["norms"] = [sum(one["norm"] ** 2 for one in kept.gradients.values()) ** 0.5, kept.grad_norm]
        with truth_model.Narrowed(torch.float64) as narrowed, torch.no_grad():
            session._model(torch.ones(1, 4, dtype=torch.long), use_cache=False)
        facts["without the block"] = sum(narrowed.found.values())
    facts["dropout"] = dropout(cache)
    return facts


def dropout(cache: Path) -> dict[str, Any]:
    """A recorded training pass of a model with dropout."""
    from actordbg.actor.session import open_actor
    from actordbg.config.replay_config import ReplayConfig

    path, _, config = model_of(cache)
    dropping = cache / "dropping"
    dropping.mkdir()
    (dropping / "model.safetensors").symlink_to(path / "model.safetensors")
    (dropping / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.25}))
    with open_actor(ReplayConfig(truth="fp32", model=str(dropping)), model_cache=cache) as session:
        one, other = (session.run(make_dump(0, training=True), backward=False) for _ in range(2))
        plain = session.run(make_dump(0, training=False), backward=False)
        return {
            "notes": [list(outcome.notes) for outcome in (one, plain)],
            "training": one.training,
            "equal": bool((one.log_probs == other.log_probs).all() and (one.log_probs == plain.log_probs).all()),
        }


if __name__ == "__main__":
    assert sys.argv[1] == "truth"
    cache = Path(sys.argv[2])
    print(json.dumps(truth(cache) | {"session": session_facts(cache)}))
