"""An optimizer step as it was recorded: the losses of all ranks, joined to their forwards. Reads dumps, without torch.

    step = recorded_step(store, run=None, number=3)
    step.expected, step.applied        # the loss of the step as one batch, and what the ranks and DeepSpeed made of it

DeepSpeed divides each micro-batch's loss by its accumulation, and averages gradients over its ranks. So a step applies
sum(losses) / (accumulation * ranks), which has to be the loss of one batch: the terms of all actions by their number.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from actordbg.base.errors import ActordbgError, NothingToDo, Unsupported, UsageError
from actordbg.base.units import listed, plural
from actordbg.catalog import query
from actordbg.catalog.selections import reasons
from actordbg.formats.weight_hashes import WeightRecord
from actordbg.recorded.loss_terms import Terms
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.records.replay_record import ReplayInput
from actordbg.records.run_files import read_weights, weights_of
from actordbg.store.layout import Store, require_run_name
from actordbg.store.places import read_record
from actordbg.trainers.trainer import TRAINER

_RECORD = "record a PPO, DPO or SFT with `actordbg run --calls forward,loss` (or `dump enable --calls forward,loss`)"
STARTED = 2
"""A loss of so few calls of its forward's model may be the first that was recorded, in the middle of a step."""
_JUDGED = "`actordbg lint` judges recorded losses of any trainer"
_REPLAYED = f"{TRAINER.package}."
"""How the function of a loss begins that `TRAINER.total_loss` computes."""


@dataclass(frozen=True)
class MicroBatch:
    """A recorded loss, `loss_path` below the store, and its forward as an input of a replay. place: its number on its rank."""

    loss: RecordedCall
    loss_path: str
    forward: ReplayInput
    place: int

    @property
    def terms(self) -> Terms:
        """The sums of its terms, from its own recorded log-probs."""
        assert self.loss.terms is not None  # `recorded_step` refuses others
        return self.loss.terms

    @property
    def recorded(self) -> float:
        """The loss that the trainer computed."""
        return float(self.loss.fact("loss"))

    @property
    def name(self) -> str:
        """Rank and place, in words."""
        return f"rank {self.loss.record.rank}, micro-batch {self.place}"


