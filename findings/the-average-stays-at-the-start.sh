#!/usr/bin/env bash
# OpenRLHF's averaged model (`enable_ema`), which is what it then saves, hardly leaves the first weights: it is averaged in bf16.
#
# Surprise: after 1,000 steps of AdamW at 1e-6 the average has gone 11 % of the policy's way, where fp32 has gone 88 %, and 78 % of its
#   elements are bit for bit the first model's. Its 0.8 % of each difference is below half a step of bf16 until a weight is far away.
# Guess: at a beta of 0.992 the average is some 125 steps behind the policy, whatever the dtype, as its name says.
# Versions: openrlhf 0.11.2, torch 2.13.0, CPU, weights of size 0.02. Seen 2026-11-29, shares of the way: 0.88 (fp32), 0.11 (bf16, as it
#   comes).
# Source: openrlhf/utils/deepspeed/deepspeed.py, `moving_average`: (1 - beta) * weight + beta * average, in the parameters' dtype;
#   openrlhf/trainer/ray/ppo_actor.py builds the averaged model with `ds.param_dtype` (bf16 unless set), and `save_model` saves it.
# For RLHF: the checkpoint of a run with `enable_ema` gives about the log-probs and rewards of the model that it began with, while the logs
#   show the policy's. Compare the saved weights with the policy's, or average in fp32.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/pip" install --quiet --no-deps openrlhf==0.11.2
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import torch

# This method alone: its module would import DeepSpeed, flash-attn and the trainers.
path = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0]) / "utils" / "deepspeed" / "deepspeed.py"
method = next(each for each in ast.walk(ast.parse(path.read_text())) if getattr(each, "name", "") == "moving_average")
names = {"torch": torch}
exec(compile(ast.Module([method], []), str(path), "exec"), names)


def averaged(dtype, steps=1000):
    """Return the share of the policy's way that its average has gone, and the share of elements that have not moved."""
    torch.manual_seed(0)
    master = torch.nn.Linear(64, 64, bias=False)  # the optimizer's fp32 weights
    torch.nn.init.normal_(master.weight, std=0.02)
    policy, average = (torch.nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(2))
    for model in (policy, average):
        model.weight.data.copy_(master.weight)
    first = average.weight.detach().clone()
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-6, weight_decay=0.0)
    strategy = SimpleNamespace(time_steps={"ema": 0}, accumulated_gradient=1, use_dynamic_batch=False, stage=2)
    for _ in range(steps):
        master.weight.grad = torch.ones_like(master.weight)
        optimizer.step()
        policy.weight.data.copy_(master.weight)
        names["moving_average"](strategy, policy, average, 0.992)
    way = policy.weight.float() - first.float()
    gone = (average.weight.float() - first.float()).sum() / way.sum()
    return round(gone.item(), 2), round((average.weight == first).float().mean().item(), 2)


shares = {str(dtype): averaged(dtype) for dtype in (torch.float32, torch.bfloat16)}
print("share of the way, share of elements that rest:", shares)
assert shares["torch.float32"][0] > 0.8 and shares["torch.bfloat16"][0] < 0.15 and shares["torch.bfloat16"][1] > 0.7
PYTHON
