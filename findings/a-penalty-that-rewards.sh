#!/usr/bin/env bash
# OpenRLHF's penalty for cut-off answers raises a reward that is below 0: a wrong answer that never ends beats one that ends.
#
# Surprise: `stop_properly_penalty_coef` from 0 to 1 multiplies the reward of a cut-off answer. With rewards of -1 (wrong) and 1 (right) and a
#   coefficient of 0.5, a wrong answer gets -1 where it ends and -0.5 where it is cut off; at 0, the strictest, 0. After the group's
#   normalization the cut-off answer is the second best of four wrong ones, at 0 with an advantage above 0.
# Guess: a penalty lowers the reward, or leaves it.
# Versions: openrlhf 0.11.2, torch 2.13.0, CPU. Seen 2026-11-29, rewards 1, -1, -1, -1, -1, the last one cut off: -0.5 at 0.5 and 0 at 0,
#   advantages 0.00 and 0.45 by the formula of `group_norm`, where the finished wrong ones have -0.58 and -0.67.
# Source: openrlhf/trainer/ppo_utils/length_penalty.py, `apply_stop_properly_penalty`: rewards[j] * coefficient, whatever the sign.
# For RLHF: with a reward model, whose scores have both signs, or rewards of -1 and 1, lengths grow to their limit while rewards rise. Use a
#   negative coefficient (the reward itself is then set to it, below the worst that a finished answer gets), or rewards from 0 on.
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
from typing import List

import torch

# This function alone: its package would import Ray and the trainers.
path = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0]) / "trainer" / "ppo_utils" / "length_penalty.py"
penalty = next(each for each in ast.parse(path.read_text()).body if getattr(each, "name", "") == "apply_stop_properly_penalty")
names = {"List": List}
exec(compile(ast.Module([penalty], []), str(path), "exec"), names)


def after(coefficient):
    """Return five rewards of a group, right, wrong, wrong, wrong, and wrong and cut off, and their normalized advantages."""
    cut_off = torch.tensor([0, 0, 0, 0, 1])
    group = SimpleNamespace(rewards=torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0]), truncated=cut_off)
    names["apply_stop_properly_penalty"]([group], coefficient)
    advantages = (group.rewards - group.rewards.mean()) / (group.rewards.std() + 1e-9)
    return [[round(value, 2) for value in each.tolist()] for each in (group.rewards, advantages)]


for coefficient in (1.0, 0.5, 0.0, -1.5):
    print(f"coefficient {coefficient}: rewards {after(coefficient)[0]}, advantages {after(coefficient)[1]}")
(half, of_half), (none, of_none), (fixed, _) = after(0.5), after(0.0), after(-1.5)
assert half[4] == -0.5 and none[4] == 0 and fixed[4] == -1.5
assert of_half[4] > of_half[1] and of_none[4] > 0 > of_none[1]
PYTHON
