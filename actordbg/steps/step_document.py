"""A replayed step as a document: the verdict, its figures, each micro-batch, and pictures of its tokens and of the mismatch.

The pictures compare the rollout's log-probs with the trainer's, where both were recorded. Their noise band is what rounding alone
does to the trainer's: its mean distance from fp32 on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from actordbg.document.blocks import Block, Chart, Grid, Heading, Items, number
from actordbg.document.specifications import ACCENT, PART, hints, layer, layered, quantity, small, whole
from actordbg.judge.token_charts import Texts, TokenPair, tokens_chart
from actordbg.recorded.recorded_calls import Calls, Numbers
from actordbg.steps.recorded_step import MicroBatch, RecordedStep
from actordbg.steps.run_step import StepFigures
from actordbg.steps.step_verdict import applied_by, causes_of, verdict_of

_ROUNDS = 10
"""A token's rounding is at most this many times the mean of all; measured 4.4."""
_BINS = 40
"""Most points of the mismatch by position."""


def step_blocks(figures: StepFigures) -> list[Block]:
    """Build what the terminal shows."""
    step, replayed, reference = figures.step, figures.replayed, figures.reference
    blocks: list[Block] = [Heading(f"step {step.number} of run {step.run}", 1), verdict_of(figures)]
    if replayed.failed or reference.failed:
        return blocks
    causes = causes_of(figures)  # the words of the first are in the verdict
    told = [f"{causes[0].rule.name}: {causes[0].todo}"] if causes and causes[0].todo else []
    told += [f"{cause.rule.name}: {cause.said}. {cause.todo}" for cause in causes[1:] if cause.todo]
    blocks += [Heading("What to do", 3), Items(told)] if told else []
    sides = (
        ("recorded", step.applied, step.grad_norm, 0.0),
        ("replayed", applied_by(step, replayed), replayed.grad_norm, figures.moved(replayed)),
        ("one batch in fp32", reference.total(), reference.grad_norm, figures.moved(reference)),
    )
    rows = [(name, number(loss), number(norm, 6), number(moved, 3)) for name, loss, norm, moved in sides]
    blocks.append(Grid(("side", "loss", "gradient norm", "log-probs moved by, nats"), rows, {"side"}))
    blocks.append(Grid(_COLUMNS, list(_micro_batches(figures))))
    return blocks


_COLUMNS = (
    "rank", "micro-batch", "rows", "actions", "loss", "replayed", "clip ratio", "replayed clip ratio", "KL to old, nats",
)  # fmt: skip


def _micro_batches(figures: StepFigures) -> Iterator[tuple[str, ...]]:
    for each, replayed in zip(figures.step.micro_batches, figures.replayed.figures, strict=True):
        known = each.loss.fact("clip_ratio"), replayed.get("clip_ratio"), replayed.get("ppo_kl")
        shown = (each.recorded, replayed["loss"], *known)
        counts = each.loss.record.rank, each.place, each.terms.rows, f"{each.terms.tokens:,}"
        yield *map(str, counts), *(number(value) for value in shown)


def step_page(figures: StepFigures, others: Calls, texts: Texts | None = None) -> list[Block]:
    """Build the page: what the terminal shows, and the pictures. others: losses of other steps of the run."""
    blocks = step_blocks(figures)
    pairs = [pair for each in figures.step.micro_batches if (pair := pair_of(each)) is not None]
    if figures.replayed.failed or figures.reference.failed or not pairs:
        return blocks
    noise = figures.moved(figures.reference)
    blocks.append(Heading("Rollout and trainer", 2))
    worst = sorted(pairs, key=lambda pair: np.abs(pair.apart).max(where=pair.mask, initial=0.0), reverse=True)
    charts = [tokens_chart(replace(pair, limit=_ROUNDS * noise), texts) for pair in worst[:4]]
    charts += [by_position(pairs, noise), by_step([*(each.loss for each in figures.step.micro_batches), *others], noise)]
    return [*blocks, *(chart for chart in charts if chart is not None)]


def pair_of(micro_batch: MicroBatch) -> TokenPair | None:
    """Return a micro-batch's rollout and trainer side by side, with what the loss made of each action; None without a rollout."""
    loss = micro_batch.loss
    known, active = loss.log_probs(), loss.active
    rollout, new = known.get("rollout_log_probs"), known.get("log_probs")
    if rollout is None or new is None or active is None:
        return None
    beside: dict[str, Numbers] = {}
    if (advantages := loss.array("advantages")) is not None:
        beside["advantage"] = advantages
    if (old := known.get("old_log_probs")) is not None:
        ratio = np.exp(np.clip(new.astype("f8") - old, -20, 20))
        low, high = (float(loss.fact(f"loss.clip_eps_{side}") or 0.0) for side in ("low", "high"))
        beside |= {"old": old, "ratio": ratio, "clipped": ((ratio < 1 - low) | (ratio > 1 + high)).astype("f8")}
    return TokenPair(
        micro_batch.name, rollout, new, active, loss.sequences, loss.real, names=("rollout", "trainer"), beside=beside
    )


