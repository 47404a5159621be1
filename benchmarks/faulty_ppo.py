"""A real OpenRLHF PPO of a tiny model on the CPU, recorded whole, with a fault planted in the trainer or in the engine.

    python -m benchmarks.faulty_ppo run FOLDER [--fault NAME] [--ranks 2] [--fp32] [--steps 3] [-- OPENRLHF OPTIONS]
    python -m benchmarks.faulty_ppo all FOLDER      every fault, and healthy runs: which command names it

Everything is OpenRLHF's own code but vLLM's sampler. FOLDER gets `store`, the initial
`model`, and `ppo.log`. A run takes about 35 seconds of two cores. Faults (`FAULTS`) are planted before a process
imports OpenRLHF; ACTORDBG_PLANTED names one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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


def _engine(change: Callable[[Any, Any], None], *, temperature: float = 1.0) -> Callable[[], None]:
    """Change what the engine returns: `change` gets the engine and the completion. temperature: a factor of the asked one."""

    def plant() -> None:
        original = vllm_standin.AsyncLLMEngine.generate

        async def generate(self: Any, prompt: Any, params: Any, request_id: str) -> Any:
            asked = dataclasses.replace(params, temperature=params.temperature * temperature)
            async for output in original(self, prompt, asked, request_id):
                change(self, output.outputs[0])
                yield output

        vllm_standin.AsyncLLMEngine.generate = generate  # type: ignore[method-assign]

    return plant


def _shifted(_: Any, done: Any) -> None:
    """Give each token the log-prob of the next."""
    values = [next(iter(each.values())) for each in done.logprobs]
    done.logprobs = [{token: value} for token, value in zip(done.token_ids, [*values[1:], values[-1]], strict=True)]


def _of_another(engine: Any, done: Any) -> None:
    """Return the log-probs of the request before."""
    own = [next(iter(each.values())) for each in done.logprobs]
    before, engine.before = getattr(engine, "before", own), own
    values = (before + own[len(before) :])[: len(own)]
    done.logprobs = [{token: value} for token, value in zip(done.token_ids, values, strict=True)]


def _appended_end(engine: Any, done: Any) -> None:
    """Append an end token that the engine did not sample, with the log-prob 0.0."""
    end = engine._tokenizer.eos_token_id
    if done.token_ids[-1] != end:
        done.token_ids.append(end)
        done.logprobs.append({end: SimpleNamespace(logprob=0.0)})
        done.finish_reason = "stop"


def _never_truncated(_: Any, done: Any) -> None:
    done.finish_reason = "stop"


def _stale() -> None:
    """Let the engine keep its first weights."""
    vllm_standin.AsyncLLMEngine.load_weights = lambda self, weights: {name for name, _ in weights}  # type: ignore[method-assign]


def _scored_warmer() -> None:
    """Score with another temperature than the rollout's."""

    def patch(module: Any) -> None:
        original = module.Actor.forward

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.temperature = 1.25
            return original(self, *args, **kwargs)

        module.Actor.forward = forward

    after_import("openrlhf.models.actor", patch)


class Fault(NamedTuple):
    """A fault: how it is planted, on which side, the command that names it, and words of that command's sentence.

    more: options of OpenRLHF.
    """

    plant: Callable[[], None]
    side: str
    command: str
    words: str
    more: str = ""


def _nothing() -> None:
    """Plant nothing: this is OpenRLHF's own fault."""


_DYNAMIC = "--train.dynamic_batch_enable --train.max_tokens_per_gpu 260 --rollout.max_tokens_per_gpu 4096"
FAULTS: dict[str, Fault] = {
    "accumulation": Fault(
        _normalizers(lambda by, n: by | {"batch_num_tokens": by["batch_num_tokens"] * n}), "trainer", "step", "accumulation twice"
    ),
    "dp_size": Fault(_normalizers(lambda by, n: by | {"dp_size": 1}), "trainer", "step", "dp_size is 1"),
    "tokens": Fault(
        _normalizers(lambda by, n: by | {"batch_num_tokens": by["batch_num_tokens"] * 1.25}),
        "trainer",
        "step",
        "batch_num_tokens is",
    ),
    "engine accumulation": Fault(_engine_accumulates(4), "trainer", "step", "DeepSpeed accumulates 8"),
    "gradient twice": Fault(_backward_twice, "trainer", "step", "applied twice"),
    "dynamic batch": Fault(_nothing, "trainer", "step", "only the gradient of the last", _DYNAMIC),
    "trainer's temperature": Fault(_scored_warmer, "trainer", "lint", "sampled at temperature 1, scored at 1.25"),
    "appended end": Fault(_engine(_appended_end), "rollout", "lint", "placeholder"),
    "never truncated": Fault(_engine(_never_truncated), "rollout", "lint", "truncat"),
    "engine's temperature": Fault(_engine(lambda *_: None, temperature=0.7), "rollout", "explain", "temperature"),
    "shift": Fault(_engine(_shifted), "rollout", "explain", "shift"),
    "another row": Fault(_engine(_of_another), "rollout", "explain", "row"),
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
    if fault := FAULTS.get(os.environ.get(PLANTED, "")):
        fault.plant()
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


def judged(folder: Path, command: str) -> str:
    """Run a judging command on a recorded run, and return its sentence."""
    base = [sys.executable, "-m", "actordbg", "--store", str(folder / "store")]
    model = ["--model", str(folder / "model")]
    if command == "explain":
        where = ["--where", "step=0 and grad_enabled", "--max-inputs", "4", "--keep-tensors"]
        subprocess.run([*base, "replay", *where, *model], check=False, capture_output=True)
    words = {"lint": ["lint"], "step": ["step", "--step", "0", *model], "explain": ["explain", "last", "--against", "rollout"]}[
        command
    ]
    done = subprocess.run([*base, *words, "--json"], check=False, capture_output=True, text=True)
    try:
        return str(json.loads(done.stdout)["sentence"])
    except (ValueError, KeyError):
        return done.stderr.strip()[-300:]


def every(folder: Path) -> bool:
    """Judge every fault and two healthy runs, recorded now if not below `folder`; print a table. Return whether all is right."""
    right = True
    for name, fault in FAULTS.items():
        own = folder / name.replace(" ", "-").replace("'", "")
        if not own.exists():
            record(own, fault=name, fp32=True, steps=4 if name == "engine accumulation" else 2, more=tuple(fault.more.split()))
        said = judged(own, fault.command)
        named = said.startswith("WRONG") and fault.words in said
        sided = fault.command != "explain" or f"the {fault.side} is wrong" in said
        right &= named and sided
        print(f"{'named' if named and sided else 'MISSED'} | {name} | {fault.side} | {fault.command} | {said}", flush=True)
    for name, fp32 in (("healthy-fp32", True), ("healthy-bf16", False)):
        if not (folder / name).exists():
            record(folder / name, fp32=fp32, steps=2)
        for command in ("lint", "step", "explain"):
            said = judged(folder / name, command)
            right &= said.startswith("RIGHT")
            print(f"{'right' if said.startswith('RIGHT') else 'FALSE ALARM'} | {name} | - | {command} | {said}", flush=True)
    return right


def main() -> None:
    """Run what the first word says; without one, be a process of a run."""
    if sys.argv[1:2] == ["all"]:
        raise SystemExit(not every(Path(sys.argv[2])))
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
    about = {"fault": given.fault, "ranks": given.ranks, "fp32": given.fp32, "steps": given.steps}
    return record(given.folder, **about, more=tuple(more[more[:1] == ["--"] :]))


if __name__ == "__main__":
    main()
