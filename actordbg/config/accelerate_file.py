"""`--accelerate-config PATH|default`: the settings that an `accelerate config` file comes to, read by accelerate's own loader.

| In the file | Setting |
|---|---|
| `distributed_type` DEEPSPEED, FSDP, else | `--backend` deepspeed, fsdp2, plain |
| `num_processes` | `--nproc` |
| `deepspeed_config.zero_stage` | `--zero-stage` |
| `mixed_precision` bf16, fp16, no | `--dtype` bf16, fp16, fp32 |
| `dynamo_config.dynamo_backend` inductor, aot_eager, eager | `--compile --compile-backend` |

A flag wins. Every other key that says something is named as not honoured. A replay runs on one machine, so a file for several
is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from actordbg.base.errors import EnvironmentProblem, Unsupported, UsageError
from actordbg.config.replay_config import COMPILE_BACKENDS

FLAG = "--accelerate-config"
_DTYPES = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}
_SILENT = {"compute_environment", "debug", "num_machines", "machine_rank", "rdzv_backend", "main_training_function", "use_cpu"}
"""Keys that mean nothing for one machine, and what accelerate writes into every file."""


def read_accelerate(named: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(settings by name, keys that are not honoured). UsageError for a file that accelerate does not read, EnvironmentProblem
    without accelerate, Unsupported for several machines.
    """
    try:
        loader = import_module("accelerate.commands.config.config_args")
    except ImportError as error:
        raise EnvironmentProblem(
            f"{FLAG} needs accelerate, which cannot be imported: {error}", hint="pip install accelerate"
        ) from None
    path = Path(loader.default_config_file) if named == "default" else Path(named)
    if not path.is_file():
        raise UsageError(
            f"{FLAG} {path} is not a file", hint="`accelerate config` writes one; its default is called `default` here"
        )
    try:
        found = loader.load_config_from_file(str(path))
        told = dict(found.to_dict()) if hasattr(found, "to_dict") else dict(vars(found))
    except Exception as error:  # noqa: BLE001 - yaml, json and accelerate raise what they like for a damaged file
        raise UsageError(f"accelerate cannot read {path}: {error}"[:400], hint="correct it, or run `accelerate config`") from None
    machines = told.get("num_machines") or 1
    if machines != 1:
        raise Unsupported(
            f"{path} is for {machines} machines, and a replay runs on one",
            hint="run it on one machine with --nproc as many as its GPUs; `num_machines: 1` in a copy of the file",
        )
    return _settings(told), tuple(_not_honoured(told))


def _settings(told: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(getattr(told.get("distributed_type"), "value", told.get("distributed_type"))).upper()
    settings: dict[str, Any] = {"backend": {"DEEPSPEED": "deepspeed", "FSDP": "fsdp2"}.get(kind, "plain")}
    if isinstance(told.get("num_processes"), int) and told["num_processes"] > 0:
        settings["nproc"] = told["num_processes"]
    stage = (told.get("deepspeed_config") or {}).get("zero_stage")
    if settings["backend"] == "deepspeed" and isinstance(stage, int):
        settings["zero_stage"] = stage
    if (dtype := _DTYPES.get(str(told.get("mixed_precision")))) is not None:
        settings["dtype"] = dtype
    dynamo = str((told.get("dynamo_config") or {}).get("dynamo_backend", "")).lower()
    if dynamo in COMPILE_BACKENDS:
        settings |= {"compile": True, "compile_backend": dynamo}
    return settings


def _not_honoured(told: Mapping[str, Any]) -> Iterator[str]:
    taken = {
        "distributed_type",
        "num_processes",
        "mixed_precision",
        "deepspeed_config.zero_stage",
        "dynamo_config.dynamo_backend",
    }
    for key, value in told.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{name}" for name, one in value.items() if f"{key}.{name}" not in taken and one is not None)
        elif key not in taken | _SILENT and value not in (None, False, {}, [], ""):
            yield key
