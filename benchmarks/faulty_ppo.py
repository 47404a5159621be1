"""A real OpenRLHF PPO of a tiny model on the CPU, recorded whole, healthy or with a fault planted in the trainer or the engine.

    python -m benchmarks.faulty_ppo run FOLDER [--fault NAME] [--ranks 2] [--fp32] [--steps 3] [-- OPENRLHF OPTIONS]
    python -m benchmarks.faulty_ppo record FOLDER [CASE...]   cases that FOLDER lacks: `planted_ppo.FAULTS`, and healthy runs
    python -m benchmarks.faulty_ppo judge FOLDER [CASE...]    recorded cases that FOLDER/outcomes.jsonl lacks: which are named
    python -m benchmarks.faulty_ppo all FOLDER [CASE...]      both, and the table

Everything is OpenRLHF's own code but vLLM's sampler. A case's folder gets `store`, the initial `model`, and `ppo.log`. A run
takes about 70 seconds of a core, its judging up to 60. ACTORDBG_PLANTED names the fault of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from actordbg.base.errors import ActordbgError
from actordbg.trainers.openrlhf import demo_programs, vllm_standin
from benchmarks.planted_ppo import FAULTS, Fault

_HERE = "benchmarks.faulty_ppo"
_prepare_cpu = demo_programs.support_cpu
PLANTED, WIDE = "ACTORDBG_PLANTED", "ACTORDBG_PLANTED_FP32"
_OPTIONS = {
    "algo.advantage.is_correction_level": "token",
    "algo.kl.init_coef": "0",
    "rollout.micro_batch_size": "4",
    "train.micro_batch_size": "2",
    "actor.adam.lr": "0.001",
    "ckpt.output_dir": "unused",
}
_RECORDED = "run --run ppo --calls forward,loss --hash-weights --turns --"
COMMANDS = ("lint", "weights", "turns", "step", "explain")

HEALTHY = {
    "1": "",
    "2": "",
    "1-cool": "--rollout.temperature 0.7",
    "1-kl": "--algo.kl.init_coef 0.01 --algo.kl.use_loss --algo.kl.estimator k3",
    "1-inner": "--train.batch_size 4",
}
"""Options of healthy runs, by the number of ranks and what is special: a KL term, two optimizer steps for each rollout."""


class Case(NamedTuple):
    """A run: its fault, or None if it is healthy, its dtype, processes, rollouts and options."""

    name: str
    fault: Fault | None
    fp32: bool
    ranks: int
    steps: int
    more: str


def cases() -> Iterator[Case]:
    """Yield every fault, and 20 healthy runs of three seeds, in fp32 and bf16."""
    for name, fault in FAULTS.items():
        yield Case(name, fault, True, fault.ranks, fault.steps, fault.more)
    one, two, cool, kl, inner = HEALTHY
    for dtype in ("fp32", "bf16"):
        for kind, seeds in {one: (42, 7, 19), cool: (42, 7, 19), two: (42,), kl: (42, 7), inner: (19,)}.items():
            for seed in seeds:
                options = f"--train.seed {seed} {HEALTHY[kind]}"
                yield Case(f"healthy-{dtype}-{kind}-seed{seed}", None, dtype == "fp32", 1 + (kind == two), 2, options)


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
    recorded = [sys.executable, "-m", "actordbg", "--store", str(folder / "store"), *_RECORDED.split()]
    os.environ |= {PLANTED: fault, WIDE: "1" if fp32 else "", "OMP_NUM_THREADS": "1"}
    with start_job(program, [*recorded, *typed], folder, folder / "ppo.log") as job:
        job.wait(timeout=900)


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


def judged(folder: Path, command: str, step: int = 0) -> str:
    """Run a judging command on a step of a recorded run, and return its sentence."""
    base = [sys.executable, "-m", "actordbg", "--store", str(folder / "store")]
    first, own = folder / "model", folder / f"checkpoint/checkpoints/global_step{step}_hf"
    model = own if own.exists() else first
    words = {
        "lint": ["lint"],
        "weights": ["weights"],
        "turns": ["turns", "--tokenizer", str(first)],
        "step": ["step", "--step", str(step), "--model", str(model)],
        "explain": ["explain", "last", "--against", "rollout", *(["--other-model", str(first)] if own.exists() else [])],
    }[command]
    if command == "explain":
        where = ["--where", f"step={step} and grad_enabled", "--max-inputs", "4", "--keep-tensors", "--no-backward"]
        subprocess.run([*base, "replay", *where, "--model", str(model)], check=False, capture_output=True)
    done = subprocess.run([*base, *words, "--json"], check=False, capture_output=True, text=True)
    try:
        return str(json.loads(done.stdout)["sentence"])
    except (ValueError, KeyError):
        return done.stderr.strip()[-300:]


def _folder(folder: Path, case: Case) -> Path:
    return folder / case.name.replace(" ", "-").replace("'", "").replace(",", "")


def _chosen(names: list[str]) -> Iterator[Case]:
    known = {case.name: case for case in cases()}
    return map(known.__getitem__, names or known)


def record_all(folder: Path, names: list[str]) -> None:
    """Record the cases that `folder` lacks. A run that was interrupted is recorded again."""
    for case in _chosen(names):
        own, begun = _folder(folder, case), folder / f"begun-{time.time_ns()}"
        if own.exists():
            continue
        try:
            record(begun, fault=case.name if case.fault else "", ranks=case.ranks, fp32=case.fp32, steps=case.steps,
                   more=tuple(case.more.split()))  # fmt: skip
        except ActordbgError as problem:
            print(f"NOT RECORDED | {case.name} | {problem.message}, see {begun}/ppo.log", flush=True)
        else:
            begun.rename(own)


def judge_all(folder: Path, names: list[str]) -> None:
    """Judge the recorded cases that `folder`/outcomes.jsonl lacks, a line for each command."""
    outcomes = folder / "outcomes.jsonl"
    known = {(line["case"], line["command"]) for line in _lines(outcomes)}
    for case in _chosen(names):
        for command in (case.fault.command,) if case.fault else COMMANDS:
            if (case.name, command) in known or not _folder(folder, case).exists():
                continue
            began = time.perf_counter()
            said = judged(_folder(folder, case), command, case.fault.step if case.fault else 0)
            named = {"case": case.name, "command": command, "sentence": said, "seconds": round(time.perf_counter() - began, 1)}
            with outcomes.open("a", encoding="utf-8") as file:
                file.write(json.dumps(named) + "\n")
            print(_row(case, named), flush=True)


def _lines(outcomes: Path) -> list[dict[str, Any]]:
    """Read the outcomes; the last of each case and command counts."""
    lines = map(json.loads, outcomes.read_text().splitlines() if outcomes.exists() else ())
    return list({(line["case"], line["command"]): line for line in lines}.values())


def _right(case: Case, said: str) -> bool:
    """Check whether a command names a fault and its side, or calls a healthy run right."""
    if case.fault is None:
        return said.startswith("RIGHT")
    return said.startswith(f"WRONG ({case.fault.side}") and case.fault.words in said


def _row(case: Case, line: dict[str, Any]) -> str:
    right = _right(case, line["sentence"])
    word = ("named" if right else "MISSED") if case.fault else "right" if right else "FALSE ALARM"
    side = case.fault.side if case.fault else "-"
    return f"{word} | {case.name} | {side} | {line['command']} | {line['sentence']}"


def table(folder: Path) -> bool:
    """Print every outcome, and how many faults are named. Return whether all are, and no healthy run."""
    by_name, lines = {case.name: case for case in cases()}, _lines(folder / "outcomes.jsonl")
    rows = [(by_name[line["case"]], line) for line in lines if line["case"] in by_name]
    for case, line in rows:
        print(_row(case, line))
    faults = [_right(case, line["sentence"]) for case, line in rows if case.fault]
    healthy = {case.name for case, _ in rows if not case.fault}
    alarms = {case.name for case, line in rows if not case.fault and not _right(case, line["sentence"])}
    seconds = sum(line["seconds"] for _, line in rows)
    print(f"{sum(faults)} of {len(faults)} faults named, {len(alarms)} of {len(healthy)} healthy runs; judged in {seconds:.0f} s")
    return all(faults) and not alarms


def main() -> None:
    """Run what the first word says; without one, be a process of a run."""
    word = "".join(sys.argv[1:2])
    if word in ("record", "judge", "all"):
        folder = Path(sys.argv[2])
        folder.mkdir(parents=True, exist_ok=True)
        if word != "judge":
            record_all(folder, sys.argv[3:])
        if word != "record":
            judge_all(folder, sys.argv[3:])
        raise SystemExit(word == "all" and not table(folder))
    if word != "run":
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
