"""Judge each place of a forced forward and backward, in units of the clean model's error there.

    ratio = sqrt(sum over tokens of error^2 of the suspect / sum over tokens of error^2 of the clean model)

A place is wrong if one of these holds:

    ratio over all tokens > LIMIT[dtype] + SPREAD / sqrt(elements)
    ratio over one row    > ROW[dtype] + SPREAD / sqrt(elements of the row)

Two healthy kernels differ by chance where there are few elements, and in fp32 by their order of summation, so fp32's limits are
wide; a fault there reads thousands. Where the clean model has no error at all (an embedding copies), the unit is 1/64 of the
dtype's rounding of the truth. Ranks that split a matrix round their partial sums, and ranks that average gradients round the
average, which the clean model does not do, so with N of them these limits are sqrt(N) times as wide.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actordbg.locate.forced_forward import Forcing
from actordbg.locate.places import Key, Sums, Tape
from actordbg.records.locate_record import BACK, GRADIENT, INTO, MOST, OUT, Located, PlaceResult, is_backward

LIMIT = {torch.bfloat16: 1.1, torch.float16: 1.1, torch.float32: 4.0}
ROW = {torch.bfloat16: 1.25, torch.float16: 1.25, torch.float32: 8.0}
SPREAD = 4.0
_COPIED = 1 / 64


def judge(
    tape: Tape, found: Forcing, floor: dict[Key, Sums], dtype: torch.dtype, notes: tuple[str, ...] = (), ranks: int = 1
) -> Located:
    """Hold the suspect's errors against the clean model's, place by place. ranks: how many average the parameters' gradients."""
    unchecked = dict(found.unchecked)
    judged_whole = {module for module, kind, *_ in floor if kind == OUT}
    for module in sorted(tape.strange):  # an activation inside experts is judged by what they give
        if module.rpartition(".")[0] not in judged_whole:
            unchecked.setdefault(module, "its tokens cannot be told apart")
    missing = {key[0] for key in floor if key not in found.sums}
    partly = {_layer(module) for module in missing}
    judged: list[PlaceResult] = []
    for key, clean in floor.items():
        if key[0] in missing:
            unchecked.setdefault(key[0], "this model has no such module, or does not call it")
        elif _layer(key[0]) in partly and (key[1] in (INTO, BACK[OUT]) or key[0] in partly):
            unchecked.setdefault(key[0], "it also has the error of modules in its layer that could not be forced")
        else:
            wider = math.sqrt(ranks if key[1] == GRADIENT else found.part[1])
            lengths = [] if key[1] == GRADIENT else tape.lengths
            judged.append(_place(key, found.sums[key], clean, lengths, dtype, wider))
    judged += [_wrong_integers(key, tokens, tape.lengths) for key, tokens in found.wrong.items()]
    wrong = [place for place in judged if place.rows or place.ratio is None or place.ratio > place.limit]
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
    )


def _layer(module: str) -> str:
    """Return the name of the decoder layer that a module is in, up to the first number; its own name outside of layers."""
    parts = module.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _place(key: Key, own: Sums, clean: Sums, lengths: list[int], dtype: torch.dtype, wider: float) -> PlaceResult:
    """Judge a place over all tokens, and over each row; tokens count where four times the row's healthy error is exceeded.

    wider: a factor of the limits.
    """
    power = clean.truths / max(1, clean.tokens * clean.width)
    least = max((_COPIED * torch.finfo(dtype).eps) ** 2 * power, 1e-300)
    errors, healthy = own.errors / own.width, clean.errors / clean.width

    def ratio_of(part: slice) -> float:
        return math.sqrt(float(errors[part].mean()) / max(float(healthy[part].mean()), least))

    rows, start, tokens, position = [], 0, 0, None
    for row, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        if not length or ratio_of(part) <= wider * ROW[dtype] + SPREAD / math.sqrt(length * own.width):
            continue
        rows.append(row)
        above = errors[part] > max(float(healthy[part].mean()), least) * 4
        tokens += int(above.sum())
        if position is None and bool(above.any()):
            position = int(above.nonzero()[0])
    elements, ratio = own.tokens * own.width, ratio_of(slice(None))
    gain = own.own / own.truths if own.truths else math.nan
    return PlaceResult(
        module=key[0],
        kind=key[1],
        what=words_of(key),
        ratio=ratio if math.isfinite(ratio) else None,
        limit=wider * LIMIT[dtype] + SPREAD / math.sqrt(elements),
        gain=gain if math.isfinite(gain) else None,
        rows=tuple(rows),
        of_rows=len(lengths),
        tokens=tokens,
        of_tokens=own.tokens,
        position=position,
    )


def _wrong_integers(key: Key, tokens: Tensor, lengths: list[int]) -> PlaceResult:
    """Build the place of token ids or positions that are not the input's."""
    ends = torch.tensor(lengths).cumsum(0)
    rows = torch.bucketize(tokens, ends, right=True).tolist()
    first = int(tokens[0] - ends[rows[0]]) + lengths[rows[0]]
    what = f"the token ids or positions that come into {key[0]}"
    return PlaceResult(
        key[0], INTO, what, None, 1.0, None, tuple(sorted({*rows})), len(lengths), len(tokens), sum(lengths), first
    )


def words_of(key: Key) -> str:
    """Name a place: the module, the operations between modules whose result comes into it, or a gradient."""
    module, kind, *_ = key
    if kind == OUT:
        return module
    if is_backward(kind):
        names = {BACK[OUT]: "the gradient that comes back to", BACK[INTO]: "the input gradient of", GRADIENT: "the gradient of"}
        return f"{names[kind]} {module}"
    parent, _, leaf = module.rpartition(".")
    if leaf in _BEHIND_ATTENTION and any(part in parent.rpartition(".")[2] for part in ("attn", "attention", "mixer")):
        return f"the attention of {parent}"
    return f"the gated product of {parent}" if leaf == "down_proj" else f"what comes into {module}"


_BEHIND_ATTENTION = ("o_proj", "out_proj", "c_proj", "dense", "norm")
