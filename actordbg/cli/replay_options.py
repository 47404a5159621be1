"""The options that describe a replay's actor, shared by `actor init` and `replay`, and how they become a ReplayConfig.

Every option is None unless it was given, so that `actordbg.toml` can fill in what the command line left out::

    [replay]
    model = "/models/llama-3.1-8b"
    backend = "deepspeed"
    zero-stage = 3
    packing = true
    timeout = 900

A flag wins over the file, the file over ReplayConfig's own default. What is still open then follows the dump's record
(`actordbg.config.choices`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.base.errors import UsageError

if TYPE_CHECKING:
    from actordbg.formats.replay_record import ReplayConfig


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="The actor")


Model = Annotated[
    str | None,
    _option(
        "--model",
        metavar="NAME|PATH|tiny",
        help="A model's folder, a hub name, or `tiny`, a random Llama that actordbg builds (default).",
    ),
]
NumLayers = Annotated[int | None, _option("--num-layers", help="Only the model's first N layers.")]
Dtype = Annotated[
    str | None,
    _option(
        "--dtype",
        metavar="bf16|fp16|fp32",
        help="Parameters' dtype (default: the recorded one; else bf16, or fp32 for `tiny` on a CPU).",
    ),
]
Attn = Annotated[
    str | None,
    _option(
        "--attn",
        metavar="flash_attention_2|sdpa|eager",
        help="Attention (default: flash_attention_2 with CUDA and flash-attn, else sdpa).",
    ),
]
NoFlashAttn = Annotated[bool, _option("--no-flash-attn", help="The same as --attn sdpa.")]
Packing = Annotated[
    bool | None, _option("--packing/--no-packing", help="Pack rows without their padding (default: as recorded).")
]
Compile = Annotated[bool | None, _option("--compile/--no-compile", help="torch.compile the model.")]
CompileBackend = Annotated[
    str | None,
    _option(
        "--compile-backend",
        metavar="inductor|aot_eager|eager",
        help="What --compile hands its graphs to (default inductor); the others leave out code generation, and autograd "
        "tracing too.",
    ),
]
Deepcompile = Annotated[
    bool | None, _option("--deepcompile/--no-deepcompile", help="DeepSpeed's DeepCompile (needs CUDA).")
]
Backend = Annotated[
    str | None,
    _option(
        "--backend",
        metavar="plain|deepspeed|fsdp2",
        help="OpenRLHF's Actor alone (default), in its DeepSpeed strategy, or in PyTorch's fully_shard.",
    ),
]
ZeroStage = Annotated[
    int | None, _option("--zero-stage", metavar="0..3", help="ZeRO stage of the deepspeed backend (default 0).")
]
Nproc = Annotated[int | None, _option("--nproc", metavar="N", help="Processes, one for each GPU (default 1).")]
Backward = Annotated[
    bool | None,
    _option("--backward/--no-backward", help="Backward too (default: where the recorded call had gradients)."),
]
Seed = Annotated[
    int | None,
    _option(
        "--seed", metavar="N", help="Set before each input (default: the generator states that were recorded, else 0)."
    ),
]
Temperature = Annotated[
    float | None, _option("--temperature", help="Divides the logits (default: as recorded, else 1).")
]
Timeout = Annotated[
    float | None,
    _option("--timeout", metavar="SECONDS", help="One input may take this long, compiling included (default 600)."),
]

Tp = Annotated[
    int | None,
    _option("--tp", metavar="N", help="Tensor parallelism over N processes, by the model's own plan (fsdp2)."),
]
Ring = Annotated[int | None, _option("--ring", metavar="N", help="Ring attention over N processes (needs --packing).")]
DistBackend = Annotated[
    str | None,
    _option("--dist-backend", metavar="gloo|nccl", help="Of torch.distributed (default: nccl with CUDA, else gloo)."),
]
Align = Annotated[
    str | None,
    _option(
        "--align",
        metavar="same|rank|shuffle",
        help="All processes the same input; each its own rank's of the same call; or each its share in an order of its "
        "own, as many as it has, which may hang. Default: each its share, kept in step.",
    ),
]
Oracle = Annotated[
    str | None,
    _option(
        "--oracle",
        metavar="[fp32|fp64]",
        help="The truth instead of the Actor: each row alone, unpadded, eager attention in fp32 (or fp64), plain PyTorch, "
        "the same weights. (bf16, fp16: what that dtype costs by itself.)",
    ),
]

_KINDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "num_layers": (int,),
    "dtype": (str,),
    "attn": (str,),
    "packing": (bool,),
    "compile": (bool,),
    "compile_backend": (str,),
    "deepcompile": (bool,),
    "backend": (str,),
    "zero_stage": (int,),
    "nproc": (int,),
    "backward": (bool,),
    "seed": (int,),
    "temperature": (int, float),
    "timeout": (int, float),
    "keep_tensors": (bool,),
    "keep_gradients": (bool,),
    "tp": (int,),
    "ring": (int,),
    "dist_backend": (str,),
    "align": (str,),
}


_BELONGS = {
    "zero_stage": ("deepspeed",),
    "deepcompile": ("deepspeed",),
    "tp": ("fsdp2",),
    "ring": ("deepspeed", "fsdp2"),
    "dist_backend": ("deepspeed", "fsdp2"),
}
"""Backends to which a setting means something."""


def build_config(defaults: Mapping[str, Any], flags: Mapping[str, Any], *, no_flash_attn: bool = False) -> ReplayConfig:
    """A checked ReplayConfig from `actordbg.toml`'s [replay] table and the flags that were given (None: not given).

    Both use the options' names, with `-` or `_`. Raises UsageError for unknown keys, wrong types and values that mean nothing.
    """
    from actordbg.config.choices import BESIDE_ORACLE, validate
    from actordbg.formats.replay_record import ReplayConfig

    given = {name: value for name, value in flags.items() if value is not None}
    values = _from_file(defaults) | given
    if no_flash_attn:
        if flags.get("attn") not in (None, "sdpa"):
            raise UsageError(
                f"--no-flash-attn and --attn {flags['attn']} contradict each other", hint="give one of them"
            )
        values["attn"] = "sdpa"
    if "oracle" in given:  # the file says how to replay; what the truth decides by itself it does not contradict
        values = {name: value for name, value in values.items() if name in given or name not in BESIDE_ORACLE}
    if "backend" in given:  # nor what the file says for the backend that it names
        idle = {name for name, backends in _BELONGS.items() if given["backend"] not in backends}
        values = {name: value for name, value in values.items() if name in given or name not in idle}
    if "nproc" not in values:
        values["nproc"] = values.get("tp", 1) * values.get("ring", 1)
    if "timeout" in values:
        values["timeout_s"] = float(values.pop("timeout"))
    config = ReplayConfig(**values)
    validate(config)
    return config


def _from_file(defaults: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, value in defaults.items():
        name = key.replace("-", "_")
        if name not in _KINDS:
            raise UsageError(
                f"actordbg.toml: [replay] has an unknown key {key!r}", hint=f"known: {', '.join(sorted(_KINDS))}"
            )
        if type(value) not in _KINDS[name]:
            raise UsageError(
                f"actordbg.toml: [replay] {key} = {value!r} is not of type {_KINDS[name][-1].__name__}",
                hint="correct the file",
            )
        values[name] = value
    return values
