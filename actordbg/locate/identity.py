"""What a loaded model is, bit for bit, against transformers' own model of the same checkpoint.

    identities_of(session)[0]["differences"][0]["name"]      # "model.norm.variance_epsilon"

Compared without any tolerance, since nothing is computed:

* **Parameters**, each gathered whole through the backend (`session.gather`), one at a time. The reference is loaded in the dtype
  that the configuration asks for; a value that is the reference's, rounded to a narrower dtype, is named as rounded.
* **Buffers**, above all a rotary embedding's `inv_freq`, which no checkpoint holds: a `model.bfloat16()` rounds it.
* **Ties**: parameters that are one tensor in the reference have to be one here.
* **Scalar attributes** of every module that both have (epsilon, scaling, window, soft cap, dropout) and of the configuration; and
  that all modules are in training mode, or none.

What a model is may change when it is called: an attribute set by a patch, a layer that is quantized at its first input. So it is
compared when it was loaded, and again after the last input (`ran`). What transformers itself sets anew for each length, the
frequencies of dynamic rotary embeddings, is named as unchecked where it differs.

A module of another class has other attributes; it is named as unchecked. The reference lies in host memory and is gone when
`identities_of` returns, so it raises no peak that a replay measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actordbg.actor.forward_outcome import plain_name
from actordbg.actor.session import ActorSession
from actordbg.base.errors import machine_errno
from actordbg.base.units import plural
from actordbg.locate.clean_models import clean_model, one_line
from actordbg.records.locate_record import (
    ATTRIBUTE,
    EVERYTHING,
    FACTOR,
    MODE,
    MOST,
    ROUNDED,
    SHAPE,
    TIE,
    VALUES,
    ZERO,
    ModelDifference,
    ModelIdentity,
)  # fmt: skip
from actordbg.trainers.rows_actor import text_config

_SCALARS = (bool, int, float, str, type(None))
_OF_A_CALL = (
    "use_cache", "output_", "return_", "gradient_checkpointing", "_token_id", "dtype", "transformers_version",
    "name_or_path",
)  # fmt: skip
"""Parts of names of settings that say how a model is called or was saved, not what it computes."""
_NARROWER = (torch.bfloat16, torch.float16)


def identities_of(session: ActorSession, *, ran: bool = False, alone: bool = False) -> list[dict[str, Any]]:
    """Compare a loaded model with transformers' own; return the `ModelIdentity` of each rank that computes with this rank.

    ran: whether its inputs have run. alone: of this rank only. Else it is collective where ranks form a process group: every
    rank has to call it. What cannot be compared is named in `unchecked`.
    """
    rank = int(session.resolved["rank"])
    try:
        identity = _identity(session, rank)
    except Exception as error:
        if machine_errno(error):
            raise
        identity = ModelIdentity(unchecked=(f"{EVERYTHING}: {one_line(error)}",), rank=rank)
    identity = replace(identity, ran=ran)
    if alone or not dist.is_initialized() or dist.get_world_size() == 1:
        return [asdict(identity)]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, asdict(identity))
    return of_ranks


def _identity(session: ActorSession, rank: int) -> ModelIdentity:
    with clean_model(session, torch.device("cpu")) as reference:
        compared = Comparison(session.model, reference.model, session.gather, reference.bring)
    return ModelIdentity(
        looked_at=compared.looked_at,
        count=len(compared.differences),
        differences=tuple(compared.differences[:MOST]),
        unchecked=tuple(compared.unchecked[:MOST]),
        rank=rank,
    )


class Comparison:
    """A model compared with a reference. gather: returns a parameter's whole value by its name in the model. bring: called with
    the name of each of the reference's tensors before its values are read.

    differences: in the order parameters, ties, buffers, attributes. looked_at: how many of these were compared.
    """

    def __init__(self, model: Any, reference: Any, gather: Callable[[str], Tensor], bring: Callable[[str], None]) -> None:
        self.looked_at, self._bring = 0, bring
        self.unchecked: list[str] = []
        self._varying = _set_anew(reference)
        self.differences: list[ModelDifference] = [
            *self._tensors(dict(reference.named_parameters()), _by_plain_name(model.named_parameters()), gather),
            *self._ties(model, reference),
            *self._tensors(dict(reference.named_buffers()), _by_plain_name(model.named_buffers()), model.get_buffer),
            *self._attributes(model, reference),
        ]

    def _tensors(
        self, wanted: Mapping[str, Tensor], ours: Mapping[str, str], read: Callable[[str], Tensor]
    ) -> Iterator[ModelDifference]:
        for name, want in wanted.items():
            if name not in ours:
                self.unchecked.append(f"{name}: this model has no such tensor")
                continue
            self.looked_at += 1
            self._bring(name)
            have = read(ours[name]).detach().cpu()
            for part, left, right in _by_expert(name, have, want.detach()):
                if (difference := _difference(part, left, right)) is not None and not self._varies(name):
                    yield difference

    def _varies(self, name: str) -> bool:
        """Check whether transformers sets a buffer or an attribute that differs anew, and name it as unchecked then."""
        module, _, own = name.rpartition(".")
        varies = module in self._varying and not own.endswith("original_inv_freq")
        if varies:
            self.unchecked.append(f"{name}: transformers sets it anew for each length")
        return varies

    def _ties(self, model: Any, reference: Any) -> Iterator[ModelDifference]:
        wanted, ours = (
            {plain_name(name): id(parameter) for name, parameter in each.named_parameters(remove_duplicate=False)}
            for each in (reference, model)
        )
        for held, others, said in (
            (wanted, ours, "{} is not tied to {}, as it is in transformers' model"),
            (ours, wanted, "{} is tied to {}, and the checkpoint has another value for it"),
        ):
            names: dict[int, str] = {}
            for name, parameter in held.items():
                first = names.setdefault(parameter, name)
                if first == name or not {first, name} <= others.keys():
                    continue
                self.looked_at += held is wanted
                if others[first] != others[name]:
                    yield ModelDifference(name, TIE, said.format(name, first))

    def _attributes(self, model: Any, reference: Any) -> Iterator[ModelDifference]:
        ours = {plain_name(name): module for name, module in model.named_modules()}
        training = bool(model.training)
        for name, want in reference.named_modules():
            module = ours.get(name)
            if module is None:
                self.unchecked.append(f"{name}: this model has no such module")
                continue
            if (kind := type(module).__name__.removeprefix("FSDP")) != type(want).__name__:
                self.unchecked.append(f"the attributes of {name}: it is a {kind}, in transformers a {type(want).__name__}")
                continue
            yield from self._scalars(name, vars(module), vars(want))
            if module.training is not training:
                mode = ("evaluation", "training")
                said = f"{name} is in {mode[not training]} mode, the model in {mode[training]} mode"
                yield ModelDifference(name, MODE, said)
        config, wanted = (text_config(each).to_dict() for each in (model, reference))
        yield from self._scalars("config", config, wanted)

    def _scalars(self, name: str, ours: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[ModelDifference]:
        for key, want in wanted.items():
            if key.startswith("_") or key == "training" or any(part in key for part in _OF_A_CALL) or key not in ours:
                continue
            have = ours[key]
            if isinstance(want, _SCALARS) and isinstance(have, _SCALARS):
                self.looked_at += 1
                full_name = f"{name}.{key}".lstrip(".")
                if have != want and not self._varies(full_name):
                    said = f"{full_name} is {have!r}; transformers' model from this checkpoint has {want!r}"
                    yield ModelDifference(full_name, ATTRIBUTE, said)


def _set_anew(reference: Any) -> set[str]:
    """Return the names of the modules whose frequencies transformers sets anew in a forward."""
    modules = set()
    for name, module in reference.named_modules():
        types = getattr(module, "rope_type", ())
        types = types.values() if isinstance(types, dict) else (types,)
        if "dynamic" in types or "longrope" in types:
            modules.add(name)
    return modules


def _by_plain_name(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    return {plain_name(name): name for name, _ in named}


def _by_expert(name: str, have: Tensor, want: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a tensor beside its reference; of experts [E, out, in], those that differ unless all do."""
    if want.dim() == 3 and have.shape == want.shape and "expert" in name:
        differing = [expert for expert in range(len(want)) if _difference("", have[expert], want[expert])]
        if len(differing) < len(want):
            yield from ((f"{name}[{expert}]", have[expert], want[expert]) for expert in differing)
            return
    yield name, have, want


