#!/usr/bin/env bash
# PEFT merges a LoRA of tied embeddings twice, just where it was told that they are tied.
#
# Surprise: with `ensure_weight_tying=True`, `merge_and_unload()` adds the adapter's delta to the shared weight twice. Without the option it
#   adds it once, to a weight that the embeddings have too, where the adapter had changed the head alone. Neither model is the trained one.
# Guess: the option exists for tied weights, so the merged model gives the adapter's log-probs. Without it, the tie is broken or refused.
# Versions: peft 0.21.2, transformers 5.0.0 and 5.24.0, torch 2.13.0, CPU. Seen 2026-11-28, a Llama of two layers: factor 2.0 and 0.47 nats
#   with the option, factor 1.0 and 0.36 nats without. Both warn of "complications".
# Source: peft/tuners/tuners_utils.py, `_unload_and_optionally_merge` visits each adapted module and merges it into its base layer's weight;
#   with the option both `embed_tokens` and `lm_head` are adapted, and their base layers' weight is one tensor.
# For RLHF: trainers send merged weights to the engine. Small models (many below 4 B tie their embeddings) with a LoRA on the head sample
#   from another policy than the one that is trained, from the first step on; ratios are wrong by what the adapter has learned.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 5.0.0 5.24.0; do
"$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$version" peft==0.21.2
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

seen = {}
for ensure in (False, True):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    base, ids = model.lm_head.weight.detach().clone(), torch.randint(64, (1, 16))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], ensure_weight_tying=ensure))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    with torch.no_grad():
        delta = adapted.base_model.model.lm_head.get_delta_weight("default")
        before = adapted(ids).logits.log_softmax(-1)
        merged = adapted.merge_and_unload()
        apart = float((merged(ids).logits.log_softmax(-1) - before).abs().max())
        added = float(((merged.lm_head.weight - base) * delta).sum() / (delta * delta).sum())
    seen[ensure] = round(added, 2)
    print(f"ensure_weight_tying={ensure}: the delta was added {added:.2f} times, log-probs move by up to {apart:.2f} nats")
    assert apart > 0.1
assert seen == {False: 1.0, True: 2.0}, seen
PYTHON
done
