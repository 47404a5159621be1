"""A replayed step as a document and as data: the verdict, its figures, and each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from actordbg.document.blocks import Block, Grid, Heading, Items, number
from actordbg.steps.recorded_step import RecordedStep
from actordbg.steps.run_step import StepFigures
from actordbg.steps.step_verdict import applied_by, causes_of, verdict_of


def step_blocks(figures: StepFigures) -> list[Block]:
    """Build what the terminal shows."""
    step, replayed, reference = figures.step, figures.replayed, figures.reference
    blocks: list[Block] = [Heading(f"step {step.number} of run {step.run}", 1), verdict_of(figures)]
    if replayed.failed or reference.failed:
        return blocks
    causes = causes_of(figures)  # the words of the first are in the verdict
    told = [f"{cause.rule.name}: {cause.todo}" for cause in causes[:1]]
    told += [f"{cause.rule.name}: {cause.said}. {cause.todo}" for cause in causes[1:]]
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
        shown = each.recorded, replayed["loss"], *known
        counts = each.loss.record.rank, each.place, each.terms.rows, f"{each.terms.tokens:,}"
        yield *map(str, counts), *(number(value) for value in shown)


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
