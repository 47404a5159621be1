"""Reads an `accelerate config` as settings of a replay: `--accelerate-config FILE|default|JSON`, or a mapping in Python.

| In the file | Setting |
|---|---|
| `distributed_type` FSDP, DEEPSPEED, any other | `backend` fsdp2, deepspeed, plain |
| `num_processes` | `nproc` |
| `mixed_precision` bf16, fp16, no | `dtype` bf16, fp16, fp32 |
| `deepspeed_config.zero_stage` | `zero_stage` |
| `parallelism_config.parallelism_config_tp_size` | `tp` |
| `dynamo_config.dynamo_backend` | `compile`, `compile_backend` |

What fsdp2 does in any case (`DONE`) needs no setting. Every other key that is on is named as not used. Neither accelerate nor
torch is imported, so the file may be another machine's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from actordbg.base.errors import Unsupported, UsageError, require_package
from actordbg.base.owners import user_cache
from actordbg.config.replay_config import COMPILE_BACKENDS, SETTINGS
from actordbg.config.sources import beneath

FLAG = "--accelerate-config"
_BACKENDS = {"FSDP": "fsdp2", "DEEPSPEED": "deepspeed"}
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "False": "fp32"}  # YAML reads a bare `no` as False
_STAGE, _TP = "deepspeed_config.zero_stage", "parallelism_config.parallelism_config_tp_size"
_DYNAMO = "dynamo_config.dynamo_backend"
_HONORED = ("distributed_type", "num_processes", "mixed_precision", _STAGE, _TP, _DYNAMO)
_OFF = ("None", "False", "no", "none", "", "[]")
DONE: Mapping[str, tuple[str, ...]] = {
    "fsdp_config.fsdp_version": ("2",),
    "fsdp_config.fsdp_reshard_after_forward": ("True", "FULL_SHARD"),
    "fsdp_config.fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
}
"""What fsdp2 does in any case: the values of a key that ask for it."""
_IDLE = (
    "compute_environment", "debug", "num_machines", "machine_rank", "rdzv_backend", "same_network", "main_training_function",
    "main_process_ip", "main_process_port", "fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_cpu_ram_efficient_loading",
)  # fmt: skip
"""Keys that say how several machines meet, or how a checkpoint is written."""


def with_accelerate(
    given: Mapping[str, Any], config: str | Mapping[str, Any], lists: Collection[str], note: Callable[[str], None]
) -> dict[str, Any]:
    """Add an accelerate config's settings to those given, which win. lists: settings whose values are comma lists.

    Notes what was read and what is not used. Raises what `read_accelerate` raises.
    """
    name, settings, unused = read_accelerate(config)
    added = beneath(given, settings)
    words = [f"{SETTINGS[key].option} {SETTINGS[key].typed(value)}" for key, value in added.items()]
    read = ", ".join(words) or "nothing beyond the given settings"
    left = f"; not used: {', '.join(unused)}" if unused else ""
    note(f"from {name}: {read}{left}")
    return {key: SETTINGS[key].typed(value) if key in lists else value for key, value in added.items()} | dict(given)


def read_accelerate(config: str | Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Read a config: its name in words, the settings, and the keys that are on and not used, with their values.

    config: a file, `default` for accelerate's own, or a mapping, also as JSON. Raises UsageError for anything else and for
    invalid values, Unsupported for fp8 and for several machines.
    """
    name, data = _load(config)
    if not isinstance(data, Mapping) or "distributed_type" not in data:
        raise UsageError(f"{name} is not an accelerate config: it has no distributed_type", hint="run `accelerate config`")
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= {f"{key}.{inner}": each for inner, each in value.items()} if isinstance(value, Mapping) else {str(key): value}
    machines, processes = flat.get("num_machines") or 1, flat.get("num_processes") or 1
    if machines != 1:
        raise Unsupported(
            f"{name} is for {machines} machines, and a replay on several machines needs a Ray cluster",
            hint="set num_machines: 1 in a copy of it, and add --engine ray --gpus-per-node N",
        )
    precision = str(flat.get("mixed_precision") or "no")
    if precision not in _PRECISIONS:
        raise Unsupported(f"{name}: a replay cannot run in mixed_precision {precision:.20}", hint="pass --dtype bf16")
    settings: dict[str, Any] = {"backend": _BACKENDS.get(str(flat["distributed_type"]).upper(), "plain"), "nproc": processes}
    settings["dtype"] = _PRECISIONS[precision]
    if settings["backend"] == "deepspeed" and flat.get(_STAGE) is not None:
        settings["zero_stage"] = flat[_STAGE]
    if flat.get(_TP) not in (None, 1):
        settings["tp"] = flat[_TP]
    compiler = str(flat.get(_DYNAMO)).lower()
    if compiler in COMPILE_BACKENDS:
        settings |= {"compile": True, "compile_backend": compiler}
    for key, value in settings.items():
        if not (SETTINGS[key].takes(value) and SETTINGS[key].allows(value)):
            raise UsageError(f"{name}: {value!r:.40} is not a value of {SETTINGS[key].flag}", hint=SETTINGS[key].hint)
    known = (*_HONORED, *_IDLE)
    unused = [f"{key} {value}" for key, value in flat.items() if key not in known and str(value) not in DONE.get(key, _OFF)]
    return name, settings, unused


def _load(config: str | Mapping[str, Any]) -> tuple[str, Any]:
    if isinstance(config, Mapping):
        return "the mapping", config
    require_package(FLAG, "yaml", "pyyaml")
    text, name = config, "the mapping"
    if not config.lstrip().startswith("{"):
        path = _default_file() if config == "default" else Path(config)
        if not path.is_file():
            raise UsageError(f"{FLAG} {path} is not a file", hint="run `accelerate config`, and pass `default` for its file")
        text, name = path.read_text(errors="replace"), path.name
    try:
        return name, import_module("yaml").safe_load(text)  # JSON is YAML
    except Exception as error:  # noqa: BLE001 - yaml raises its own
        raise UsageError(f"{name} cannot be read: {error}"[:400], hint="correct it, or run `accelerate config`") from None


def _default_file() -> Path:
    """Return where `accelerate config` writes its file."""
    hub = Path(os.environ.get("HF_HOME") or user_cache().parent / "huggingface")
    return hub / "accelerate" / "default_config.yaml"
