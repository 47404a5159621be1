"""Judge a replayed step: do the recorded loss and norm follow from its rows, and if not, which known fault explains them?

Three questions, in this order, since each explains what comes after it:

| Question | Needs | Causes |
|---|---|---|
| Are the losses normalized over the step? | recorded losses | dp_size, token or row count, accumulation, own means |
| Is each loss its formula, and does backward get every term? | recorded losses | sign, mask, clipping; KL and doubled terms |
| Is the norm that of the whole step's gradient? | the step's weights | last micro-batch only, twice, ranks, accumulation |

A cause is named only if what it predicts agrees with what was recorded to rounding. Of a step that was not recorded whole, only
what a single loss shows is judged. Losses are compared on the sum of their absolute terms. A step is right only with its own
weights (`compare.same_weights`). With those, log-probs that are not the recorded ones are the trainer's fault; with others,
they and the norm are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from actordbg.actor.hub_model import base_of
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import plural, some
from actordbg.compare.same_weights import WEIGHTS
from actordbg.config.replay_config import TINY
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Block, Grid, Heading, Items, Verdict, number
from actordbg.recorded.loss_laws import LOSS_OFF
from actordbg.recorded.loss_terms import Terms, kl_terms
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.recorded.step_laws import MOVED
from actordbg.records.finding import Finding, NotChecked, Rule
from actordbg.steps.adam_update import of_update, unchecked
from actordbg.steps.gradient_norm import NORM_OFF, of_norm
from actordbg.steps.recorded_step import MicroBatch, RecordedStep
from actordbg.steps.rules import RULES, UNKNOWN, broken, near
from actordbg.steps.run_step import Side, StepFigures
from actordbg.steps.step_plan import ENTROPY

LEAST = 1e-3
"""Nats that an action's loss counts as at least, as rounding of the terms beside it does not vanish where advantages are 0."""
COUNT_OFF = 1e-5
"""Largest relative error of a recorded number of tokens, which is an fp32 tensor."""

FAR, ON_AVERAGE, WORST = 5.0, {True: 5e-3, False: 0.02}, {True: 0.1, False: 0.3}
"""A log-prob is wrong, with the right weights, if it is this many times what rounding costs, and so many nats, from fp32's. By
whether the run computes in fp32: in a tiny model products in TF32 cost 7e-4 where bf16 costs 1e-2.
"""


def normalization(step: RecordedStep) -> Iterator[Finding]:
    """Yield the faults of what the losses are divided by. Needs no model."""
    terms, dp_size = "tokens" if step.by_token else "rows", step.fact("dp_size")
    if not step.missing and dp_size is not None and dp_size != step.ranks:
        words = f"dp_size is {dp_size}, and the step has {plural(step.ranks, 'rank')}: every loss is"
        yield broken("dp_size", f"{words} {number(dp_size / step.ranks)} times what it should be")
    ours, engine = step.fact("accumulation"), step.fact("engine_accumulation")
    if ours and engine and ours != engine and not step.fact("dynamic_batch"):
        words = f"DeepSpeed accumulates {plural(engine, 'micro-batch')}, and the trainer normalizes over {ours}"
        yield broken("engine accumulation", f"{words}: an optimizer step comes after {number(engine / ours)} of its steps")
        return
    if step.missing:
        return
    name = "batch_num_tokens" if step.by_token else "global_batch_size"
    by, wanted = step.fact(name), step.divisor / step.accumulation
    of_step = f"the step has {step.divisor:,} {terms}, {number(wanted, 6)} for each of {plural(step.accumulation, 'micro-batch')}"
    if by is None:
        alone = all(_gives(each, step, each.terms) for each in step.micro_batches)
        if alone and not _as_one(step):
            words = f"each micro-batch is divided by its own {terms}: losses apply {number(step.applied)}, one batch"
            words += f" {number(step.expected)}"
            yield broken("own means", words)
    elif len(by_rank := step.by_rank(name)) > 1 and len({*by_rank.values()}) > 1:
        counted = some([f"{number(float(value), 6)} on rank {rank}" for rank, value in by_rank.items()], 4)
        yield broken("counts of ranks", f"each rank divides by a count of its own: {name} is {counted}, and {of_step}")
    elif not near(float(by), wanted, COUNT_OFF):
        times = float(by) / wanted
        words = f"{name} is {number(float(by), 6)}, and {of_step}: the loss is {number(1 / times)} times what it should be"
        double, never = (near(times, each, COUNT_OFF) and each != 1 for each in (step.accumulation, 1 / step.accumulation))
        if double or never:
            said = "are divided by the accumulation twice" if double else "are not divided by the accumulation"
            yield broken("accumulation", f"losses {said}: {words}")
        else:
            yield broken("token count" if step.by_token else "row count", words)


