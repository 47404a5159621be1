#!/usr/bin/env bash
# A checkpoint with a head of its own, whose configuration says that it is tied: two models, one under ZeRO-3 and one everywhere else.
#
# Surprise: where `tie_word_embeddings` is true and the file has embeddings and a head that differ, `from_pretrained` warns that it will not tie
#   them, and uses the file's head. Under ZeRO-3 the same call ties them without a word: the head of the file is gone, logits are others.
# Guess: one checkpoint is one model, whatever shards it.
# Versions: transformers 5.15.0 and 5.22.0, deepspeed 0.19.6, torch 2.13.0, CPU, one process. Seen 2026-11-30 with both: tied under ZeRO-3
#   alone, logits up to 42 apart (embeddings of unit size).
# Source: transformers/modeling_utils.py, `tie_weights`: where both are in the file, it ties what `torch.equal` says is equal. A parameter
#   that is partitioned is an empty placeholder, and any two of those are.
# For RLHF: a model that was trained untied, or merged, and kept the base's configuration. The trainer under ZeRO-3 trains another head than
#   the rollout engine samples from, and a switch to ZeRO-2 changes log-probs by nats. `check` names the tie.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet "$@"; }
pip torch==2.13.0 numpy setuptools wheel ninja packaging psutil
DS_ACCELERATOR=cpu pip --no-build-isolation deepspeed==0.19.6
for version in 5.15.0 5.22.0; do
pip "transformers==$version" accelerate==1.15.0
(cd "$folder" && DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 venv/bin/python - "$version") <<'PYTHON'
import os
import sys

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29537", DS_LOG_LEVEL="error")
import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that would be compiled first, and is not needed
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
untied = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=False, **sizes))
torch.nn.init.normal_(untied.model.embed_tokens.weight)
untied.config.tie_word_embeddings = True  # as the base's configuration has it
untied.save_pretrained("model", state_dict=untied.state_dict())
ids = torch.arange(32)[None]
plain = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
stage_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
kept = HfDeepSpeedConfig(stage_3)  # while it lives, `from_pretrained` partitions
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
engine, *_ = deepspeed.initialize(model=model, config=stage_3)
with torch.no_grad():
    apart = (engine(ids).logits - plain(ids).logits).abs().max().item()
tied = [each.lm_head.weight is each.model.embed_tokens.weight for each in (plain, model)]
print(f"{sys.argv[1]}: tied {tied}, logits up to {apart:.2f} apart")
assert tied == [False, True] and apart > 1
PYTHON
done
