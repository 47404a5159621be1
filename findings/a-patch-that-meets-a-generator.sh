#!/usr/bin/env bash
# OpenRLHF's patch of how transformers loads a model under ZeRO-3 fails since transformers 5.23, with every model.
#
# Surprise: the same job loads its model with ZeRO stage 2 and raises AttributeError ('generator' object has no attribute 'update') with
#   stage 3. The patch is put in place at stage 3 alone; what it wraps returned a dictionary until 5.22 and yields dictionaries since 5.23.
# Guess: a model that loads under ZeRO 2 loads under ZeRO-3.
# Versions: openrlhf 0.11.2 (0.10.3 to 0.11.1 have the same patch, by reading); transformers 5.22.0, 5.23.0 and 5.24.0. Seen 2026-11-30:
#   5.22.0 returns the state, 5.23.0 and 5.24.0 raise. A whole OpenRLHF Actor under ZeRO-3 (DeepSpeed 0.19.8, torch 2.13.0, CPU) did the
#   same.
# Source: openrlhf/models/actor.py, `_patch_zero3_weight_mapping`; transformers/integrations/deepspeed.py,
#   `_apply_weight_conversions_to_state_dict`, a private function.
# For RLHF: who upgrades transformers alone cannot load a policy, reference or critic under ZeRO-3. OpenRLHF pins transformers 5.15.0.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet --no-deps openrlhf==0.11.2
for version in 5.22.0 5.23.0 5.24.0; do
"$folder/venv/bin/pip" install --quiet "transformers==$version"
"$folder/venv/bin/python" - <<'PYTHON'
import ast
import importlib.util
import pathlib

import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import deepspeed as loading

# The one function, out of the installed file: the whole module would import flash-attn.
root = pathlib.Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0])
tree = ast.parse((root / "models" / "actor.py").read_text())
tree.body = [node for node in tree.body if getattr(node, "name", "") == "_patch_zero3_weight_mapping"]
names = {}
exec(compile(tree, "openrlhf/models/actor.py", "exec"), names)
names["_patch_zero3_weight_mapping"]()

small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**small))
try:
    state = loading._apply_weight_conversions_to_state_dict(model, dict(model.state_dict()), [])
    seen = f"{len(state)} parameters"
except AttributeError as error:
    seen = f"AttributeError: {error}"
print(f"transformers {transformers.__version__}: {seen}")
assert seen.startswith("AttributeError") == (transformers.__version__ != "5.22.0"), seen
PYTHON
done