def _as_one(step: RecordedStep) -> bool:
    return abs(step.applied - step.expected) <= LOSS_OFF[step.fp32] * step.size


def formula(step: RecordedStep, entropies: Sequence[float | None]) -> Iterator[Finding]:
    """Yield the faults of single losses, and of what backward gets. Needs no model.

    entropies: of each micro-batch, the sum over its actions; None if unknown, so that an entropy term is not judged.
    """
    limit = LOSS_OFF[step.fp32]
    wrong = [each for each in step.micro_batches if not _gives(each, step, each.terms)]
    for first in wrong[:1]:
        wanted = number(_per_term(first, step.by_token) * step.sum_of(first.terms))
        text = f"{first.name}: its loss is {number(first.recorded)}, its formula gives {wanted}"
        common = set.intersection(*({name for name, by in each.loss.others.items() if _gives(each, step, by)} for each in wrong))
        nearest = min(sorted(common), key=lambda name: round(abs(_off(first, step, first.loss.others[name])), 9), default="")
        yield broken("formula", f"{text}; it is that of {nearest}" if nearest else text)
    for each, entropy in zip(step.micro_batches, entropies, strict=True):
        if (cause := _missing_term(each, limit, entropy)) is not None:
            yield cause
            break


def _gives(micro_batch: MicroBatch, step: RecordedStep, terms: Terms) -> bool:
    """Check whether these terms give the recorded loss."""
    return abs(_off(micro_batch, step, terms)) <= LOSS_OFF[step.fp32] * _per_term(micro_batch, step.by_token) * terms.size


def _off(micro_batch: MicroBatch, step: RecordedStep, terms: Terms) -> float:
    return micro_batch.recorded - _per_term(micro_batch, step.by_token) * step.sum_of(terms)


def _missing_term(micro_batch: MicroBatch, limit: float, entropy: float | None) -> Finding | None:
    """Name what backward got too much or too little of, from the loss that it got."""
    loss, got, recorded = micro_batch.loss, micro_batch.loss.fact("backward_loss"), micro_batch.recorded
    if got is None:
        return None
    extra, per_term = float(got) - recorded, _per_term(micro_batch)
    size = max(micro_batch.terms.size, LEAST * micro_batch.terms.tokens) * per_term
    coefficient = float(loss.fact("entropy_coef") or 0.0)
    terms = {"KL": _kl_term(micro_batch) * per_term, "entropy": -coefficient * (entropy or 0.0) * per_term}
    known = sum(terms.values())
    of_others = {f"with that of {each}": _kl_term(micro_batch, each) * per_term for each in ("k1", "k2", "k3")}
    for name, term in terms.items():
        changed = {"without it": 0.0, "with it negated": -term} | (of_others if name == "KL" else {})
        for how, other in changed.items():
            if abs(term - other) > limit * size and abs(extra - known + term - other) <= limit * abs(term - other):
                words = f"{micro_batch.name}: backward gets {number(got)}, {how}: the {name} term is {number(term)}"
                return broken(f"{name} term", words)
    if _why_more(loss) or (coefficient and entropy is None):
        return None
    if size and abs(recorded) > limit * size and near(float(got), 2 * recorded + known, limit):
        return broken("doubled loss", f"{micro_batch.name}: backward gets twice the loss, {number(got)}")
    if abs(extra - known) > limit * (size + sum(map(abs, terms.values()))):
        words = f"{micro_batch.name}: backward gets {number(extra - known)} that is neither the loss nor its KL or entropy term"
        return broken("unknown term", words)
    return None


