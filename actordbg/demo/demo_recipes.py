"""The command lines of the demo's two trainings: real ones, small.

Both train the tiny model for real, long enough that dumping can be switched on after the first step and still sees plenty
of calls: on two cores eight PPO steps take about 8 s and make 48 forward calls, the SFT run makes 120 in about 7 s.
Start-up, that is importing torch, transformers and deepspeed in five processes, is most of the time either way.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Literal

from actordbg.demo.demo_assets import Assets

Trainer = Literal["ppo", "sft"]

_PPO_STEPS = 8
_PROMPTS_PER_STEP = 4
PPO_PROMPTS = _PPO_STEPS * _PROMPTS_PER_STEP
SFT_CONVERSATIONS = 96
_SFT_EPOCHS = 5


def ppo_command(assets: Assets, output: Path) -> list[str]:
    """`train_ppo_ray`: one policy rank, its reference model, one sampling engine; reinforce_baseline, two samples a prompt."""
    reward = importlib.util.find_spec("actordbg.host.openrlhf.demo_reward")
    assert reward is not None and reward.origin is not None
    options = {
        "actor.model_name_or_path": assets.model,
        "reward.remote_url": reward.origin,
        "data.prompt_dataset": assets.prompts,
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.apply_chat_template": None,
        "data.max_len": 256,
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
        **_shared(output),
    }
    return [sys.executable, "-m", "actordbg.host.openrlhf.demo_driver", "ppo", "--", *_words(options)]


def sft_command(assets: Assets, output: Path, *, port: int) -> list[str]:
    """`train_sft` on one rank under the deepspeed launcher, which listens on `port` of this host."""
    options = {
        "model.model_name_or_path": assets.model,
        "data.dataset": assets.conversations,
        "data.input_key": "prompt",
        "data.output_key": "answer",
        "data.apply_chat_template": None,
        "data.max_len": 256,
        "train.batch_size": 4,
        "train.micro_batch_size": 4,
        "train.max_epochs": _SFT_EPOCHS,
        "adam.lr": 1e-4,
        **_shared(output),
    }
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", str(port)]
    return [*launcher, "--module", "actordbg.host.openrlhf.demo_driver", "sft", "--", *_words(options)]


def _shared(output: Path) -> dict[str, object]:
    return {
        "ds.zero_stage": 2,
        "ds.param_dtype": "bf16",
        "ds.attn_implementation": "sdpa",
        "ckpt.output_dir": output,
        "ckpt.path": output / "checkpoints",
        "logger.logging_steps": 1,
    }


def _words(options: dict[str, object]) -> list[str]:
    return [
        word for name, value in options.items() for word in ([f"--{name}"] + ([] if value is None else [str(value)]))
    ]
