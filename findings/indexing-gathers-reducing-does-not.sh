#!/usr/bin/env bash
# One element of a sharded parameter costs a collective; a check of the whole of it costs none, and sees this rank's part.
#
# Surprise: with FSDP2, `w[0]`, `w[:1]` and `w.flatten()[:4]` gather the whole parameter over the ranks, even for `w[0].numel()`. And
#   `w.sum().item()`, `w.norm().item()`, `w.abs().max().item()` and `bool(w.isnan().any())` do not communicate: each rank gets the figure
#   of its own shard, as a plain number, without a word. `w.std().item()` communicates, and is the whole's.
# Guess: a row of the own shard is local, and a reduction to a number is that of the whole parameter.
# Versions: torch 2.13.0, CPU, two ranks by torch's own process group for tests (rank 1 alone runs, nothing can wait). Seen 2026-11-28.
#   torch 2.14.1: the same, but `bool(w.isnan().any())` is a collective, so a check on one rank alone waits for the others.
# Source: torch/distributed/tensor/_ops/_tensor_ops.py, the strategies of select and slice, which unshard the dimension that is indexed;
#   _math_ops.py: reductions give a Partial placement, and `item()` reads the local tensor of it.
# For RLHF: a hook or a logger that looks at "one element" on rank 0 only waits for ranks that never come. A NaN check or a norm that
#   is written for plain tensors is true on the rank that has the NaN and false on the others, which then take another branch.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(4, 6)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
weight = model.weight
local = weight.to_local()


def collectives(look):
    with torch.no_grad(), CommDebugMode() as counted:
        value = look(weight)
    return counted.get_total_counts(), value


for name, look in {"w[0].numel()": lambda w: w[0].numel(), "w[:1]": lambda w: w[:1], "w.flatten()[:4]": lambda w: w.flatten()[:4]}.items():
    count, _ = collectives(look)
    print(f"{name:24} {count} collective")
    assert count == 1, name
for name, look in {"w.sum().item()": lambda w: w.sum().item(), "w.norm().item()": lambda w: w.norm().item(),
                   "w.abs().max().item()": lambda w: w.abs().max().item(), "bool(isnan().any())": lambda w: bool(w.isnan().any())}.items():
    count, value = collectives(look)
    print(f"{name:24} {count} collectives, {value}; of this rank's shard {look(local)}")
    assert count == 0 and abs(value - look(local)) < 1e-6, name
assert collectives(lambda w: w.std().item())[0] == 1
PYTHON
