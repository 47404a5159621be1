#!/usr/bin/env bash
# Packed rows see each other in transformers' eager and sdpa attention as soon as the cache is on, a model's default, after train() too.
#
# Surprise: two rows packed into one, with position_ids that begin anew and no mask, are kept apart only with use_cache=False. With the
#   default the second row's log-probs move by nats when the first row changes. Nothing warns. GPT-OSS, and LFM2's convolutions, leak
#   without the cache too.
# Guess: position_ids that begin anew are enough, or at least train() turns the cache off.
# Versions: torch 2.13.0, transformers 5.0.0 and 5.24.0, CPU, fp32, eager and sdpa, random weights. Seen 2026-11-28: Llama 3.9 nats with the
#   cache, 0 without; LFM2 (three convolutions, one attention) 1.8 and 1.8; GPT-OSS, which has eager only, 4.1 and 4.1.
# Source: transformers/masking_utils.py, `_preprocess_mask_arguments`: packed rows are looked for only where there is no cache and no mask;
#   the model makes the cache before it makes the mask. GPT-OSS' own forward does not pass on what the mask needs. LFM2's convolution begins
#   anew only where seq_idx is passed. FlashAttention looks at position_ids itself (by reading).
# For RLHF: in a loop of one's own, log-probs of packed rows are another row's business. Gradient checkpointing hides it (it turns the cache
#   off), so the policy in training is right and the reference, or an evaluation of the same batch, is not. Trainer, TRL's main trainers and
#   OpenRLHF turn the cache off.
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


def leak(family, attention, use_cache, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
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
mixed = dict(block_ff_dim=128, layer_types=["conv", "conv", "full_attention", "conv"])
tried = [(family, attention, more) for family, more in (("llama", {}), ("lfm2", mixed)) for attention in ("eager", "sdpa")]
for family, attention, more in (*tried, ("gpt_oss", "eager", moe)):
    cached, uncached = (leak(family, attention, cache, **more) for cache in (None, False))
    print(f"{family:8} {attention:5} the second row moves by {cached:.2g} nats, {uncached:.2g} with use_cache=False")
    assert cached > 0.1 and (uncached == 0 if family == "llama" else uncached > 0.1), family
PYTHON
done
