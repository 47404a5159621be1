"""Demonstrate these faults in TRL's own code: a GRPO training on the CPU, with and without a fault, and a command on each.

    pip install trl==1.16.0
    python examples/threads/trl_itself.py [FAULT...]      without a FAULT: all of them

Everything is TRL's except the small random model and the fault, which is put into TRL's modules before the training begins.
`run.py` has stand-ins for these, which do not need TRL.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
NOTHING = "nothing"
WORDS = [f"w{number}" for number in range(300)]


def temperature() -> None:
    """trl#4159: the temperature on one side only. The fused head gets 1, the trainer says 0.7."""
    grpo: Any = importlib.import_module("trl.trainer.grpo_trainer")
    fused = grpo.add_fused_lm_head
    grpo.add_fused_lm_head = lambda model, temperature=1.0, **others: fused(model, temperature=1.0, **others)


def entropies() -> None:
    """trl PR#5620: entropies stand one position further than log-probs."""
    utils: Any = importlib.import_module("trl.trainer.utils")

    class Shifted(utils.FusedCausalLMOutput):  # type: ignore[misc]
        def __post_init__(self) -> None:
            if self.entropy is not None:
                self.entropy = torch.roll(self.entropy, 1, 1)
            super().__post_init__()

    utils.FusedCausalLMOutput = Shifted


def labels() -> None:
    """Each label is the token after the next one."""
    utils: Any = importlib.import_module("trl.trainer.utils")
    of_the_next = utils._ChunkedLogProbFunction.apply

    class Later:
        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, labels: torch.Tensor, *others: Any) -> Any:
            return of_the_next(hidden, weight, bias, torch.roll(labels, -1, 0), *others)

    utils._ChunkedLogProbFunction = Later


FAULTS: dict[str, Callable[[], None]] = {"temperature": temperature, "entropies": entropies, "labels": labels}


def train(fault: str, checkpoint: Path) -> None:
    """The job that is recorded: one step of TRL's GRPO."""
    FAULTS.get(fault, lambda: None)()
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    draw = random.Random(0)
    prompts = [{"prompt": " ".join(draw.choices(WORDS, k=3 + row % 7))} for row in range(8)]
    settings: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "seed": 1, "bf16": False, "report_to": [], "save_strategy": "no"}
    GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(checkpoint),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        reward_funcs=lambda completions, **_: [float(len(set(item.split()))) for item in completions],
        train_dataset=Dataset.from_list(prompts),
        args=GRPOConfig(
            output_dir=str(checkpoint / "out"), per_device_train_batch_size=4, num_generations=4, max_completion_length=24,
            temperature=0.7, gradient_checkpointing=False, **settings,
        ),
    ).train()  # fmt: skip


def checkpoint_in(folder: Path) -> Path:
    """A small random Llama with a tokenizer of 300 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(names), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1, initializer_range=0.3,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def ask(folder: Path, checkpoint: Path, fault: str) -> str:
    """Record the training, and ask whether its first call is right."""
    from run import actordbg

    job = (sys.executable, str(HERE / "trl_itself.py"), "--train", fault, str(checkpoint))
    done = actordbg(folder, "run", "--run", fault, "--adapter", "trl", "--with-outputs", "--free-floor", "0", "--", *job)
    if done.returncode:
        raise SystemExit(f"{fault}: the training failed\n{done.stdout}{done.stderr}")
    where = f"run='{fault}' and call_index=0"
    return actordbg(folder, "check", "--recorded", "--where", where, "--model", str(checkpoint), "--no-laws").stdout.strip()


def main(words: list[str]) -> int:
    """1 if a fault was not found, or found if there is none."""
    if words[:1] == ["--train"]:
        train(words[1], Path(words[2]))
        return 0
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed: pip install trl==1.16.0; `run.py` has the same faults in stand-ins", file=sys.stderr)
        return 4
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = checkpoint_in(Path(scratch))
        for fault in [NOTHING, *(words or FAULTS)]:
            said = ask(Path(scratch), checkpoint, fault).split("\npage: ")[0]
            print(f"\n== {fault}", said, sep="\n", flush=True)
            missed += ("WRONG" in said) == (fault == NOTHING)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
    sys.exit(main(sys.argv[1:]))
