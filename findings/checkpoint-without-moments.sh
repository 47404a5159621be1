#!/usr/bin/env bash
# torch.distributed.checkpoint restores an optimizer's learning rate and leaves its moments out, without a word.
#
# Surprise: saving optimizer.state_dict() and loading it into a new optimizer's state_dict() succeeds, sets the learning rate of the
#   checkpoint, and restores no moment and no step count. Adam begins anew, with the schedule's late learning rate.
# Guess: what was saved is restored, or the missing part is an error.
# Versions: torch 2.13.0 (here) and 2.14.1, CPU. Seen 2026-11-28: learning rate 0.001 restored (the new one had 0.05), 0 of 2 parameters have moments; the
#   files on disk hold all of them.
# Source: torch/distributed/checkpoint/default_planner.py, `create_default_local_load_plan`: what to read is taken from the keys of the
#   state that is loaded into; a new optimizer has none. The way that works: `get_optimizer_state_dict` of checkpoint/state_dict.py.
# For RLHF: a run that was resumed takes its first steps without Adam's memory: equal weights, data and learning rate, another update.
#   Comparing checkpoints of weights, or the first loss, shows nothing.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - "$folder/checkpoint" <<'PYTHON'
import sys
import torch
import torch.distributed.checkpoint as dcp

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=sys.argv[1])
saved = sum(name.endswith("exp_avg") for name in dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata)

new = torch.optim.AdamW(model.parameters(), lr=5e-2)
state = {"optimizer": new.state_dict()}
dcp.load(state, checkpoint_id=sys.argv[1])
new.load_state_dict(state["optimizer"])
restored = sum("exp_avg" in new.state[parameter] for parameter in model.parameters())
print(f"learning rate {new.param_groups[0]['lr']}; moments of {saved} parameters saved, of {restored} restored")
assert new.param_groups[0]["lr"] == 1e-3 and saved == 2 and restored == 0
PYTHON
