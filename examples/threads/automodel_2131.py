"""Automodel#2131, SkyRL#1525, slime PR#1686, torchtitan PR#3892: a linear attention's state runs on into the next packed row.

Log-probs were off by 0.4, in four trainers, and one log said "fix applied" while it was not. Nothing is planted: transformers'
own Qwen3.5 does it here where rows are packed and the kernels that know their borders are missing. Without packing it is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMAND = ("check", "--model", "{model}", "--through", "rows", "--laws", "1")
SHAPE = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip


def answer(folder: Path) -> tuple[Any, ...]:
    import torch
    from run import actordbg, in_words
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = str(folder / "qwen3_5")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **SHAPE)).save_pretrained(model)
    made = ("dump", "create", "--batch-size", "3", "--seq-len", "24", "--count", "1", "--vocab-size", "256", "--quiet")
    actordbg(folder, *made)
    command = [word.format(model=model) for word in COMMAND]
    planted, without = (actordbg(folder, *command, packing) for packing in ("--packing", "--no-packing"))
    return in_words([*(word.format(model="QWEN3.5") for word in COMMAND), "--packing"]), planted, without, "WRONG"
