"""Reduce a replay: from its wrong input to the smallest case with the same fingerprint, confirmed and checked.

    record = reduce_replay(store, spec, most=200, seconds=300)
    record.case, record.fingerprint, record.confirmed

1. What is wrong, and in which input, is the fingerprint (`suspects`).
2. The case that is furthest from the replay and shows it is the start: transformers alone before the trainer, a small random
   model before the checkpoint, one process before several.
3. It is shrunk (`shrink`). The result runs twice in this call, in two processes, and is checked as a replay: a smaller
   case with another law or module is set aside, and the last case with the same is taken.

`store/reductions/<id>/` has `trials.jsonl` and `reduction.json`; <id> is the replay's, so the same command continues.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from actordbg.actor.family_models import config_of_model
from actordbg.actor.hub_model import folder_of, read_json, versions_of
from actordbg.base.errors import ActordbgError, Unsupported
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.records.replay_record import ReplaySpec
from actordbg.records.stored_record import StoredRecord
from actordbg.reduce.case import MODEL, FaultCase, clean_config
from actordbg.reduce.shrink import Shrinker, neighbours
from actordbg.reduce.suspects import Checks, recorded_suspects, suspects_of
from actordbg.reduce.trials import RETURNED, Fingerprint, OutOfBudget, Trials
from actordbg.replay.group_engine import WarmGroups
from actordbg.store.layout import Store

RECORD = "reduction.json"
WIDEST = 1024
"""The largest hidden size of a random model that has the sizes of the replay's."""


@dataclass(frozen=True)
class Reduction(StoredRecord):
    """A reduction. start: the size of the first case in words. trials: how many ran. finished: nothing smaller shows it.

    confirmed: the case ran twice, in two processes, and showed it. checked: a replay of the case has the same law or module, or
    `unchecked` says why that was not checked. aside: smaller cases with another fault. tried: settings beside the case's, and
    whether they are right. stack: the innermost frames of an exception.
    """

    what: ClassVar[str] = "reduction"

    reduction_id: str
    created_at: str
    fingerprint: Fingerprint
    case: FaultCase
    start: str
    trials: int
    seconds: float
    finished: bool
    confirmed: bool
    checked: bool
    unchecked: str = ""
    aside: dict[str, str] | None = None
    tried: dict[str, str] | None = None
    stack: tuple[str, ...] = ()
    versions: dict[str, str] | None = None


def folder_of_reduction(store: Store, reduction_id: str) -> Path:
    """Return the folder of a reduction; its id is the replay's or the comparison's."""
    return store.root / "reductions" / reduction_id


def reduce_replay(
    store: Store, spec: ReplaySpec, *, reduction_id: str, recorded: bool, compared: ComparisonRecord | None,
    most: int, seconds: float, on_step: Callable[[str], None],
) -> Reduction:  # fmt: skip
    """Reduce a replay's wrong input. recorded: the outputs that the run recorded are wrong, not the replay's.
    compared: a comparison that says which inputs are wrong.

    most, seconds: the budget of trials of this call. Raises NothingToDo if no input is wrong now, Unsupported if no script
    shows it.
    """
    began, folder = time.monotonic(), folder_of_reduction(store, reduction_id or spec.replay_id)
    own = Store(folder / "store").create()
    with Trials(folder, most=most, seconds=seconds) as trials, WarmGroups(reopen=True) as warm:
        checks = Checks(own, spec.config, warm, trials)
        suspects = recorded_suspects(store, checks, spec) if recorded else suspects_of(store, checks, spec, compared, on_step)
        for fingerprint, case in suspects:
            shrinker, finished = Shrinker(trials, fingerprint, case, on_step), False
            try:
                shrinker = Shrinker(trials, fingerprint, _start(trials, fingerprint, case, on_step), on_step)
                shrinker.run()
                finished = True
            except OutOfBudget:
                pass  # what was reached is reported, be it the replay's own case
            except Unsupported as raised:
                problem = raised
                continue
            break
        else:
            raise problem
        on_step("checking the smallest case as a replay")
        accepted = shrinker.accepted
        smallest = len(accepted) - 1
        good, unchecked = smallest, "a replay passes use_cache=False"
        if not recorded:
            good, unchecked = _checked(checks, fingerprint, accepted)
        aside = shrinker.aside
        if good < smallest:
            aside["another law or module"] = accepted[smallest].words
        best = accepted[good]
        on_step("running it again")
        confirmed = all(fingerprint.shown_by(best, trials.ending(best, again=True)) for _ in range(2))
        ending = trials.ending(best)
        tried = {}
        with contextlib.suppress(OutOfBudget):
            for words, case_beside in neighbours(best):
                tried[words] = _in_words(fingerprint, case_beside, trials)
    record = Reduction(
        folder.name, now_timestamp(), fingerprint, best,
        start=case.words, trials=trials.known, seconds=round(time.monotonic() - began, 1), finished=finished,
        confirmed=confirmed, checked=not unchecked, unchecked=unchecked, aside=aside, tried=tried,
        stack=ending.frames, versions=dict(versions_of(spec.config.model)),
    )  # fmt: skip
    store.publish_text(folder / RECORD, record.to_json())
    return record


