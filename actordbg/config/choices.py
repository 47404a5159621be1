"""What a replay's configuration comes to: every None decided, and where each value came from.

`ReplayConfig` says what the user asked for; a field that is None means "as the dump's own record has it, else what suits
this machine". This module makes those decisions, in one place and without torch, so that the desk can show them before
anything starts and the worker decides the same.

| Field | From the record | Else |
|---|---|---|
| model | never: a run's model may be gone or too large, so `tiny` stays the default | `tiny` |
| dtype | `model_dtype` | bf16 with CUDA; on a CPU fp32 for `tiny`, and bf16 (OpenRLHF's default) for other models |
| attn | never: it is not recorded | flash_attention_2 with CUDA and flash-attn, else sdpa |
| packing | `packing_samples` | off |
| temperature | `temperature` | 1.0 |
| backward | `grad_enabled`: a training pass is replayed with its backward | off |
| seed | before each forward the generator states of *its* dump (`actordbg.actor.randomness`) | 0 |

The truth (`oracle`) decides more by itself: no packing, eager attention, nothing around the model. Its `dtype` is the one that
the weights are rounded to before they are raised.

Packing, temperature and backward follow *each* dump's record where the configuration leaves them open (see
`ActorSession.run`); what is decided here from the first dump decides how the engine is built.

Example:
    >>> choose(ReplayConfig(), None, Facts(cuda=False, gpus=0, flash_attn=False)).dtype
    'fp32'
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.replay_record import ReplayConfig

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""OpenRLHF's name of a parameter dtype, and torch's."""
ATTENTIONS = ("flash_attention_2", "sdpa", "eager")
BACKENDS = ("plain", "deepspeed", "fsdp2")
DIST_BACKENDS = ("gloo", "nccl")
ALIGNMENTS = ("same", "rank", "shuffle")
TRUTHS = ("fp32", "fp64")
ORACLES = (*TRUTHS, "bf16", "fp16")
"""What --oracle computes in: a truth, or with the lower dtypes what these cost by themselves."""
VARIATIONS = ("repeat", "repad", "rebatch", "reorder")
"""What `vary` does to an input: see `actordbg.actor.variants`."""
COMPILE_BACKENDS = ("inductor", "aot_eager", "eager")
"""What torch.compile may hand its graphs to; each runs one stage less, which tells which stage breaks."""
TINY = "tiny"
DEFAULT_SEED = 0

_PACKAGES = ("openrlhf", "torch", "transformers", "deepspeed", "flash-attn", "ring-flash-attn", "safetensors")


@dataclass(frozen=True)
class Facts:
    """What this environment has, as far as configurations depend on it. `gpus` counts CUDA devices."""

    cuda: bool
    gpus: int
    flash_attn: bool
    compiler: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)


def gather_facts(*, cuda: bool | None = None, gpus: int | None = None) -> Facts:
    """The facts of this process's environment, without importing torch.

    A worker passes `cuda` and `gpus` as torch sees them; the desk leaves them out and goes by the NVIDIA driver's device
    files, `CUDA_VISIBLE_DEVICES`, and whether the installed torch is a CPU build.
    """
    versions = installed_versions()
    seen = _visible_gpus(versions) if gpus is None else gpus
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++", "c++"))
    return Facts(
        cuda=bool(seen) if cuda is None else cuda,
        gpus=seen,
        flash_attn="flash-attn" in versions,
        compiler=compiler,
        versions=versions,
    )


def installed_versions() -> dict[str, str]:
    """Versions of python and of the packages that a replay's result depends on; those not installed are left out."""
    found = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Choices:
    """A configuration with nothing left open. `dtype` is one of DTYPES, `attn` one of ATTENTIONS."""

    model: str
    dtype: str
    attn: str
    packing: bool
    temperature: float
    backward: bool
    num_layers: int | None = None
    seed: int = DEFAULT_SEED


def choose(config: ReplayConfig, defaults: DumpRecord | None, facts: Facts) -> Choices:
    """Decide every open field of `config` from the record `defaults` and the environment; see the module's table."""
    validate(config)
    return Choices(
        model=config.model,
        dtype=config.dtype or _dtype(config, defaults, facts),
        attn="eager" if config.oracle else config.attn or default_attention(facts),
        packing=not config.oracle and _first(config.packing, defaults and defaults.packing_samples, False),
        temperature=_first(config.temperature, defaults and defaults.temperature, 1.0),
        backward=_first(config.backward, defaults and defaults.grad_enabled, False),
        num_layers=config.num_layers,
        seed=_first(config.seed, DEFAULT_SEED),
    )


