"""One dump on both sides: whether both are about the same call, and every figure of how far they are apart.

What a side lacks is no error: `not_compared` names it with the reason. What is a mismatch under any thresholds (a value that is
finite, or zero, on one side only) is returned in words beside the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from actordbg.judge.sides import Values
from actordbg.judge.thresholds import weaker
from actordbg.records.comparison_record import MATCH, DumpComparison

WORST_TOKENS = 5
WORST_PARAMETERS = 10
MOST_DISTANCES = 4000
"""Parameters that a record keeps the distance of: all but those of a model with very many experts."""


def unlike(a: Values, b: Values) -> str | None:
    """Why the two sides of a dump are not about the same call; None if they are."""
    for what, ours, theirs in (("log-probs", a.log_probs, b.log_probs), ("masks", a.mask, b.mask)):
        if ours.shape != theirs.shape:
            return f"A's {what} are {list(ours.shape)}, B's {list(theirs.shape)}"
    if not bool((a.mask == b.mask).all()):
        return f"the masks differ in {int((a.mask != b.mask).sum())} tokens"
    if bool(a.folded) != bool(b.folded):
        return f"token ids were folded into the vocabulary on side {'A' if a.folded else 'B'} only"
    if a.temperature is not None and b.temperature is not None and a.temperature != b.temperature:
        return f"A's temperature is {a.temperature:g}, B's {b.temperature:g}"
    for name, one, other in (("A", a, b), ("B", b, a)):
        if one.trained and other.undropped:
            return f"{name} ran in training mode, where its model drops {other.undropped:g} at random; the truth drops nothing"
    return None


@dataclass(frozen=True)
class Measured:
    """Every figure of one dump without its verdict. broken: what is a mismatch under any thresholds. distances: of each
    parameter's gradient (`gradient_figures`).
    """

    dump: DumpComparison
    broken: list[str]
    distances: dict[str, float]


def measure(dump_id: str, length: int | None, a: Values, b: Values) -> Measured:
    """Every figure of one dump on both sides."""
    import numpy as np

    from actordbg.judge.tensor_figures import figures, sequence_sums, worst_tokens

    dtype = a.dtype if a.dtype == b.dtype else None
    mask, broken, missing = a.mask, [], {}
    tokens = figures(a.log_probs[mask], b.log_probs[mask], log_probs=True, dtype=dtype)
    if tokens.nonfinite:
        broken.append(f"{tokens.nonfinite} of {tokens.count} log-probs are not finite on one side only")
    outside = int(((np.isfinite(a.log_probs) ^ np.isfinite(b.log_probs)) & ~mask).sum())
    if outside:
        broken.append(f"{outside} log-probs outside the mask are not finite on one side only: a product with the mask keeps them")
    sequences = figures(sequence_sums(a.log_probs, mask), sequence_sums(b.log_probs, mask))
    entropy = None
    if a.entropy is not None and b.entropy is not None and a.entropy.shape == b.entropy.shape == mask.shape:
        entropy = figures(a.entropy[mask], b.entropy[mask])
        if entropy.nonfinite:
            broken.append(f"{entropy.nonfinite} of {entropy.count} entropies are not finite on one side only")
    elif a.entropy is not None or b.entropy is not None:
        missing["entropy"] = _only_one("entropies", a.entropy, b.entropy)
    dump = DumpComparison(
        dump_id,
        MATCH,
        seq_len=length,
        log_probs=tokens,
        sequences=sequences,
        entropy=entropy,
        loss_abs=_apart("the loss", a.loss, b.loss, broken, missing, relative=False),
        worst_tokens=worst_tokens(a.log_probs, b.log_probs, mask, WORST_TOKENS),
    )
    distances: dict[str, float] = {}
    return Measured(_with_gradients(dump, a, b, broken, missing, distances), broken, distances)


def _with_gradients(
    dump: DumpComparison, a: Values, b: Values, broken: list[str], missing: dict[str, str], distances: dict[str, float]
) -> DumpComparison:
    """The comparison with figures of gradients, if both sides' gradients are of the same inputs."""
    from actordbg.judge.gradient_figures import compare_gradients

    if (a.grad_norm is not None or b.grad_norm is not None) and a.gradient_over != b.gradient_over:
        ours, theirs = len(a.gradient_over), len(b.gradient_over)
        missing["gradients"] = f"A's gradient is over {ours} inputs, B's over {theirs}{' others' * (ours == theirs)}"
        return replace(dump, not_compared=missing)
    if not a.gradients or not b.gradients:
        norm = _apart("the gradient norm", a.grad_norm, b.grad_norm, broken, missing, relative=True)
        if bool(a.gradients) != bool(b.gradients):
            missing["gradients"] = _only_one("gradients", a.gradients or None, b.gradients or None)
        return replace(dump, grad_norm_rel=norm, not_compared=missing)
    found = compare_gradients(a.gradients, b.gradients, count=WORST_PARAMETERS, dtype=weaker([a.dtype, b.dtype]))
    alone = len(a.gradients) == len(b.gradients) == 1  # else B's is a mean over lanes
    if alone or (a.grad_norm is not None and found.norm_b is not None):
        norm = b.grad_norm if alone else found.norm_b
        dump = replace(dump, grad_norm_rel=_apart("the gradient norm", a.grad_norm, norm, broken, missing, relative=True))
    if found.missing:
        broken.append(f"A has no gradient of {_some(found.missing)}")
    if found.nonfinite:
        broken.append(f"gradients are not finite on one side only: {_some(found.nonfinite)}")
    elif found.together and found.together.count and found.together.distance is None:
        broken.append("B's gradients are all zero, A's are not")
    distances |= found.distances
    furthest = sorted(found.distances, key=lambda name: -found.distances[name])
    worst = furthest[0] if furthest else ""
    return replace(
        dump,
        gradients=found.together,
        parameters=found.worst,
        parameter_distance=found.distances.get(worst),
        worst_parameter=worst,
        distances={name: float(f"{found.distances[name]:.4g}") for name in furthest[:MOST_DISTANCES]},
        not_compared=missing | found.not_compared,
    )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _apart(
    what: str, a: float | None, b: float | None, broken: list[str], missing: dict[str, str], *, relative: bool
) -> float | None:
    """|a - b|, by |b| if `relative`. None where a side has no value, or the figure is undefined (`broken` says so)."""
    if a is None or b is None:
        if a is not b:
            missing[what.removeprefix("the ")] = _only_one(what, a, b)
        return None
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        broken.append(f"{what} is not finite on one side only")
        return None
    if relative and not b:
        broken.append(f"{what} is {a:.3g} in A and 0 in B")
        return None
    return abs(a - b) / (abs(b) if relative else 1.0)


def _only_one(what: str, a: object, b: object) -> str:
    if a is not None and b is not None:
        return f"{what} of another shape on each side"
    return f"only {'A' if a is not None else 'B'} has {what}"
