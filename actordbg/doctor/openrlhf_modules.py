"""Does OpenRLHF import? Each module that matters, in a child process, with the cause and the way out where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actordbg.doctor import known_versions as known_good
from actordbg.doctor.check_result import Finding, bad, ok, warn
from actordbg.doctor.child_probe import Ended, ask
from actordbg.doctor.python_environment import Environment

MODULES: dict[str, str] = {
    "openrlhf.models.actor": "capture and replay",
    "openrlhf.utils.deepspeed": "replay --backend deepspeed",
    "openrlhf.trainer.sft_trainer": "SFT training",
    "openrlhf.cli.train_sft": "SFT training",
    "openrlhf.cli.train_dpo": "DPO training",
    "openrlhf.cli.train_ppo_ray": "PPO training under Ray",
}
"""What is imported, in this order, and what does not work without it."""

IMPORT_SECONDS = 180.0


def check(env: Environment, gpus: int, timeout: float = IMPORT_SECONDS) -> Iterator[Finding]:
    """A finding for torch and for each of MODULES, as they come; `timeout` is for one module."""
    if not env.versions.get("torch") or not env.versions.get("openrlhf"):
        missing = [name for name in ("torch", "openrlhf") if not env.versions.get(name)]
        yield warn(
            "imports", f"not tried: {' and '.join(missing)} not installed", "see above; capture and replay need them"
        )
        return
    left = list(MODULES)
    said: set[str] = set()
    while left:
        for finding in _one_child(env, left, gpus, timeout):
            if finding.name not in said:
                said.add(finding.name)
                yield finding
        reached = [module for module in left if f"import {module}" in said]
        left = [module for module in left if module not in reached] if reached else []


def _one_child(env: Environment, modules: list[str], gpus: int, timeout: float) -> Iterator[Finding]:
    """Findings of one child process; if a module killed or hung it, that one is the last."""
    current, support, left = "torch", "", list(modules)
    for answer in ask(env.python, ["imports", *modules], timeout):
        if isinstance(answer, Ended):
            if current or left:
                yield _broken(current or f"actordbg's CPU support, before {left[0]}", answer, timeout)
        elif "torch" in answer:
            yield from _cuda(answer["torch"], gpus)
        elif "cpu_support" in answer:
            support = str(answer["cpu_support"])
        elif answer["state"] == "begin":
            current = str(answer["module"])
        else:
            left = [module for module in left if module != current]
            current = ""
            yield _ended(env, answer, support)


def _cuda(torch: dict[str, Any], gpus: int) -> Iterator[Finding]:
    if gpus and not torch["cuda"]:
        build = f"built for CUDA {torch['built_for']}" if torch["built_for"] else "a build without CUDA"
        remedy = "install a torch built for your CUDA driver, or set CUDA_VISIBLE_DEVICES"
        yield warn("torch and the GPU", f"torch {torch['version']} is {build} and sees no GPU", remedy)


def _broken(module: str, end: Ended, timeout: float) -> Finding:
    name = f"import {module}"
    if end.code is None:
        return bad(name, f"no end in {timeout:.0f} s", "import it by hand with `python -X importtime`; try --timeout")
    how = f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
    return bad(
        name, f"the process died ({how}): {end.last_words}", "a compiled package is broken: reinstall what it names"
    )


def _ended(env: Environment, answer: dict[str, Any], support: str) -> Finding:
    module = str(answer["module"])
    name = f"import {module}"
    if answer["error"] is None:
        return ok(name, f"imported in {answer['seconds']:.1f} s")
    missing = answer.get("missing")
    needed = MODULES.get(module, "everything")
    if missing and (missing == module or module.startswith(f"{missing}.")):
        return warn(name, f"this OpenRLHF has no {missing}", f"without it: no {needed}")
    if missing == "vllm":
        remedy = f"{env.pip('vllm')} (needs CUDA); without it `actordbg demo` samples with its own stand-in"
        return warn(name, f"needs vllm, which is not installed; without it: no {needed}", remedy)
    return bad(name, _cause(answer), _remedy(env, answer, support))


def _cause(answer: dict[str, Any]) -> str:
    where = f" (asked for by {answer['where']})" if answer["where"] else ""
    return f"{' '.join(str(answer['first']).split())[:300]}{where}"


def _remedy(env: Environment, answer: dict[str, Any], support: str) -> str:
    missing = answer.get("missing")
    if missing in ("flash_attn",) and support:
        return f"actordbg's stand-in for it could not be used ({support}): {env.pip('actordbg')}"
    if missing:
        top = str(missing).partition(".")[0]
        if env.versions.get(top):
            return f"{top} {env.versions[top]} has no {missing}: {env.pip(known_good.requirement(top))}"
        return env.pip(known_good.requirement(top))
    if str(answer["first"]).startswith(("ImportError", "AttributeError")):
        pins = [p for p in ("transformers", "deepspeed", "peft") if env.versions.get(p)]
        return f"versions that do not fit each other; known good: {env.pip(*map(known_good.requirement, pins))}"
    return "run it by hand to see the whole traceback: python -c 'import " + str(answer["module"]) + "'"
