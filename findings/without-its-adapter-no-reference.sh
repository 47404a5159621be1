#!/usr/bin/env bash
# With LoRA initialised by PiSSA or OLoRA, `disable_adapter()` does not give the base model: the reference is another model.
#
# Surprise: before any training the adapted model is the base to 2e-6 nats, and the model with its adapter disabled is off by nats. With
#   LoRA's default initialisation both are the base, bit for bit.
# Guess: an adapter is something beside the weights, so without it the weights are those that were loaded.
# Versions: peft 0.21.2, transformers 5.15.0, torch 2.13.0, CPU, fp32, random weights. Seen 2026-11-28, from the base, adapted and disabled:
#   0 and 0 (default), 1e-6 and 2.1 (PiSSA), 1e-6 and 2.3 (OLoRA).
# Source: peft/tuners/lora/layer.py, `pissa_init` and `olora_init`: what the adapter begins with is subtracted from the base layer's weight,
#   in place, so that their sum is the base.
# For RLHF: trainers with LoRA save a reference model and compute its log-probs with the adapter disabled (TRL 1.16 and verl 0.9.1, by
#   reading). The KL of the first step is then far from 0, with a ratio of exactly 1, and the penalty pulls to a model that nobody chose.
#   Saved beside the original base, the adapter is wrong too, unless it was converted to plain LoRA. Load the reference as a model of its
#   own.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.15.0 peft==0.21.2
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def log_probs(model):
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)


for initialised, far in ((True, False), ("pissa", True), ("olora", True)):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1)).eval()
    base = log_probs(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=initialised))
    with_adapter = (log_probs(adapted) - base).abs().max().item()
    with adapted.disable_adapter():
        without = (log_probs(adapted) - base).abs().max().item()
    print(f"init_lora_weights={initialised}: adapted {with_adapter:.1g}, adapter disabled {without:.2g} nats from the base")
    assert with_adapter < 1e-4 and (without > 0.3) == far and (far or without == 0)
PYTHON