def by_position(pairs: Sequence[TokenPair], noise: float) -> Chart | None:
    """Draw the mean |rollout - trainer| over the position in the response, with the noise band."""
    at = np.concatenate([(np.cumsum(pair.mask, 1) - 1)[pair.mask] for pair in pairs])
    if not len(at):
        return None
    width = max(1, math.ceil((at.max() + 1) / _BINS))
    points = _means(at // width * width, [np.abs(pair.apart)[pair.mask] for pair in pairs])
    return _mismatch("Mismatch by position", "position in the response, actions", points, noise)


def by_step(losses: Calls, noise: float) -> Chart | None:
    """Draw the mean |rollout - trainer| over the steps of a run, with the noise band; None for a single step."""
    known = [(loss.record.step, loss.apart) for loss in losses if loss.record.step is not None and loss.apart is not None]
    steps = [np.full(len(far), step) for step, far in known]
    points = _means(np.concatenate(steps), [far for _, far in known]) if known else []
    return _mismatch("Mismatch by step", "optimizer step", points, noise) if len(points) > 1 else None


def _means(places: Numbers, values: Sequence[Numbers]) -> list[dict[str, Any]]:
    """Return the mean and the number of the values [n] at each of the places [n], as points of a chart."""
    every = np.concatenate(values)
    at_place = ((place, every[places == place]) for place in np.unique(places))
    return [{"x": int(place), "y": float(f"{own.mean():.4g}"), "n": len(own)} for place, own in at_place]


def _mismatch(title: str, axis: str, points: list[dict[str, Any]], noise: float) -> Chart:
    worst = max(points, key=lambda point: float(point["y"]))
    most = max(float(worst["y"]), noise)
    y = quantity("y", "mean |rollout - trainer|, nats", axis=small(most))
    shown = hints(("x", axis), ("y", "mean, nats"), ("n", "actions"))
    line = layer("line", points, {"color": ACCENT}, y=y)
    dots = layer("point", points, {"filled": True, "size": 40, "color": ACCENT}, y=y, tooltip=shown)
    ends = [{"x": points[0]["x"], "x2": points[-1]["x"], "y": 0.0, "y2": noise}]
    band = layer("rect", ends, {"color": PART, "opacity": 0.25}, x2={"field": "x2"}, y={**y}, y2={"field": "y2"})
    spec = layered([], band, line, dots, height=220, x=whole("x", axis))
    thin = " (invisible at this scale)" if noise < most / 100 else ""
    says = f"Largest at {worst['x']}: {number(worst['y'], 3)} nats. The band is rounding alone: {number(noise, 3)} nats{thin}."
    table = Grid(
        (axis, "mean |rollout - trainer|, nats", "actions"), [(str(p["x"]), number(p["y"], 3), f"{p['n']:,}") for p in points]
    )
    return Chart(title, says, spec, table, half=True)


def step_data(figures: StepFigures) -> dict[str, Any]:
    """Return a replayed step as data: losses, norms and distances of each side, and each micro-batch."""
    step = figures.step
    if figures.replayed.failed or figures.reference.failed:
        return _about(step)
    sides = {"replayed": figures.replayed, "reference": figures.reference}
    norms = {name: None if math.isnan(side.grad_norm) else side.grad_norm for name, side in sides.items()}
    return _about(step) | {
        "loss": {
            "recorded": step.applied, "expected": step.expected, "replayed": applied_by(step, figures.replayed),
            "reference": figures.reference.total(), "sum_of_absolute_terms": step.size,
        },
        "grad_norm": {"recorded": step.grad_norm, **norms, "alone": figures.reference.alone},
        "moved": {name: figures.moved(side) for name, side in sides.items()},
        "micro_batches": [
            {"rank": each.loss.record.rank, "place": each.place, "loss": each.recorded, "forward": each.forward.dump_id,
             "tokens": each.terms.tokens, "rows": each.terms.rows, "replayed": figures.replayed.figures[at]}
            for at, each in enumerate(step.micro_batches)
        ],
        "configuration": figures.config.to_dict(),
    }  # fmt: skip


def _about(step: RecordedStep) -> dict[str, Any]:
    return {"run": step.run, "step": step.number, "ranks": step.ranks, "tokens": step.tokens, "rows": step.rows}