def _difference(name: str, have: Tensor, want: Tensor) -> ModelDifference | None:
    """Say how a tensor differs from the reference's; None if it has the same values."""
    if have.shape != want.shape:
        said = f"{name} is {list(have.shape)}; transformers' model from this checkpoint has {list(want.shape)}"
        return ModelDifference(name, SHAPE, said)
    wide = torch.promote_types(have.dtype, want.dtype)
    left, right = have.to(wide), want.to(wide)
    differs = (left != right) & ~(left.isnan() & right.isnan()) if wide.is_floating_point else left != right
    count = int(differs.sum())
    if not count:
        return None
    for dtype in _NARROWER:
        if wide.is_floating_point and torch.equal(left, right.to(dtype).to(wide)):
            short = str(dtype).removeprefix("torch.").replace("bfloat16", "bf16")
            return ModelDifference(name, ROUNDED, f"{name} was rounded to {short}")
    many = f"{count:,} of {plural(have.numel(), 'element')}"
    if not bool(left[differs].any()):
        return ModelDifference(name, ZERO, f"{name} is 0 in {many} where the checkpoint is not")
    if wide.is_floating_point and (factor := _factor_of(left.double(), right.double())) is not None:
        return ModelDifference(name, FACTOR, f"{name} is {factor:.6g} times the checkpoint's", factor)
    return ModelDifference(name, VALUES, f"{name} differs from the checkpoint's in {many}")


def _factor_of(have: Tensor, want: Tensor) -> float | None:
    """Return the factor that explains the difference of two tensors; None if none does, as between two steps of a training."""
    size, factor = want.norm(), float((have * want).sum() / want.square().sum())
    left, apart = (have - factor * want).norm(), (have - want).norm()
    return factor if bool(left < 0.01 * size * abs(factor)) and bool(left < apart / 2) else None
