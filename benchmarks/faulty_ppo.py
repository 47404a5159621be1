"""A real OpenRLHF PPO of a tiny model on the CPU, recorded whole, with a fault planted in the trainer or in the engine.

    python -m benchmarks.faulty_ppo run FOLDER [--fault NAME] [--ranks 2] [--fp32] [--steps 3] [-- OPENRLHF OPTIONS]

Everything is OpenRLHF's own code but vLLM's sampler. FOLDER gets `store`, the initial
`model`, and `ppo.log`. A run takes about 35 seconds of two cores. Faults (`FAULTS`) are planted before a process
imports OpenRLHF; ACTORDBG_PLANTED names one.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actordbg.trainers.importhook import after_import
from actordbg.trainers.openrlhf import demo_programs, vllm_standin

_HERE = "benchmarks.faulty_ppo"
_prepare_cpu = demo_programs.support_cpu
PLANTED, WIDE = "ACTORDBG_PLANTED", "ACTORDBG_PLANTED_FP32"
_OPTIONS = {
    "algo.advantage.is_correction_level": "token",
    "rollout.micro_batch_size": "4",
    "train.micro_batch_size": "2",
    "actor.adam.lr": "0.001",
    "ckpt.output_dir": "unused",
}


def _normalizers(change: Callable[[dict[str, Any], int], dict[str, Any]]) -> Callable[[], None]:
    """Plant a fault in what OpenRLHF divides a step's losses by: `change` gets dp_size, tokens, rows, and the accumulation."""

    def patch(module: Any) -> None:
        original = module._optimizer_step_loss_norm

        @functools.wraps(original)
        def changed(masks: Any, group: Any, dp_size: int, accumulation: int) -> dict[str, Any]:
            return change(original(masks, group, dp_size, accumulation), accumulation)

        module._optimizer_step_loss_norm = changed

    return lambda: after_import("openrlhf.utils.loss_utils", patch)


def _engine_accumulates(times: int) -> Callable[[], None]:
    """Let DeepSpeed accumulate more micro-batches than OpenRLHF normalizes over."""

    def patch(module: Any) -> None:
        original = module.DeepspeedStrategy.get_ds_train_config

        @functools.wraps(original)
        def changed(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            config: dict[str, Any] = original(self, *args, **kwargs)
            config["gradient_accumulation_steps"] = times * self.accumulated_gradient
            config.pop("train_batch_size", None)
            return config

        module.DeepspeedStrategy.get_ds_train_config = changed

    return lambda: after_import("openrlhf.utils.deepspeed.deepspeed", patch)


def _backward_twice() -> None:
    """Run each micro-batch's backward twice, as a checkpointed wrapper once did."""

    def patch(module: Any) -> None:
        original = module.DeepspeedStrategy.backward

        def changed(self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
            original(self, loss + loss, *args, **kwargs)

        module.DeepspeedStrategy.backward = functools.wraps(original)(changed)

    after_import("openrlhf.utils.deepspeed.deepspeed", patch)


FAULTS: dict[str, Callable[[], None]] = {
    "accumulation": _normalizers(lambda by, n: by | {"batch_num_tokens": by["batch_num_tokens"] * n}),
    "dp_size": _normalizers(lambda by, n: by | {"dp_size": 1}),
    "tokens": _normalizers(lambda by, n: by | {"batch_num_tokens": by["batch_num_tokens"] * 1.25}),
    "engine accumulation": _engine_accumulates(4),
    "gradient twice": _backward_twice,
}
"""The faults, by name."""


def record(
    folder: Path, *, fault: str = "", ranks: int = 2, fp32: bool = False, steps: int = 3, more: tuple[str, ...] = ()
) -> None:
    """Run the PPO and record it whole into `folder`. steps: rollouts of 4 prompts with 2 samples, one optimizer step each."""
    from actordbg.demo.demo_training import build_assets, start_job
    from actordbg.trainers.trainer import TRAINER

    folder.mkdir(parents=True)
    program = TRAINER.programs["ppo"]
    model, data = build_assets(folder, 4 * steps)
    typed = program.command(model, data, folder / "checkpoint", 0)
    typed[typed.index("-m") + 1] = _HERE
    options = {**_OPTIONS, "actor.num_gpus_per_node": str(ranks), "ckpt.output_dir": str(folder / "checkpoint")}
    options |= {"ds.param_dtype": "fp32"} if fp32 else {}
    typed += [word for name, value in options.items() for word in (f"--{name}", value)] + list(more)
    store = str(folder / "store")
    recorded = [sys.executable, "-m", "actordbg", "--store", store, "run", "--run", "ppo", "--calls", "forward,loss"]
    os.environ[PLANTED], os.environ[WIDE] = fault, "1" if fp32 else ""
    with start_job(program, [*recorded, "--", *typed], folder, folder / "ppo.log") as job:
        job.wait(timeout=600)


def support_cpu() -> None:
    """Prepare a process of the run: OpenRLHF on the CPU, and the planted fault."""
    _prepare_cpu()
    if plant := FAULTS.get(os.environ.get(PLANTED, "")):
        plant()
    if os.environ.get(WIDE):
        original = vllm_standin.AsyncLLMEngine.__init__

        def wide(self: Any, args: Any) -> None:
            original(self, args)
            self._model.float()

        vllm_standin.AsyncLLMEngine.__init__ = wide  # type: ignore[method-assign]


def _drive() -> None:
    """Be the process of `DemoProgram.command`, with faults in it and in its Ray workers."""
    container: Any = argparse._ActionsContainer
    add = container.add_argument

    def add_argument(self: Any, *names: str, **facts: Any) -> Any:
        if "--ds.param_dtype" in names:  # OpenRLHF offers bf16 and fp16 only
            facts.pop("choices", None)
        return add(self, *names, **facts)

    container.add_argument = add_argument
    vars(demo_programs).update(_DRIVER=_HERE, support_cpu=support_cpu)
    demo_programs.main()


def main() -> None:
    if sys.argv[1:2] != ["run"]:
        return _drive()
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", default="", choices=["", *FAULTS])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fp32", action="store_true")
    given, more = parser.parse_known_args()
    record(
        given.folder,
        fault=given.fault,
        ranks=given.ranks,
        fp32=given.fp32,
        steps=given.steps,
        more=tuple(more[more[:1] == ["--"] :]),
    )


if __name__ == "__main__":
    main()
