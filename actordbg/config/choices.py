"""Resolve a replay's configuration: every None gets a value.

`ReplayConfig` has what the user requested; a field that is None means "as the dump's own record has it, else what suits this
machine". This module makes those decisions, in one place and without torch, so that the desk can show them before anything
starts and the worker decides the same.

| Field | From the record | Else |
|---|---|---|
| model | never: a run's model may be gone or too large, so `tiny` stays the default | `tiny` |
| dtype | `model_dtype` | bf16 with CUDA; on a CPU fp32 for `tiny`, and bf16 (the trainer's default) for other models |
| attn | never: it is not recorded | flash_attention_2 with CUDA and flash-attn, else sdpa |
| packing | `packing_samples` | off |
| temperature | `temperature` | 1.0 |
| backend, zero_stage | those of a DeepSpeed engine (`recorded_backend`), before a replay is planned | plain |
| through | the Actor's own code if it is the home trainer's; `rows` for what an adapter recorded | the home trainer's |
| backward | `grad_enabled`: a training pass is replayed with its backward | off |
| seed | before each forward the RNG states of *its* dump (`actordbg.actor.randomness`) | 0 |

The truth (`truth`) also fixes other fields: no packing, eager attention, nothing around the model. The weights are rounded to its
`dtype` and then widened.

Packing, temperature and backward follow *each* dump's record where the configuration leaves them open (see
`ActorSession.run`); what is decided here from the first dump decides how the engine is built.

Example:
    >>> choose(ReplayConfig(), None, Facts(cuda=False, gpus=0, flash_attn=False)).dtype
    'fp32'
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.config.replay_config import DEFAULT_SEED, DTYPES, ENDPOINT, SETTINGS, TINY, ReplayConfig, validate
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.dumpfile import IMPORTED

_PACKAGES = ("actordbg", "openrlhf", "torch", "transformers", "deepspeed", "flash-attn", "ring-flash-attn", "safetensors")


@dataclass(frozen=True)
class Facts:
    """Facts of this environment that configurations depend on. `gpus` counts CUDA devices, `cpus` the CPU cores that a
    process may use, 0 where that is unknown. cpu_fp16: the CPU computes in fp16."""

    cuda: bool
    gpus: int
    flash_attn: bool
    compiler: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 0
    cpu_fp16: bool = False


def gather_facts(*, cuda: bool | None = None, gpus: int | None = None) -> Facts:
    """Gather the facts of this process's environment, without importing torch.

    A worker passes `cuda` and `gpus` as torch sees them; the desk leaves them out and goes by the NVIDIA driver's device
    files, `CUDA_VISIBLE_DEVICES`, and whether the installed torch is a CPU build.
    """
    if cuda is None and gpus is None and (elsewhere := _elsewhere.get()) is not None:
        return elsewhere
    versions = installed_versions()
    if gpus is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = [path.name for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
        if visible is not None and devices:
            devices = [part for part in visible.split(",") if part.strip() not in ("", "-1")]
        gpus = 0 if "+cpu" in versions.get("torch", "") else len(devices)
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++", "c++"))
    return Facts(
        cuda=bool(gpus) if cuda is None else cuda,
        gpus=gpus,
        flash_attn="flash-attn" in versions,
        compiler=compiler,
        versions=versions,
        cpus=len(os.sched_getaffinity(0)),
        cpu_fp16=_computes_fp16(),
    )


_CPU, _FP16 = Path("/proc/cpuinfo"), {"avx512_fp16", "avx_ne_convert"}
"""Either flag is enough for oneDNN's fp16 kernels (x86 only). DeepSpeed asks torch for the same, by
`torch.ops.mkldnn._is_mkldnn_fp16_supported`."""


def _computes_fp16() -> bool:
    try:
        lines = _CPU.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not _FP16.isdisjoint(flags.split())


_elsewhere: ContextVar[Facts | None] = ContextVar("facts elsewhere", default=None)


@contextlib.contextmanager
def facts_elsewhere(facts: Facts) -> Iterator[None]:
    """Make the desk use these facts inside the block: its replays run on other machines."""
    before = _elsewhere.set(facts)
    try:
        yield
    finally:
        _elsewhere.reset(before)


def are_elsewhere() -> bool:
    """Return whether replays now run on other machines, so that it does not matter what is installed here."""
    return _elsewhere.get() is not None


def installed_versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of python and of those of these packages that are installed, usually those that decide a result."""
    import importlib.metadata  # it imports the parsers of e-mail

    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@dataclass(frozen=True)
