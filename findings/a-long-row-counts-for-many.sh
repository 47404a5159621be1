#!/usr/bin/env bash
# With `train_sampling_strategy="batch_rebalance"`, a long sample weighs several times as much in a step as a short one.
#
# Surprise: of 8 samples of which one is long, a step of two micro-batches gives the long one half of the gradient, not an eighth. The
#   sampler makes micro-batches of 1 and 7 rows, and a loss that is a mean over its rows counts both micro-batches alike.
# Guess: the option arranges the samples of a step for speed; each still counts alike, as with "random" and "group_by_length".
# Versions: transformers 5.24.0 (5.15.0 has no such option), torch 2.13.0, accelerate 1.15.0, CPU, fp32, random weights. Seen 2026-11-30:
#   random and group_by_length 0.125, batch_rebalance 0.5; a language model's loss, a sum over the tokens of the step, is not touched.
# Source: transformers/trainer_pt_utils.py, `BatchRebalanceSampler`; transformers/trainer.py, `training_step`, which divides each loss by
#   the number of micro-batches where `loss_is_scaled_for_ga` is false: TRL 1.16's reward, DPO and KTO trainers (by reading).
# For RLHF: reward models, DPO and every loss that is a mean over rows learn long answers most. SFT with transformers' own loss is right.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "pad_token_id": 0}
torch.manual_seed(0)
ROWS = [{"input_ids": torch.randint(3, 64, (length,))} for length in [256] + [16] * 7]


class Rewards(Trainer):
    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, **more):
        return model(inputs["input_ids"], inputs["attention_mask"]).logits.mean()


def gradient(trainer, made, strategy, rows=ROWS, batch=4):
    """Return the gradient of one step over all rows, made of micro-batches of so many rows."""

    def batched(items):
        ids = torch.nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.where(ids > 0, ids, -100)}

    settings = {"train_sampling_strategy": strategy, "per_device_train_batch_size": batch, "gradient_accumulation_steps": len(rows) // batch}
    settings |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}
    settings |= {"remove_unused_columns": False, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    torch.manual_seed(0)
    model = made(LlamaConfig(**SIZES, num_labels=1))
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().double()
    trainer(model, TrainingArguments(sys.argv[1], **settings), train_dataset=rows, data_collator=batched).train()
    return before - torch.nn.utils.parameters_to_vector(model.parameters()).detach()


long, short = (gradient(Rewards, LlamaForSequenceClassification, "random", rows, len(rows)) for rows in (ROWS[:1], ROWS[1:]))
for strategy, share in (("random", 1 / 8), ("group_by_length", 1 / 8), ("batch_rebalance", 1 / 2)):
    step = gradient(Rewards, LlamaForSequenceClassification, strategy) - short
    seen = (step @ (long - short) / (long - short).norm() ** 2).item()
    print(f"{strategy}: the long row has {seen:.3f} of the gradient")
    assert abs(seen - share) < 1e-3
whole, parts = (gradient(Trainer, LlamaForCausalLM, *case) for case in (("random", ROWS, 8), ("batch_rebalance",)))
print(f"a language model's loss differs by {(parts - whole).norm() / whole.norm():.0e}")
assert torch.allclose(parts, whole, atol=1e-6)
PYTHON
