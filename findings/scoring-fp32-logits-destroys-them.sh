#!/usr/bin/env bash
# Megatron-Core's cross entropy leaves bf16 logits as they are, and turns fp32 logits into something else.
#
# Surprise: `vocab_parallel_cross_entropy` gives the right loss. Handed fp32 logits, it has then overwritten them: an entropy that is taken
#   of them is that of a nearly uniform distribution, and a second call gives another loss. With bf16 logits nothing of this happens.
# Guess: a loss does not change its input; if it saves memory that way, it does so for each dtype.
# Versions: megatron-core 0.16.1, torch 2.13.0, CPU, one process, vocabulary of 16 (entropies of up to 2.77). Seen 2026-11-28: entropy 0.74
#   before and 2.74 behind in fp32, the second loss up to 11 nats off; 0.74 and 0.74, and 0, in bf16.
# Source: megatron/core/tensor_parallel/cross_entropy.py, `VocabParallelCrossEntropy`: the logits are cast to fp32, which copies bf16 and
#   is nothing for fp32; the maximum is then subtracted, the exponential taken and the sum divided out, in place: the logits are now
#   the softmax.
# For RLHF: log-probs and entropy of one forward come from the same logits. A trainer whose head is moved to fp32 to come closer to the engine
#   gets right log-probs and a wrong entropy, on the dashboard and in the entropy bonus. Take the entropy first, or clone.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy packaging
"$folder/venv/bin/pip" install --quiet --no-deps megatron-core==0.16.1
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import os

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29537")
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel()


def entropy(logits):
    log_probs = logits.float().log_softmax(-1)
    return round(-(log_probs.exp() * log_probs).sum(-1).mean().item(), 2)


seen = {}
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(0)
    logits, ids = (3 * torch.randn(4, 2, 16)).to(dtype), torch.randint(16, (4, 2))
    right = -logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    before = entropy(logits)
    loss = vocab_parallel_cross_entropy(logits, ids).clone()
    behind = entropy(logits)
    again = (vocab_parallel_cross_entropy(logits, ids) - loss).abs().max().item()
    seen[dtype] = (before, behind)
    print(f"{dtype}: entropy {before} before the loss, {behind} behind it; a second loss is up to {again:.2g} off")
    assert (loss - right).abs().max() < 1e-5
    assert (again > 1) == (dtype == torch.float32)
assert seen[torch.float32][1] > 2.5 > 1 > seen[torch.float32][0] and seen[torch.bfloat16][0] == seen[torch.bfloat16][1]
PYTHON
