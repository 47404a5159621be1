"""Measure how far apart the two sides of one dump are: every figure of `comparison_record`.

Figures are float64 for arrays of any dtype. Equal values differ by 0, even if both are infinite or both NaN. A value that is
finite on one side only is counted in `nonfinite`; then no mean is taken, because a mean without the worst values would mislead.

A value that is missing on one side is not an error: `not_compared` names it with the reason. Mismatches under any thresholds (a
value that is finite, or zero, on one side only) are listed in `reasons`.

**Gradients** are compared parameter by parameter, and all together. A file holds `grad/<parameter>` (float32, 1-D): the whole
flattened gradient of a small parameter; for a large parameter, the elements at `floor(i * numel / GRADIENT_SAMPLE)`. Its
metadata `gradients` gives the number of elements of the whole gradient. One parameter of both sides is in memory at a time, and
one float32 difference per kept element. The overall `distance` weights a sampled parameter by its number of elements, not of
samples.

Ranks that compute together average their gradients, so a side's gradient of one dump may be over several dumps. The mean of
samples is the sample of the mean, so a side with a gradient per dump can compute any such average from its files.

**Single parameters** are also judged (`parameter_distance`): a missing gradient of one parameter moves the overall distance by
less than rounding does. The measure is |a - b| of one parameter divided by |b|, or by the |b| of a parameter whose elements are
`SMALL` times the root mean square of all elements, whichever is larger: some gradients are zero in exact arithmetic (GPT-2's
key biases), and only rounding is left.

Uses numpy only: importing torch takes longer than a comparison, and a plain installation has no torch.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from actordbg.base.units import some
from actordbg.compare.sides import Values, opened
from actordbg.compare.thresholds import weaker
from actordbg.formats.encoding import Array
from actordbg.formats.record_reading import MOST_VALUES, strict_json
from actordbg.records.comparison_record import MATCH, MISMATCH, DumpComparison, Figures, ParameterFigures, WorstToken

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""PPO's usual clip range of the ratio exp(a - b)."""


@np.errstate(all="ignore")
def figures(a: Array, b: Array, *, log_probs: bool = False) -> Figures:
    """Compare `a` with `b`: 1-D arrays of equal length and any float dtype.

    log_probs: also compute KL and clip_share.
    """
    if not a.size:
        return Figures(0)
    ours, theirs, nonfinite = a.astype(np.float64), b.astype(np.float64), odd_values(a, b)
    both = np.isfinite(ours) & np.isfinite(theirs)
    difference = np.where(both | nonfinite, ours - theirs, 0.0)
    band = (difference < math.log(CLIP_LOW)) | (difference > math.log(CLIP_HIGH)) | nonfinite  # one-sided counts as outside
    outside = float(band.mean()) if log_probs else None
    if nonfinite.any():
        return Figures(a.size, clip_share=outside, nonfinite=int(nonfinite.sum()))
    distances, ours, theirs = np.abs(difference), ours[both], theirs[both]
    fields = spread_of(distances) | angle_of(products(ours, theirs))
    if log_probs:
        fields |= {
            "kl_k1": float(0.0 - difference.mean()),  # never -0.0
            "kl_k3": _finite((np.expm1(difference) - difference).mean()),
            "rms_abs": _finite(np.sqrt(np.mean(difference**2))),
        }
    return Figures(a.size, **fields, clip_share=outside)


def odd_values(a: Array, b: Array) -> Array:
    """Mark (bool) values that are finite on one side only, or differ without being finite; `Figures.nonfinite` counts them."""
    nonfinite: Array = ~(np.isfinite(a) & np.isfinite(b)) & ~_same(a, b)
    return nonfinite


@np.errstate(all="ignore")
def spread_of(values: Array) -> dict[str, Any]:
    """Return max, mean, p95 and p99 of 1-D differences, by the names of `Figures`; {} for an empty array."""
    if not values.size:
        return {}
    p95, p99 = np.percentile(values, (95, 99))
    spread = {"max": values.max(), "mean": values.mean(dtype=np.float64), "p95": p95, "p99": p99}
    return {f"{name}_abs": _finite(value) for name, value in spread.items()}


def products(a: Array, b: Array) -> Array:
    """Return a·a, b·b, a·b and |a - b|² of two vectors (float64), the input of `angle_of`. Products of parts can be added."""
    difference = a - b
    return np.array([a @ a, b @ b, a @ b, difference @ difference])


