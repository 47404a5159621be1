#!/usr/bin/env bash
# FSDP2's mixed precision rounds every float that goes into a sharded module: a residual stream in fp32 ends at each layer.
#
# Surprise: Mamba adds its residuals in fp32 (`residual_in_fp32`). The same bf16 weights sharded layer by layer, as all recipes do, give
#   log-probs 0.02 nats apart from the unsharded model; with cast_forward_inputs=False they are its log-probs, bit for bit. A loss
#   inside such a module gets old log-probs and advantages in bf16 too: a ratio of 1 becomes 1.06.
# Guess: `param_dtype` is the dtype of the parameters; sharding over one rank changes no bit of a model that is in that dtype already.
# Versions: torch 2.13.0 (here) and 2.14.1, transformers 5.15.0, CPU, one process, 8 layers of random weights. Seen 2026-11-29: 0.025 nats at
#   most, 0 without the cast; a ratio of 1.06 among log-probs of down to -21 nats, 1 without the cast.
# Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `_pre_forward`: with `cast_forward_inputs`, on unless set, floating-point
#   arguments become `param_dtype`.
# For RLHF: a trainer on FSDP2 and an engine or a DDP trainer with the same weights and dtype disagree by more than kernels explain, in models
#   with fp32 residuals (Mamba, Mamba 2, hybrids). Set cast_forward_inputs=False for a model whose weights are all in `param_dtype`, and keep
#   losses outside of what is sharded.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.15.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - 2>/dev/null <<'PYTHON'
import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import MambaConfig, MambaForCausalLM

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)
ids = torch.randint(0, 128, (2, 48))
model = MambaForCausalLM(MambaConfig(hidden_size=64, vocab_size=128, num_hidden_layers=8, state_size=16)).bfloat16().eval()


class Ratio(torch.nn.Linear):
    def forward(self, hidden, old=0.0):  # log-probs, or their ratio to old ones
        return super().forward(hidden).float().log_softmax(-1) - old


def sharded(model, parts, cast):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
    for each in (*parts, model):
        fully_shard(each, mesh=mesh, mp_policy=policy)
    return model


with torch.no_grad():
    plain, apart, ratios = model(ids).logits.float().log_softmax(-1), [], []
    for cast in (True, False):
        other, head = copy.deepcopy(model), sharded(Ratio(64, 128, dtype=torch.bfloat16), [], cast)
        log_probs = sharded(other, other.backbone.layers, cast)(ids).logits.float().log_softmax(-1)
        apart.append((log_probs - plain).gather(-1, ids[..., None]).abs().max().item())
        hidden = 5 * torch.randn(64, 64, dtype=torch.bfloat16)
        ratios.append(head(hidden, head(hidden)).exp().max().item())
print(f"sharded {apart[0]:.3f} nats from unsharded, without the cast {apart[1]}; ratios {ratios[0]:.3f} and {ratios[1]}")
assert apart[0] > 0.01 and apart[1] == 0 and ratios[0] > 1.01 and ratios[1] == 1
PYTHON
