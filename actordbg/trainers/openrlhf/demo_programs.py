"""OpenRLHF's own programs as commands: the demo's two training runs of a tiny model.

Both really train, long enough that recording can be turned on after the first step and still sees plenty of calls: on two
cores eight PPO steps take about 8 s and make 48 forward calls, the SFT run makes 120 in about 7 s. Start-up (importing torch,
transformers and deepspeed in five processes) takes most of the time either way.

| program | what runs |
|---|---|
| ppo | `train_ppo_ray`: one policy rank, its reference model, one sampling engine; reinforce_baseline, two samples per prompt |
| sft | `train_sft` on one rank under the deepspeed launcher |

They run in a child process, `main`, which starts OpenRLHF's own training CLI with stand-ins for what this machine lacks:

    python -m actordbg.trainers.openrlhf.demo_programs ppo -- <arguments of openrlhf.cli.train_ppo_ray>
    deepspeed --module actordbg.trainers.openrlhf.demo_programs sft -- <arguments of openrlhf.cli.train_sft>

`runpy` runs the CLI unchanged as `__main__`; the first `openrlhf` on PYTHONPATH trains.

They run on the CPU, GPUs or not: CPU support is installed on first import of openrlhf, here and (through Ray's worker setup
hook) in every Ray worker; the vLLM stand-in is registered; and Ray is initialized with *declared* GPUs before the CLI, since
OpenRLHF's actors each ask Ray for a GPU and would otherwise wait for a placement forever.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from actordbg.trainers.importhook import before_import
from actordbg.trainers.openrlhf.cpu import install_cpu_support, map_flash_attention_to_sdpa

_DRIVER = "actordbg.trainers.openrlhf.demo_programs"
_IMPORTS = ("torch", "transformers", "deepspeed", "peft", "datasets", "tokenizers", "torchdata", "pylatexenc", "openrlhf")
_PPO_STEPS = 8
_PROMPTS_PER_STEP = 4
_PPO = f"""
    --data.input_key prompt --data.label_key answer --actor.num_nodes 1 --actor.num_gpus_per_node 1
    --ref.num_nodes 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.tensor_parallel_size 1 --vllm.enforce_eager
    --algo.advantage.estimator reinforce_baseline --rollout.n_samples_per_prompt 2 --rollout.batch_size {_PROMPTS_PER_STEP}
    --rollout.micro_batch_size 4 --rollout.max_new_tokens 32 --train.batch_size 8 --train.micro_batch_size 4
    --train.max_epochs 1 --train.num_episodes 1 --actor.adam.lr 0.0001"""
_SFT = """
    --data.input_key prompt --data.output_key answer --train.batch_size 4 --train.micro_batch_size 4 --train.max_epochs 5
    --adam.lr 0.0001"""
_BOTH = """
    --data.apply_chat_template --data.max_len 256 --ds.zero_stage 2 --ds.param_dtype bf16 --ds.attn_implementation sdpa
    --logger.logging_steps 1"""


class DemoProgram(NamedTuple):
    """A real training run for the demo, small enough for a laptop.

    typed: the command without options, as a user types it. needs: modules that it imports. rows: how many it uses. every: report
    every Nth step.
    """

    name: str
    typed: str
    needs: tuple[str, ...]
    rows: int
    every: int

    def command(self, model: Path, data: Path, output: Path, port: int) -> list[str]:
        """Build the command of the demo driver with OpenRLHF's options; for SFT with the deepspeed launcher on `port`."""
        if self.name == "ppo":
            start, words = ["-m", _DRIVER, "ppo"], _PPO
            options: dict[str, Any] = {"actor.model_name_or_path": model, "data.prompt_dataset": data}
            options["reward.remote_url"] = __file__
        else:
            launcher = f"-m deepspeed.launcher.runner --num_gpus 1 --master_port {port} --module {_DRIVER} sft"
            start, words = launcher.split(), _SFT
            options = {"model.model_name_or_path": model, "data.dataset": data}
        options |= {"ckpt.output_dir": output, "ckpt.path": output / "checkpoints"}
        typed = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [sys.executable, *start, "--", *typed, *words.split(), *_BOTH.split()]

    def environment(self, temporary: Path) -> dict[str, str]:
        """Return the environment variables that tell the driver where Ray keeps its files, and keep it to the CPU."""
        return {RAY_TEMP_VARIABLE: str(temporary), **WITHOUT_GPUS}

    def progress(self, text: str) -> Iterator[tuple[str, int, str]]:
        """Yield (kind, number, text) for each log line that tells progress, in order."""
        for line in re.split(r"[\r\n]+", text):
            if line in ON_CPU.values():
                yield "starting", 0, line
            elif match := _ACTOR.search(line):
                rank = match[1] or "rank 0"
                yield "loading", 0, f"OpenRLHF's Actor is built ({rank})"
            elif match := _PPO_STEP.search(line):
                yield "step", int(match[1]), f"reward {float(match[2]):.3f}"
            elif match := _SFT_STEP.search(line):
                epoch, done, of = int(match[1]), int(match[2]), int(match[3])
                yield "step", epoch * of + done, f"loss {float(match[4]):.3f}"


