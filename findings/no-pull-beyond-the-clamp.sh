#!/usr/bin/env bash
# OpenRLHF's KL loss with k3 stops pulling at 2.6 nats below the reference: beyond that its gradient is 0, where k3 would pull hardest.
#
# Surprise: `compute_approx_kl` bounds the estimate to 10. k3 of a token that the policy finds 2.61 nats less likely than the reference is
#   10, so every token further away has the same penalty and no gradient: -12.6 just before, 0 behind. For k2 the end is at 4.5 nats, on
#   both sides.
# Guess: the bound is there against overflow, tens of nats away, and the penalty pulls harder the further a token is.
# Versions: openrlhf 0.11.2, torch 2.13.0, CPU. Seen 2026-11-28: k3's gradient at 2.5, 2.6, 2.62 and 5 nats: -11.2, -12.5, 0, 0. k2's at 4.4
#   and 4.5: -4.4, 0. With `unbiased_gradient` it is the distance at each.
# Source: openrlhf/models/utils.py, `compute_approx_kl`: the clamp to [-10, 10] is applied to the estimate; the log-ratio's own, against
#   overflow, is at -10 nats. exp(2.611) - 1 - 2.611 = 10. verl's `kl_penalty_forward` (core_algos.py, 0.9.1, by reading) has the same clamp
#   for k3.
# For RLHF: with the KL as a loss (algo.kl.use_loss, as in GRPO) of k2 or k3, without unbiased_gradient, a token that a run has pushed away
#   is not brought back by a larger coefficient, which multiplies 0. The logged KL is bounded too, at 10 for each token. A gradient that is
#   computed from the formula differs on these tokens alone.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet "$@"; }
pip torch==2.13.0 numpy setuptools wheel ninja packaging psutil
DS_ACCELERATOR=cpu pip --no-build-isolation deepspeed==0.19.6
pip --no-deps openrlhf==0.11.2
DS_ACCELERATOR=cpu DS_LOG_LEVEL=error "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import importlib.util
from pathlib import Path

import torch

# The file alone: the package would import its trainers, and with them Ray and vLLM.
path = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0]) / "models" / "utils.py"
spec = importlib.util.spec_from_file_location("openrlhf_models_utils", path)
utils = importlib.util.module_from_spec(spec)
spec.loader.exec_module(utils)


def pulls(estimator, distances, **more):
    """Return the gradient of the KL term with respect to log-probs that lie below the reference's by some nats."""
    log_probs = (-torch.tensor(distances)).requires_grad_()
    utils.compute_approx_kl(log_probs, torch.zeros(len(distances)), kl_estimator=estimator, **more).sum().backward()
    return [round(value, 1) for value in log_probs.grad.tolist()]


k3, k2 = pulls("k3", [1.0, 2.5, 2.6, 2.62, 5.0]), pulls("k2", [1.0, 4.4, 4.5, 9.0])
unbiased = pulls("k3", [1.0, 2.5, 2.6, 2.62, 5.0], unbiased_gradient=True)
print("k3 at 1, 2.5, 2.6, 2.62, 5 nats:", k3)
print("k2 at 1, 4.4, 4.5, 9 nats:     ", k2)
print("k3 with unbiased_gradient:     ", unbiased)
assert k3[1] < -11 and k3[2] < k3[1] and k3[3:] == [0, 0] and k2[1] == -4.4 and k2[2:] == [0, 0]
assert unbiased == [-1.0, -2.5, -2.6, -2.6, -5.0]
PYTHON