def validate(config: ReplayConfig) -> None:
    """Refuse, with UsageError, values that mean nothing on any machine."""
    _one_of("--dtype", config.dtype, tuple(DTYPES))
    _one_of("--attn", config.attn, ATTENTIONS)
    _one_of("--backend", config.backend, BACKENDS)
    _one_of("--compile-backend", config.compile_backend, COMPILE_BACKENDS)
    _one_of("--dist-backend", config.dist_backend, DIST_BACKENDS)
    _one_of("--align", config.align, ALIGNMENTS)
    _one_of("--oracle", config.oracle, ORACLES)
    _one_of("--vary", config.vary, VARIATIONS)
    _only_the_truth(config)
    if config.compile_backend and not config.compile:
        raise UsageError("--compile-backend compiles nothing by itself", hint="add --compile")
    if config.zero_stage not in (0, 1, 2, 3):
        raise UsageError(f"--zero-stage {config.zero_stage} does not exist", hint="ZeRO stages are 0, 1, 2 and 3")
    if config.backend != "deepspeed" and config.zero_stage:
        raise UsageError("--zero-stage needs DeepSpeed", hint="add --backend deepspeed, or leave --zero-stage out")
    if config.backend != "deepspeed" and config.deepcompile:
        raise UsageError("--deepcompile needs DeepSpeed", hint="add --backend deepspeed, or use --compile")
    if config.keep_gradients and config.backward is False:
        raise UsageError("--keep-gradients keeps nothing without a backward", hint="leave --no-backward out")
    for option, size in (("--tp", config.tp), ("--ring", config.ring)):
        if size < 1:
            raise UsageError(f"{option} {size} makes no group", hint=f"{option} 1 or more")
    if config.nproc < 1:
        raise UsageError(f"--nproc {config.nproc} starts nothing", hint="--nproc 1 or more")
    if config.nproc % (config.tp * config.ring):
        raise UsageError(
            f"--nproc {config.nproc} cannot be divided into groups of {config.tp * config.ring} (--tp x --ring)",
            hint=f"--nproc {config.tp * config.ring}, or a multiple of it",
        )
    if config.num_layers is not None and config.num_layers < 1:
        raise UsageError(f"--num-layers {config.num_layers} leaves no model", hint="--num-layers 1 or more")
    if not config.timeout_s > 0:
        raise UsageError(f"--timeout {config.timeout_s:g} gives no input a chance", hint="seconds, more than 0")
    if config.temperature is not None and not config.temperature > 0:
        raise UsageError(f"--temperature {config.temperature} divides by nothing", hint="a temperature above 0")


BESIDE_ORACLE: Mapping[str, tuple[Any, ...]] = {
    "attn": (None, "eager"),
    "packing": (None, False),
    "compile": (False,),
    "compile_backend": (None,),
    "deepcompile": (False,),
    "backend": ("plain",),
    "zero_stage": (0,),
    "tp": (1,),
    "ring": (1,),
    "align": (None,),
}
"""What the truth decides by itself, and the values that do not contradict it."""


def _only_the_truth(config: ReplayConfig) -> None:
    """Refuse what contradicts --oracle: a truth that was packed, compiled or sharded would be none."""
    if config.oracle is None:
        return
    for name, allowed in BESIDE_ORACLE.items():
        value = getattr(config, name)
        if value not in allowed:
            option = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
            raise UsageError(
                f"--oracle and {option} contradict each other: the truth is each row alone, unpadded, with eager "
                "attention in plain PyTorch",
                hint=f"leave {option} out",
            )


def default_attention(facts: Facts) -> str:
    """The attention that runs where none is asked for: OpenRLHF's default where it can, else sdpa."""
    return "flash_attention_2" if facts.cuda and facts.flash_attn else "sdpa"


def short_dtype(name: str | None) -> str | None:
    """OpenRLHF's name of a torch dtype ("bf16" for "torch.bfloat16"); None where an Actor cannot be built in it."""
    plain = (name or "").removeprefix("torch.")
    return plain if plain in DTYPES else next((short for short, full in DTYPES.items() if full == plain), None)


def is_local(model: str) -> bool:
    """Whether `model` names a folder on this machine rather than a model of a hub."""
    return Path(model).expanduser().is_dir()


def _dtype(config: ReplayConfig, defaults: DumpRecord | None, facts: Facts) -> str:
    recorded = short_dtype(defaults.model_dtype if defaults else None)
    if recorded:
        return recorded
    return "fp32" if not facts.cuda and config.model == TINY else "bf16"


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def _one_of(option: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise UsageError(f"{option} {value} is not known", hint=f"one of: {', '.join(allowed)}")


def _visible_gpus(versions: Mapping[str, str]) -> int:
    if "+cpu" in versions.get("torch", ""):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    if visible is not None and devices:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(devices)
