#!/usr/bin/env bash
# DeepSpeed's `get_global_grad_norm` between backward and step is the norm of the step before, and None under ZeRO 0 in fp32.
#
# Surprise: after `engine.backward(loss)` the call returns what the previous step had, None in the first. Under ZeRO 0 in fp32 it is None
#   for ever, with gradient clipping configured too, which is applied.
# Guess: the norm of the gradients that are there, as torch's `get_total_norm` gives it; and the same under each stage.
# Versions: deepspeed 0.19.6 (here) and 0.19.8, torch 2.13.0, CPU, one process. Seen 2026-11-28 for two steps, before and after `step`:
#   None 7.12, 7.12 7.11 under ZeRO 1, 2 and 3, and under ZeRO 0 in bf16; None throughout under ZeRO 0 in fp32.
# Source: deepspeed/runtime/engine.py, `_take_model_step` copies the optimizer's `_global_grad_norm` if it has one: a plain torch optimizer,
#   which fp32 at stage 0 keeps, has none.
# For RLHF: who logs the norm where they would clip, between backward and step, sees every spike one step late, and blames the next batch.
#   A log with no norm at all is not a broken logger.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet "$@"; }
pip torch==2.13.0 numpy setuptools wheel ninja packaging psutil
DS_ACCELERATOR=cpu pip --no-build-isolation deepspeed==0.19.6
DS_ACCELERATOR=cpu "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import os

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", DS_LOG_LEVEL="error")
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that would be compiled first, and is not needed
deepspeed.init_distributed("gloo", verbose=False)
for bf16 in (False, True):
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
        config |= {"bf16": {"enabled": bf16}, "zero_allow_untested_optimizer": True}
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), config=config)
        norms = []
        for _ in range(2):
            engine.backward(engine(torch.full((1, 8), 3.0, dtype=torch.bfloat16 if bf16 else torch.float32)).sum())
            norms.append(engine.get_global_grad_norm())
            engine.step()
            norms.append(engine.get_global_grad_norm())
        print(f"ZeRO {stage}, {'bf16' if bf16 else 'fp32'}:", [None if norm is None else round(float(norm), 2) for norm in norms])
        if stage == 0 and not bf16:
            assert norms == [None] * 4, norms
        else:
            assert norms[0] is None and norms[2] == norms[1] != norms[3], norms
PYTHON
