#!/usr/bin/env bash
# With scaled rotary positions, a row's log-probs depend on the longest row beside it, or on one that was computed before it.
#
# Surprise: with `longrope` a short row of a padded batch moves by nats as soon as another row is longer than the original context. With
#   `dynamic` a row that is longer than the context gets other log-probs after a longer row was seen once, in an earlier call.
# Guess: padded rows do not see each other, and a forward has no memory, so both are 0.
# Versions: transformers 5.15.0 and 5.24.0, torch 2.13.0, CPU, fp32, random weights. Seen 2026-11-28: longrope (Phi-3) 7.4 nats beside a
#   longer row, 0 beside one of its own kind; dynamic (Llama) 4.2 nats after a longer row, 0 after a short one has reset it.
# Source: transformers/modeling_rope_utils.py, `dynamic_rope_update`: one set of frequencies for the whole call, chosen by its largest
#   position; for `dynamic` it stays until a call fits into the original context.
# For RLHF: the micro-batch decides: regrouping by tokens, sorting by length, or a reference computed in other groups gives ratios and KL that
#   are far from 1 and 0, for short answers too, from the first step on. An engine that takes one set for its longest context is different
#   from both. Models of the Phi-3 and Phi-4-mini kind switch at 4,096 tokens.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 5.15.0 5.24.0; do
"$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==$version"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

transformers.logging.set_verbosity_error()
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
sizes |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
longrope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
longrope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def log_probs(model, rows):
    """Return the log-probs of the first of some rows, padded on the right to the longest."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        logits = model(ids, attention_mask=(ids > 0).long(), use_cache=False).logits
    return logits[0, : len(rows[0])].log_softmax(-1)


torch.manual_seed(0)
phi = Phi3ForCausalLM(Phi3Config(**sizes, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=longrope)).eval()
llama = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=32, rope_parameters=dynamic)).eval()
short, other, middle, long = (torch.randint(3, 64, (length,)) for length in (24, 30, 48, 128))
alone = log_probs(phi, [short])
beside_short, beside_long = ((log_probs(phi, [short, row]) - alone).abs().max().item() for row in (other, middle))
first = log_probs(llama, [middle])
log_probs(llama, [long])
after_long = (log_probs(llama, [middle]) - first).abs().max().item()
log_probs(llama, [short])
after_short = (log_probs(llama, [middle]) - first).abs().max().item()
print(transformers.__version__, f"longrope: beside a short row {beside_short:.1g}, beside a long one {beside_long:.2g} nats")
print(transformers.__version__, f"dynamic: after a longer row {after_long:.2g}, after a short one {after_short:.1g} nats")
assert beside_short < 1e-3 and beside_long > 1 and after_long > 1 and after_short == 0
PYTHON
done
