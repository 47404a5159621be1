"""Was the optimizer's step Adam's? Judged from samples of its parameters and moments before and after, without a model.

With m, v, p before, m', v', p' after a step of learning rate lr at bias corrections c1 and c2:

| Law | Broken by |
|---|---|
| v' = b2 v + (1 - b2) g^2, with g of m' = b1 m + (1 - b1) g | moments that were lost, or are another model's |
| p' = (1 - lr wd) p - (lr / c1) m' / (sqrt(v' / c2) + eps) | another learning rate or decay, parameters set anew |
| settings are the trainer's: lr, betas, eps, weight decay | an optimizer that was made or changed otherwise |

Each holds for every element to fp32 rounding. Whether g is the step's gradient is what its norm says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from actordbg.base.units import plural, some
from actordbg.document.blocks import number
from actordbg.formats.weight_hashes import GroupState
from actordbg.recorded.recorded_calls import Numbers
from actordbg.records.finding import Finding
from actordbg.steps.recorded_step import RecordedStep
from actordbg.steps.rules import broken

OFF, SHARE = 2e-3, 0.1
"""A law is broken if it is off by so much, relative to the change itself, in so many of the elements that change."""
CUT_OFF, CUT_LEAST, CUT_SHARE = 1e-4, 8, 0.02
"""A gradient was cut at a value if so many elements, and such a share, have its largest size, to so much of it."""
_ULP = 4e-7
"""A few roundings of fp32, relative."""


def unchecked(step: RecordedStep, *, lost: bool = False) -> str:
    """Say what of the update of a step is not judged, and why; "" if all is. lost: a finding names lost gradients."""
    if not step.states:
        why = "its state was not recorded both before and after (record the next step as well)"
        if any(each.loss.record.actor.get("zero_stage") == 3 for each in step.micro_batches):
            why = "DeepSpeed has no optimizer state to sample between steps under ZeRO 3"
        return f"the optimizer's update: {why}"
    still = [] if lost else resting(step)
    return f"why the update did not move {some(still)} (in the recorded elements)" if still else ""


def resting(step: RecordedStep) -> list[str]:
    """Return the trained parameters that did not move where most did: without a gradient, or not given what the optimizer has.

    Half precision rounds a step of a usual learning rate away, most of all of weights near 1: what is recorded in it is left out.
    """
    still = dict[str, None]()
    for before, after in step.states:
        sampled = [name for name, own in before.parameters.items() if own.dtype == "float32" and own.sample and not own.frozen]
        own = [name for name in sampled if before.parameters[name] == after.parameters.get(name)]
        still |= dict.fromkeys(own if 2 * len(own) < len(sampled) else ())
    return [*still]


def of_update(step: RecordedStep) -> Iterator[Finding]:
    """Yield what is wrong with the update of a step, with the figures that show it."""
    ours, engine = step.fact("max_norm"), step.fact("engine_max_norm")
    if None not in (ours, engine) and float(ours) != float(engine):
        yield broken(
            "gradient clipping", f"gradients should be clipped at {ours:g}, and DeepSpeed clips at {engine:g} (0: never)"
        )
    for before, after in step.states:
        pairs = list(zip(before.optimizer, after.optimizer, strict=False))
        for old, new in pairs:
            yield from _settings(step, old)
            yield from _moved(old, new)
        moved = (before.parameters[name] for name in before.parameters if before.parameters[name] != after.parameters.get(name))
        if wrong := _decay(step, [old for old, _ in pairs], any(len(each.shape) == 1 for each in moved)):
            yield wrong


def _settings(step: RecordedStep, group: GroupState) -> Iterator[Finding]:
    """Yield the settings of a group that are not the trainer's."""
    wanted, base = step.fact("adam.lr"), group.lr if group.first_lr is None else group.first_lr
    if wanted and not abs(base - wanted) <= 1e-6 * wanted and (group.first_lr is not None or base > wanted):
        words = f"the optimizer's learning rate is {base:g}, the trainer's {wanted:g}, {number(base / wanted, 3)} times it"
        yield broken("learning rate", words)
    elif group.lr > base * (1 + 1e-6):
        yield broken("learning rate", f"the learning rate is {group.lr:g}, above the {base:g} that its schedule begins from")
    for name in ("betas", "eps"):
        own, asked = np.atleast_1d(getattr(group, name)), step.fact(f"adam.{name}")
        if asked is not None and not np.allclose(own, asked, rtol=1e-6, atol=0.0):
            yield broken(name, f"Adam's {name} is {own.tolist()}, the trainer's {asked}")


