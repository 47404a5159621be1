"""Look into the layer where a place is wrong: which operation, by the field's word.

    target = suspicious(located, missing, model)              # "model.layers.1", "" if there is nothing to look into
    looked_into(session, target, call, layout)                # Operation, None if all operations are transformers'

The layer's attention may be computed by a kernel that torch's functions do not show (flash attention): what comes before and
after it is compared, and the kernel is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from actordbg.actor import changes
from actordbg.actor.forward_outcome import plain_name
from actordbg.actor.from_papers import window_of
from actordbg.actor.session import ActorSession
from actordbg.base.units import plural
from actordbg.locate.clean_models import bare_model, dtype_of, one_line
from actordbg.locate.operations import CAST, CORE, Call, Listing, TokenLayout, leaves_of, rerun
from actordbg.locate.places import layer_of
from actordbg.records.locate_record import INTO, Located, Operation, is_backward
from actordbg.store.payload import Dump

MASK, NUMBERS, INPUT, OUTPUT = "mask", "numbers", "input", "output"
"""What differs first in a call that both lists have."""
_ACTIVATIONS = {"silu", "gelu", "relu", "sigmoid", "erf", "softplus", "mish", "hardswish"}
_STATES = ("queries", "keys", "values")


@dataclass(frozen=True)
class Difference:
    """The first difference. own, clean: the calls, of the suspect and of transformers, that differ in `what`.

    added, missing: calls before them that only the suspect has, and that only transformers has. before: whether they lie in front
    of the attention's scores. states: which of queries, keys and values differ there. soft_cap: whether a tanh is beside them.
    left_out: the module that only transformers calls, "" for none. later: names of missing calls that the suspect makes later.
    """

    what: str
    own: Call
    clean: Call
    added: tuple[Call, ...]
    missing: tuple[Call, ...]
    before: bool
    states: tuple[str, ...]
    soft_cap: bool
    left_out: str
    later: tuple[str, ...] = ()

    @property
    def casts_only(self) -> bool:
        """Check whether a list lacks only casts of the other: rounding, of which a later difference may be the cause."""
        calls = (*self.added, *self.missing)
        return bool(calls) and self.what in (INPUT, OUTPUT) and all(call.name.startswith(CAST) for call in calls)


def difference(suspect: Listing, clean: Listing, dtype: torch.dtype) -> Difference | None:
    """Return the first difference; None if the calls give the same values, though other calls may make them."""
    own, want, rounding = suspect.calls, clean.calls, torch.finfo(dtype).eps
    names = [[f"{call.block} {call.name}" for call in calls] for calls in (want, own)]
    matcher = SequenceMatcher(None, names[0], names[1], autojunk=False)
    scores = [next((at for at, call in enumerate(calls) if call.name in (CORE, "matmul")), -1) for calls in (want, own)]
    pairs = zip(_STATES, want[scores[0]].taken, own[scores[1]].taken, strict=False) if min(scores) >= 0 else ()
    states = tuple(name for name, left, right in pairs if _apart(left, right, 0))
    leaves = suspect.leaves | clean.leaves
    only_clean = {call.block for call in want} - {call.block for call in own}
    added: list[Call] = []
    missing: list[Call] = []
    passed: list[Difference] = []
    cast: Difference | None = None
    for tag, start, end, own_start, own_end in matcher.get_opcodes():
        if tag != "equal":
            missing += want[start:end]
            added += own[own_start:own_end]
            continue
        for at, (right, left) in enumerate(zip(want[start:end], own[own_start:own_end], strict=True), start):
            what = _differing(left, right, rounding if passed or added or missing else 0.0, rounding, suspect.layout)
            if not (what or added or missing) or (cast and not (added or missing) and what in (INPUT, OUTPUT)):
                continue
            if what == INPUT and not (added or missing):  # made earlier, and used here
                made = [each for each in passed if _is_in(each, right.block)]
                added, missing = ([call for each in made for call in part(each)] for part in (_ADDED, _MISSING))
            begin = max(0, at - 1)
            near = (*missing, *added, *want[begin : at + 2])
            first = Difference(
                what, left, right, tuple(added), tuple(missing),
                before=at < scores[0] or (at == scores[0] and what in ("", INPUT)),
                states=states,
                soft_cap=any(call.name == "tanh" and "attn" in call.block for call in near),
                left_out=next((call.block for call in missing if call.block in only_clean and not added), ""),
                later=tuple(call.name for call in missing if call.name in {later.name for later in own[own_start:]} & leaves),
            )  # fmt: skip
            if first.casts_only:
                cast = cast or first
            elif what:
                return first
            else:
                passed.append(first)
            added, missing = [], []
    return cast


_ADDED, _MISSING = attrgetter("added"), attrgetter("missing")


def _is_in(first: Difference, block: str) -> bool:
    return any(f"{call.block}.".startswith(f"{block}." if block else "") for call in (*first.added, *first.missing))


def _differing(own: Call, clean: Call, tolerance: float, rounding: float, layout: TokenLayout) -> str:
    """Return what differs first in two calls of the same function, "" if nothing does."""
    if any(_apart(a, b, tolerance) for a, b in zip(own.taken, clean.taken, strict=False)):
        return INPUT
    floats = [[each for each in call.numbers if type(each) is float] for call in (own, clean)]
    if len(floats[0]) == len(floats[1]) and any(abs(a - b) > 1e-7 * abs(b) for a, b in zip(*floats, strict=True)):
        return NUMBERS
    if own.seen is not None and clean.seen is not None:
        if not torch.equal(layout.of_judged(own.seen), layout.of_judged(clean.seen)):
            return MASK
        tolerance = rounding  # kernels differ by how a mask is given
    if any(_apart(a, b, tolerance) for a, b in zip(own.given, clean.given, strict=False)):
        return OUTPUT if own.numbers == clean.numbers else NUMBERS
    return ""


def _apart(own: Tensor, clean: Tensor, tolerance: float) -> bool:
    """Check whether two samples differ: by more than a part of their size, or, with no tolerance, by a bit."""
    if own.shape != clean.shape:
        return True
    apart, size = ((each.square().mean().sqrt()) for each in (own - clean, clean))
    return bool(apart > tolerance * size)


def named(first: Difference, layer: str, layout: TokenLayout, window: int | None) -> Operation:
    """Name a difference. layer: the layer's name. window: of its attention, in tokens, by the configuration."""
    calls = (*first.missing, *first.added)
    block = min((call.block for call in calls), key=len, default=first.clean.block)
    said, other_rows = _in_place_of(first.added, first.missing), False
    own, clean = first.own, first.clean
    sides = (*first.added, own), (*first.missing, clean)
    masks = [mask for side in sides for mask in [call.seen for call in side if call.seen is not None][:1]]
    if first.left_out:
        block, word, said = first.left_out, "call", "left out"
    elif first.later:
        word, said = "order of operations", f"{' and '.join(dict.fromkeys(first.later))} called later than in transformers"
    elif any(call.name == "tanh" and "attn" in call.block for call in calls):
        word = "soft cap"
    elif len(masks) == 2 and not torch.equal(*(layout.of_judged(mask) for mask in masks)):
        word, said, other_rows = _of_masks(masks[0], masks[1], layout, window)
    elif len(masks) == 1 and calls:
        word = "attention mask"
    elif first.soft_cap:
        word = "soft cap"
    elif first.what == NUMBERS and "attn" in block and own.name in (CORE, "mul", "div"):
        word = "softmax scale"
    elif first.before and first.states and "attn" in block.rpartition(".")[2]:
        behind = clean.name in (CORE, "matmul") and first.added and not first.missing  # all turned, then changed
        word = " and ".join(first.states) if behind or first.states == ("values",) else "rotary embedding"
        said = said or f"other {' and '.join(first.states)} than transformers'"
    elif {call.name for call in calls} & _ACTIVATIONS:
        word = "activation"
    elif block:
        leaf = block.rpartition(".")[2]
        word = {"mlp": "gated product", "self_attn": "attention", "gate": "router", "router": "router"}.get(leaf, "code")
    else:
        word = "residual" if layer.rpartition(".")[2].isdigit() else "code"
    if first.what == NUMBERS and not calls:
        said = _of_numbers(own.numbers, clean.numbers)
    elif first.what == OUTPUT and not calls:
        said = f"{own.name} gives other values for the same inputs"
    return Operation(f"{layer}.{block}".rstrip("."), word, said or f"what comes into {clean.name} differs", other_rows)


