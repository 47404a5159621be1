"""Check the laws on one input, through the loaded Actor, with a fixed list of forwards and backwards.

If ranks compute together, all of them run this at the same time, each for its own input, and meet in each forward's collectives.
Then the list of forwards depends on the configuration only, never on the input or the results. Otherwise a broken law may cost a
few more forwards, to find which row depends on which.

An error in a forward ends the checks: its law has failed, which forbids a green verdict; the remaining laws are `not-checked`.
If ranks compute together, this process is then out of step with its peers (`LawRun.out_of_step`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from actordbg.actor import changes
from actordbg.actor.changes import FACTOR, rounded_anew
from actordbg.actor.forward_outcome import PREFIX, ForwardOutcome, GradientKeeper
from actordbg.actor.routing import EXPERTS
from actordbg.actor.session import ActorSession
from actordbg.base.errors import machine_errno
from actordbg.base.units import first_line
from actordbg.laws.given import WITH_IMAGES, judge_images, judge_routing
from actordbg.laws.jacobian import halves, judge_additivity, support
from actordbg.laws.judging import (
    NOISE_FACTOR,
    Change,
    Expected,
    ForwardValues,
    answer,
    change,
    judge_normalisation,
    not_checked,
    watching,
)
from actordbg.laws.rules import LAWS
from actordbg.records.finding import BROKEN, KEPT
from actordbg.records.replay_record import LAWS as IN_EXTRA, NONDETERMINISTIC, WITHIN_ROUNDING, LawAnswer
from actordbg.replay.instruments import Examined, Examiner
from actordbg.store.payload import Dump
from actordbg.trainers.images import PIXELS, pictures_of
from actordbg.trainers.rows_actor import drawn_share, has_experts, text_config

_OF_SOME = {"images": PIXELS, "routing": EXPERTS}
"""Laws of calls that have this tensor."""
_CULPRITS = 4
"""After a broken law, how many rows are changed individually to find the row that leaks."""
_CAPACITY = ("expert_capacity", "expert_capacity_factor", "capacity_factor", "moe_capacity_factor")


@dataclass
class LawRun:
    """The law checks of one input. together: other ranks compute with this rank. tell: called with the name of each next step."""

    session: ActorSession
    dump: Dump
    outcome: ForwardOutcome
    backward: bool
    together: bool
    tell: Callable[[str], None] = lambda name: None
    answers: dict[str, LawAnswer] = field(default_factory=dict)
    out_of_step: str = ""

    def __post_init__(self) -> None:
        session, config = self.session, self.session.config
        self.call = changes.plain_call(self.dump, int(session.resolved["vocab_size"]))
        self.ids: Tensor = self.call.inputs["sequences"]
        self.real, self.tokens = changes.attended(self.call), changes.next_tokens(self.call)
        self.base = ForwardValues(self.outcome.log_probs)
        self._rows = torch.arange(len(self.real))
        self._pictures, self._misfit = pictures_of(session.model, self.call.inputs)
        self._waiting: dict[str, tuple[Change, str]] = {}
        self._noise = 0.0
        self._compiled: bool = config.compiles
        self._experts: bool = has_experts(session.model)
        self._draws: bool = self.outcome.training and drawn_share(session.model) > 0

    def run(self) -> list[LawAnswer]:
        """Check every law, and return the answers in the order of `LAWS`."""
        step, why = "rerun", self._misfit or changes.unsupported(self.dump, WITH_IMAGES if self._pictures else ())
        if self._misfit:
            self._take(LawAnswer("images", BROKEN, self._misfit))
        missing = {"jacobian": "a compiled graph cannot have a hook", "additivity": "no backward ran"}
        missing = dict.fromkeys(LAWS, why) if why else dict.fromkeys(LAWS, "not requested") | missing
        try:
            for step, ask in self._steps().items() if self.together or not why else ():
                self.tell(step)
                ask()
        except Exception as error:
            if machine_errno(error):
                raise
            self._take(replace(not_checked(step, f"{type(error).__name__}: {first_line(error)}"), raised=True))
            missing = dict.fromkeys(LAWS, why or f"{step} failed")
            if self.together or self.session.tainted:
                self.out_of_step = f"the law {step} failed, and its leftovers cannot be cleaned up"
        laws = [law for law in LAWS if _OF_SOME.get(law, "sequences") in self.call.tensors]
        answers = [self.answers.get(law) or not_checked(law, missing[law]) for law in laws]
        if answers[0].verdict == BROKEN:
            answers = [
                not_checked(each.law, STATE) if each.law in BETWEEN_CALLS and each.verdict != KEPT else each for each in answers
            ]
        forward = {answer.verdict for answer in answers if answer.law in ("neighbour", "padding", "future")}
        if not forward & {BROKEN} and forward & {KEPT, WITHIN_ROUNDING}:
            answers = [_of_the_backward(answer) if answer.law == "jacobian" else answer for answer in answers]
        return [_without_meaning(self.session, answer) for answer in answers]

    def _steps(self) -> dict[str, Callable[[], None]]:
        steps = {"rerun": self._rerun, "neighbour": self._neighbours, "future": self._future, "state": self._state}
        if not self._compiled:
            steps["jacobian"] = self._jacobian
        steps["order"] = self._rounding
        return steps | ({"additivity": self._additivity} if self.backward else {})

    # The exact laws

    def _rerun(self) -> None:
        places = changes.places(self.call, self.outcome.packing, *self.session.ring)
        expected = Expected(places, self.ids, self.tokens, self.outcome.temperature, self.outcome.entropy is not None)
        seed = None if self._draws else self.session.choices.seed + 1
        again = self._forward(self.dump, seed)
        with watching(self.session.actor, expected) as given:
            self.base = self._forward(self.call)
        if self._pictures is not None:
            self._take(judge_images(self.session.model, self.call.inputs, given, self._pictures))
        if EXPERTS in self.call.tensors:
            self._take(judge_routing(self.session.model, self.call, self.session.seen, places))
        first, entropy = self.outcome.log_probs, self.outcome.entropy
        before = ForwardValues(self._placed(first), None if entropy is None else self._placed(entropy))
        moved = change(again, before, self._placed(self.outcome.mask))
        self._noise = moved.size
        nothing = "the input has no token to check"
        self._take(answer("rerun", moved, self.ids, _NOT_AGAIN, verdict=NONDETERMINISTIC, nothing=nothing))
        self._take(judge_normalisation(self.base, expected, self.tokens))  # in a ring: of this rank's part
        self._mask(again.log_probs)

    def _mask(self, masked: Tensor) -> None:
        """Check `mask`. masked: log-probs of the recorded call, whose action mask multiplies those of the call without it."""
        if "action_mask" not in self.dump.inputs:
            return self._take(not_checked("mask", "the call has no action mask"))
        given = self.dump.inputs["action_mask"]
        factor, covered = self._placed(given.float()), self._placed(torch.ones_like(given)) != 0
        ours, base = ForwardValues(masked), ForwardValues(self.base.log_probs * factor)
        outside = change(ours, base, covered & (factor == 0))
        if outside.count:
            return self._take(answer("mask", outside, self.ids, NO_MASK))
        self._waiting["mask"] = (change(ours, base, factor != 0), MASK_CHANGES)
        return None

    def _neighbours(self) -> None:
        """Check `neighbour` and `padding` together in two forwards; separately if something moves."""
        tokens, real, odd = self.tokens, self.real, self._rows[:, None] % 2 == 1
        alone = self.together or len(self._rows) < 2
        ways = [(real & ~odd, tokens & odd), (real & odd, tokens & ~odd)]
        moved = _joined(*(self._changed(where if alone else where | ~real, mask) for where, mask in ways))
        padding = moved
        if alone or moved.count:
            padding = self._changed(~real, tokens)
        if moved.count and not alone:
            moved = _joined(*(self._changed(where, mask) for where, mask in ways))
        words = f"row {padding.first[0]} depends on the padding" if padding.count else ""
        self._exact("padding", padding, words, "" if bool((~real).any()) else "the input has no padding")
        self._exact("neighbour", moved, self._who(moved), ONE_ROW if len(self._rows) < 2 else "")

    def _future(self) -> None:
        where = changes.behind_the_middle(self.call)
        moved = self._changed(where, changes.before(where) & self.tokens)
        mixed = ", or another row's" if self.answers["neighbour"].verdict == BROKEN else ""
        words = f"row {moved.first[0]} depends on later tokens{mixed}" if moved.count else ""
        self._exact("future", moved, words, "" if moved.looked_at else "no row has three tokens")

    def _jacobian(self) -> None:
        try:
            self._take(support(self.session, self.call, backward=self.backward, packing=self.outcome.packing))
        except torch.OutOfMemoryError:
            if self.together or self.backward:
                raise
            self._take(not_checked("jacobian", NO_ROOM))

    def _state(self) -> None:
        """Check `state`: the call after a call with other tokens, against `base`, the call after itself.

        Noise moves a call that follows itself just as far. What a state still has of older calls moves it less.
        """
        moved = change(self._forward(self.call), self.base, self.tokens)
        why = "" if bool(changes.behind_the_middle(self.call).any()) else "no row has three tokens"
        if self.together or moved.count:
            noise = change(self._forward(self.call), self._forward(self.call), self.tokens)
            if moved.size <= NOISE_FACTOR * noise.size and moved.count:
                why = "a rerun moves it as far"
        self._take(not_checked("state", why) if why else answer("state", moved, self.ids, STATE))

    def _exact(self, law: str, moved: Change, words: str, why: str) -> None:
        """Record the answer of an exact law: bit for bit, or for a model with experts later, within rounding (`_rounding`).

        why: the reason why the law cannot be checked, or "".
        """
        if not why and moved.count and moved.size <= NOISE_FACTOR * self._noise:
            why = f"the configuration's own noise is {self._noise:.2g} nats"
        if not why and moved.count and self._experts:
            self._waiting[law] = (moved, words)
            why = "rounding on this input was not measured"
        self._take(not_checked(law, why) if why else answer(law, moved, self.ids, words))

    def _who(self, moved: Change) -> str:
        """Describe which row depends on which, as far as known: "row 1 depends on row 0"."""
        if not moved.count:
            return ""
        seen = moved.first[0]
        others = [row for row in range(len(self._rows)) if row % 2 != seen % 2 and bool(self.real[row].any())]
        if len(others) > 1 and not self.together:
            near, tokens = sorted(others, key=lambda row: abs(row - seen))[:_CULPRITS], self._of_row(self.tokens, seen)
            reach = ([row] for row in near if self._changed(self._of_row(self.real, row), tokens).count)
            others = next(reach, others)
        return f"row {seen} depends on " + (f"row {others[0]}" if len(others) == 1 else "other rows")

    # Laws within rounding

    def _rounding(self) -> None:
        """Check `order` and `alone` against rounding; with experts, also the exact laws that wait for it."""
        rows = self.tokens.any(1).nonzero().flatten()
        row = int(rows[-1]) if len(rows) else 0
        turned = self._rows.flip(0)
        order = self._forward(changes.with_rows(self.call, turned, self._pictures)).rows(turned)
        self._waiting["order"] = (change(order, self.base, self.tokens), "reordering the rows changes results")
        if self.session.config.packing or not self._compiled:  # otherwise a batch of one row would need another graph
            lone_call = changes.with_rows(self.call, self._rows[row : row + 1], self._pictures)
            lone = self._forward(lone_call).rows(torch.zeros_like(self._rows))
            words = f"row {row} differs when run alone"
            self._waiting["alone"] = (change(lone, self.base, self._of_row(self.tokens, row)), words)
        with rounded_anew(self.session.model):
            moved = change(self._forward(self.call), self.base, self.tokens)
        base = self.base.log_probs.nan_to_num(0, 0, 0)
        largest = base.abs().max()
        last_place = torch.finfo(torch.float32).eps * float(largest)
        limit = FACTOR * max(moved.mean if self._experts else moved.size, last_place)  # rounding may move none by as much
        why = ONE_ROW if len(self._rows) < 2 else _RANDOM if self._draws else ""
        if "alone" not in self._waiting:
            self._take(not_checked("alone", why or "a batch of one row would be recompiled"))
        for law, (difference, words) in self._waiting.items():  # with experts a token may be rerouted, so the mean counts
            within = answer(law, difference, self.ids, words, limit=limit, by_mean=self._experts)
            self._take(not_checked(law, why) if why and law in ("order", "alone") else within)

    # Gradients

    def _additivity(self) -> None:
        terms = torch.zeros_like(self.tokens)
        terms[:, -self.outcome.mask.shape[1] :] = self.outcome.mask
        kept = self.session.config.keep_gradients  # then the outcome already has the whole gradient
        mean = terms.double() / terms.sum().clamp(min=1)
        weights = (*(() if kept else (mean,)), *halves(terms))
        keepers = [GradientKeeper(self.session.records) for _ in weights]
        for part, keeper in zip(weights, keepers, strict=True):
            self.session.gradient(self.call, part, keeper=keeper)
        given = {name: tensor for name, tensor in self.outcome.tensors.items() if name.startswith(PREFIX)}
        *whole, first, second = (keeper.tensors for keeper in keepers)
        answer = judge_additivity(str(self.session.resolved["dtype"]), whole[0] if whole else given, first, second)
        if int(terms.sum()) < 2:
            answer = not_checked("additivity", "the loss has fewer than two terms")
        self._take(answer)

    # What the steps share

    def _of_row(self, where: Tensor, row: int) -> Tensor:
        return where & (self._rows == row)[:, None]

    def _forward(self, dump: Dump, seed: int | None = None) -> ForwardValues:
        def read(log_probs: Tensor, entropy: Tensor | None) -> ForwardValues:
            return ForwardValues(self._placed(log_probs), None if entropy is None else self._placed(entropy))

        return self.session.probe(dump, read, backward=self.backward, seed=seed)

    def _placed(self, values: Tensor) -> Tensor:
        """Return values of the last A next tokens, [B, A], as [B, S-1] with 0 before them, on the CPU; floats as float32."""
        values = values.detach().cpu()
        whole = values.new_zeros(len(values), self.ids.shape[1] - 1, dtype=torch.float32 if values.is_floating_point() else None)
        whole[:, whole.shape[1] - values.shape[1] :] = values
        return whole

    def _changed(self, where: Tensor, mask: Tensor) -> Change:
        return change(self._forward(changes.with_other_tokens(self.call, where, self._pictures)), self.base, mask)

    def _take(self, answer: LawAnswer) -> None:
        self.answers[answer.law] = answer


ONE_ROW = "the input has one row"
NO_ROOM = "its backward takes more memory than is left; the replay made none"
_NOT_AGAIN = "a rerun gave different numbers"
NO_MASK = "log-probs outside the action mask are not 0: it is not applied, or to other tokens"
MASK_CHANGES = "selected log-probs are other numbers with the action mask than without it"
STATE = "the result depends on the call before it"
BETWEEN_CALLS = ("rerun", "mask", "neighbour", "padding", "future", "order", "alone")
"""Laws that compare a call with another call."""
_RANDOM = "the call draws random numbers, which depend on shapes"


def _without_meaning(session: ActorSession, answer: LawAnswer) -> LawAnswer:
    """Replace a broken law that cannot hold for this model by `not-checked`, with the reason."""
    config = text_config(session.model)
    capacity = next((name for name in _CAPACITY if getattr(config, name, None)), None)
    quantization = str(getattr(session.model.config, "quantization_config", ""))
    scaled = "fp8" in quantization.lower()
    if answer.verdict != BROKEN or answer.law in ("state", "mask", "normalisation", "additivity") or not (capacity or scaled):
        return answer
    why = f"routing has a capacity ({capacity})" if capacity else "an FP8 scale covers a whole tensor"
    return not_checked(answer.law, f"{why}: a token may change all others")


def _of_the_backward(jacobian: LawAnswer) -> LawAnswer:
    """Say of a broken `jacobian` that the forward depends on nothing else: it held the laws of the forward."""
    if jacobian.verdict != BROKEN:
        return jacobian
    return replace(jacobian, words="the backward adds gradients that no log-prob has, as an auxiliary loss does")


def _joined(first: Change, second: Change) -> Change:
    looked_at = first.looked_at + second.looked_at
    mean = (first.mean * first.looked_at + second.mean * second.looked_at) / max(1, looked_at)
    return Change(first.where | second.where, max(first.size, second.size), mean, looked_at)


class LawsInWorker(Examiner):
    """The laws of an input, checked in a worker after it has run."""

    def examine(self, run: Examined) -> dict[str, Any]:
        if not run.asked:
            return {}
        asking = LawRun(self.session, run.dump, run.outcome, run.backward, together=self.together, tell=run.tell)
        answers = [answer.to_dict() for answer in asking.run()]
        self.out_of_step = asking.out_of_step
        return {IN_EXTRA: answers}
