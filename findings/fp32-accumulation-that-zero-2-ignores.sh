#!/usr/bin/env bash
# DeepSpeed adds micro-batches up in bf16, and under ZeRO 2 until lately also where it was told to add them in fp32.
#
# Surprise: in bf16, 0.19.6 accepts `data_types.grad_accum_dtype: fp32` under ZeRO 2, and it changes nothing: after one gradient of 1, 64 of
#   0.0019 are lost, each below half a step of bf16. ZeRO 1 and 3 obey, and 0.19.8 does. Without the option all stages lose them in both.
# Guess: fp32 master weights come with fp32 sums of gradients; and an option that is accepted is used, or refused (ZeRO 0 does refuse it).
# Versions: deepspeed 0.19.6 and 0.19.8, torch 2.13.0, CPU, one process, 65 micro-batches. Seen 2026-11-28, the sum that was applied, where
#   1.12 is right: 1.0 under ZeRO 0, 1, 2 and 3; with the option refused, 1.12, 1.0 and 1.12, and under ZeRO 2 in 0.19.8 1.12.
# Source: deepspeed/runtime/zero/stage_1_and_2.py: the separate fp32 sum (`use_grad_accum_attribute`) is for unpartitioned gradients only. With
#   partitions `get_all_grad_tensors` is given the dtype and uses it for parameters without a gradient alone: sums stay in the gradients'.
#   0.19.7 has these lines too, by reading.
# For RLHF: ZeRO 2 is OpenRLHF's default, and a rollout is many micro-batches of few tokens. What each adds is 1/64 of the sum, so rounding to
#   8 bits takes part of it; tokens with small gradients, added late, have no effect. A replay in one batch has another gradient.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet "$@"; }
pip torch==2.13.0 numpy setuptools wheel ninja packaging psutil
for version in 0.19.6 0.19.8; do
DS_ACCELERATOR=cpu pip --no-build-isolation "deepspeed==$version"
DS_ACCELERATOR=cpu "$folder/venv/bin/python" -W ignore - <<'PYTHON' | grep ZeRO
import os

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29535", DS_LOG_LEVEL="error")
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that would be compiled first, and is not needed
deepspeed.init_distributed("gloo", verbose=False)


def applied(stage, option):
    """Return the sum of 65 micro-batches' gradients, 1 and 64 of 0.0019, as the step applied it."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 65, "bf16": {"enabled": True}, "gradient_clipping": 0.0}
    config |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "data_types": option}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=65.0), config=config)
    for gradient in (1.0, *[0.0019] * 64):
        engine.backward(engine(torch.full((1, 2), gradient, dtype=torch.bfloat16)).sum())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return round(-engine.module.weight[0, 0].item(), 2)


default = [applied(stage, {}) for stage in (0, 1, 2, 3)]
asked = [applied(stage, {"grad_accum_dtype": "fp32"}) for stage in (1, 2, 3)]
print(deepspeed.__version__, "1.12 is right; ZeRO 0, 1, 2, 3:", default, "ZeRO 1, 2, 3 with grad_accum_dtype fp32:", asked)
assert default == [1.0] * 4 and asked == [1.12, 1.0 if deepspeed.__version__ == "0.19.6" else 1.12, 1.12], (default, asked)
PYTHON
done
