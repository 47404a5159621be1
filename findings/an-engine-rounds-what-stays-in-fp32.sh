#!/usr/bin/env bash
# A router that transformers keeps in fp32, in a bf16 model: DeepSpeed's bf16 engine rounds it, and tokens go to other experts.
#
# Surprise: `from_pretrained(dtype=bfloat16)` leaves some parameters in fp32 (`_keep_in_fp32_modules_strict`: ERNIE 4.5's router and its
#   correction bias). `deepspeed.initialize` with bf16 casts each of them, without a word. A layer that FSDP2 shards raises an error instead.
# Guess: a model that is in bf16 already stays as it was loaded.
# Versions: transformers 5.15.0, deepspeed 0.19.6 (here) and 0.19.8, torch 2.13.0, CPU, one process. Seen 2026-11-30: the router in float32, then in bfloat16;
#   of 2,048 tokens of a random ERNIE 4.5 (64 experts, 6 chosen) 1.0 % get other experts in the first layer.
# Source: deepspeed/runtime/engine.py, `_configure_distributed_model`; torch/distributed/fsdp, "uniform original parameter dtype".
# For RLHF: the trainer routes otherwise than an engine that keeps the router, before any update. `check --backend deepspeed` names each
#   such tensor as rounded; the plain backend, fsdp2 (a group for each) and `--dtype fp32` keep it.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet "$@"; }
pip torch==2.13.0 numpy setuptools wheel ninja packaging psutil
DS_ACCELERATOR=cpu pip --no-build-isolation deepspeed==0.19.6
pip transformers==5.15.0 accelerate==1.15.0
cd "$folder" && DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import os

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29538", DS_LOG_LEVEL="error")
import deepspeed
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that would be compiled first, and is not needed
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
experts = {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 16, "moe_layer_start_index": 0}
made = AutoModelForCausalLM.from_config(AutoConfig.for_model("ernie4_5_moe", vocab_size=2048, **sizes, **experts))
torch.nn.init.normal_(made.model.layers[0].mlp.gate.weight, std=0.02)
made.save_pretrained("model")
plain, model, sharded = (AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16).eval() for _ in range(3))
deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}})
gates, chosen = [each.model.layers[0].mlp.gate for each in (plain, model)], []
for gate, each in zip(gates, (plain, model), strict=True):
    gate.register_forward_hook(lambda gate, given, out: chosen.append(out[2].sort(-1).values))
    with torch.no_grad():
        each(torch.arange(2048)[None])
dtypes, moved = [gate.weight.dtype for gate in gates], (chosen[0] != chosen[1]).any(-1).double().mean().item()
print(f"the router: {dtypes}; other experts for {moved:.1%} of the tokens")
fully_shard(sharded.model.layers[0])
try:
    raised = sharded(torch.arange(8)[None]) and ""
except AssertionError as error:
    raised = str(error)
print(f"sharded by FSDP2: {raised}")
assert dtypes == [torch.float32, torch.bfloat16] and moved > 0.005 and "uniform original parameter dtype" in raised
PYTHON