def _in_words(fingerprint: Fingerprint, case: FaultCase, trials: Trials) -> str:
    ending = trials.ending(case)
    if fingerprint.shown_by(case, ending):
        return "shows it too"
    if ending.status != RETURNED:
        return ending.words
    if not all(value is not None and value <= case.limit for value in ending.values):
        return "wrong in another way"
    if case.dtype != "fp32" and ending.values:
        return f"not shown: rounding alone may be {case.limit:g} nats"
    return f"right, to {case.limit:g} nats" if ending.values else "right"


def _start(trials: Trials, fingerprint: Fingerprint, case: FaultCase, on_step: Callable[[str], None]) -> FaultCase:
    """Return the simplest start that shows it: a random model before the checkpoint, transformers before the trainer."""
    plain = {"processes": 1, "engine": "", "zero": 0, "through": MODEL}
    stacks: list[dict[str, Any]] = [plain, {**plain, "through": case.through}, {"through": MODEL}, {}]
    shown: list[str] = []
    for changes in [change for index, change in enumerate(stacks) if change not in stacks[:index]]:
        for model in _models(case):
            start = replace(case, **changes, **model).fitted
            weights = "random weights" if start.config else "the checkpoint"
            on_step(f"does this show it? {start.words}, {weights}")
            ending = trials.ending(start)
            if fingerprint.shown_by(start, ending):
                return start
            shown.append(ending.words)
    raise Unsupported(
        f"no script without actordbg shows it ({'; '.join(dict.fromkeys(shown))})",
        hint="the fault may be in the trainer's own code, in this process's state, or need several processes, of which a script "
        "shows crashes and hangs only: `actordbg explain` names the module",
    )


def _models(case: FaultCase) -> Iterator[dict[str, Any]]:
    """Yield the models to try: small random ones of the family, a random one with the model's own sizes, the checkpoint."""
    folder = folder_of(case.checkpoint)
    configs: list[dict[str, Any]] = []
    if folder is not None:
        own = clean_config(read_json(Path(folder) / "config.json"))
        with contextlib.suppress(ActordbgError):  # a family without small sizes
            configs.append(clean_config(config_of_model(Path(folder))))
        if "vision_config" not in own and int(own.get("hidden_size") or 0) <= WIDEST:
            configs.append(own)
    yield from ({"config": config, "checkpoint": "", "layers": None} for config in configs)
    yield {}


def _checked(checks: Checks, fingerprint: Fingerprint, accepted: Sequence[FaultCase]) -> tuple[int, str]:
    """Return the index of the last accepted case that `check` says the same of, by bisection, and why it was not checked."""
    low, high, why = 0, len(accepted) - 1, ""

    def same(index: int) -> bool:
        nonlocal why
        try:
            return fingerprint.matches(checks.of_case(accepted[index], fingerprint))
        except ActordbgError as problem:
            why = problem.message
            return True

    if same(high):
        return high, why
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if same(middle) else (low, middle)
    if low == 0 and (high == 0 or not same(0)):
        why = "no case has the same law or module"
    return low, why