@dataclass(frozen=True)
class RecordedStep:
    """The micro-batches of a step by place, then rank; ranks with the same rows (of a ring, of tensor parallelism) count once.

    missing: why it is not the whole step; "" if it is. states: for each rank, what its optimizer held at this step and at the
    next, where both were recorded. frozen: names of parameters that are not trained.
    """

    run: str
    number: int
    micro_batches: tuple[MicroBatch, ...]
    missing: str = ""
    states: tuple[tuple[WeightRecord, WeightRecord], ...] = ()
    frozen: tuple[str, ...] = ()

    def fact(self, name: str) -> Any:
        """Return a plain value that all its losses recorded alike; that of the first."""
        return self.micro_batches[0].loss.fact(name)

    def by_rank(self, name: str) -> dict[int, Any]:
        """Return a value by rank, where each rank recorded one; that of its first micro-batch."""
        values = ((each.loss.record.rank, each.loss.fact(name)) for each in reversed(self.micro_batches))
        return {rank: value for rank, value in values if value is not None}

    @property
    def fp32(self) -> bool:
        """Check whether the run computed in fp32."""
        return self.micro_batches[0].loss.fp32

    @cached_property
    def ranks(self) -> int:
        """The number of data-parallel ranks."""
        return len({each.loss.record.rank for each in self.micro_batches})

    @property
    def places(self) -> int:
        """The number of micro-batches of a rank."""
        return len(self.micro_batches) // self.ranks

    @property
    def by_token(self) -> bool:
        """Check whether the loss is a mean over tokens, rather than over rows."""
        return self.fact("loss.token_level_loss") is not False

    @cached_property
    def tokens(self) -> int:
        return sum(each.terms.tokens for each in self.micro_batches)

    @cached_property
    def rows(self) -> int:
        return sum(each.terms.rows for each in self.micro_batches)

    @property
    def divisor(self) -> int:
        """The number of terms that the loss is a mean of."""
        return self.tokens if self.by_token else self.rows

    def sum_of(self, terms: Terms) -> float:
        """Return the sum of these terms."""
        return terms.by_token if self.by_token else terms.by_row

    @property
    def accumulation(self) -> int:
        """The number that the engine divides each loss by: DeepSpeed's accumulation, else the number of micro-batches; 1 if
        another trainer's loss has this formula.
        """
        return int(self.fact("engine_accumulation") or (1 if self.fact("loss.formula_of") else self.places))

    @cached_property
    def expected(self) -> float:
        """The loss of the step as one batch, from the recorded log-probs."""
        return sum(self.sum_of(each.terms) for each in self.micro_batches) / self.divisor

    @cached_property
    def applied(self) -> float:
        """The loss whose gradient the engine applies, from the recorded losses."""
        return sum(each.recorded for each in self.micro_batches) / (self.accumulation * self.ranks)

    @property
    def factor(self) -> float:
        """The factor by which dp_size and the recorded count make every loss too large; 1 if they are right."""
        by = self.fact("batch_num_tokens" if self.by_token else "global_batch_size")
        ranks = float(self.fact("dp_size") or self.ranks) / self.ranks
        return ranks if by is None else ranks * self.divisor / (float(by) * self.accumulation)

    @cached_property
    def size(self) -> float:
        """The sum of absolute terms by their number, which a loss is compared on: the terms themselves cancel."""
        return sum(each.terms.size for each in self.micro_batches) / self.tokens

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradient, before clipping, as the engine computed it; None if it was not recorded."""
        known = (each.loss.fact("grad_norm") for each in reversed(self.micro_batches))
        return next((float(norm) for norm in known if norm is not None), None)


def recorded_step(store: Store, run: str | None, number: int) -> RecordedStep:
    """Read the losses of a step, and look up their forwards.

    run: None if only one run has losses of that step. Raises NothingToDo if there are none, UsageError for several runs,
    Unsupported for a loss of another trainer or of an unknown formula, or whose forward is not in the store. A step that was
    recorded again, such as after a restart from a checkpoint, is the one of the newest processes.
    """
    catalog = query.open_fresh(store.require())
    require_run_name(run)
    of_run = "point = 'loss'" + (f" and run = '{run}'" if run is not None else "")
    rows = query.select_dumps(catalog, f"{of_run} and step = {number}", losses=True)
    if not rows:
        others = query.select_dumps(catalog, of_run, losses=True, limit=1)
        problem = f"no loss of step {number} was recorded" + (f" in run {run}" if run else "")
        if not others:
            raise NothingToDo(problem, hint=_RECORD)
        raise NothingToDo(f"{problem}: {'; '.join(reasons(catalog, f'step = {number}'))}", hint="choose a recorded step")
    runs = sorted({row.run for row in rows})
    if len(runs) > 1:
        raise UsageError(f"{plural(len(runs), 'run')} have losses of step {number}: {listed(runs)}", hint="pass --run NAME")
    by_rank: dict[int, dict[tuple[object, ...], list[tuple[RecordedCall, str]]]] = {}
    for row in rows:
        call = RecordedCall.read(str(store.root / row.path))
        if call.fact("loss") is not None and call.record.role == "policy loss":
            process = call.record.host, call.record.pid, call.record.instance
            by_rank.setdefault(row.rank, {}).setdefault(process, []).append((call, row.path))
    newest = {
        rank: max(of.values(), key=lambda calls: max(call.record.timestamp for call, _ in calls)) for rank, of in by_rank.items()
    }
    micro_batches = [micro for calls in newest.values() for micro in _joined(catalog, calls)]
    if not micro_batches:
        raise NothingToDo(f"the losses of step {number} lack results, or are those of another model than a policy", hint=_JUDGED)
    micro_batches.sort(key=lambda each: (each.place, each.loss.record.rank))
    whole, seen = [], set[tuple[int, tuple[bytes, ...]]]()
    for each in micro_batches:
        key = each.place, tuple(each.loss.row_keys)
        if key not in seen or each.loss.fact("dp_size") == each.loss.record.world_size:
            whole.append(each)
        seen.add(key)
    made = RecordedStep(runs[0], number, tuple(whole))
    counts = {rank: len(calls) for rank, calls in newest.items()}
    missing = _missing(made, counts, {len(of) for of in by_rank.values()})
    held = [_weights(store, each) for each in {each.loss.record.rank: each for each in whole}.values()]
    states = [(of[0], of[1]) for of in held if len(of) > 1 and all(each.optimizer for each in of)]
    frozen = {name: None for of in held for name, each in of[0].parameters.items() if each.frozen} if all(held) else {}
    return replace(made, missing=missing, states=tuple(states), frozen=tuple(frozen))


def _weights(store: Store, micro_batch: MicroBatch) -> list[WeightRecord]:
    """Return what a micro-batch's rank held at its step and at the next; less where that was not recorded."""
    step = micro_batch.loss.record.step
    try:
        path = weights_of(store.root, read_record(store.root / micro_batch.forward.path))
        if path is None or step is None:
            return []
        own = path.name.rpartition("-")[0]
        later = min((each for each in path.parent.glob(f"{glob.escape(own)}-*.json") if each.name > path.name), default=None)
        held = [read_weights(each) for each in (path, later) if each is not None]
    except (ActordbgError, OSError):
        return []
    return held if [each.step for each in held] == [step, step + 1] else held[:1] if held[0].step == step else []


