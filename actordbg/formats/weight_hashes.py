"""The weights that a recorded call met: a file per model, optimizer step and rank.

    store/weights/<run>/<rank>-<host>-<pid>-<instance>-<call>.json

For each parameter, the file has its whole shape, its dtype, and a sample of the elements that this rank held, evenly spaced; with
`run --hash-weights` also the SHA-256 of them all. For a shard that is a run of elements of the flattened parameter (FSDP2 over
dimension 0, a ZeRO-3 partition), it also has the range of elements, so that a replay can take the same elements of its own
weights, however they are sharded. The file holds from its call until the end of its step; where the step is unknown, until the
next file of the same instance.

Only taking weights imports torch, never reading.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from actordbg.formats.dump_record import dtype_name, now_timestamp

if TYPE_CHECKING:
    import torch

RUN_FILE_FORMAT = 1
"""Format of a `RunFile`."""
WEIGHTS = "weights"
"""The folder in a store."""
_PIECE = 2**24
"""Elements that are copied to the host at a time."""
SAMPLED = 16
"""Elements of a parameter, or of a rank's part of it, that are sampled. A step at a learning rate of 1e-6 changes 1 to 2 % of the
elements of a bf16 model: some tens of those of a model with 300 parameters.
"""
_HEX = re.compile(r"[0-9a-f]{64}\Z")
_SAMPLE = re.compile(rf"([0-9a-f]{{8}}){{0,{SAMPLED}}}\Z")
STATE_SAMPLED = 1024
"""Elements of an optimizer that are sampled."""
_STATE = re.compile(rf"[0-9a-f]{{0,{48 * STATE_SAMPLED}}}\Z")
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|base_model\.model\.")
"""Prefixes that torch.compile, activation checkpointing and peft add to parameter names."""


def check_sizes(sizes: Iterable[int], most: int = 2**62) -> None:
    """Raise ValueError for sizes or token ids that cannot be."""
    if not all(0 <= size < most for size in sizes):
        raise ValueError("a number is out of range")


@dataclass(frozen=True)
class RunFile:
    """A JSON file that a recorded process leaves in a run's folder; `records.run_files` reads it. what: the file, in words."""

    what: ClassVar[str]

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({"format": RUN_FILE_FORMAT, **asdict(self)}, separators=(",", ":"))


@dataclass(frozen=True)
class ParameterHash:
    """What identifies a parameter. part: (first, count) of its flattened elements that the rank held, None for all. sha256: of
    these, None if not hashed. frozen: not trained. sample: `sampled` ones, float32 in hex; "" for none, and `why_not` says why.
    """

    dtype: str
    shape: tuple[int, ...]
    part: tuple[int, int] | None = None
    sha256: str | None = None
    frozen: bool = False
    why_not: str = ""
    sample: str = ""

    def __post_init__(self) -> None:
        check_sizes((*self.shape, *(self.part or ())))
        if not _SAMPLE.match(self.sample) or (self.sha256 is not None and not _HEX.match(self.sha256)):
            raise ValueError("a hash or a sample is invalid")


@dataclass(frozen=True)
class GroupState:
    """A sample of what an optimizer holds for a group of parameters, and the group's settings, before the step.

    kind: the optimizer's class. steps: how often it stepped; None if only a device knows. first_lr: what its schedule begins
    from, None without a schedule. sample: elements of the parameters in fp32, then of Adam's two moments, in hex as `in_hex`.
    """

    kind: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    sample: str
    steps: int | None = None
    first_lr: float | None = None

    def __post_init__(self) -> None:
        if len(self.sample) % 24 or not _STATE.match(self.sample):
            raise ValueError("a sample is invalid")


@dataclass(frozen=True)
class WeightRecord(RunFile):
    """The parameters of a model at a step, as one rank held them. call_index: the first recorded call with these weights.
    optimizer: of an Adam whose parameters are in fp32, where losses are recorded.
    """

    what = "a file of recorded weights"
    run: str
    rank: int
    host: str
    pid: int
    instance: str
    call_index: int
    step: int | None
    timestamp: str
    seconds: float
    nbytes: int
    parameters: dict[str, ParameterHash] = field(default_factory=dict)
    optimizer: tuple[GroupState, ...] = ()

    @property
    def name(self) -> str:
        """Return the file's name."""
        return f"{self.rank:04d}-{self.host}-{self.pid}-{self.instance}-{self.call_index:06d}.json"


