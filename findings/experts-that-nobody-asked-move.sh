#!/usr/bin/env bash
# Since transformers keeps a layer's experts in one parameter, an expert that no token was sent to moves all the same.
#
# Surprise: in version 5, Adam moves each expert in each step: those without a token get a gradient of 0 (not none), and go on by their
#   momentum, by two thirds of the learning rate in the next step and half in the one after. In version 4 they rest.
# Guess: what no token used is not touched; the same checkpoint, data and optimizer give the same update in both versions.
# Versions: transformers 4.57.6, 5.15.0 and, elsewhere, 5.24.0, torch 2.13.0, CPU, Mixtral with 8 experts, one for each token. Seen 2026-11-28, a step in which one
#   expert is used, after one in which all are: the others move by 0 (version 4) and 0.67 (version 5) of the learning rate.
# Source: transformers/models/mixtral/modeling_mixtral.py: `MixtralExperts` has the weights of all experts as one 3-dimensional parameter, where
#   version 4 had a ModuleList, whose unused members had no gradient, which torch's optimizers pass over.
# For RLHF: with few tokens and many experts most experts are unused in a step. Weight decay and momentum now act on them; their moments decay,
#   too, so the next token finds a larger step. A run does not repeat across the versions, with forwards, losses and gradients that agree.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 4.57.6 5.15.0; do
"$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=1))
layer = model.model.layers[0]
block = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)


def experts():
    """Return each expert's down projection."""
    if isinstance(block.experts, torch.nn.ModuleList):
        return [expert.w2.weight.detach().clone() for expert in block.experts]
    return list(block.experts.down_proj.detach().clone())


moved = []
for ids in (torch.randint(64, (8, 64)), torch.full((1, 2), 5)):  # tokens for all experts, then for one
    before = experts()
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    moved.append([round(float((now - old).abs().mean()) / 1e-3, 2) for now, old in zip(experts(), before, strict=True)])
print(transformers.__version__, "with tokens for all:", moved[0])
print(transformers.__version__, "with tokens for one:", moved[1])
resting = sum(move == 0 for move in moved[1])
assert min(moved[0]) > 0.9 and resting == (7 if transformers.__version__.startswith("4") else 0), moved
PYTHON
done
