"""Check whether a replay's weights are those that its inputs met in training, of which the training recorded samples, or hashes.

What was recorded covers a whole parameter, or a run of its elements; the same part of the loaded model is held against it in the
narrower of both dtypes. A hash cannot be rounded: in a narrower replay, the sample alone is compared.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from actordbg.actor.session import ActorSession
from actordbg.base.errors import ActordbgError
from actordbg.base.units import plural, some
from actordbg.config.replay_config import TINY
from actordbg.formats.weight_hashes import ParameterHash, WeightRecord, sampled, sha256_of
from actordbg.records.replay_record import ReplayInput
from actordbg.records.run_files import MET_WEIGHTS, RECORDED_WEIGHTS, read_weights, weights_of
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
    try:
        known = functools.cache(read_weights)
        paths = [_recorded_for(root, item, known) for item in inputs]
    except (OSError, ActordbgError) as error:
        return {RECORDED_WEIGHTS: f"not checked: {error}"}
    met = Counter(path for path in paths if path is not None)
    if not met:
        return {}
    compared = _comparing(session)
    answers = [HeldAgainst(path, known(path), inputs, compared) for path, inputs in sorted(met.items())]
    unknown = paths.count(None)
    summary: dict[str, Any] = {"same": [], "other": {}, "unknown": unknown}
    for answer in answers:
        if answer.differ:
            summary["other"][f"{answer.path.parent.name}/{answer.path.name}"] = answer.record.step
        elif answer.unchecked:
            summary["unknown"] += answer.inputs
        elif answer.record.step not in summary["same"]:
            summary["same"].append(answer.record.step)
    said = in_words(answers)
    if unknown:
        said += f"; {unknown} of {len(paths)} inputs have no recorded weights"
    return {RECORDED_WEIGHTS: said, MET_WEIGHTS: summary}


def _recorded_for(root: Path, item: ReplayInput, known: Callable[[Path], WeightRecord]) -> Path | None:
    """Return the file with the weights that an input met. That of an earlier step is not: its own was lost with the process."""
    try:
        record = read_record(root / item.path)
    except (ActordbgError, OSError):
        return None
    path = weights_of(root, record)
    return path if path is not None and known(path).step in (None, record.step) else None


class HeldAgainst:
    """A record compared with the model. inputs: how many met it. unchecked: the number of unchecked parameters by reason."""

    def __init__(self, path: Path, record: WeightRecord, inputs: int, compared: Callable[[str, ParameterHash], str]) -> None:
        self.path, self.record, self.inputs = path, record, inputs
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
        if recorded.sha256 is None and not recorded.sample:
            return recorded.why_not or "it has no elements"
        if name not in names:
            return "not a parameter of this model"
        ours, dtype = session.gather(name), getattr(torch, recorded.dtype, None)
        if tuple(ours.shape) != recorded.shape:
            return DIFFERS
        if not isinstance(dtype, torch.dtype):
            return f"recorded in {recorded.dtype}"
        narrower = ours.dtype != dtype and torch.promote_types(ours.dtype, dtype) != ours.dtype
        part = ours.reshape(-1) if recorded.part is None else ours.reshape(-1)[recorded.part[0] : sum(recorded.part)]
        if recorded.sha256 is not None and not narrower:
            return EQUAL if sha256_of(part.to(dtype)) == recorded.sha256 else DIFFERS
        if not recorded.sample:
            return f"this replay has them in {str(ours.dtype)[6:]}, the run in {recorded.dtype}"
        theirs = torch.frombuffer(bytearray.fromhex(recorded.sample), dtype=torch.float32)
        taken, wanted = sampled(part).to(dtype).float().cpu(), theirs.to(ours.dtype).float()
        return EQUAL if torch.equal(taken.view(torch.int32), wanted.view(torch.int32)) else DIFFERS  # a NaN is itself

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
        sentences.append(
            f"{len(names)} of {total} parameters differ from those recorded{_when(other, inputs)}: {some(names, _NAMED)}"
        )
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
    word = "step" if len(steps) == 1 else "steps"
    return f" at {word} {some(steps, _NAMED)}"