def _of_numbers(own: Iterable[Any], clean: Iterable[Any]) -> str:
    """Say which argument differs first."""
    have, want = next(((a, b) for a, b in zip(own, clean, strict=False) if a != b), (tuple(own), tuple(clean)))
    if isinstance(have, float) and isinstance(want, float) and want:
        return f"{have:.6g} where transformers has {want:.6g} (x{have / want:.4g})"
    return f"{have} where transformers has {want}"


def _in_place_of(added: Iterable[Call], missing: Iterable[Call]) -> str:
    """Say which calls one list has and the other lacks, casts last."""
    each = [sorted((call.name for call in calls), key=lambda name: name.startswith(CAST)) for calls in (added, missing)]
    own, clean = (", ".join(name for name, _ in groupby(names)) for names in each)
    if own and clean:
        return f"{own} in place of {clean}"
    return f"with {own} added" if own else f"without {clean}" if clean else ""


def _of_masks(own: Tensor, clean: Tensor, layout: TokenLayout, window: int | None) -> tuple[str, str, bool]:
    """Return the word for two masks that differ, what queries see by the suspect's, and whether that is other rows.

    own, clean: bool [B or 1, S, S].
    """
    length = layout.rows.shape[1]
    have, want = (layout.of_judged(mask) for mask in (own, clean))
    of_query = layout.judged // length
    rows = layout.rows.flatten()[layout.judged][:, None]
    same = layout.rows[of_query] == rows
    distance = layout.positions.flatten()[layout.judged][:, None] - layout.positions[of_query]
    widest = int((distance + 1)[have & same].max())
    if torch.equal(have, same & (distance >= 0) & (distance < widest)):
        expected = f"{window:,}" if window else "none"
        return "sliding window", f"{widest:,} tokens where the configuration has {expected}", False
    more, less = have & ~want, want & ~have
    if bool((more & same & (distance < 0)).any()):
        ahead = int((-distance)[more & same].max())
        return "attention mask", f"queries see up to {plural(ahead, 'token')} ahead", False
    if bool((outside := more & ~same).any()):
        others = bool((layout.rows[of_query] >= 0)[outside].any())
        whose = "other rows" if others else "padding"
        many = int(outside.sum())
        return "attention mask", f"queries see keys of {whose} ({many:,} pairs)", others
    pairs, verb = (less, "does not see") if bool(less.any()) else (more, "sees")
    query, key = pairs.nonzero()[0].tolist()
    at = int(layout.positions.flatten()[layout.judged][query]), int(layout.positions[of_query[query]][key])
    said = f"{plural(int(pairs.sum()), 'pair')} of query and key: position {at[0]} {verb} position {at[1]}"
    return "attention mask", said, False