def angle_of(products: Array) -> dict[str, Any]:
    """Return the cosine of two vectors, |a - b| / |b| and the factor of b that is nearest to a: 1, 0 and 1 if equal; None where a
    divisor is zero or overflows.
    """
    ours, theirs, product, difference = products.tolist()
    if not difference:
        return {"cosine": 1.0, "distance": 0.0, "gain": 1.0}
    norms = math.sqrt(ours) * math.sqrt(theirs)
    return {
        "cosine": max(-1.0, min(1.0, product / norms)) if 0 < norms < math.inf else None,
        "distance": _finite(math.sqrt(difference / theirs)) if theirs else None,
        "gain": _finite(product / theirs) if 0 < theirs < math.inf else None,
    }


def scaled_gradients(dumps: Iterable[DumpComparison]) -> float | None:
    """Return the factor by which A's gradients are B's in all mismatches, if that is all of their difference to a tenth."""
    gains = set()
    for dump in dumps:
        each = dump.gradients
        if dump.verdict == MISMATCH:
            if each is None or each.gain is None or each.distance is None:
                return None
            apart = abs(each.gain - 1.0)
            rest = math.sqrt(max(0.0, each.distance**2 - apart**2))
            if apart < SCALED or rest > apart / 10:
                return None
            gains.add(float(f"{each.gain:.3g}"))
    return gains.pop() if len(gains) == 1 else None


SCALED = 0.01
"""A factor of gradients this far from 1 is named: rounding to bf16 does not reach it."""


@np.errstate(all="ignore")
def worst_tokens(a: Array, b: Array, mask: Array, count: int, seq_len: int | None = None) -> tuple[WorstToken, ...]:
    """Return the `count` masked tokens of [B, A] that differ most, worst first, without equal tokens.

    A value that is finite on one side only ranks first. seq_len: the length S of the dump's rows, which ends with the A tokens.
    """
    before = max(0, (seq_len or 0) - mask.shape[1])
    ours, theirs = a.astype(np.float64), b.astype(np.float64)
    difference = ours - theirs
    distance = np.nan_to_num(np.abs(difference), nan=math.inf, posinf=math.inf)
    distance = np.where(_same(ours, theirs) | ~mask, -1.0, distance).ravel()
    some = np.argsort(-distance, kind="stable")[:count]  # on a tie, the first
    return tuple(
        WorstToken(at[0], before + at[1], _finite(ours[at]), _finite(theirs[at]), _finite(difference[at]))
        for at in (divmod(index, mask.shape[1]) for index in some[distance[some] > 0].tolist())
    )


def _same(a: Array, b: Array) -> Array:
    """Mark values that are equal, or both NaN."""
    same: Array = (a == b) | (np.isnan(a) & np.isnan(b))
    return same


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


WORST_TOKENS = 5
WORST_PARAMETERS = 10
PREFIX = "grad/"
SMALL = {"bf16": 0.05, "fp16": 0.01}
"""By dtype: a gradient whose elements are below this share of the root mean square of all elements is mostly rounding."""
SMALL_ELSE = 1e-3


def unlike(a: Values, b: Values) -> str | None:
    """Return why the two sides of a dump are not the same call; None if they are."""
    for what, ours, theirs in (("log-probs", a.log_probs, b.log_probs), ("masks", a.mask, b.mask)):
        if ours.shape != theirs.shape:
            return f"A's {what} are {list(ours.shape)}, B's {list(theirs.shape)}"
    if not bool((a.mask == b.mask).all()):
        differ = int((a.mask != b.mask).sum())
        return f"the masks differ in {differ} tokens"
    if bool(a.folded) != bool(b.folded):
        side = "A" if a.folded else "B"
        return f"token ids were wrapped (modulo the vocabulary) on side {side} only"
    if a.temperature is not None and b.temperature is not None and a.temperature != b.temperature:
        return f"A's temperature is {a.temperature:g}, B's {b.temperature:g}"
    for name, values, other in (("A", a, b), ("B", b, a)):
        if values.trained and other.undropped:
            return f"{name} ran in training mode, where its model drops {other.undropped:g} at random; the truth drops nothing"
    return None


