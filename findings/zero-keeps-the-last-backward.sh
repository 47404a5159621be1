#!/usr/bin/env bash
# Three backwards before one step: ZeRO 1 and 2 apply the last gradient alone, ZeRO 0 and 3 their sum.
#
# Surprise: with gradient_accumulation_steps 1, `engine.backward` three times and `engine.step` once, as a trainer does whose micro-batches
#   differ in number from step to step, moves the weight by the last gradient under ZeRO 1 and 2, without a word: 100 of 1 + 10 + 100.
# Guess: gradients add up until the step, as in torch, or the engine refuses a backward that it will forget.
# Versions: deepspeed 0.19.6 and 0.19.8, torch 2.13.0, CPU, one process. Seen 2026-11-28: 111, 100, 100, 111 under ZeRO 0, 1, 2, 3.
# Source: deepspeed/runtime/zero/stage_1_and_2.py, the epilogue of a backward: at a boundary of accumulation `averaged_gradients` is assigned
#   anew, and with accumulation 1 every backward is a boundary. stage3.py adds to its partition's buffer while `micro_step_id` is above 0.
# For RLHF: dynamic batches (by tokens) give a rank one micro-batch in this step and five in the next. Training runs, losses look right, and
#   all but the last micro-batch of each step have no effect. The norm in the log is the last one's, too.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet "$@"; }
pip torch==2.13.0 numpy setuptools wheel ninja packaging psutil
for version in 0.19.6 0.19.8; do
DS_ACCELERATOR=cpu pip --no-build-isolation "deepspeed==$version"
DS_ACCELERATOR=cpu "$folder/venv/bin/python" - "$version" <<'PYTHON'
import os
import sys

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", DS_LOG_LEVEL="error")
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that would be compiled first, and is not needed
deepspeed.init_distributed("gloo", verbose=False)
moved = {}
for stage in (0, 1, 2, 3):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
              "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for gradient in (1.0, 10.0, 100.0):
        engine.backward(engine(torch.full((1, 2), gradient)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved[stage] = -engine.module.weight[0, 0].item()
print(sys.argv[1], moved)
assert moved == {0: 111.0, 1: 100.0, 2: 100.0, 3: 111.0}
PYTHON
done
