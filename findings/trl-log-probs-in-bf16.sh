#!/usr/bin/env bash
# TRL's helper selective_log_softmax makes bf16 log-probs of bf16 logits. Its experimental trainers call it; GRPO, RLOO, DPO, SFT, KTO do not.
#
# Surprise: selective_log_softmax takes logits in bf16 and returns bf16: a log-prob of -8 has steps of 0.03 nats. Two calls on equal logits
#   agree, but against the same logits' log-probs in fp32 the ratio is wrong by up to 6 %, without any other model involved.
# Guess: the reduction is done in fp32 (as OpenRLHF does, which casts the logits first), or at least the result is.
# Versions: torch 2.13.0, trl 1.0.0 and 1.16.0, transformers 5.24.0, CPU (with Triton and a GPU another branch is taken). Seen 2026-11-28:
#   largest difference 0.058 nats over 64 tokens of a vocabulary of 1,000; the ratio is off by 0.060.
# Source: trl/trainer/utils.py, `selective_log_softmax`: fp32 and fp64 go through logsumexp, every other dtype through log_softmax in its
#   own dtype, row by row.
# For RLHF: an engine that returns fp32 log-probs differs from the trainer by this much on a model that is exactly right. It is a rounding
#   of the last step, not of the model: it does not shrink with a better kernel, and a bound of 1 % on ratios drops tokens by it.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 1.0.0 1.16.0; do
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 "trl==$version"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from trl.trainer.utils import selective_log_softmax

torch.manual_seed(0)
logits = (3 * torch.randn(4, 16, 1000)).bfloat16()
ids = torch.randint(0, 1000, (4, 16))
rounded, exact = selective_log_softmax(logits, ids), selective_log_softmax(logits.float(), ids)
difference = (rounded.float() - exact).abs().max().item()
ratio = (rounded.float() - exact).exp().sub(1).abs().max().item()
print(f"{rounded.dtype}: up to {difference:.3f} nats from fp32 of the same logits; the ratio is off by up to {ratio:.3f}")
assert rounded.dtype == torch.bfloat16 and 0.01 < difference < 0.2 and ratio > 0.01
PYTHON
done
