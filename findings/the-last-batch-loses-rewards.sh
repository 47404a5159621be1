#!/usr/bin/env bash
# `gather_for_metrics` cuts whatever it is given to the last batch's number of prompts: of 8 rewards for 2 prompts 2 are left.
#
# Surprise: at the end of an epoch a tensor of four samples a prompt loses three quarters of its rows, in a single process too, and rows of
#   another source altogether are cut to the same number. In all other batches it is returned whole.
# Guess: it removes the samples that were added to fill the last batch, and so nothing where none were added.
# Versions: accelerate 1.15.0, torch 2.13.0, CPU, one process. Seen 2026-11-29, for 10 prompts by fours, 4 samples each: 16, 16, 2 rewards, not 8.
# Source: accelerate/accelerator.py, `Accelerator.gather_for_metrics`: at the end of the data loader in use, data[:remainder], with the
#   remainder of its prompts.
# For RLHF: a trainer that draws several samples a prompt and logs or normalizes with it has too few rewards at each epoch's end: a reward curve
#   that jumps there, and advantages of another batch. Use `gather`, as TRL's GRPO does.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
prompts = accelerator.prepare(torch.utils.data.DataLoader(list(range(10)), batch_size=4))
left, expected, others, gathered = [], [], [], []
for batch in prompts:
    rewards = torch.rand(4 * len(batch))  # four samples of each prompt
    expected.append(len(rewards))
    left.append(len(accelerator.gather_for_metrics(rewards)))
    gathered.append(len(accelerator.gather(rewards)))
    others.append(len(accelerator.gather_for_metrics(torch.zeros(100))))
print(f"rewards made {expected}, gathered for metrics {left}, by gather {gathered}; of 100 other values {others}")
assert expected == gathered == [16, 16, 8] and left == [16, 16, 2] and others == [100, 100, 2]
PYTHON
