#!/usr/bin/env bash
# Under accelerate's bf16, a model computes in bf16 only if it is called itself; and unwrapping it once can end that for good.
#
# Surprise: `prepared(ids)` runs in bf16, `prepared.model(ids)` (the decoder that gives hidden states) in fp32. And after one call of
#   `unwrap_model(prepared, keep_fp32_wrapper=False)`, as for saving, `prepared(ids)` runs in fp32 too, for the rest of the run.
# Guess: mixed precision is a property of the prepared model and of what is in it; unwrapping gives another object and changes nothing.
# Versions: accelerate 1.15.0, transformers 5.15.0, torch 2.13.0, CPU. Seen 2026-11-28, dtype of an MLP's output: bf16 and fp32, with
#   log-probs 0.11 nats apart; fp32 after unwrapping.
# Source: accelerate/accelerator.py, `prepare_model`: the forward of that one instance is replaced by one within autocast. utils/other.py,
#   `extract_model_from_parallel`: with keep_fp32_wrapper=False the original forward is put back onto the same instance.
# For RLHF: losses that take hidden states and compute logits in chunks call the decoder, while the reference or the old log-probs call the
#   model: two precisions in one ratio, which looks like a mismatch of the engine. And the steps after a checkpoint was written compute in
#   another dtype than those before it: log-probs of equal weights jump.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.15.0 accelerate==1.15.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
model = accelerator.prepare(LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2)))
ids, dtypes = torch.randint(64, (2, 16)), []
model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, given, made: dtypes.append(made.dtype))
with torch.no_grad():
    whole = model(ids).logits.float().log_softmax(-1)
    parts = model.lm_head(model.model(ids).last_hidden_state).float().log_softmax(-1)
    apart = (whole - parts).abs().max().item()
    accelerator.unwrap_model(model)
    model(ids)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    model(ids)
words = ("the model", "its decoder", "the model, unwrapped once", "the model, unwrapped with keep_fp32_wrapper=False")
for word, dtype in zip(words, dtypes, strict=True):
    print(f"{word:50} {dtype}")
print(f"the model and its decoder with the head: up to {apart:.2f} nats apart")
assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32] and apart > 0.02
PYTHON
