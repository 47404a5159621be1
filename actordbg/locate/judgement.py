"""Judge each place of a forced forward and backward, in units of the clean model's error there.

    ratio = sqrt(sum over tokens of error^2 of the suspect / sum over tokens of error^2 of the clean model)

A place is wrong if one of these holds:

    ratio over all tokens > LIMIT[dtype] * (1 + SPREAD / sqrt(elements))
    ratio over one row    > ROW[dtype] * (1 + SPREAD / sqrt(elements of the row))

Two healthy kernels differ by chance where few elements have most of the error, so with the clean model's squared errors e
elements are counted as (sum of e)^2 / (sum of e^2) * width. In fp32 kernels differ by their order of summation, so fp32's limits
are wide; a fault there reads thousands. Where the clean model has no error at all (an embedding copies), the unit is 1/64 of the
dtype's rounding of the truth. Ranks that split a matrix round their partial sums, and ranks that average gradients round the
average, which the clean model does not do, so with N of them these limits are sqrt(N) times as wide.

Two healthy kernels round differently: eager attention may be 1.35 times as far from the truth as sdpa. So the clean model runs in
the suspect's attention kernel and in transformers' eager attention, and a place that is as near to the truth as one of them is
right. What the kernel leaves out (sdpa has no soft cap of the attention logits) would be missing in both models, so where it is
much worse than eager attention it is wrong itself (`hold_against_eager`). A kernel that is not transformers' own is never the
clean model's.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actordbg.base.units import plural
from actordbg.locate.forced_forward import Forcing
from actordbg.locate.places import Key, Sums, Tape, layer_of
from actordbg.locate.token_patterns import pattern_of
from actordbg.records.locate_record import BACK, GRADIENT, INTO, MOST, OUT, ROUTING, Located, PlaceResult, is_backward

LIMIT = {torch.bfloat16: 1.1, torch.float16: 1.1, torch.float32: 4.0}
ROW = {torch.bfloat16: 1.25, torch.float16: 1.25, torch.float32: 8.0}
SPREAD = 4.0
MOST_FIELDS, MOST_RATIO = 96, 1e9
"""Fields of tokens that a heat map has, and the largest ratio that it shows."""
_COPIED = 1 / 64


def judge(
    tape: Tape,
    forcing: Forcing,
    floor: dict[Key, Sums],
    dtype: torch.dtype,
    features: Mapping[str, Any],
    notes: tuple[str, ...] = (),
    ranks: int = 1,
    lost: Mapping[str, str] = {},
    eager: Mapping[Key, Sums] = {},
) -> Located:
    """Hold the suspect's errors against the clean model's, place by place.

    eager: the clean model's errors with eager attention; a place that is as near to the truth as those is right.

    features: of each token, for `pattern_of`. ranks: how many average the gradients of parameters. lost: a
    sentence, by parameter, about experts that no gradient reaches.
    """
    unchecked = dict(forcing.unchecked)
    judged_whole = {module for module, kind, *_ in floor if kind == OUT}
    for module in sorted(tape.strange):  # an activation inside experts is judged by what they give
        if module.rpartition(".")[0] not in judged_whole:
            unchecked.setdefault(module, "its tokens cannot be told apart")
    missing = {key[0] for key in floor if key not in forcing.sums}
    unchecked |= dict.fromkeys(sorted(missing - unchecked.keys()), "this model has no such module, or does not call it")
    partly = {layer_of(module) for module in missing}
    judged: list[PlaceResult] = []
    heat: dict[str, Tensor] = {}
    for key, clean in floor.items():
        if key[0] in missing:
            continue
        own = forcing.sums[key]
        if layer_of(key[0]) in partly and (key[1] in (INTO, BACK[OUT]) or key[0] in partly):
            unchecked.setdefault(key[0], "it also has the error of modules in its layer that could not be forced")
        elif key[1] == GRADIENT:
            place = _place(
                key, own, clean, lengths=[], dtype=dtype, wider=math.sqrt(ranks), ratios=torch.zeros(0), features=features
            )
            judged.append(replace(place, pattern=lost.get(key[0], "")))
        else:
            ratios = _token_ratios(own, clean, tape.lengths, dtype)
            layer = layer_of(key[0])
            heat[layer] = torch.maximum(heat.get(layer, ratios), ratios)
            chosen = not tape.values[key][0].is_floating_point()
            rounded = torch.bfloat16 if chosen else dtype  # a choice has no rounding of its own
            wider = math.sqrt(forcing.part[1])
            beside = functools.partial(
                _place, key, own, lengths=tape.lengths, dtype=rounded, wider=wider, ratios=ratios, features=features
            )
            place = beside(clean)
            if is_wrong(place) and key in eager and not chosen:
                place = beside(eager[key])
            judged.append(replace(place, what=f"{ROUTING} {key[0]}") if chosen else place)
    judged += [_wrong_integers(key, tokens, features) for key, tokens in forcing.wrong.items()]
    wrong = [place for place in judged if is_wrong(place)]
    wrong.sort(key=lambda place: (is_backward(place.kind), -math.inf if place.ratio is None else -place.ratio))
    gradients = sum(is_backward(place.kind) for place in judged)
    return Located(
        places=len(judged) - gradients,
        gradients=gradients,
        wrong=tuple(wrong[:MOST]),
        count=len(wrong),
        largest=max((place.ratio for place in judged if place.ratio is not None), default=None),
        unchecked=tuple(f"{module}: {why}" for module, why in unchecked.items()),
        dtype=str(dtype).removeprefix("torch."),
        tokens=sum(tape.lengths),
        notes=notes,
        **(_heat(heat, features) if wrong else {}),
    )


def is_wrong(place: PlaceResult) -> bool:
    """Check whether a place, or a row of it, exceeds its limit, or is not finite."""
    return bool(place.rows) or place.ratio is None or place.ratio > place.limit


def _largest(ratios: Tensor) -> float:
    """Return the largest of these ratios, to three digits."""
    largest = min(MOST_RATIO, float(ratios.max()))
    return float(f"{largest:.3g}")


def _heat(by_layer: Mapping[str, Tensor], features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Located` that are drawn: each row in fields of so many tokens that there are about MOST_FIELDS."""
    rows, positions = features["row"], features["position"]
    width = max(1, -(-len(rows) // MOST_FIELDS))
    in_row = np.arange(len(rows)) - np.searchsorted(rows, rows)
    starts = np.flatnonzero(in_row % width == 0).tolist()
    parts = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
    heat = {layer: tuple(_largest(ratios[part]) for part in parts) for layer, ratios in by_layer.items()}
    ends = [(part.start, part.stop - 1) for part in parts]
    fields = tuple((int(rows[start]), int(positions[start]), int(positions[last])) for start, last in ends)
    return {"heat": heat, "fields": fields}


def _least(clean: Sums, dtype: torch.dtype) -> float:
    """Return the squared error of an element below which no error is worth a word: what a copy would cost."""
    power = clean.truths / max(1, clean.tokens * clean.width)
    return max((_COPIED * torch.finfo(dtype).eps) ** 2 * power, 1e-300)


def _token_ratios(own: Sums, clean: Sums, lengths: list[int], dtype: torch.dtype) -> Tensor:
    """Return the error of each token, in units of its healthy error or its row's, whichever is larger: float64 [T]."""
    healthy = torch.cat([part.clamp_min(float(part.mean())) for part in torch.split(clean.errors / clean.width, lengths)])
    return (own.errors / own.width / healthy.clamp_min(_least(clean, dtype))).sqrt()


def _place(
    key: Key,
    own: Sums,
    clean: Sums,
    *,
    lengths: list[int],
    dtype: torch.dtype,
    wider: float,
    ratios: Tensor,
    features: Mapping[str, Any],
) -> PlaceResult:
    """Judge a place over all tokens, and over each row; tokens count where twice the healthy error is exceeded.

    wider: a factor of the limits. ratios: those of each token.
    """
    least = _least(clean, dtype)
    errors, healthy = own.errors / own.width, clean.errors / clean.width

    def ratio_of(part: slice) -> float:
        return math.sqrt(float(errors[part].mean()) / max(float(healthy[part].mean()), least))

    def spread_of(part: slice) -> float:
        total, squares = float(healthy[part].sum()), float(healthy[part].square().sum())
        return 1 + SPREAD / math.sqrt((total * total / squares if squares else max(1, len(healthy[part]))) * own.width)

    rows, start, above = [], 0, torch.zeros(len(ratios), dtype=torch.bool)
    for row, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        if length and ratio_of(part) > wider * ROW[dtype] * spread_of(part):
            rows.append(row)
            above[part] = ratios[part] > 2
    ratio = ratio_of(slice(None))
    gain = own.own / own.truths if own.truths else math.nan
    pattern = pattern_of(above.numpy(), features) if lengths else None
    return PlaceResult(
        module=key[0],
        kind=key[1],
        what=words_of(key),
        ratio=ratio if math.isfinite(ratio) else None,
        limit=wider * LIMIT[dtype] * spread_of(slice(None)),
        gain=gain if math.isfinite(gain) else None,
        rows=tuple(rows),
        of_rows=len(lengths),
        tokens=int(above.sum()),
        of_tokens=own.tokens,
        position=int(features["position"][int(above.nonzero()[0])]) if bool(above.any()) else None,
        pattern=pattern.sentence if pattern else "",
    )


def _wrong_integers(key: Key, tokens: Tensor, features: Mapping[str, Any]) -> PlaceResult:
    """Build the place of token ids or positions that are not the input's. tokens: which."""
    rows, above = features["row"], np.zeros(len(features["row"]), bool)
    above[tokens.numpy()] = True
    pattern = pattern_of(above, features)
    return PlaceResult(
        module=key[0],
        kind=INTO,
        what=f"the token ids or positions that come into {key[0]}",
        ratio=None,
        limit=1.0,
        rows=tuple(np.unique(rows[above]).tolist()),
        of_rows=int(rows[-1]) + 1,
        tokens=len(tokens),
        of_tokens=len(rows),
        position=int(features["position"][int(tokens[0])]),
        pattern=pattern.sentence if pattern else "",
    )


def words_of(key: Key) -> str:
    """Name a place: the module, the operations between modules whose result comes into it, or a gradient."""
    module, kind, _, part = key
    if part and kind != INTO:
        module += f" (tensor {part + 1})"
    if kind == OUT:
        return module
    if is_backward(kind):
        names = {BACK[OUT]: "the gradient that comes back to", BACK[INTO]: "the input gradient of", GRADIENT: "the gradient of"}
        return f"{names[kind]} {module}"
    parent, _, leaf = module.rpartition(".")
    if is_attention(key):
        return f"the attention of {parent}"
    return f"the gated product of {parent}" if leaf == "down_proj" else f"what comes into {module}"


def is_attention(key: Key) -> bool:
    """Check whether a place is the result of an attention: what comes into the module behind it."""
    parent, _, leaf = key[0].rpartition(".")
    block = parent.rpartition(".")[2]
    return key[1] == INTO and leaf in _BEHIND_ATTENTION and any(part in block for part in ("attn", "attention", "mixer"))


_BEHIND_ATTENTION = ("o_proj", "out_proj", "c_proj", "dense", "norm")


_OTHER = {torch.bfloat16: 1.5, torch.float16: 1.5, torch.float32: 8.0}
"""Kernels whose errors differ by more than this factor compute different things. Healthy ones: 1.15 in bf16."""


def hold_against_eager(clean: dict[Key, Sums], eager: dict[Key, Sums], dtype: torch.dtype) -> tuple[float, int] | None:
    """Replace the clean model's errors by those of its eager attention in the places behind attention where its kernel is worse.

    Return the largest ratio of the two and the number of such places, None if there are none.
    """
    ratios = {key: _rms(clean[key]) / max(_rms(eager[key]), 1e-300) for key in clean.keys() & eager.keys() if is_attention(key)}
    worse = {key: ratio for key, ratio in ratios.items() if ratio > _OTHER[dtype]}
    clean |= {key: eager[key] for key in worse}
    return (max(worse.values()), len(worse)) if worse else None


def kernel_in_words(attn: str, config: Any, ratio: float, count: int) -> str:
    """Say what a kernel does that is further from the truth than eager attention, and what it leaves out if that is known."""
    cap = getattr(config, "attn_logit_softcapping", None)
    why = (
        f": {attn} ignores the soft cap of the attention logits (attn_logit_softcapping {cap:g})"
        if cap and attn == "sdpa"
        else ""
    )
    return f"{attn} attention is {ratio:,.3g} times as far from the truth as eager attention in {plural(count, 'layer')}{why}"


def _rms(sums: Sums) -> float:
    return math.sqrt(float(sums.errors.sum()))
