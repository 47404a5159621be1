#!/usr/bin/env bash
# One infinite element of a gradient makes `clip_grad_norm_` set all other gradients to 0; the step goes on, on momentum alone.
#
# Surprise: the norm is inf, so the factor is max_norm / inf = 0: every finite element becomes 0, the infinite one NaN. AdamW then moves all
#   other weights by what earlier steps left, 0.77 of the learning rate here, and nothing raises.
# Guess: clipping scales the infinite part away, or everything becomes NaN and the next loss shows it.
# Versions: torch 2.13.0 (here) and 2.14.1, CPU. Seen 2026-11-29: norm inf, largest other gradient 0, one NaN; an update of 0.77 of the learning rate after two
#   equal steps, without a gradient.
# Source: torch/nn/utils/clip_grad.py, `_clip_grads_with_norm_`: the factor is clamped from above only, and multiplies every gradient.
# For RLHF: a log-prob of -inf gives such an element. The log has an infinite norm at one step; its rows trained nothing, and one weight is NaN.
#   If that weight is of a token or an expert that is rarely used, the losses stay finite for long. Call it with error_if_nonfinite=True, or
#   skip the step where the norm is not finite, as OpenRLHF's DeepSpeed and verl do.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch

weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0)
for step in range(3):
    before = weights[0].detach().clone()
    for each in weights:
        each.grad = torch.full_like(each, 0.1)
    if step == 2:
        weights[2].grad[1] = float("inf")
    norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
others = max(each.grad.abs().max().item() for each in weights[:2])
broken = int(weights[2].grad.isnan().sum())
moved = (weights[0] - before).abs().max().item() / 1e-3
print(f"norm {norm}, largest gradient of the others {others}, NaN gradients {broken}, update {moved:.2f} of the learning rate")
assert norm == float("inf") and others == 0 and broken == 1 and int(weights[2].isnan().sum()) == 1
assert 0.5 < moved < 0.95
PYTHON
