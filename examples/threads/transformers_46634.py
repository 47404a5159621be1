"""transformers PR#46634: rows that are packed by `position_ids` see each other, and nothing says so.

Nothing is planted, and nothing but transformers is needed to see it: `python examples/threads/transformers_46634.py`. Version
5.15 looks for the borders of packed rows only where a call has neither an attention mask (the thread) nor a cache, and a model
makes a cache unless it is told not to. With `use_cache=False` it is gone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

FIRST, SECOND = 10, 14
COMMAND = ("check", "--recorded", "--where", "run='{run}'", "--model", "{model}", "--no-laws")


def log_probs(model: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return the log-prob of each next id of a row [1, S]."""
    logits = model(input_ids=ids, **given).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def packed_and_alone(model: Any, **given: Any) -> float:
    """Return the largest difference of the second row's log-probs, packed after the first row, from those of the row alone."""
    ids = torch.randint(3, model.config.vocab_size, (1, FIRST + SECOND), generator=torch.Generator().manual_seed(1))
    places = torch.cat((torch.arange(FIRST), torch.arange(SECOND)))[None]
    packed = log_probs(model, ids, position_ids=places, **given)[:, FIRST:]
    return float((packed - log_probs(model, ids[:, FIRST:], use_cache=False)).abs().max())


def answer(folder: Path) -> tuple[Any, ...]:
    from run import actordbg, in_words
    from stand_in import model_in

    model = str(model_in(folder))
    for run in ("planted", "without"):
        job = (
            "--run",
            run,
            "--adapter",
            "plain",
            "--with-outputs",
            "--free-floor",
            "0",
            "--",
            sys.executable,
            __file__,
            model,
            run,
        )
        actordbg(folder, "run", *job)
    planted, without = (
        actordbg(folder, *(word.format(run=run, model=model) for word in COMMAND)) for run in ("planted", "without")
    )
    command = in_words(word.format(run="planted", model="CHECKPOINT") for word in COMMAND)
    return command, planted, without, "the run's packed rows leaked into each other"


def main(words: list[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    if words:
        model = LlamaForCausalLM.from_pretrained(words[0], dtype=torch.float32).eval()
        packed_and_alone(model, **({"use_cache": False} if words[1] == "without" else {}))
        return
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.3)).eval()
    ones: dict[str, Any] = {"attention_mask": torch.ones(1, FIRST + SECOND), "use_cache": False}
    ways: dict[str, dict[str, Any]] = {"as it is": {}, "use_cache=False": {"use_cache": False}, "a mask of ones": ones}
    for way, given in ways.items():
        print(f"{way:16} {packed_and_alone(model, **given):.2g} nats")


if __name__ == "__main__":
    main(sys.argv[1:])