def _joined(catalog: query.Catalog, calls: Sequence[tuple[RecordedCall, str]]) -> list[MicroBatch]:
    """Join the losses of a rank to their forwards, in the order in which they ran."""
    joined = []
    for place, (loss, path) in enumerate(sorted(calls, key=lambda pair: pair[0].record.monotonic_ns)):
        about = f"the loss {loss.record.dump_id}"
        function = str(loss.record.actor.get("function"))
        if not (function.startswith(_REPLAYED) or loss.fact("loss.formula_of")):
            text = f"{about} is {function}, and only losses of {TRAINER.package} are replayed"
            raise Unsupported(text, hint=_JUDGED)
        if loss.terms is None:
            raise Unsupported(f"{about} has a formula that is not known: {function}", hint=_RECORD)
        forward = next(iter(query.select_dumps(catalog, f"dump_id = '{loss.forward_id}'")), None) if loss.forward_id else None
        if forward is None:
            raise Unsupported(f"the forward of {about} is not in the store", hint="replay a step whose forwards were kept")
        names = ("dump_id", "path", "rank", "batch_size", "seq_len", "tokens")
        joined.append(MicroBatch(loss, path, ReplayInput(**{name: getattr(forward, name) for name in names}), place))
    return joined


def _missing(step: RecordedStep, counts: dict[int, int], recordings: set[int]) -> str:
    """Say what a step lacks; "" if it is whole. counts: micro-batches by rank. recordings: how often ranks recorded the step."""
    first = step.micro_batches[0].loss.record
    absent = sorted(set(range(first.world_size or 1)) - counts.keys())
    if absent:
        return f"the losses of {plural(len(absent), 'rank')} were not recorded: {listed(absent[:8])}"
    if len(recordings) > 1:
        return "some ranks recorded the step more often than others"
    if len(set(counts.values())) > 1 or len(step.micro_batches) % step.ranks:
        return "ranks recorded different numbers of micro-batches"
    engine = None if step.fact("dynamic_batch") else step.fact("engine_accumulation")
    if engine:
        own = min(counts.values())
        return "" if own == engine else f"{own} of {plural(int(engine), 'micro-batch')} of each rank were recorded"
    numbers = {each.loss.fact("micro_batch") for each in step.micro_batches} - {None}
    calls = int(step.micro_batches[0].forward.dump_id.split("-")[1])
    if min(numbers, default=0) > 0 and (calls < STARTED or step.fact("loss.formula_of")):
        return "recording may have begun after its first micro-batch"
    if numbers and max(numbers) - min(numbers) >= len(numbers):
        return f"{plural(len(numbers), 'micro-batch')} of each rank were recorded, with others between them"
    if step.grad_norm is None and first.actor.get("wrapper_class") == "DeepSpeedEngine":
        return "no recorded loss is followed by the optimizer step"
    return ""
