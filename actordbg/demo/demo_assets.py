"""What the demo's training needs on disk, made on the spot: a tokenizer, a model, prompts and answers.

Nothing is downloaded. The tokenizer is a byte-level BPE trained on the demo's own sentences, so any text round-trips; the
model is the embedded tiny Llama with the tokenizer's vocabulary. The tasks are small sums and sorting jobs of very
different length, because sequence length is what the demo's queries select by.

Example:
    model = build_assets(Path("work"))     # work/model, work/prompts.jsonl, work/sft.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from actordbg.actor.tiny import TinyShape, build_tiny

PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|end|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
_VOCAB = 512
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Assets:
    """Paths of what a training run is started with."""

    model: Path
    prompts: Path
    conversations: Path


def build_assets(directory: Path, *, prompts: int, conversations: int) -> Assets:
    """Write tokenizer, model and both data sets under `directory`; the same arguments give the same files."""
    assets = Assets(directory / "model", directory / "prompts.jsonl", directory / "sft.jsonl")
    build_tokenizer(assets.model)
    build_tiny(assets.model, TinyShape(vocab_size=_VOCAB), {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    _write_lines(assets.prompts, ({"prompt": task, "label": answer} for task, answer in tasks(prompts)))
    _write_lines(assets.conversations, ({"prompt": task, "answer": answer} for task, answer in tasks(conversations)))
    return assets


def build_tokenizer(directory: Path) -> None:
    """Train the BPE tokenizer and write it, chat template included, so that `AutoTokenizer` opens `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=[PAD, BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{task} {answer}" for task, answer in tasks(400)), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def tasks(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """`count` pairs of task and answer, from one short sum to sorting forty numbers."""
    chance = random.Random(seed)
    for index in range(count):
        numbers = [chance.randrange(100) for _ in range(chance.choice((2, 3, 5, 12, 24, 40)))]
        listed = ", ".join(map(str, numbers))
        if index % 2:
            yield f"Sort these numbers, smallest first: {listed}.", ", ".join(map(str, sorted(numbers)))
        else:
            yield f"What is the sum of {listed}?", f"The sum is {sum(numbers)}."


def _write_lines(path: Path, rows: Iterator[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