def _why_more(loss: RecordedCall) -> str:
    """Say why backward may get more than a loss and its KL and entropy terms; "" if it may not."""
    if loss.fact("aux_loss_coef"):
        return "the auxiliary loss, of its experts or of DPO's chosen rows, is not replayed"
    followed = loss.fact("accumulation") or loss.fact("loss.formula_of") or not loss.fact("engine_accumulation")
    return "" if followed else "the trainer's settings are unknown, as its loop ran when recording began"


def _per_term(micro_batch: MicroBatch, by_token: bool = True) -> float:
    """Return what a term, or a row's mean, is multiplied by in its micro-batch's loss."""
    by = micro_batch.loss.fact("batch_num_tokens" if by_token else "global_batch_size")
    own = micro_batch.terms.tokens if by_token else micro_batch.terms.rows
    return 1 / own if by is None else float(micro_batch.loss.fact("dp_size") or 1) / float(by)


def _kl_term(micro_batch: MicroBatch, estimator: str = "") -> float:
    """Return the sum of the KL penalty's terms times its coefficient; 0 without one. estimator: another than the run's."""
    loss = micro_batch.loss
    known, base = loss.log_probs(), loss.array("base_action_log_probs")
    if not (loss.fact("kl.use_loss") and loss.fact("kl.init_coef")) or base is None or loss.active is None:
        return 0.0
    terms = kl_terms(np, estimator or loss.fact("kl.estimator"), known["log_probs"].astype("f8"), base.astype("f8"))
    return 0.0 if terms is None else float(np.where(loss.active, terms, 0.0).sum()) * float(loss.fact("kl_ctl") or 0.0)


def causes_of(figures: StepFigures) -> list[Finding]:
    """Return every known fault of the step, the first explains most."""
    step, unclear = figures.step, why_no_norm(figures)
    entropies = [None if unclear else each.get(ENTROPY) for each in figures.reference.figures]
    losses = [*formula(step, entropies or [None] * len(step.micro_batches))]
    causes = [*normalization(step), *losses, *forward(figures)]
    causes += {finding.rule.name: finding for finding in of_update(step)}.values()  # of several groups, one
    cause = None if unclear else of_norm(figures)
    if cause is not None and (cause.rule.name != UNKNOWN or (figures.weights.same and not losses)):  # which change the gradient
        causes.append(cause)
    return causes


def forward(figures: StepFigures) -> Iterator[Finding]:
    """Yield the fault of recorded log-probs that are not what the step's own weights give, where those were recorded.

    Other kernels cost as much as rounding does; more than `FAR` times that, of the mean or of the worst action, they cannot.
    """
    if not (figures.weights.recorded and figures.weights.same) or figures.step.missing:
        return
    apart, rounding = figures.apart(figures.reference), figures.apart(figures.replayed, figures.reference)
    if not len(apart):
        return
    fp32 = figures.step.fp32
    measured = [("on average", apart.mean(), rounding.mean(), ON_AVERAGE[fp32])]
    if not (figures.replayed.resolved or {}).get("experts"):  # which rounding may choose anew for a token
        measured.append(("in the worst action", apart.max(), rounding.max(), WORST[fp32]))
    for name, value, usual, least in measured:
        if not value <= max(FAR * usual, least):
            words = f"its log-probs are {number(float(value), 3)} nats {name} from what the step's own weights give"
            yield broken("log-probs", f"{words} (rounding {number(float(usual), 3)})")
            return


def why_no_norm(figures: StepFigures) -> str:
    """Say why the norm cannot be checked: a part of the gradient is missing, or the step's weights; "" if it can."""
    if figures.step.missing:
        return "the step is not whole"
    if more := _why_more(figures.step.micro_batches[0].loss):
        return more
    if figures.weights.same is False:
        return figures.weights.words
    if figures.step.micro_batches[0].loss.record.actor.get("lora") and base_of(figures.config.model or "") is None:
        return "the run trains an adapter, and the model has none"
    distance, limit = figures.moved(figures.reference), MOVED[figures.step.fp32]
    if distance <= limit:
        return ""
    words = f"the model's log-probs are {number(distance, 3)} nats from the recorded ones (limit {limit:g})"
    why = "another kernel or dtype" if figures.weights.same else "its weights are another step's"
    if dropped := (figures.reference.resolved or {}).get("undropped"):
        why = f"a dropout of {dropped:g} draws anew what it drops"
    return f"{words}: " + ("it is the toy model (--model)" if figures.config.model == TINY else why)


