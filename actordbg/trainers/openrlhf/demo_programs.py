"""OpenRLHF's own programs as commands: the demo's two trainings of a tiny model, and the SFT of a training check.

Both train for real, long enough that dumping can be switched on after the first step and still sees plenty of calls: on two
cores eight PPO steps take about 8 s and make 48 forward calls, the SFT run makes 120 in about 7 s. Start-up, that is importing
torch, transformers and deepspeed in five processes, is most of the time either way.

| program | what runs |
|---|---|
| ppo | `train_ppo_ray`: one policy rank, its reference model, one sampling engine; reinforce_baseline, two samples a prompt |
| sft | `train_sft` on one rank under the deepspeed launcher |

`train-check --trainer sft` runs `train_sft` under a configuration of its own (`sft_command`), as far as this release has it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actordbg.trainers.openrlhf.demo_driver import ON_CPU, RAY_TEMP_VARIABLE

_DRIVER = "actordbg.trainers.openrlhf.demo_driver"
_IMPORTS = ("torch", "transformers", "deepspeed", "peft", "datasets", "tokenizers", "torchdata", "pylatexenc", "openrlhf")
_PPO_STEPS = 8
_PROMPTS_PER_STEP = 4
_PPO: dict[str, Any] = {
    "data.input_key": "prompt",
    "data.label_key": "label",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 1,
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 1,
    "vllm.enforce_eager": None,
    "algo.advantage.estimator": "reinforce_baseline",
    "rollout.n_samples_per_prompt": 2,
    "rollout.batch_size": _PROMPTS_PER_STEP,
    "rollout.micro_batch_size": 4,
    "rollout.max_new_tokens": 32,
    "train.batch_size": 8,
    "train.micro_batch_size": 4,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "actor.adam.lr": 1e-4,
}
_SFT: dict[str, Any] = {
    "data.input_key": "prompt",
    "data.output_key": "answer",
    "train.batch_size": 4,
    "train.micro_batch_size": 4,
    "train.max_epochs": 5,
    "adam.lr": 1e-4,
}
_BOTH: dict[str, Any] = {
    "data.apply_chat_template": None,
    "data.max_len": 256,
    "ds.zero_stage": 2,
    "ds.param_dtype": "bf16",
    "ds.attn_implementation": "sdpa",
    "logger.logging_steps": 1,
}


@dataclass
class DemoProgram:
    """One training. See `actordbg.trainers.trainer.Program`."""

    name: str
    typed: str
    needs: tuple[str, ...]
    data: str
    rows: int
    every: int
    gpus: int

    def command(self, model: Path, data: Path, output: Path, port: int) -> list[str]:
        """The demo driver with OpenRLHF's options; for SFT the deepspeed launcher, which listens on `port`, in front of it."""
        if self.name == "ppo":
            reward = importlib.util.find_spec("actordbg.trainers.openrlhf.demo_reward")
            assert reward is not None and reward.origin is not None
            start = ["-m", _DRIVER, "ppo"]
            options = {"actor.model_name_or_path": model, "data.prompt_dataset": data, "reward.remote_url": reward.origin}
            options |= _PPO
        else:
            start = _launcher(1, port)
            options = {"model.model_name_or_path": model, "data.dataset": data} | _SFT
        return _words(start, options | _BOTH | _places(output))

    def environment(self, temporary: Path) -> dict[str, str]:
        """Where Ray keeps its files, for the driver."""
        return {RAY_TEMP_VARIABLE: str(temporary)}

    def hide_gpus(self) -> dict[str, str]:
        """It needs flash-attn to use any GPU, and for PPO a real vLLM and three GPUs (policy, reference, sampler).

        The second variable keeps Ray from showing its workers the GPUs that we declare to it.
        """
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        modules = ("flash_attn", "vllm") if self.name == "ppo" else ("flash_attn",)
        equipped = gpus >= self.gpus and all(importlib.util.find_spec(name) is not None for name in modules)
        if gpus == 0 or equipped:
            return {}
        return {"CUDA_VISIBLE_DEVICES": "", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

    def progress(self, text: str) -> Iterator[tuple[str, int, str]]:
        """What the lines of the log say, in order; lines that say nothing are skipped."""
        for line in re.split(r"[\r\n]+", text):
            if line in ON_CPU.values():
                yield "starting", 0, line
            elif found := _ACTOR.search(line):
                yield "loading", 0, f"OpenRLHF's Actor is built ({found[1] or 'rank 0'})"
            elif found := _PPO_STEP.search(line):
                yield "step", int(found[1]), f"reward {float(found[2]):.3f}"
            elif found := _SFT_STEP.search(line):
                epoch, done, of = int(found[1]), int(found[2]), int(found[3])
                yield "step", epoch * of + done, f"loss {float(found[4]):.3f}"


def sft_command(order: Any, output: Path, port: int) -> list[str]:
    """`train_sft` as a `SftOrder` (`actordbg.trainers.trainer`) says, under the deepspeed launcher, which listens on `port`."""
    options: dict[str, Any] = {
        "model.model_name_or_path": order.model,
        "data.dataset": order.data,
        "data.input_key": order.keys[0],
        "data.output_key": order.keys[1],
        "data.max_len": order.max_len,
        "data.max_samples": order.samples,
        "train.max_epochs": order.epochs,
        "train.batch_size": order.batch,
        "train.micro_batch_size": order.micro_batch,
        "train.seed": order.seed,
        "adam.lr": order.lr,
        "adam.weight_decay": order.weight_decay,
        "max_norm": order.max_norm,
        "lr_scheduler": "constant",
        "ds.zero_stage": order.zero_stage,
        "ds.tensor_parallel_size": order.tp,
        "ds.ring_attn_size": order.ring,
        "ds.param_dtype": order.dtype,
        "ds.attn_implementation": "flash_attention_2" if order.ring > 1 else order.attn,
        "logger.logging_steps": 1,
    }
    switches = {"ds.packing_samples": order.ring > 1, "model.gradient_checkpointing_enable": order.gradient_checkpointing}
    given = {name: None for name, on in switches.items() if on}
    return _words(_launcher(order.processes, port), options | given | _places(output))


def sft_lacks(backend: str) -> str:
    """Why `train_sft` of this release cannot run so; "" if it can."""
    return "" if backend == "deepspeed" else f"train_sft of this OpenRLHF has no {backend} backend: no release of it has"


def _launcher(processes: int, port: int) -> list[str]:
    return [
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        str(processes),
        "--master_port",
        str(port),
        "--module",
        _DRIVER,
        "sft",
    ]


def _places(output: Path) -> dict[str, Any]:
    return {"ckpt.output_dir": output, "ckpt.path": output / "checkpoints"}


def _words(start: list[str], options: Mapping[str, Any]) -> list[str]:
    words = [(f"--{name}", value) for name, value in options.items()]
    return [sys.executable, *start, "--", *(str(one) for pair in words for one in pair if one is not None)]


PROGRAMS: Mapping[str, DemoProgram] = {
    "ppo": DemoProgram(
        "ppo", "python -m openrlhf.cli.train_ppo_ray", (*_IMPORTS, "ray"),
        data="prompts", rows=_PPO_STEPS * _PROMPTS_PER_STEP, every=1, gpus=3,
    ),
    "sft": DemoProgram(
        "sft", "deepspeed --num_gpus 1 --module openrlhf.cli.train_sft", _IMPORTS,
        data="conversations", rows=96, every=24, gpus=1,
    ),
}  # fmt: skip

_ACTOR = re.compile(r"(?:\((\w+) pid=\d+\) )?Actor\($")
_PPO_STEP = re.compile(r"Global step (\d+): .*?'reward': ([-\d.e]+)")
_SFT_STEP = re.compile(r"Train step of epoch (\d+):.*\| (\d+)/(\d+) \[.*gpt_loss=([-\d.e]+)")