_OPEN = ("eager", "sdpa")
"""Attention that is made of torch's functions."""
_MASKED = (None, "full_attention", "sliding_attention")
"""Types of layers whose mask follows from rows, positions and a window."""
_MOST_PAIRS = 2**28


def suspicious(located: Located, missing: Iterable[str], model: Any) -> str:
    """Return the layer to look into, or the module in it that is wrong; "" for none. missing: modules without a call."""
    known = {plain_name(name) for name, _ in model.named_modules()}
    forward = [place for place in located.wrong if not is_backward(place.kind) and place.ratio is not None]
    targets = [layer_of(place.module) if place.kind == INTO else place.module for place in forward[:1]]
    targets = targets or [layer_of(name) for name in missing if name in known]
    return next((name for name in targets if name in known), "")


def layout_of(session: ActorSession, call: Dump, packed: bool, judged: torch.Tensor) -> TokenLayout:
    """Return where the tokens of a call lie in the Actor's tensors. judged: flat places, int [n]."""
    real, places = changes.attended(call), changes.places(call, packed, *session.ring)
    at = places.unbind(1)
    shape = (1, len(places)) if packed else tuple(real.shape)
    rows, positions = places[:, 0].where(real[at], torch.tensor(-1)), (real.cumsum(1) - 1)[at]
    return TokenLayout(rows.view(shape), positions.view(shape), judged)


def looked_into(session: ActorSession, target: str, call: Dump, layout: TokenLayout) -> Operation | None:
    """List the operations of a target's layer in a forward, and name the first that is not transformers' own."""
    layer, attn = layer_of(target), session.choices.attn if session.ring_group is None else "a ring's attention"
    clean_model = bare_model(session)
    clean = clean_model.get_submodule(layer)
    suspect = next(module for name, module in session.model.named_modules() if plain_name(name) == layer)
    listing = Listing(suspect, leaves_of(clean, {target[len(layer) + 1 :]}), layout)
    with changes.eagerly(session.model), listing.on():
        session.probe(call, lambda *_: None, backward=False)
    config, window, seen = clean_model.config.get_text_config(), None, None
    if (
        (number := layer.rpartition(".")[2]).isdigit()
        and attn in _OPEN
        and layout.rows.numel() * layout.rows.shape[1] < _MOST_PAIRS
    ):
        window = window_of(config, int(number))
        types = getattr(config, "layer_types", None)
        seen = layout.band(window) if (types[int(number)] if types else None) in _MASKED else None
    opaque = f"{attn} is not made of torch's functions"
    try:
        with torch.no_grad(), session.autocast(call.record):
            first = difference(listing, rerun(clean, listing, seen, attn), dtype_of(session))
    except (ValueError, TypeError, RuntimeError) as error:  # weights elsewhere, other arguments or shapes, values on meta
        return Operation(target, "", one_line(error) if session.ring_group is None else opaque)
    if first is None:
        return None
    if attn not in _OPEN and not first.before and "attn" in f"{first.clean.block} {first.clean.name}":
        return Operation(target, "", opaque)
    return named(first, layer, layout, window)
