"""Six planted faults, each walked from a red replay to its cause as the skill says: by `--json` and each answer's `next` alone.

    python examples/agent_walk.py [FOLDER] [FAULT...]

Prints each command with the verdict and the sentence of its answer, and how many commands the cause took.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import actordbg

MOST = 5
"""How many commands a cause may take."""
VOCABULARY, ROWS, LENGTH = 512, 3, 24


@dataclass(frozen=True)
class Fault:
    """plant: makes store and model in a folder, and returns the command that shows the fault. cause: words that name it."""

    plant: Callable[[Path], str]
    cause: tuple[str, ...]


def small_model(folder: Path, **settings: Any) -> Any:
    """Save a small random Llama in `folder`, and return it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **sizes, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def recorded(folder: Path, model: Any, *, scored_at: float = 1.0, late: int = 0) -> None:
    """Record what a run computed for two batches. scored_at: the temperature of its log-probs. late: by how many tokens."""
    store = actordbg.open(folder / "store")
    for seed in range(2):
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[0, :9], mask[1, :3] = 0, 0
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1].float() / scored_at
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        store.add(ids, mask, log_probs=(log_probs * mask[:, 1:] * mask[:, :-1]).roll(late, dims=1), model=model)


def packing(folder: Path) -> str:
    """Rows of a pack meet in the state of linear attention."""
    from actordbg.actor.family_models import FAMILIES

    recorded(folder, small_model(folder / "unused"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(**FAMILIES["qwen3_5"].config)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return "actordbg check --model MODEL --packing --no-backward"


def temperature(folder: Path) -> str:
    """The trainer divided its logits by 0.7, and did not say so."""
    recorded(folder, small_model(folder / "model"), scored_at=0.7)
    return "actordbg check --recorded --model MODEL --no-backward"


def epsilon(folder: Path) -> str:
    """The checkpoint's config.json has another epsilon of its norms than the run."""
    recorded(folder, small_model(folder / "model", rms_norm_eps=1e-6))
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))
    return "actordbg check --recorded --model MODEL --no-backward"


def scale(folder: Path) -> str:
    """The run's kernel scaled its attention by 1.1."""
    model = small_model(folder / "model")
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.1
    recorded(folder, model)
    return "actordbg check --recorded --model MODEL --no-backward"


def shift(folder: Path) -> str:
    """The run's log-probs lie a token late."""
    recorded(folder, small_model(folder / "model"), late=1)
    return "actordbg check --recorded --model MODEL --no-backward"


def not_a_number(folder: Path) -> str:
    """A weight of the checkpoint is NaN."""
    model = small_model(folder / "model")
    recorded(folder, model)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[5, 7] = float("nan")
    model.save_pretrained(folder / "model")
    return "actordbg check --model MODEL --no-backward"


FAULTS = {
    "packing": Fault(packing, ("neighbour", "row")),
    "temperature": Fault(temperature, ("temperature", "0.7")),
    "epsilon": Fault(epsilon, ("epsilon",)),
    "scale": Fault(scale, ("attention's scale", "1.1")),
    "shift": Fault(shift, ("shifted by",)),
    "not_a_number": Fault(not_a_number, ("layers.2.mlp.up_proj",)),
}


def walk(folder: Path, fault: Fault) -> int:
    """Follow the answers from the first command until a sentence names the cause; return the number of commands, 0 for none."""
    folder.mkdir(parents=True, exist_ok=True)
    command = fault.plant(folder).replace("MODEL", str(folder / "model"))
    for number in range(1, MOST + 1):
        answer = ask(folder, command)
        print(f"\n{number}. $ {command.replace(str(folder), '.')} --json\n   {answer['verdict']}: {answer['sentence']}")
        if all(word in answer["sentence"] for word in fault.cause):
            return number
        if not (command := answer["next"]):
            break
    return 0


def ask(folder: Path, command: str) -> dict[str, Any]:
    """Run a command with --json, and return its answer."""
    environment = os.environ | {"ACTORDBG_STORE": str(folder / "store"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", *shlex.split(command), "--json"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout or '{"verdict": "", "next": ""}')
    return answer | {"sentence": answer.get("sentence") or done.stderr}


def main(folder: str = "agent-walk", *names: str) -> int:
    """Walk the named faults, by default all of them; return 1 if a cause was not named."""
    missed = []
    for name in names or FAULTS:
        print(f"\n{name}: {FAULTS[name].plant.__doc__}")
        taken = walk(Path(folder).absolute() / name, FAULTS[name])
        print(f"   cause named after {taken} commands" if taken else "   cause not named")
        missed += [name] * (not taken)
    return 1 if missed else 0


if __name__ == "__main__":
    with contextlib.redirect_stderr(sys.stdout):
        sys.exit(main(*sys.argv[1:]))
