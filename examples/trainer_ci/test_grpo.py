"""A trainer's CI: two GRPO steps of TRL on a CPU, each call's log-probs held against the truth of the weights at that moment.

    pip install actordbg trl pytest && pytest examples/trainer_ci

`actordbg_check` comes with actordbg's pytest plugin. A failure's text is the verdict: what is wrong, where, by how much.
"""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def test_two_grpo_steps_compute_the_right_log_probs(actordbg_check, tmp_path: Path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = datasets.Dataset.from_dict({"prompt": ["a b c d", "e", "f g", "h i j"] * 2})
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 2}
    quiet = {"output_dir": str(tmp_path), "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    args = trl.GRPOConfig(**sizes, **quiet, temperature=0.7, learning_rate=1e-3, use_cpu=True, bf16=False)
    trainer = trl.GRPOTrainer(model, reward, args, prompts, processing_class=tokenizer)
    with actordbg_check.calls("trl"):
        trainer.train()


def reward(completions: list[str], **_: object) -> list[float]:
    return [len(text) % 5 for text in completions]


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1))
    for weight in model.parameters():
        weight.data *= 3 if weight.dim() > 1 else 1  # so that the attention is not almost uniform
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
