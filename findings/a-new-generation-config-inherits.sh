#!/usr/bin/env bash
# A GenerationConfig that is passed to `generate` inherits the model's sampling wherever it says nothing.
#
# Surprise: `generate(generation_config=GenerationConfig(do_sample=True))` samples with the top_k, top_p, temperature and repetition penalty
#   of the checkpoint's generation_config.json: 3 of 64 tokens can be drawn here, and their scores are not the logits.
# Guess: the object that is passed is the whole configuration, and what it leaves out is neutral.
# Versions: transformers 5.0.0 and 5.24.0, torch 2.13.0, CPU. Seen 2026-11-28: 3 finite scores of 64; 64, equal to the logits, with all four
#   set.
# Source: transformers/generation/utils.py, `_prepare_generation_config`: fields that are None are filled from the model's own configuration
#   first, and from the defaults then.
# For RLHF: checkpoints ship sampling settings (a repetition penalty of 1.05, top_k 20 and top_p 0.8 are common). A rollout through
#   `generate` is then drawn from a truncated and penalised distribution, while the trainer's log-probs are of the full softmax: ratios of
#   the first step are right, since both are the trainer's, and the policy gradient is of another policy than the one that sampled.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 5.0.0 5.24.0; do
"$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0)).eval()
model.generation_config = GenerationConfig(do_sample=True, top_k=3, top_p=0.8, temperature=0.7, repetition_penalty=1.3, pad_token_id=0)
neutral = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}
seen = {}
for words, settings in (("nothing but do_sample", {}), ("all four set to neutral", neutral)):
    config = GenerationConfig(do_sample=True, max_new_tokens=1, pad_token_id=0, **settings)
    made = model.generate(
        torch.tensor([[5, 6, 7, 8]]), generation_config=config, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    scores, logits = made.scores[0][0], made.logits[0][0]
    drawn = torch.isfinite(scores)
    seen[words] = int(drawn.sum()), bool(torch.equal(scores[drawn], logits[drawn]))
    print(f"{words}: {seen[words][0]} of 64 tokens can be drawn; their scores are the logits: {seen[words][1]}")
assert seen["nothing but do_sample"][0] <= 3 and not seen["nothing but do_sample"][1], seen
assert seen["all four set to neutral"] == (64, True), seen
PYTHON
done
