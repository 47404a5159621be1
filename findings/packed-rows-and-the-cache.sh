#!/usr/bin/env bash
# Packed rows see each other in transformers as soon as the cache is on, and it is on by default, in training too.
#
# Surprise: two rows packed into one, with position_ids that begin anew and no mask, are kept apart only with use_cache=False. With the
#   default the second row's log-probs move by nats when the first row changes. Nothing warns. GPT-OSS leaks without the cache too.
# Guess: position_ids that begin anew are enough, or at least train() turns the cache off.
# Versions: torch 2.13.0, transformers 5.0.0 and 5.24.0, CPU, fp32, random weights. Seen 2026-11-28: Llama 3.9 nats with the cache, 0 without;
#   LFM2 3.6 and 0; GPT-OSS 4.1 and 4.1.
# Source: transformers/masking_utils.py, `_preprocess_mask_arguments`: packed rows are looked for only where there is no cache and no
#   mask; the model makes the cache before it makes the mask. GPT-OSS' own forward does not pass on what the mask needs.
# For RLHF: log-probs of packed rows are another row's business. Gradient checkpointing hides it (it turns the cache off), so the policy
#   in training is right and the reference, or an evaluation of the same batch, is not.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 5.0.0 5.24.0; do
"$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=256, head_dim=16, pad_token_id=0)


def leak(family, use_cache, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    first, other, second = torch.randint(1, 256, (3, 1, 12))
    asked = {"position_ids": torch.arange(12).repeat(2)[None]}
    if use_cache is not None:
        asked["use_cache"] = use_cache
    with torch.no_grad():
        seen = [model(torch.cat([before, second], 1), **asked).logits[:, 12:].log_softmax(-1) for before in (first, other)]
    return (seen[0] - seen[1]).abs().max().item()


moe = dict(num_local_experts=4, num_experts_per_tok=2)
found = {(family, cache): leak(family, cache, **more)
         for family, more in (("llama", {}), ("lfm2", dict(block_ff_dim=128)), ("gpt_oss", moe)) for cache in (None, False)}
for (family, cache), nats in found.items():
    print(f"{family:8} use_cache {'default' if cache is None else cache}: the second row moves by {nats:.2g} nats")
assert all(found[family, None] > 0.1 for family in ("llama", "lfm2", "gpt_oss")), "the default does not leak any more"
assert found["llama", False] == found["lfm2", False] == 0 and found["gpt_oss", False] > 0.1, "without the cache it changed"
PYTHON
done