WHOLE = Rule("whole step", "every micro-batch of the step was recorded")


def verdict_of(figures: StepFigures) -> Verdict:
    """Return the verdict of a replayed step in one sentence."""
    step, replayed, reference = figures.step, figures.replayed, figures.reference
    title = f"step {step.number} of run {step.run}"
    if failed := replayed.failed or reference.failed:
        model, plain = in_shell(figures.config.model), figures.config.backend == "plain"
        following = "" if plain else f"actordbg step --run {step.run} --step {step.number} --model {model} --backend plain"
        return Verdict(FAILED, f"{title} did not run: {failed}", next=following)
    left = [NotChecked(WHOLE, step.missing, "`run --step N` records it whole")] if step.missing else []
    if other := why_no_norm(figures):
        beside = step.fact("entropy_coef") or _why_more(step.micro_batches[0].loss)
        terms = "what backward gets beside the loss, and " if beside else ""
        left.append(NotChecked(RULES["unknown"], f"{terms}the gradient's norm, since {other}"))
    elif figures.weights.same is None:
        left.append(NotChecked(WEIGHTS, figures.weights.words))
    if not other and step.grad_norm is None:
        left.append(NotChecked(RULES["unknown"], "the gradient's norm, which was not recorded"))
    causes, shown = causes_of(figures), figures_of(figures)
    update = unchecked(step, lost=any(cause.rule.name == "lost gradient" for cause in causes))
    missing = left + ([NotChecked(RULES["update"], update)] if update else [])
    if causes:
        others = f"; also {', '.join(cause.rule.name for cause in causes[1:])}" if causes[1:] else ""
        return Verdict(WRONG, f"{title}: {causes[0].said}{others}", shown, missing, "actordbg lint", findings=causes)
    if not other and (apart := _apart(figures)):
        repeats = step.grad_norm is not None and near(replayed.grad_norm, step.grad_norm, NORM_OFF[step.fp32])
        rule, how = RULES["configuration"], "is right as recorded, but not under this configuration"
        if repeats:
            rule, how = RULES[UNKNOWN], "repeats what was recorded, which is wrong"
        return Verdict(WRONG, f"{title} {how}: {apart}", shown, left, "actordbg check", findings=[Finding(rule, apart)])
    count = plural(len(step.micro_batches), "micro-batch") + (f" of {step.ranks} ranks" if step.ranks > 1 else "")
    losses = "have each the loss of their rows" if step.missing else "add up to the loss of one batch"
    further = []
    if not left:
        further = [figures.weights.words]
        further += [] if update else ["the update is Adam's"]
    word = UNCHECKED if left else RIGHT
    return Verdict(word, f"{title}: {count} {losses}", shown, missing, "actordbg lint", further=further)


def _apart(figures: StepFigures) -> str:
    """Say in which figure the replay under the configuration differs from the reference; "" in none."""
    step, replayed, whole = figures.step, figures.replayed, abs(figures.step.factor) * figures.reference.grad_norm
    wide = step.fp32 and figures.config.dtype in (None, "fp32")
    if not near(replayed.grad_norm, whole, NORM_OFF[wide]):
        return f"its norm is {number(replayed.grad_norm)}, that of the whole step in fp32 {number(whole)}"
    loss, size = applied_by(step, replayed), step.size * abs(step.factor)
    if abs(loss - step.applied) > LOSS_OFF[wide] * size:
        return f"its loss is {number(loss)}, the recorded one {number(step.applied)}"
    return ""


def applied_by(step: RecordedStep, side: Side) -> float:
    """Return the loss whose gradient a replayed side applies."""
    return side.total(step.accumulation * step.ranks)


def figures_of(figures: StepFigures) -> list[tuple[str, str]]:
    """Return loss and norm of a step, recorded and as one batch; the table has the replay's too."""
    step, reference = figures.step, figures.reference
    losses = [("loss, recorded", number(step.applied)), ("loss, one batch in fp32", number(reference.total()))]
    norms = [("gradient norm, recorded", number(step.grad_norm, 6))]
    norms += [("gradient norm, one batch in fp32", number(reference.grad_norm, 6))]
    return norms + losses if _as_one(step) and step.grad_norm is not None else losses + norms


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