class Choices:
    """A configuration with nothing left open. `dtype` is one of DTYPES, `attn` one of ATTENTIONS.

    through: "rows" or "trainer". adapter: what recorded the first dump, None for the trainer that needs none. recorded_model:
    that the first dump names.
    """

    model: str
    dtype: str
    attn: str
    packing: bool
    temperature: float
    backward: bool
    num_layers: int | None = None
    seed: int = DEFAULT_SEED
    through: str = "trainer"
    adapter: str | None = None
    recorded_model: str | None = None


def choose(config: ReplayConfig, defaults: DumpRecord | None, facts: Facts) -> Choices:
    """Decide every open field of `config` from the record `defaults` and the environment; see the module's table."""
    validate(config)
    adapter = adapter_of(defaults.actor) if defaults else None
    recorded = short_dtype(defaults.model_dtype if defaults else None)
    return Choices(
        model=config.model,
        dtype=config.dtype or recorded or ("fp32" if not facts.cuda and config.model == TINY else "bf16"),
        attn="eager" if config.truth else config.attn or ("flash_attention_2" if facts.cuda and facts.flash_attn else "sdpa"),
        packing=not config.truth and first_of(config.packing, defaults and defaults.packing_samples, False),
        temperature=first_of(config.temperature, defaults and defaults.temperature, 1.0),
        backward=first_of(config.backward, defaults and defaults.grad_enabled, False),
        num_layers=config.num_layers,
        seed=first_of(config.seed, DEFAULT_SEED),
        through=through_of(config, adapter),
        adapter=adapter,
        recorded_model=defaults.model_name if defaults else None,
    )


AS_RECORDED = "as recorded"
DEEPSPEED_ABSENT = "recorded under DeepSpeed, which is not installed"


def recorded_backend(record: DumpRecord | None, facts: Facts) -> dict[str, tuple[Any, str]]:
    """Return the backend settings that a call was recorded under, each with its origin in words; {} without DeepSpeed.

    An old pickle names no engine. The scripts that wrote such pickles ran in DeepSpeed jobs. Rows of another trainer's file name
    its layout as their adapter.
    """
    if record is None:
        return {}
    setting = SETTINGS["zero_stage"]
    stage = record.actor.get("zero_stage")
    if not (setting.takes(stage) and setting.allows(stage)):
        stage = None
    old_pickle = record.source == IMPORTED and adapter_of(record.actor) is None
    if stage is None and not old_pickle:
        return {}
    if "deepspeed" not in facts.versions:
        return {"backend": ("plain", DEEPSPEED_ABSENT)}
    if stage is None:
        return {"backend": ("deepspeed", "old pickles are of DeepSpeed jobs")}
    return {"backend": ("deepspeed", AS_RECORDED), "zero_stage": (stage, AS_RECORDED)}


def adapter_of(actor: Mapping[str, Any]) -> str | None:
    """Return the adapter that recorded a call, by the record's facts of the actor; None for the trainer that needs none."""
    label = str(actor.get("actor_class", ""))
    return actor.get("adapter") or (label.partition(".")[0] if "." in label else None)


def through_of(config: ReplayConfig, adapter: str | None) -> str:
    """Return whose code runs, "rows" or "trainer", for dumps of this adapter (None: the home trainer)."""
    return config.through or ("rows" if adapter or config.backend == ENDPOINT else "trainer")


def short_dtype(name: str | None) -> str | None:
    """Return the trainer's name of a torch dtype ("bf16" for "torch.bfloat16"); None if an Actor cannot be built in it."""
    plain = (name or "").removeprefix("torch.")
    return plain if plain in DTYPES else next((short for short, full in DTYPES.items() if full == plain), None)


def is_local(model: str) -> bool:
    """Return whether `model` names a folder on this machine rather than a model of a hub."""
    return Path(model).expanduser().is_dir()


def first_of(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
