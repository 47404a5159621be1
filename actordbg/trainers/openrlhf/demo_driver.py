"""Child program of the demo: start OpenRLHF's own training CLI in this process, with what this machine lacks put in place.

    python -m actordbg.trainers.openrlhf.demo_driver ppo -- <arguments of openrlhf.cli.train_ppo_ray>
    deepspeed --module actordbg.trainers.openrlhf.demo_driver sft -- <arguments of openrlhf.cli.train_sft>

The CLI is run by `runpy` as `__main__`, unchanged; whichever `openrlhf` is first on PYTHONPATH is the one that trains.

Without CUDA: CPU support is installed on first import of openrlhf, here and (through Ray's worker set-up hook) in every Ray
worker; the vLLM stand-in is registered; and Ray is initialised with *declared* GPUs before the CLI, since OpenRLHF's actors
ask Ray for one each and would otherwise wait for a placement for ever. With CUDA and vLLM none of that happens: Ray finds
the GPUs itself. (That path has not been run yet: it needs three GPUs; `training.hide_gpus` keeps to the CPU with fewer.)
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

from actordbg.trainers.importhook import before_import
from actordbg.trainers.openrlhf.cpu import install_cpu_support, map_flash_attention_to_sdpa

_RING = "--ds.ring_attn_size"
RAY_TEMP_VARIABLE = "ACTORDBG_DEMO_RAY_TEMP"
ON_CPU = {
    "sft": "on the CPU: OpenRLHF as installed, with actordbg's CPU support",
    "ppo": "on the CPU: OpenRLHF as installed, with actordbg's CPU support; only vLLM's sampler is a stand-in",
}
"""What the log says first where there is no CUDA to train on, by trainer."""


def main(argv: list[str] | None = None) -> None:
    """Run the trainer named first with the arguments after `--`. (The deepspeed launcher puts its --local_rank before it.)"""
    argv = sys.argv[1:] if argv is None else argv
    own, given = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    trainer = next(word for word in own if not word.startswith("-"))
    launcher_options = [word for word in own if word.startswith("--local_rank")]
    if not runs_on_cuda(trainer):
        sys.stdout.write(ON_CPU[trainer] + "\n")
        support_cpu()
        if _RING in given and given[given.index(_RING) + 1] != "1":
            from actordbg.trainers.openrlhf.ring_attention import prepare_ring

            prepare_ring("sdpa")
    module = {"ppo": "openrlhf.cli.train_ppo_ray", "sft": "openrlhf.cli.train_sft"}[trainer]
    if trainer == "ppo":
        _start_ray()
    sys.argv = [module, *given, *launcher_options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def runs_on_cuda(trainer: str) -> bool:
    """Whether the run uses the GPU: SFT needs CUDA, PPO needs CUDA and a real vLLM. Does not import vllm."""
    import torch

    return torch.cuda.is_available() and (trainer == "sft" or importlib.util.find_spec("vllm") is not None)


def support_cpu() -> None:
    """Prepare this process, the driver or a Ray worker, before it imports openrlhf. Cheap: imports neither torch nor openrlhf."""
    from actordbg.trainers.openrlhf import vllm_standin

    before_import("openrlhf", install_cpu_support)
    map_flash_attention_to_sdpa()
    vllm_standin.register()


def _start_ray() -> None:
    import ray
    import torch

    options: dict[str, object] = {}
    if not torch.cuda.is_available():
        options["num_gpus"] = 4
        options["num_cpus"] = 8
        options["runtime_env"] = {"worker_process_setup_hook": "actordbg.trainers.openrlhf.demo_driver.support_cpu"}
    ray.init(include_dashboard=False, object_store_memory=128 * 1024 * 1024, _temp_dir=os.environ[RAY_TEMP_VARIABLE], **options)


if __name__ == "__main__":
    main()
