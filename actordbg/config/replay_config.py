"""The table of settings: each field of ReplayConfig is a setting, with all that the product knows about it.

To add a setting, add a field here; the backend that honors it is the only other place. `actordbg.config.setting` explains the
facts, CONTRIBUTING.md has the recipe. Options, labels and columns follow the order of the fields; a matrix varies the first
settings slowest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from actordbg.base.errors import NewerFormat, UsageError
from actordbg.config.setting import Setting, setting, table_of

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The trainer's name of a parameter dtype, and torch's."""
ATTENTIONS = ("flash_attention_2", "sdpa", "eager")
ENDPOINT = "endpoint"
LAUNCHERS = {"plain": "python", "deepspeed": "deepspeed", "fsdp2": "torchrun", ENDPOINT: "python"}
"""The backends, and what starts their workers. Under `python` ranks are independent processes; the others compute together."""
BACKENDS = tuple(LAUNCHERS)
TOGETHER = tuple(name for name, launcher in LAUNCHERS.items() if launcher != "python")
TRUTHS = ("fp32", "fp64")
WIDER = {"bf16": "fp32", "fp16": "fp32", "fp32": "fp64"}
"""The dtype of each dtype's truth: its rounding is measured against that."""
ANY_WIDER = "wider"
"""Stands for the dtype in WIDER."""
LONE_ROWS = (*TRUTHS, "bf16", "fp16")
"""Dtypes of --truth: a truth, or with the lower dtypes the cost of the dtype alone."""
VARIATIONS = ("repeat", "repad", "rebatch", "reorder")
"""How `vary` changes an input: see `actordbg.actor.changes`."""
COMPILE_BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of torch.compile; each runs one stage less than the backend before it, which shows the stage that breaks."""
ACCEPTABLE = ("nondeterministic",)
"""Values of `--accept`: verdicts that the user may exclude from the failures of the configuration."""
USUAL_LAWS, ALL_LAWS = 2, 10**6
"""Number of inputs whose laws `matrix`, and `--laws` without a number, checks; and the number that `--laws all` stands for."""
TINY = "tiny"
TOY_MODEL = "TOY MODEL"
"""Name of `tiny` beside each of its figures: its speed and its memory say nothing about a user's model."""
DEFAULT_SEED = 0
NAME = re.compile(r"[A-Za-z][\w.+-]{0,63}\Z")
"""Valid names of replays: ids begin with a digit."""
NOT_NAMES = ("last", "all", "truth", "golden", "recorded")
"""Words that mean other things where a replay is named."""

_REPLAYS = ("replay", "check", "noise", "matrix")
_JUDGES = ("replay", "check", "matrix")
_NO_TRAINING = (*_REPLAYS, "actor init")
_NO_CURVE = (*_REPLAYS, "actor init", "train-check", "step")
deciding_setting = partial(setting, numbers=True, cost=True)
"""A setting that changes the results, and time or memory."""
run_setting = partial(setting, switchable=True, resolved=None)
"""A setting of the run, not of the Actor: workers do not report it."""


