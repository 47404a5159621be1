#!/usr/bin/env bash
# transformers' Trainer logs a NaN loss as 0.0, or as the mean of the losses before it: the log of a broken run has finite losses to its end.
#
# Surprise: with `logging_steps=1` each loss after the first NaN is logged as 0.0; with 4, the interval with the NaN has a plausible loss. Only
#   the norm says NaN. `logging_nan_inf_filter`, on as it comes, does it; the weights are NaN all the same.
# Guess: a NaN shows in the log as NaN, or the filter leaves such a step out of the log.
# Versions: transformers 5.15.0 (here) and 5.24.0, accelerate 1.15.0, torch 2.13.0, CPU. Seen 2026-11-29, NaN from step 4 on: losses 3.9, 3.9, 3.9, 0.0, 0.0,
#   0.0, 0.0, 0.0 logged by ones; 3.6, 0.0 by fours; with the filter off nan from the first one.
# Source: transformers/trainer.py, `Trainer._run_epoch`: a NaN loss adds the mean of the interval so far.
# For RLHF: a log-prob of -inf or a group without tokens breaks a GRPO run whose loss is near 0 anyhow: nothing in its curve changes. Set
#   logging_nan_inf_filter=False, and look at the norm: the rule `finite curves` of `actordbg lint` names it.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.15.0 accelerate==1.15.0
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import math
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Broken(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        loss = model(**inputs).loss
        return loss * math.nan if self.state.global_step >= 3 else loss


def logged(every, hides):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 16
    common = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "learning_rate": 0.0}
    setup = TrainingArguments(sys.argv[1], max_steps=8, logging_steps=every, logging_nan_inf_filter=hides, **common)
    trainer = Broken(model, setup, train_dataset=rows)
    trainer.train()
    return [round(float(line["loss"]), 1) for line in trainer.state.log_history if "loss" in line], model


ones, model = logged(1, True)
fours, whole = logged(4, True)[0], logged(1, False)[0]
print(f"logged by ones {ones}, by fours {fours}, without the filter {whole}; NaN weights: {bool(model.lm_head.weight.isnan().any())}")
assert ones == [3.9] * 3 + [0.0] * 5 and all(map(math.isfinite, fours)) and model.lm_head.weight.isnan().any()
assert math.isnan(whole[3]) and math.isnan(whole[-1])
PYTHON