def measure(dump_id: str, seq_len: int | None, a: Values, b: Values) -> DumpComparison:
    """Compute every figure of one dump, but not its verdict.

    In the result, `reasons` are mismatches under any thresholds; `distances` are by parameter, largest first.
    """
    mask, notes = a.mask, _Notes()
    tokens = figures(a.log_probs[mask], b.log_probs[mask], log_probs=True)
    notes.odd("log-probs", tokens)
    if outside := int(((np.isfinite(a.log_probs) ^ np.isfinite(b.log_probs)) & ~mask).sum()):
        where = "outside the mask are not finite on one side only: multiplying by the mask keeps them"
        notes.broken.append(f"{outside} log-probs {where}")
    entropy = None
    if a.entropy is not None and b.entropy is not None and a.entropy.shape == b.entropy.shape == mask.shape:
        entropy = figures(a.entropy[mask], b.entropy[mask])
        notes.odd("entropies", entropy)
    elif a.entropy is not None or b.entropy is not None:
        notes.lacking("entropy", "entropies", a.entropy, b.entropy)
    loss = notes.apart("loss", a.loss, b.loss)
    gradients = _gradients(a, b, notes)
    return DumpComparison(
        dump_id,
        MATCH,
        tuple(notes.broken),
        seq_len=seq_len,
        log_probs=tokens,
        entropy=entropy,
        loss_abs=loss,
        worst_tokens=worst_tokens(a.log_probs, b.log_probs, mask, WORST_TOKENS, seq_len),
        not_compared=notes.missing,
        **gradients,
    )


@dataclass
class _Notes:
    """Remarks on a dump. broken: mismatches under any thresholds. missing: by figure, why it was not computed."""

    broken: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def odd(self, what: str, values: Figures) -> None:
        if values.nonfinite:
            self.broken.append(f"{values.nonfinite} of {values.count} {what} are not finite on one side only")

    def lacking(self, name: str, what: str, a: object, b: object) -> None:
        """Note a figure that a side lacks. What only B has was not left unchecked of A, and has a key of its own."""
        if a is None:
            self.missing[f"B's {name}"] = f"only B has {what}"
        else:
            self.missing[name] = f"only A has {what}" if b is None else f"{what} of different shapes"

    def apart(self, what: str, a: float | None, b: float | None, *, relative: bool = False) -> float | None:
        """Return |a - b|, divided by |b| if `relative`; None if a side has no value or the figure is undefined (see `broken`)."""
        if a is None or b is None:
            if a is not b:
                self.lacking(what, f"the {what}", a, b)
            return None
        if a == b or (math.isnan(a) and math.isnan(b)):
            return 0.0
        if not (math.isfinite(a) and math.isfinite(b)):
            self.broken.append(f"the {what} is not finite on one side only")
        elif relative and not b:
            self.broken.append(f"the {what} is {a:.3g} in A and 0 in B")
        else:
            return abs(a - b) / (abs(b) if relative else 1.0)
        return None


def _gradients(a: Values, b: Values, notes: _Notes) -> dict[str, Any]:
    """Return the gradient fields of a DumpComparison; {} if the two sides' gradients are over different inputs."""
    if (a.grad_norm is not None or b.grad_norm is not None) and a.gradient_over != b.gradient_over:
        counts = len(a.gradient_over), len(b.gradient_over)
        others = " others" if counts[0] == counts[1] else ""
        notes.missing["gradients"] = f"A's gradient is over {counts[0]} inputs, B's over {counts[1]}{others}"
        return {}
    fields: dict[str, Any] = {}
    norm = b.grad_norm
    if a.gradients and b.gradients:
        whole = None
        try:
            with _opened(a.gradients) as ours, _opened(b.gradients) as theirs:
                fields, whole = _compared(ours, theirs, SMALL.get(weaker([a.dtype, b.dtype]) or "", SMALL_ELSE), notes)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            notes.missing["gradients"] = f"the kept tensors cannot be read ({error})"
        if not len(a.gradients) == len(b.gradients) == 1:  # then B's gradient is a mean; its norm needs the whole gradient
            norm = whole
            if a.grad_norm is None or whole is None:
                return fields
    elif a.gradients or b.gradients:
        notes.lacking("gradients", "gradients", a.gradients or None, b.gradients or None)
    return fields | {"grad_norm_rel": notes.apart("gradient norm", a.grad_norm, norm, relative=True)}


@dataclass
class _KeptGradients:
    handles: list[Any]
    names: set[str]
    sizes: dict[str, int]

    def read(self, name: str) -> Array:
        """Return the mean over the files, float32."""
        each = [handle.get_tensor(PREFIX + name) for handle in self.handles]
        return np.asarray(np.mean(each, axis=0, dtype=np.float64), np.float32)


@contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[_KeptGradients]:
    with ExitStack() as stack:
        handles = [stack.enter_context(opened(path)) for path in paths]
        names = [{key.removeprefix(PREFIX) for key in file.keys() if key.startswith(PREFIX)} for file in handles]  # noqa: SIM118
        metadata = strict_json((handles[0].metadata() or {}).get("gradients", "{}"), json.loads, MOST_VALUES)
        sizes = {name: int(entry["numel"]) for name, entry in metadata.items()} if isinstance(metadata, dict) else {}
        yield _KeptGradients(handles, set.intersection(*names), sizes)


@np.errstate(all="ignore")
def _compared(a: _KeptGradients, b: _KeptGradients, small: float, notes: _Notes) -> tuple[dict[str, Any], float | None]:
    """Return a DumpComparison's fields from kept gradients, and the norm of B's whole gradient; None if only samples were kept.

    small: the share from `SMALL`.
    """
    total, absolute = np.zeros(4), []
    apart: dict[str, tuple[float, float, int]] = {}
    badness: dict[str, float] = {}
    nonfinite: dict[str, int] = {}
    sampled, unlike = set(), set()
    for name in sorted(a.names & b.names):
        ours, theirs = a.read(name), b.read(name)
        numel = a.sizes.get(name, ours.size)
        if ours.shape != theirs.shape or numel != b.sizes.get(name, theirs.size):
            unlike.add(name)
            continue
        if numel > ours.size:
            sampled.add(name)
        if invalid := int(odd_values(ours, theirs).sum()):
            nonfinite[name], badness[name] = invalid, math.inf
            continue
        both = np.isfinite(ours)
        wide, other = ours[both].astype(np.float64), theirs[both].astype(np.float64)
        sums = products(wide, other) * (numel / max(1, ours.size))
        total += sums
        absolute.append(np.abs(wide - other).astype(np.float32))
        _, norm, _, difference = np.sqrt(np.abs(sums)).tolist()
        apart[name] = difference, norm, numel
        badness[name] = difference and (difference / norm if norm else math.inf)
    left = _left_out("only A has it", a.names - b.names) | _left_out("only B has it", b.names - a.names)
    left |= _left_out("different sizes", unlike)
    notes.missing |= left
    if missing := [name for name in sorted(b.names - a.names) if badness and np.abs(b.read(name)).max(initial=0) > 0]:
        notes.broken.append(f"A has no gradient of {some(missing)}")
    together = Figures(0)
    if count := sum(part.size for part in absolute):
        together = Figures(count, **spread_of(np.concatenate(absolute)), **angle_of(total))
    if nonfinite:
        notes.broken.append(f"gradients are not finite on one side only: {some(nonfinite)}")
    elif together.count and together.distance is None:
        notes.broken.append("B's gradients are all zero, A's are not")
    worst = sorted((name for name in badness if badness[name] > 0), key=lambda name: (-badness[name], name))
    distances, scales = _distances(apart, small)
    fields = {
        "gradients": replace(together, nonfinite=sum(nonfinite.values())) if badness else None,
        "parameters": tuple(
            ParameterFigures(name, figures(a.read(name), b.read(name)), name in sampled) for name in worst[:WORST_PARAMETERS]
        ),
        "parameter_distance": next(iter(distances.values()), None),
        "worst_parameter": next(iter(distances), ""),
        "distances": distances,
        "scales": scales,
    }
    return fields, math.sqrt(total[1]) if badness and not sampled and not left else None


def _distances(apart: dict[str, tuple[float, float, int]], small: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return each parameter's distance, largest first, and what it is relative to, in units of the whole gradient's scale.

    apart: |a - b|, |b| and number of elements by name. The scale: the norm that so many elements of a usual size would have.
    """
    elements = sum(numel for _, _, numel in apart.values())
    usual = math.sqrt(sum(norm**2 for _, norm, _ in apart.values()) / elements) if elements else 0.0
    distances, scales = {}, {}
    for name, (difference, norm, numel) in apart.items():
        scale = max(norm, small * usual * math.sqrt(numel))
        if difference == 0 or scale:
            distances[name] = difference and difference / scale
        if scale and usual:
            scales[name] = scale / (usual * math.sqrt(numel))
    return dict(sorted(distances.items(), key=lambda item: -item[1])), scales


def _left_out(why: str, names: set[str]) -> dict[str, str]:
    return {f"gradient of {some(sorted(names))}": why} if names else {}