@dataclass(frozen=True)
class ReplayConfig:
    """A replay's configuration as requested. None means: as the dump's own record has it, else the backend's default."""

    model: str = deciding_setting(
        TINY,
        help="Model folder, hub name, or `tiny`, a built-in random Llama (default).",
        rank=3, metavar="NAME|PATH|tiny", column="model: tiny, a path or a hub name",
        words={TINY: f"{TOY_MODEL} ({TINY})"}, decides_truth=True, commands=_NO_CURVE,
    )  # fmt: skip
    through: str | None = deciding_setting(
        None,
        help="rows: a plain transformers model, no trainer; trainer: the trainer's own code (default: set by the recorder).",
        column="whose code computed the results: rows or trainer",
        values=("rows", "trainer"), words={"rows": "on the rows", "trainer": "through the trainer"},
        unset="through what recorded it", axis="default: set by the recorder", beside_truth=("rows",),
    )  # fmt: skip
    num_layers: int | None = deciding_setting(
        None,
        help="Only the model's first N layers.",
        column="layers kept of the model; NULL for all",
        least=1, words="{} layer", unset="all layers", decides_truth=True, resolved=None,
    )  # fmt: skip
    backend: str = deciding_setting(
        "plain",
        help="Plain PyTorch, the trainer's DeepSpeed strategy, FSDP2, or an inference server (default: as recorded, else plain).",
        rank=4, column="plain, deepspeed, ...",
        values=BACKENDS, words="{}", axis="default: as `replay`'s", beside_truth=(),
    )  # fmt: skip
    url: str | None = deciding_setting(
        None,
        help="Address of the server that the endpoint backend asks: http://127.0.0.1:8000, or https.",
        rank=30, metavar="URL", column="address of the server that scored the inputs",
        words="at {}", unset="no server", backends=(ENDPOINT,), commands=("replay",), resolved=None,
        needs="--backend endpoint", beside_truth=(),
    )  # fmt: skip
    served_model: str | None = deciding_setting(
        None,
        help="Name of the model on that server (default: its only one).",
        rank=31, metavar="NAME", column="name of the model on the server that scored the inputs",
        words="serving {}", unset="the only model served", backends=(ENDPOINT,), commands=("replay",),
        needs="--backend endpoint", beside_truth=(),
    )  # fmt: skip
    zero_stage: int = deciding_setting(
        0,
        help="ZeRO stage of the deepspeed backend (default: as recorded, else 0).",
        rank=15, metavar="0..3", column="ZeRO stage",
        values=(0, 1, 2, 3), least=0, words="ZeRO {}", axis="for cells with deepspeed", backends=("deepspeed",),
        needs="--backend deepspeed", beside_truth=(),
    )  # fmt: skip
    nproc: int = deciding_setting(
        1,
        help="Processes, one per GPU (default 1).",
        rank=5, column="processes",
        least=1, words="{} process", brief="{} proc", quiet=(1,), axis="default: 1, or what tp and ring need",
        resolved="world_size",
    )  # fmt: skip
    tp: int = deciding_setting(
        1,
        help="Tensor-parallel size, by the model's own plan (fsdp2).",
        column="ranks of a tensor-parallel group",
        least=1, words="tp {}", quiet=(1,), axis="tensor-parallel sizes, for cells with fsdp2", backends=("fsdp2",),
        needs="--backend fsdp2", beside_truth=(),
    )  # fmt: skip
    ring: int = deciding_setting(
        1,
        help="Ring-attention size (needs --packing).",
        column="ranks of a ring-attention group",
        least=1, words="ring {}", quiet=(1,), axis="ring sizes, for packed cells of deepspeed and fsdp2",
        backends=TOGETHER, needs="--backend fsdp2, or deepspeed", beside_truth=(),
    )  # fmt: skip
    dist_backend: str | None = deciding_setting(
        None,
        help="torch.distributed backend (default: nccl with CUDA, else gloo); --dist-plugin adds others.",
        metavar="gloo|nccl|NAME", column="gloo or nccl; NULL: chosen by device",
        words="over {}", unset="no process group", quiet=("gloo", "nccl"), backends=TOGETHER,
    )  # fmt: skip
    dtype: str | None = deciding_setting(
        None,
        help="Parameter dtype (default: as recorded, else bf16; fp32 for `tiny` on a CPU).",
        rank=6, column="bf16, fp16 or fp32",
        values=tuple(DTYPES), words="{}", unset="the recorded dtype", axis="default: as `replay`'s", decides_truth=True,
    )  # fmt: skip
    attn: str | None = deciding_setting(
        None,
        help="Attention (default: flash_attention_2 with CUDA and flash-attn, else sdpa).",
        rank=7, column="attention: flash_attention_2, sdpa or eager",
        values=ATTENTIONS, words="{}", brief={"flash_attention_2": "flash"}, unset="the machine's attention",
        axis="default: flash_attention_2,sdpa", axis_values=("flash_attention_2", "sdpa"),
        shorthands={"flash-attn": "flash_attention_2", "no-flash-attn": "sdpa"},
        switchable=True, beside_truth=("eager",),
    )  # fmt: skip
    compile: bool = deciding_setting(
        False,
        help="torch.compile the model.",
        rank=9, column="whether torch.compile was on",
        words=("not compiled", "compiled"), quiet=(False,), axis="default: both", axis_values=(False, True),
        switchable=True, beside_truth=(),
    )  # fmt: skip
    compile_backend: str | None = deciding_setting(
        None,
        help="Backend of torch.compile (default inductor). aot_eager skips code generation; eager also skips AOTAutograd.",
        column="what torch.compile was told to use: inductor, aot_eager or eager",
        values=COMPILE_BACKENDS, words="compile backend {}", brief={}, unset="no compile backend", quiet=("inductor",),
        axis="for compiled cells", needs="--compile on, or off,on", switchable=True, beside_truth=(),
    )  # fmt: skip
    deepcompile: bool = deciding_setting(
        False,
        help="DeepSpeed's DeepCompile (needs CUDA).",
        column="whether DeepSpeed's DeepCompile was on",
        words=("no DeepCompile", "DeepCompile"), quiet=(False,), axis="needs CUDA, for cells with deepspeed",
        backends=("deepspeed",), needs="--backend deepspeed", beside_truth=(),
    )  # fmt: skip
    packing: bool | None = deciding_setting(
        None,
        help="Pack rows, dropping padding (default: as recorded).",
        rank=8, column="whether samples were packed",
        words=("not packed", "packed"), unset="packed as recorded", axis="default: both", axis_values=(False, True),
        switchable=True, beside_truth=(False,),
    )  # fmt: skip
    backward: bool | None = setting(
        None,
        help="Also run backward (default: if the recorded call did).",
        rank=16, column="whether backward also ran",
        words=("forward only", "with backward"), unset="backward as recorded", quiet=(False, True), cost=True,
        commands=_NO_TRAINING,
    )  # fmt: skip
    temperature: float | None = setting(
        None,
        help="Logit divisor (default: as recorded, else 1).",
        column="temperature that logits were divided by",
        above=0, words="temperature {:g}", unset="the recorded temperature", quiet=(1.0,), numbers=True, switchable=True,
        decides_truth=True,
    )  # fmt: skip
    routing: str | None = setting(
        None,
        help="recorded: force the experts of the rollout, where the call has them; free: the router chooses (default: recorded).",
        column="experts of a mixture: recorded or free; NULL: as recorded where the call has them",
        values=("recorded", "free"), words="routing {}", unset="experts as recorded", numbers=True, switchable=True,
        decides_truth=True, resolved=None,
    )  # fmt: skip
    seed: int | None = setting(
        None,
        help="RNG seed for each input (default: the recorded RNG state, else 0).",
        column="random seed",
        words="seed {}", unset="the recorded RNG state", numbers=True, switchable=True, resolved=None,
    )  # fmt: skip
    align: str | None = setting(
        None,
        help="same: every rank runs the same input. rank: its own input of the recorded call. shuffle: its share, shuffled, in "
        "unequal numbers; may hang. Default: its share, in step.",
        column="which rank gets which input: same, rank or shuffle; NULL: each rank its share",
        values=("same", "rank", "shuffle"), words="align {}", unset="each rank its share", commands=_REPLAYS,
        numbers=True, resolved=None, beside_truth=(),
    )  # fmt: skip
    truth: str | None = deciding_setting(
        None,
        help="Compute the truth instead: the same weights in plain PyTorch, one unpadded row at a time, eager, in fp32 or fp64 "
        "(bf16, fp16: that dtype's own rounding).",
        metavar="[fp32|fp64]", column="dtype of the truth, fp32 or fp64; NULL if the replay is not a truth",
        stored="oracle", resolved="oracle", bare="fp32", values=LONE_ROWS, words="the truth in {}",
        unset="no truth", commands=("replay", "noise"), flag_only=True,
        decides_truth=True,
    )  # fmt: skip
    vary: str | None = setting(
        None,
        help="How the inputs are varied to measure noise.",
        column="how inputs were varied to measure noise; NULL if they were not",
        values=VARIATIONS, words="varied: {}", unset="not varied", commands=(), flag_only=True, numbers=True,
        switchable=True, decides_truth=True, resolved=None,
    )  # fmt: skip
    planted: bool = setting(
        False,
        help="Also compute planted faults of known sizes, to see which would be detected.",
        column="whether planted faults of known sizes were also computed, for --power",
        words=("no fault planted", "with planted faults"), quiet=(False,), commands=(), flag_only=True, decides_truth=True,
        resolved=None,
    )  # fmt: skip
    causes: str | None = setting(
        None,
        help="Also compute the truth under causes of wrong log-probs, to name the cause that a run has.",
        column="causes of wrong log-probs that the truth was also computed under: all, or NAME=SIZE,...; NULL if none",
        words="under causes ({})", unset="no causes", commands=(), flag_only=True, decides_truth=True,
        resolved=None,
    )  # fmt: skip
    timeout_s: float = run_setting(
        600.0,
        help="Time limit per input, compilation included (default 600).",
        rank=18, metavar="SECONDS", column="time limit of each input, in seconds",
        option="timeout", above=0, words="timeout {:g} s", commands=_NO_CURVE,
    )  # fmt: skip
    keep_tensors: bool = run_setting(
        True,
        help="Save log-probs and entropies for `compare` (default: on).",
        column="whether outputs were saved under tensors/",
        words=("outputs not kept", "outputs kept"), commands=("replay",),
    )  # fmt: skip
    keep_gradients: bool = run_setting(
        False,
        help="Also save parameter gradients, whole or a fixed sample.",
        column="whether parameter gradients were saved there as well",
        words=("gradients not kept", "gradients kept"), commands=_JUDGES,
    )  # fmt: skip
    memory_snapshot: bool = run_setting(
        False,
        help="Save torch's CUDA allocation history, one file per rank.",
        column="whether torch's history of CUDA allocations was saved",
        words=("allocations not recorded", "allocations recorded"), commands=("replay",), beside_truth=(),
    )  # fmt: skip
    laws: int = run_setting(
        0,
        help=f"Check the laws (invariance checks) on N inputs ({USUAL_LAWS} without a number).",
        metavar="[N|all]", column="number of inputs whose laws were checked",
        least=0, named={"all": ALL_LAWS}, bare=str(USUAL_LAWS), shorthands={"no-laws": 0}, words="laws of {} input",
        commands=_JUDGES, beside_truth=(),
    )  # fmt: skip
    name: str | None = run_setting(
        None,
        help="Name it, for `report NAME` or `compare NAME truth` (the newest such replay wins).",
        metavar="NAME", column="the replay's name; NULL without --name",
        words="called {}", commands=("replay", "check"), flag_only=True,
    )  # fmt: skip
    accept: str | None = run_setting(
        None,
        help="Do not fail on this law verdict.",
        column="the accepted law verdict; NULL if none",
        values=ACCEPTABLE, words="{} accepted", commands=_JUDGES,
    )  # fmt: skip

    @property
    def lane_width(self) -> int:
        """Number of ranks that run an input together: a *lane*. Ranks of a lane are adjacent; the first writes the results."""
        return self.nproc if self.align == "same" else self.tp * self.ring

    @property
    def lanes(self) -> int:
        """Number of inputs that run at a time."""
        return self.nproc // self.lane_width

    @property
    def compiles(self) -> bool:
        """True if torch.compile or DeepCompile compiles the model."""
        return self.compile or self.deepcompile

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON, by the names in files."""
        return {entry.stored: getattr(self, entry.name) for entry in SETTINGS.values()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReplayConfig:
        """Build from plain data; NewerFormat for keys that this version does not know."""
        names = {entry.stored: entry.name for entry in SETTINGS.values()}
        unknown = sorted(data.keys() - names.keys())
        if unknown:
            raise NewerFormat(f"a replay's configuration has unknown settings: {', '.join(unknown)}", hint="upgrade actordbg")
        return cls(**{names[key]: value for key, value in data.items()})


_SERVED = ("model", "dtype", "backend", "url", "served_model")
"""The settings that decide what a server computes, or what it is compared with."""


def _validate_endpoint(config: ReplayConfig) -> None:
    """Refuse settings that a server decides, and work that it cannot do."""
    if not config.url:
        raise UsageError("--backend endpoint needs a server", hint="add --url http://127.0.0.1:8000")
    decided = [entry for entry in SETTINGS.values() if entry.numbers and entry.cost and entry.name not in _SERVED]
    decided += [SETTINGS[name] for name in ("temperature", "backward", "keep_gradients", "laws", "align", "memory_snapshot")]
    for entry in decided:
        if (value := getattr(config, entry.name)) != entry.default and value is not False:
            why = "a server scores raw logits" if entry.name == "temperature" else "a server decides that, or cannot do it"
            hint = f"drop {entry.flag}; judge it with `replay`, then `compare last truth`"
            raise UsageError(f"{entry.flag} and --backend endpoint conflict: {why}", hint=hint)


SETTINGS: dict[str, Setting] = table_of(ReplayConfig)
"""The table of settings, by name."""
AXES: dict[str, Setting] = {name: entry for name, entry in SETTINGS.items() if entry.axis is not None}
"""The settings that a matrix varies, the slowest first: that is the order of the combinations."""
TRAINING_AXES = ("backend", "zero_stage", "tp", "ring")
"""The settings that a training check varies."""


def has(entry: Setting, backend: str, compile: bool) -> bool:
    """Return whether the setting applies to this backend, compiled or not."""
    if entry.name == "compile_backend":
        return compile
    return not entry.backends or backend in entry.backends or (entry.name == "tp" and backend == "deepspeed")


def validate(config: ReplayConfig) -> None:
    """Refuse, with UsageError, values that are invalid on any machine."""
    for entry in SETTINGS.values():
        value = getattr(config, entry.name)
        if not entry.allows(value):
            wrong = "is not known" if entry.values else "is too small"
            raise UsageError(f"{entry.flag} {entry.typed(value)} {wrong}", hint=f"{entry.flag}: {entry.hint}")
        allowed = None if config.truth is None else entry.beside_truth
        if allowed is not None and value not in (entry.default, *allowed):
            option = entry.flag + ("" if value is True else f" {value}")
            raise UsageError(  # a packed, compiled or sharded truth would not be a truth
                f"{SETTINGS['truth'].flag} and {option} conflict: the truth is each row alone, unpadded, "
                "with eager attention in plain PyTorch",
                hint=f"drop {option}",
            )
    if config.name is not None and (NAME.match(config.name) is None or config.name in NOT_NAMES):
        hint = f"use a letter, then letters, digits and . _ + -; reserved: {', '.join(NOT_NAMES)}"
        raise UsageError(f"--name {config.name!r:.40} cannot name a replay", hint=hint)
    if config.backend == ENDPOINT:
        _validate_endpoint(config)
    elif config.url or config.served_model:
        raise UsageError("--url and --served-model need a server", hint=f"add --backend {ENDPOINT}")
    if config.compile_backend and not config.compile:
        raise UsageError("--compile-backend needs --compile", hint="add --compile")
    for name in ("zero_stage", "deepcompile"):
        entry = SETTINGS[name]
        if getattr(config, name) != entry.idle and config.backend not in entry.backends:
            raise UsageError(f"{entry.flag} needs DeepSpeed", hint=f"add {entry.needs}, or drop {entry.flag}")
    if config.keep_gradients and config.backward is False:
        raise UsageError("--keep-gradients needs a backward", hint="drop --no-backward")
    if config.nproc % (config.tp * config.ring):
        raise UsageError(
            f"--nproc {config.nproc} cannot be divided into groups of {config.tp * config.ring} (--tp x --ring)",
            hint=f"use --nproc {config.tp * config.ring}, or a multiple of it",
        )