PROGRAMS: Mapping[str, DemoProgram] = {
    "ppo": DemoProgram(
        "ppo", "python -m openrlhf.cli.train_ppo_ray", (*_IMPORTS, "ray"),
        rows=_PPO_STEPS * _PROMPTS_PER_STEP, every=1,
    ),
    "sft": DemoProgram(
        "sft", "deepspeed --num_gpus 1 --module openrlhf.cli.train_sft", _IMPORTS,
        rows=96, every=24,
    ),
}  # fmt: skip

_ACTOR = re.compile(r"(?:\((\w+) pid=\d+\) )?Actor\($")
_PPO_STEP = re.compile(r"Global step (\d+): .*?'reward': ([-\d.e]+)")
_SFT_STEP = re.compile(r"Train step of epoch (\d+):.*\| (\d+)/(\d+) \[.*gpt_loss=([-\d.e]+)")


RAY_TEMP_VARIABLE = "ACTORDBG_DEMO_RAY_TEMP"
ON_CPU = {
    "sft": "on the CPU: OpenRLHF as installed, with actordbg's CPU support",
    "ppo": "on the CPU: OpenRLHF as installed; only vLLM's sampler is a stand-in",
}
"""The first line of the log, by trainer."""
DECLARED_GPUS = 4
WITHOUT_GPUS = {
    "CUDA_VISIBLE_DEVICES": ",".join(["-1"] * DECLARED_GPUS),
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
"""Variables that hide GPUs. Ray refuses to start with more GPUs than the first lists, and CUDA stops reading it at -1. The second
keeps Ray from showing its workers the GPUs that we declare to it.
"""


def main(argv: list[str] | None = None) -> None:
    """Run the trainer named first with the arguments after `--`. (The deepspeed launcher puts --local_rank before the name.)"""
    argv = sys.argv[1:] if argv is None else argv
    own, given = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    trainer = next(word for word in own if not word.startswith("-"))
    launcher_options = [word for word in own if word.startswith("--local_rank")]
    sys.stdout.write(ON_CPU[trainer] + "\n")
    support_cpu()
    module = {"ppo": "openrlhf.cli.train_ppo_ray", "sft": "openrlhf.cli.train_sft"}[trainer]
    if trainer == "ppo":
        import ray

        ray.init(
            include_dashboard=False, object_store_memory=128 * 1024 * 1024, _temp_dir=os.environ[RAY_TEMP_VARIABLE],
            num_gpus=DECLARED_GPUS, num_cpus=8, runtime_env={"worker_process_setup_hook": f"{_DRIVER}.support_cpu"},
            _system_config={"prestart_worker_first_driver": False},  # it would start eight workers, and four are used
        )  # fmt: skip
    sys.argv = [module, *given, *launcher_options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def support_cpu() -> None:
    """Prepare this process, the driver or a Ray worker, before it imports openrlhf. Cheap: imports neither torch nor openrlhf."""
    from actordbg.trainers.openrlhf import vllm_standin

    before_import("openrlhf", install_cpu_support)
    map_flash_attention_to_sdpa()
    vllm_standin.register()


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, object]:
    """Return a reward in [0, 1] for each query: the share of distinct characters in the text after the prompt.

    Advantages then differ between samples. OpenRLHF loads this file by path (`--reward.remote_url <this file>`), so the file
    cannot define a dataclass.
    """
    import torch

    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([len(set(answer)) / max(len(answer), 1) for answer in answers])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


if __name__ == "__main__":
    main()
