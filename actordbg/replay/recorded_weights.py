"""Check whether a replay's weights are those that its inputs met in training, if the training recorded hashes.

Each recorded hash covers a whole parameter, or a run of its elements; the same part of the loaded model is hashed in the recorded
dtype. A replay in a narrower dtype cannot distinguish a rounded weight from a different one, and reports it as not checked.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
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
    sha256_of,
    weights_of,
)
from actordbg.records.replay_record import ReplayInput
from actordbg.records.run_files import read_weights
from actordbg.store.places import read_record

_NAMED = 4
"""How many parameters or steps a sentence lists."""
EQUAL, DIFFERS = "equal", "differs"


def statement(root: Path, inputs: Sequence[ReplayInput], session: Any) -> dict[str, Any]:
    """Return the resolved facts about a replay's weights; {} if no hashes were recorded for its inputs.

    Collective if ranks hold shards: all ranks must call it.
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
    compared = _comparing(session)
    answers = [HeldAgainst(record, paths.count(path), compared) for path, record in zip(met, records, strict=True)]
    unknown = sum(path is None for path in paths)
    behind = f"; {unknown} of {len(paths)} inputs have no recorded hashes" if unknown else ""
    summary: dict[str, Any] = {"same": [], "other": {}, "unknown": unknown}
    for path, answer in zip(met, answers, strict=True):
        if answer.differ:
            summary["other"][f"{path.parent.name}/{path.name}"] = answer.record.step
        elif answer.unchecked:
            summary["unknown"] += answer.inputs
        else:
            summary["same"] += [answer.record.step] * (answer.record.step not in summary["same"])
    return {RECORDED_WEIGHTS: in_words(answers) + behind, MET_WEIGHTS: summary}


def _recorded_for(root: Path, item: ReplayInput) -> Path | None:
    with contextlib.suppress(ActordbgError, OSError):
        return weights_of(root, read_record(root / item.path))
    return None


class HeldAgainst:
    """A record compared with the model. inputs: how many met it. unchecked: the number of unchecked parameters by reason."""

    def __init__(self, record: WeightRecord, inputs: int, compared: Callable[[str, ParameterHash], str]) -> None:
        self.record, self.inputs = record, inputs
        answers = {name: compared(name, recorded) for name, recorded in record.parameters.items()}
        self.differ = [name for name, answer in answers.items() if answer == DIFFERS]
        self.unchecked = Counter(answer for answer in answers.values() if answer not in (EQUAL, DIFFERS))
        self.same = not self.differ and EQUAL in answers.values()


def _comparing(session: Any) -> Callable[[str, ParameterHash], str]:
    """Return a function that compares a recorded hash with the loaded model: EQUAL, DIFFERS, or why it cannot be checked.

    Each part is hashed once.
    """
    names = {name for name, _ in session.model.named_parameters()}

    @functools.cache
    def compared(name: str, recorded: ParameterHash) -> str:
        if recorded.sha256 is None:
            return recorded.why_not or "not hashed"
        if name not in names:
            return "not a parameter of this model"
        ours, dtype = session.gather(name), getattr(torch, recorded.dtype, None)
        if tuple(ours.shape) != recorded.shape:
            return DIFFERS
        if not isinstance(dtype, torch.dtype):
            return f"recorded in {recorded.dtype}"
        narrower = ours.dtype != dtype and torch.promote_types(ours.dtype, dtype) != ours.dtype
        part = ours.reshape(-1) if recorded.part is None else ours.reshape(-1)[recorded.part[0] : sum(recorded.part)]
        if sha256_of(part.to(dtype)) == recorded.sha256:
            return EQUAL
        return f"this replay has them in {str(ours.dtype)[6:]}, the run in {recorded.dtype}" if narrower else DIFFERS

    return compared


def in_words(answers: Sequence[HeldAgainst]) -> str:
    """Summarize all records in a sentence or two."""
    other = [answer for answer in answers if answer.differ]
    same = [answer for answer in answers if answer.same]
    inputs = sum(answer.inputs for answer in answers)
    sentences = []
    if other:
        names = list(dict.fromkeys(name for answer in other for name in answer.differ))
        total = len({name for answer in other for name in answer.record.parameters})
        sentences.append(f"{len(names)} of {total} parameters differ from those recorded{_when(other, inputs)}: {_first(names)}")
    if same:
        count = len({name for answer in same for name in answer.record.parameters})
        all_of = "the weights are those that were recorded" if not other else "they are those that were recorded"
        sentences.append(f"{all_of}{_when(same, inputs)} ({count} parameters)")
    sentences += [f"{count} not checked: {why}" for why, count in answers[0].unchecked.most_common(2)]
    return "; ".join(sentences)


def _when(answers: Sequence[HeldAgainst], inputs: int) -> str:
    """Describe at which steps, or, if steps are not known, for how many inputs."""
    steps = sorted({answer.record.step for answer in answers if answer.record.step is not None})
    if not steps:
        return f" for {sum(answer.inputs for answer in answers)} of {plural(inputs, 'input')}"
    return f" at {'step' if len(steps) == 1 else 'steps'} {_first(list(map(str, steps)))}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:_NAMED] + ["..."] * (len(names) > _NAMED))
