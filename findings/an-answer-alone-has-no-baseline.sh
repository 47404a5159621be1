#!/usr/bin/env bash
# In verl an answer that is alone in its group is trained on its raw reward, by GRPO and RLOO; by RLOO's vectorized form it is not trained on.
#
# Surprise: where filtering leaves one answer of a prompt, `grpo` and `rloo` give it its reward as advantage: 1 for a right answer, beside 0.87
#   for the right ones of a mixed group and 0 in a group where all are right. `rloo_vectorized`, the same estimator, gives 0.
# Guess: what has nothing to be compared with has advantage 0 (or is an error), and two forms of one estimator agree.
# Versions: verl 0.9.1, torch 2.13.0, CPU. Seen 2026-11-29, rewards 1 1 0 0 (one prompt), 1 (alone), -1 (alone), 1 1 (one prompt): grpo
#   0.87 0.87 -0.87 -0.87, 1, -1, 0 0; rloo 0.67 0.67 -0.67 -0.67, 1, -1, 0 0; rloo_vectorized the same, but 0 and 0 for those alone.
# Source: verl/trainer/ppo/core_algos.py: groups of one get the mean 0 and the standard deviation 1 (`compute_grpo_outcome_advantage`,
#   `compute_rloo_outcome_advantage`); `compute_rloo_vectorized_outcome_advantage` multiplies by (count > 1).
# For RLHF: after dropping answers (too long, aborted, stale) the easiest prompts, whose groups teach nothing when whole, push their last answer
#   with full weight, in the direction of the reward's sign; with rewards from 0 to 1 nothing pushes back. Drop such rows or keep groups
#   whole, and recompute advantages from rewards.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/pip" install --quiet --no-deps verl==0.9.1
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import __future__

import ast
import importlib.util
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

# Three functions alone: their package would import Ray and the engines.
path = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "trainer" / "ppo" / "core_algos.py"
names = {"torch": torch, "np": np, "defaultdict": defaultdict}
for each in ast.parse(path.read_text()).body:
    if isinstance(each, ast.FunctionDef) and each.name.endswith("outcome_advantage"):
        each.decorator_list = []
        exec(compile(ast.Module([each], []), str(path), "exec", __future__.annotations.compiler_flag), names)

rewards = torch.tensor([1.0, 1, 0, 0, 1, -1, 1, 1])[:, None]
prompts = np.array(["mixed"] * 4 + ["right", "wrong"] + ["easy"] * 2)
found = {}
for name in ("grpo", "rloo", "rloo_vectorized"):
    advantages, _ = names[f"compute_{name}_outcome_advantage"](rewards.clone(), torch.ones(8, 1), prompts)
    found[name] = [round(value, 2) + 0.0 for value in advantages[:, 0].tolist()]
    print(name, found[name])
assert found["grpo"][4:] == found["rloo"][4:] == [1, -1, 0, 0] and found["rloo_vectorized"][4:] == [0, 0, 0, 0]
assert found["grpo"][:4] == [0.87, 0.87, -0.87, -0.87] and found["rloo"][:4] == found["rloo_vectorized"][:4]
PYTHON