def _decay(step: RecordedStep, groups: list[GroupState], norms: bool) -> Finding | None:
    """Return what is wrong with the weight decay: a group has the trainer's or, as that of norms and biases, none.

    norms: whether norms or biases move, which then are in a group.
    """
    asked, own = step.fact("adam.weight_decay"), [group.weight_decay for group in groups]
    right = asked is None or ({asked} <= {*own} <= {0.0, asked} and (0.0 in own or (len(own) == 1 and not norms)))
    text = f"the weight decay is {some(own)}, the trainer's {asked}, of norms and biases 0"
    return None if right else broken("weight decay", text)


def _moved(old: GroupState, new: GroupState) -> Iterator[Finding]:
    """Yield the laws that the moments and the parameters of a group break."""
    (p, m, v), (q, n, w) = _elements(old), _elements(new)
    if p.shape != q.shape or (old.steps == new.steps is not None and (p == q).all()):
        return  # another model, or a step that was skipped
    if old.steps is not None and new.steps is not None and new.steps != old.steps + 1:
        words = f"Adam counts {plural(new.steps, 'step')} after {plural(old.steps, 'step')}"
        yield broken("Adam's state", words)
    b1, b2 = old.betas
    gradient = (n - b1 * m) / (1 - b1)
    blur = _ULP * (abs(n) + abs(m)) / (1 - b1)
    highest = abs(gradient).max(initial=0.0)
    at_limit = (abs(gradient) >= highest * (1 - CUT_OFF)) & (blur < CUT_OFF * highest)
    if at_limit.sum() >= max(CUT_LEAST, CUT_SHARE * len(gradient)):
        words = f"{plural(int(at_limit.sum()), 'element')} of {len(gradient):,} of the gradient have the size {number(highest)}"
        yield broken("clipped by value", f"{words}, and none a larger one: it is cut at a value, not by its norm")
    wanted = b2 * v + (1 - b2) * gradient**2
    room = OFF * np.maximum(w, wanted) + (1 - b2) * (2 * abs(gradient) + blur) * blur
    if (share := _share(abs(w - wanted) > room, (w > 0) | (wanted > 0))) > SHARE:
        words = f"Adam's second moment does not follow from its first in {100 * share:.0f} % of the elements"
        lost = not (m.any() or v.any()) and bool(old.steps)
        yield broken("Adam's state", f"{words}: both were 0 before" if lost else words)
    if old.steps is None:
        return
    corrected = np.sqrt(w / (1 - b2 ** (old.steps + 1))) + old.eps
    update = old.lr * n / (1 - b1 ** (old.steps + 1)) / corrected
    decays = (old.lr * old.weight_decay * p, 0.0 * p)  # AdamW's own term; in Adam it is part of the gradient
    off = [abs(q - (p - decay - update)) > OFF * abs(update + decay) + _ULP * abs(p) for decay in decays]
    moves = (abs(update) > 10 * _ULP * abs(p)) | (q != p)
    if (share := min(_share(each, moves) for each in off)) > SHARE:
        sure = abs(update) > 100 * _ULP * abs(p)
        ratios = ((p - decays[0] - q) / np.where(sure, update, 1.0))[sure]
        middle = float(np.median(ratios)) if len(ratios) else 0.0
        times = f", {number(middle, 3)} times it" if len(ratios) else ""
        words = f"parameters did not move by what Adam's state and learning rate {old.lr:g} give{times}"
        yield broken("update", f"{words}, in {100 * share:.0f} % of the elements")


def _elements(group: GroupState) -> Numbers:
    """Return the sample as [3, elements], float64."""
    values: Any = np.frombuffer(bytes.fromhex(group.sample), "<f4").astype("f8")
    return values.reshape(3, -1)


def _share(wrong: Numbers, of: Numbers) -> float:
    return float((wrong & of).sum() / max(of.sum(), 1))
