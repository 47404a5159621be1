#!/usr/bin/env bash
# GLM-5's and DeepSeek-V3.2's sdpa attention in transformers 5.15 and 5.16 sees later tokens as soon as a batch has padding.
#
# Surprise: one padded row in the batch, and log-probs of earlier tokens move by nats when the last token changes. Eager attention, and
#   sdpa without padding, do not. Nothing warns, and losses look better than they are.
# Guess: a causal model is causal, whatever attention it runs with and whatever padding stands beside its rows.
# Versions: torch 2.13.0, CPU, fp32, random weights. Seen 2026-11-30: transformers 5.15.0 and 5.16.0: 0.89 nats (GLM-5) and 1.1
#   (DeepSeek-V3.2) in sdpa, 0 in eager; 5.17.0 and 5.24.0: 0.
# Source: transformers/models/glm_moe_dsa/modeling_glm_moe_dsa.py, the attention's forward: sdpa's mask is boolean (True: seen) once there
#   is padding, and positions that the indexer did not choose are filled with the least number of the dtype, which a boolean takes as True.
# For RLHF: OpenRLHF 0.11.2 pins 5.15.0, and pads. A policy, reference or critic of these families that trains or scores in sdpa has
#   log-probs that know the answer; a rollout engine has not, so the two disagree from the first step. Rows without padding hide it.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 5.15.0 5.16.0 5.17.0 5.24.0; do
"$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, vocab_size=256, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16,
             v_head_dim=16, index_topk=8, index_n_heads=4, index_head_dim=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
             topk_group=1, first_k_dense_replace=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def moved(family, attention, padding):
    """Nats by which the first 23 of 24 tokens move when the last one changes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL), attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    rows = torch.randint(3, 256, (1, 24)).repeat(2, 1)
    rows[1, -1] = rows[0, -1] % 250 + 3
    padded = torch.nn.functional.pad(rows, (0, padding))
    with torch.no_grad():
        logits = model(padded, attention_mask=(padded > 0).long(), use_cache=False).logits
    one, other = logits[:, :23].log_softmax(-1)
    return (one - other).abs().max().item()


leaks = transformers.__version__ in ("5.15.0", "5.16.0")
for family in ("glm_moe_dsa", "deepseek_v32"):
    seen = {(attention, padding): moved(family, attention, padding) for attention in ("eager", "sdpa") for padding in (0, 4)}
    print(transformers.__version__, family, {f"{name}, padding {size}": f"{far:.2g}" for (name, size), far in seen.items()})
    assert (seen.pop(("sdpa", 4)) > 0.1) == leaks and max(seen.values()) < 1e-4, family
PYTHON
done
