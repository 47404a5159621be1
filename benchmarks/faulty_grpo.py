"""A real TRL GRPO of a tiny model on the CPU, recorded whole, healthy or with a fault planted in the trainer or the engine.

    python -m benchmarks.faulty_grpo all FOLDER [NAME ...]   record and judge every case, or those named, that FOLDER lacks
    python -m benchmarks.faulty_grpo train FOLDER NAME       be the training process of a case

Everything is TRL's own code but the vLLM server: `planted_grpo.Server` stands in for its HTTP client, samples with transformers,
and gets the weights that TRL sends. A case's folder gets `store`, the initial `model`, and a checkpoint for each optimizer step.
It takes about 10 seconds of a core to record, and up to 70 to explain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planted_grpo import FAULTS, HEALTHY, Fault, Server

_SIZES = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 20,
    "max_steps": 3, "save_steps": 1, "learning_rate": 3e-3, "temperature": 0.8, "logging_steps": 1,
}  # fmt: skip
CASES = FAULTS | {name: Fault(lambda _: None, "", "explain", "", more, more.get("step", 0)) for name, more in HEALTHY.items()}
"""All runs; without a side a run is healthy."""


def without_deepspeed() -> None:
    """Leave DeepSpeed out: accelerate imports it to ask whether a model is its engine, which takes longer than the training."""
    from accelerate.utils import other

    vars(other)["is_deepspeed_available"] = lambda: False


def train(folder: Path, name: str) -> None:
    """Train a case, with its fault."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.generation import vllm_generation

    without_deepspeed()
    fault = CASES[name]
    options = dict(fault.more)
    dtype = options.pop("dtype", "float32")
    options.pop("step", None)
    Server.model_path, Server.dtype = str(folder / "model"), "bfloat16" if "bf16" in name else dtype
    vars(vllm_generation).update(is_vllm_available=lambda: True, VLLMClient=Server)
    fault.plant(trl)
    prompts = [json.loads(line)["prompt"] for line in (folder / "tasks.jsonl").read_text().splitlines()]
    quiet: dict[str, Any] = {"output_dir": str(folder / "out"), "report_to": [], "disable_tqdm": True, "save_only_model": True}
    engine: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "use_cpu": True, "bf16": False}
    model = AutoModelForCausalLM.from_pretrained(Server.model_path, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(Server.model_path)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    given = trl.GRPOConfig(**engine | _SIZES | quiet | options)
    trl.GRPOTrainer(model, reward, given, Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer).train()


def _likely_end(model: Path) -> None:
    """Give the end token a logit with which completions have various lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.randint(5, made.config.vocab_size, (8, 32), generator=torch.Generator().manual_seed(0))
        states = made.model(ids).last_hidden_state.flatten(0, 1)
        wanted = torch.full((len(states), 1), float(made(ids).logits.logsumexp(-1).mean()) - 2.0)
        made.lm_head.weight[made.config.eos_token_id] = torch.linalg.lstsq(states, wanted).solution[:, 0]
    made.save_pretrained(model)


def record(folder: Path, adapter: str, *command: str, options: Sequence[str] = ()) -> None:
    """Record a Python module of a command into `folder`, which gets a model and prompts. options: of `run`."""
    from actordbg.demo.demo_training import build_assets

    folder.mkdir(parents=True)
    build_assets(folder, 8)
    if command[-1] == "late":
        _likely_end(folder / "model")
    ours = [sys.executable, "-m", "actordbg", "--store", str(folder / "store"), "run", "--adapter", adapter, "--run", adapter]
    with (folder / "train.log").open("w") as log:
        words = [*ours, "--calls", "forward,loss", *options, "--", sys.executable, "-m", *command]
        subprocess.run(words, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def judged(folder: Path, command: str, step: int = 0) -> str:
    """Run a judging command on a step of a recorded run, and return its sentence."""
    base = [sys.executable, "-m", "actordbg", "--store", str(folder / "store")]
    model = folder / "out" / f"checkpoint-{step}" if step else folder / "model"
    words = [command]
    if command == "check":
        words += ["--recorded", "--where", f"step={step}", "--model", str(model)]
    if command == "step":
        words += ["--step", str(step), "--model", str(model)]
    if command == "explain":
        where = ["--where", f"step={step} and grad_enabled", "--max-inputs", "2", "--keep-tensors", "--no-backward"]
        subprocess.run([*base, "replay", *where, "--model", str(model)], check=False, capture_output=True)
        words += ["last", "--against", "rollout", *(["--other-model", str(folder / "model")] if step else [])]
    done = subprocess.run([*base, *words, "--json"], check=False, capture_output=True, text=True)
    try:
        return str(json.loads(done.stdout)["sentence"])
    except (ValueError, KeyError):
        return done.stderr.strip()[-300:]


def every(folder: Path, cases: dict[str, Fault], recorded: Callable[[Path, str], None]) -> bool:
    """Record and judge cases, and print a table. Return whether every fault is named, on its side, and nothing healthy is."""
    right = True
    for name, fault in cases.items():
        if not (folder / name).exists():
            recorded(folder / name, name)
        for command in [fault.command] if fault.side else dict.fromkeys(("lint", fault.command)):
            said = judged(folder / name, command, fault.step)
            named = [f"WRONG ({fault.side}", f"WRONG (TOY MODEL; {fault.side}"]
            named += ["WRONG: recorded log-probs"] if command == "check" and fault.side == "trainer" else []
            good = said.startswith(tuple(named)) and fault.words in said
            good = good if fault.side else said.startswith("RIGHT")
            right &= good
            word = "right" if good and not fault.side else "named" if good else "MISSED" if fault.side else "FALSE ALARM"
            print(f"{word} | {name} | {fault.side} | {command} | {said}", flush=True)
    return right


def recorded(folder: Path, name: str) -> None:
    """Record a case into a folder."""
    record(folder, "trl", "benchmarks.faulty_grpo", "train", str(folder), name)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    what, where, *rest = sys.argv[1:]
    if what == "train":
        train(Path(where), rest[0])
    else:
        raise SystemExit(not every(Path(where), {name: CASES[name] for name in rest or CASES}, recorded))
