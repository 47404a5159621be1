"""Are the weights of a replay those that its inputs met in the training? Asked where the training recorded hashes.

Each recorded hash is of a whole parameter, or of a run of its elements: the same of the loaded model is hashed, in the recorded
dtype. A narrower replay cannot tell a rounded weight from another one, and says that it was not checked.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actordbg.actor.session import ActorSession
from actordbg.base.errors import ActordbgError
from actordbg.base.units import plural
from actordbg.config.replay_config import TINY
from actordbg.formats.weight_hashes import (
    MET_WEIGHTS,
    RECORDED_WEIGHTS,
    ParameterHash,
    WeightRecord,
    read_weights,
    sha256_of,
    weights_of,
)
from actordbg.records.replay_record import ReplayInput
from actordbg.store.places import read_record

_NAMED = 4
"""Parameters that are named."""


def statement(root: Path, inputs: Sequence[ReplayInput], session: Any) -> dict[str, Any]:
    """What a replay says of its weights, as resolved facts; empty where nothing was recorded of its inputs' weights.

    Where ranks hold shards all of them have to ask.
    """
    if session.resolved["model"] == TINY or not isinstance(session, ActorSession):
        return {}
    paths = [_recorded_for(root, item) for item in inputs]
    met = sorted({path for path in paths if path is not None})
    try:
        records = [read_weights(path) for path in met]
    except (OSError, ActordbgError) as error:
        return {RECORDED_WEIGHTS: f"not checked: {error}"}
    if not records:
        return {}
    hashing = _Hashing(session)
    found = [hashing.held_against(record) for record in records]
    unknown = sum(path is None for path in paths)
    behind = f"; {unknown} of {len(paths)} inputs have no recorded hashes" if unknown else ""
    told: dict[str, Any] = {"same": [], "other": {}, "unknown": unknown}
    for path, record, one in zip(met, records, found, strict=True):
        if one.differ:
            told["other"][f"{path.parent.name}/{path.name}"] = record.step
        elif one.unchecked:
            told["unknown"] += paths.count(path)
        else:
            told["same"] += [record.step] * (record.step not in told["same"])
    return {RECORDED_WEIGHTS: in_words(records, found, [paths.count(path) for path in met]) + behind, MET_WEIGHTS: told}


def _recorded_for(root: Path, item: ReplayInput) -> Path | None:
    with contextlib.suppress(ActordbgError, OSError):
        return weights_of(root, read_record(root / item.path))
    return None


@dataclass
class HeldAgainst:
    """One record against the model. unchecked: parameters by why nothing can be said of them."""

    equal: int = 0
    differ: list[str] = field(default_factory=list)
    unchecked: Counter[str] = field(default_factory=Counter)


class _Hashing:
    """The loaded model's hashes, each computed once."""

    def __init__(self, session: Any) -> None:
        self._names = {name for name, _ in session.model.named_parameters()}
        self._gather: Callable[[str], torch.Tensor] = session.gather
        self._known: dict[tuple[str, ParameterHash], str] = {}

    def held_against(self, record: WeightRecord) -> HeldAgainst:
        found = HeldAgainst()
        for name, one in record.parameters.items():
            answer = self._answer(name, one)
            if answer == "equal":
                found.equal += 1
            elif answer == "differs":
                found.differ.append(name)
            else:
                found.unchecked[answer] += 1
        return found

    def _answer(self, name: str, one: ParameterHash) -> str:
        if (name, one) not in self._known:
            self._known[name, one] = self._compared(name, one)
        return self._known[name, one]

    def _compared(self, name: str, one: ParameterHash) -> str:
        if one.sha256 is None:
            return one.why_not or "not hashed"
        if name not in self._names:
            return "not a parameter of this model"
        ours, dtype = self._gather(name), getattr(torch, one.dtype, None)
        if tuple(ours.shape) != one.shape:
            return "differs"
        if not isinstance(dtype, torch.dtype):
            return f"recorded in {one.dtype}"
        narrower = ours.dtype != dtype and torch.promote_types(ours.dtype, dtype) != ours.dtype
        part = ours.reshape(-1) if one.part is None else ours.reshape(-1)[one.part[0] : sum(one.part)]
        if sha256_of(part.to(dtype)) == one.sha256:
            return "equal"
        return f"this replay has them in {str(ours.dtype)[6:]}, the run in {one.dtype}" if narrower else "differs"


def in_words(records: Sequence[WeightRecord], found: Sequence[HeldAgainst], inputs: Sequence[int]) -> str:
    """What is to be said of all records in one sentence or two. inputs: how many met each."""
    other = [at for at, one in enumerate(found) if one.differ]
    same = [at for at, one in enumerate(found) if one.equal and not one.differ]
    said = []
    if other:
        names = list(dict.fromkeys(name for at in other for name in found[at].differ))
        total = len({name for at in other for name in records[at].parameters})
        shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        said.append(f"{len(names)} of {total} parameters differ from those recorded{_when(records, inputs, other)}: {shown}")
    if same:
        count = len({name for at in same for name in records[at].parameters})
        all_of = "the weights are those that were recorded" if not other else "they are those that were recorded"
        said.append(f"{all_of}{_when(records, inputs, same)} ({count} parameters)")
    unchecked = found[0].unchecked
    for why, count in unchecked.most_common(2):
        said.append(f"{count} not checked: {why}")
    return "; ".join(said)


def _when(records: Sequence[WeightRecord], inputs: Sequence[int], which: Sequence[int]) -> str:
    """At which steps; where steps are not known, for how many inputs."""
    steps = sorted({step for at in which if (step := records[at].step) is not None})
    if not steps:
        return f" for {sum(inputs[at] for at in which)} of {plural(sum(inputs), 'input')}"
    shown = ", ".join(map(str, steps[:_NAMED])) + (", ..." if len(steps) > _NAMED else "")
    return f" at {'step' if len(steps) == 1 else 'steps'} {shown}"