def sha256_of(tensor: torch.Tensor) -> str:
    """Hash a tensor's elements in order, as they are stored, copying them to the host in pieces. Returns the SHA-256 in hex."""
    import torch

    digest = hashlib.sha256()
    for piece in tensor.detach().reshape(-1).split(_PIECE):  # type: ignore[no-untyped-call]
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sampled(tensor: torch.Tensor, most: int = SAMPLED) -> torch.Tensor:
    """Return at most so many elements of a tensor, evenly spaced in its flattened order, where they are: nothing waits."""
    flat: torch.Tensor = tensor.detach()  # type: ignore[no-untyped-call]
    flat = flat if flat.is_contiguous() else flat.reshape(-1)
    size = flat.numel()
    return flat.as_strided((min(size, most),), (max(1, size // most),), flat.storage_offset())


def in_hex(sample: torch.Tensor) -> str:
    """Return elements as float32, little-endian, in hex."""
    import ctypes

    plain = sample.float().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes).hex() if plain.numel() else ""


@dataclass(slots=True)
class StepWeights:
    """The weights that a call met, on their way to a file. met: the ledger and the moment that they hold for. held: for each
    parameter its name, `weights_held`'s facts, its SHA-256 if hashed, and where its sample is: the device and how many elements.
    groups: the settings of the optimizer's groups, whose samples are copied by their numbers. copies: a snapshot of the samples
    of each device, concatenated; None if there is nothing to write, or no longer. path, size: of the file, once it is written.
    """

    met: Any = None
    call_index: int = 0
    step: int | None = None
    seconds: float = 0.0
    nbytes: int = 0
    held: Sequence[tuple[str, tuple[Any, ...], str | None, Any, int]] = ()
    groups: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    copies: Any = None
    path: Any = None
    size: int = 0

    def record(self, who: Any) -> WeightRecord:
        """Wait for the copies, and return the file's content. who: the ledger's identity."""
        self.copies.wait()
        copies, at = self.copies.tensors(), Counter[Any]()
        parameters = {}
        for name, facts, sha256, device, count in self.held:
            sample = in_hex(copies[device][at[device] : at[device] + count]) if count else ""
            at[device] += count
            plain, parameters[plain] = described(name, facts, sha256=sha256, sample=sample)
        groups = tuple(GroupState(**group, sample=in_hex(copies[number])) for number, group in self.groups.items())
        own = (who.run, who.rank, who.host, who.pid, who.instance, self.call_index, self.step, now_timestamp())
        return WeightRecord(*own, round(self.seconds, 3), self.nbytes, parameters, groups)


def step_weights(
    model: torch.nn.Module, copied: Callable[[Mapping[Any, torch.Tensor]], Any], *, hashed: bool, optimizer: Any = None
) -> StepWeights:
    """Take the weights of a model. copied: copies tensors of devices by key, without waiting. hashed: wait for a hash of all.
    optimizer: its state is sampled too, if it is an Adam; that in a wrapper of DeepSpeed's counts.
    """
    import torch

    began, nbytes, samples = time.perf_counter(), 0, defaultdict[Any, list[torch.Tensor]](list)
    held: list[tuple[str, tuple[Any, ...], str | None, Any, int]] = []
    with torch.no_grad():
        for name, facts, local in weights_held(model):
            sha256, device, count = None, None, 0
            if local is not None and hashed:
                sha256, nbytes = sha256_of(local), nbytes + local.nbytes
            if local is not None and local.is_floating_point() and local.element_size() > 1:
                try:
                    sample, device = sampled(local), local.device
                    samples[device].append(sample)
                    count = len(sample)
                except (RuntimeError, NotImplementedError, TypeError):  # it was freed, is sparse, is of a class of its own
                    facts = (*facts[:-1], "its elements cannot be read")
            elif local is not None and not hashed:
                facts = (*facts[:-1], "elements of its dtype are not sampled")
            held.append((name, facts, sha256, device, count))
        states = dict(_states(getattr(optimizer, "optimizer", optimizer)))
        joined = {device: torch.cat(each) for device, each in samples.items()}
        copies = copied(joined | {number: sample for number, (_, sample) in states.items()})
    groups = {number: group for number, (group, _) in states.items()}
    return StepWeights(held=held, groups=groups, copies=copies, seconds=time.perf_counter() - began, nbytes=nbytes)


def _states(optimizer: Any) -> Iterator[tuple[int, tuple[dict[str, Any], torch.Tensor]]]:
    """Yield the settings of each group of an Adam, and a sample of its parameters and moments: [3 n], float32. Nothing waits."""
    import torch

    groups = getattr(optimizer, "param_groups", ())
    count = max(1, sum(len(group["params"]) for group in groups))
    many, apart = max(1, STATE_SAMPLED // count), max(1, count // STATE_SAMPLED)
    for number, group in enumerate(groups):
        states = [(each, optimizer.state.get(each) or {}) for each in group["params"] if _is_plain_fp32(each)][::apart]
        numbers = (*(group.get(name) for name in ("lr", "eps", "weight_decay", "initial_lr")), *group.get("betas", ()))
        if not {"betas", "lr", "eps", "weight_decay"} <= group.keys() or not states:
            continue
        if any(isinstance(each, torch.Tensor) and not each.is_cpu for each in numbers):
            continue  # to read it would wait for its device
        if not all(math.isfinite(each) for each in numbers if each is not None):
            continue  # JSON has no NaN; `lint` names a rate that is not finite
        parts: list[list[torch.Tensor]] = [[], [], []]
        for parameter, state in states:
            parts[0].append(sampled(parameter, many))
            for part, name in zip(parts[1:], ("exp_avg", "exp_avg_sq"), strict=True):
                part.append(sampled(state[name], many) if name in state else torch.zeros_like(parts[0][-1]))
        steps: Any = states[0][1].get("step", group.get("step", 0))
        known = isinstance(steps, int) or (isinstance(steps, torch.Tensor) and steps.is_cpu)
        settings: dict[str, Any] = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
        first = group.get("initial_lr")
        settings |= {"betas": tuple(map(float, group["betas"])), "first_lr": None if first is None else float(first)}
        settings |= {"kind": type(optimizer).__name__, "steps": int(steps) if known else None}
        samples = [each for part in parts for each in part]
        if len({each.device for each in samples}) == 1:  # an optimizer in part on the host is not sampled
            yield number, (settings, torch.cat(samples).float())


def _is_plain_fp32(parameter: torch.Tensor) -> bool:
    """Check whether a parameter of an optimizer can be sampled: it has memory, and is not a DTensor."""
    import torch

    whole = not parameter.is_meta and not hasattr(parameter, "placements")
    return whole and parameter.dtype == torch.float32 and parameter.untyped_storage().nbytes() >= parameter.nbytes


def weights_held(model: torch.nn.Module) -> Iterator[tuple[str, tuple[Any, ...], torch.Tensor | None]]:
    """Yield each parameter's name, what it is as `described` reads it, and the part that this rank holds, None if unknown."""
    for name, parameter in model.named_parameters():
        local, part, why = _local(name, parameter)
        dtype = parameter.dtype if local is None else local.dtype
        yield name, (dtype, getattr(parameter, "ds_shape", parameter.shape), part, None, not parameter.requires_grad, why), local


def described(name: str, held: tuple[Any, ...], **more: Any) -> tuple[str, ParameterHash]:
    """Return the plain name of a parameter, and its record. held: of `weights_held`. more: the record's other fields."""
    dtype, shape, *rest = held
    return bare_name(name), replace(ParameterHash(dtype_name(dtype), tuple(shape), *rest), **more)


def bare_name(name: str) -> str:
    """Return the name of a parameter without what wrappers add."""
    return _WRAPPERS.sub("", name)


def _local(name: str, parameter: Any) -> tuple[torch.Tensor | None, tuple[int, int] | None, str]:
    """Return this rank's part of a parameter, its place in the flattened whole, and why the part is unknown ("" if known)."""
    if "_fsdp_wrapped_module." in name or "_flat_param" in name:
        return None, None, "a shard of FSDP1, which does not say where it starts"
    if parameter.is_meta:
        return None, None, "it has no values"
    if hasattr(parameter, "ds_tensor"):
        return _partition(parameter)
    if not hasattr(parameter, "placements"):
        return parameter, None, ""
    sharded = [(at, each) for at, each in enumerate(parameter.placements) if not each.is_replicate()]
    if not sharded:
        return parameter.to_local(), None, ""
    ((at, placement), *more) = sharded
    if more or type(placement).__name__ != "Shard" or placement.dim != 0:
        return None, None, f"sharded as {parameter.placements}"
    size, ranks, rank = parameter.shape[0], parameter.device_mesh.size(at), parameter.device_mesh.get_local_rank(at)
    row = parameter.shape[1:].numel()  # `parameter[0]` would gather the whole, and wait for the other ranks
    first = min(-(-size // ranks) * rank, size)
    local = parameter.to_local()
    return local, (first * row, local.numel()), ""


def _partition(parameter: Any) -> tuple[torch.Tensor | None, tuple[int, int] | None, str]:
    """Return a partition of ZeRO-3: equal runs of the flattened parameter, the last padded."""
    import torch

    held = parameter.ds_tensor
    if held.is_meta or str(getattr(getattr(held, "status", None), "name", "AVAILABLE")) != "AVAILABLE":
        return None, None, "its partition is on a disk"
    rank = torch.distributed.get_rank(getattr(parameter, "ds_process_group", None))
    first = min(rank * held.numel(), parameter.ds_numel)
    count = min(held.numel(), parameter.ds_numel - first)
    return held.reshape(-1)[:count], (first, count), ""
