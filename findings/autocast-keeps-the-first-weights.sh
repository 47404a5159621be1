#!/usr/bin/env bash
# Inside one autocast block the model goes on computing with the weights that it had at the block's first forward.
#
# Surprise: an optimizer step within a `torch.autocast` block moves the fp32 weights, and the next forward does not see it: the log-probs
#   are bit for bit those of before, for every step of the block.
# Guess: autocast casts the weights in each forward, or notices that they changed (they carry a version counter).
# Versions: torch 2.13.0 (here) and 2.14.1, CPU, bf16. Seen 2026-11-28, losses of four steps: 1.4747 in each; 1.47 to 0.27 with cache_enabled=False, and with a
#   block for each forward. The gradients are those of the old weights too.
# Source: aten/src/ATen/autocast_mode.cpp, `cached_cast`: leaves that require gradients are cast once, and the copy is kept until the outermost
#   block ends. A no_grad forward (the old log-probs) fills the cache too.
# For RLHF: PPO with a block around all epochs of a rollout has a ratio of exactly 1 and a clip fraction of 0 in each of them, and takes one
#   large step of the first gradient instead of several small ones. Norms, which are not cast, do move. The cure is a block for each forward.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import contextlib

import torch


def losses(around_all, cache):
    """Return the losses of four steps of SGD, in one block of autocast around all or in a block for each forward."""
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(8, 4), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)

    with autocast() if around_all else contextlib.nullcontext():
        for _ in range(4):
            with contextlib.nullcontext() if around_all else autocast():
                loss = -model(inputs).float().log_softmax(-1)[:, 0].mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    return seen


one, each, uncached = losses(True, True), losses(False, True), losses(True, False)
for words, seen in (("one block", one), ("a block each", each), ("one block, no cache", uncached)):
    print(f"{words:20}", [round(loss, 4) for loss in seen])
assert len(set(one)) == 1, one
assert each == uncached and each[0] - each[3] > 0.5, (each, uncached)
PYTHON
