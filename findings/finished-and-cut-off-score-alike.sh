#!/usr/bin/env bash
# A reward model whose padding is its end-of-sequence token never reads the end: finished and cut-off answers have equal scores, bit for bit.
#
# Surprise: the score is taken at the last id that is not the padding's, whatever the attention mask says. Where both tokens are one, that of
#   a finished answer is taken before its end. With a padding token of its own the end counts, and the scores are 0.13 apart.
# Guess: the score is that of the last token of the attention mask, which for a finished answer is its end.
# Versions: transformers 5.15.0 (here) and 5.24.0, torch 2.13.0, CPU, fp32, a random Llama. Seen 2026-11-29: apart by 0 (one token for both), 0.129 (two).
# Source: transformers/modeling_layers.py, `GenericForSequenceClassification.forward`: the rightmost position with another id than pad_token_id.
# For RLHF: many tokenizers without a padding token are given their end's. The reward model then cannot tell whether an answer ended, and
#   a policy that never ends loses nothing: lengths grow to the limit while rewards stay. Trained so and served with another padding token, it
#   is read at a position that it was never trained at. The law `cut off` of `actordbg lint` looks at the rewards of cut-off rows.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.15.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

END = 2
sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def apart(padding):
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, eos_token_id=END, pad_token_id=padding, num_labels=1)
    model = LlamaForSequenceClassification(config).eval()
    scores = []
    for ids in ([5, 6, 7, 8, END], [5, 6, 7, 8]):
        row = torch.tensor([ids])
        with torch.no_grad():
            scores.append(model(input_ids=row, attention_mask=torch.ones_like(row)).logits.item())
    return abs(scores[0] - scores[1])


one, two = apart(END), apart(0)
print(f"finished and cut off are apart by {one} where padding is the end, by {two:.4f} where it is not")
assert one == 0 and two > 0.01
PYTHON
