#!/usr/bin/env bash
# `from_pretrained` without a dtype loads bf16 weights as bf16, and training at RL's learning rates then moves almost nothing.
#
# Surprise: since version 5 the default is the checkpoint's dtype, where it was fp32. An AdamW over such a model has no master weights: at a
#   learning rate of 1e-6, 2 % of the elements have moved after 20 steps, and 99.6 % where fp32 was asked for. The loss is as usual.
# Guess: fp32, the default of version 4, so that a trainer's own autocast decides what is computed in bf16.
# Versions: transformers 5.0.0 and 5.24.0, torch 2.13.0, CPU. Seen 2026-11-28: 1.9 % (1e-6) and 15 % (1e-5) of the elements moved; 99.6 % in
#   fp32.
# Source: transformers/modeling_utils.py, `from_pretrained`: `dtype` None becomes "auto". A step of 1e-6 is below half a unit in the last
#   place of a bf16 weight above 4.9e-4 (8 bits of significand), and one of 1e-5 above 3.9e-3, so adding it gives the weight again.
# For RLHF: a script written for version 4 loads, trains, logs a loss and a gradient norm, and all but its smallest weights stay where they
#   were: a policy that learns far more slowly than its learning rate says. DeepSpeed's bf16 keeps fp32 master weights and hides it; plain
#   AdamW and FSDP2 over bf16 parameters do not.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 5.0.0 5.24.0; do
"$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(sys.argv[1] + "/model")
moved = {}
for words, asked in (("no dtype", {}), ("dtype fp32", {"dtype": torch.float32})):
    for rate in (1e-6, 1e-5):
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model", **asked)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for _ in range(20):
            ids = torch.randint(3, 64, (2, 16))
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        changed = sum(int((now != old).sum()) for now, old in zip(model.parameters(), before, strict=True))
        share = moved[words, rate] = changed / sum(old.numel() for old in before)
        print(f"{words}: {model.dtype}, learning rate {rate:g}: {share:.1%} of the elements moved in 20 steps")
assert moved["no dtype", 1e-6] < 0.05 and moved["no dtype", 1e-5] < 0.25, moved
assert min(moved["dtype fp32", rate] for rate in (1e-6, 1e-5)) > 0.99, moved
PYTHON
done
