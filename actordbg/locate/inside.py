"""Look into the layer where a place is wrong: which operation, by the field's word.

    target = suspicious(located, missing, model)              # "model.layers.1", "" if there is nothing to look into
    looked_into(session, target, call, layout)                # Operation, None if all operations are transformers'

The layer's attention may be computed by a kernel that torch's functions do not show (flash attention): what comes before and
after it is compared, and the kernel is named.
"""

from collections.abc import Iterable
from typing import Any

import torch

from actordbg.actor import changes
from actordbg.actor.forward_outcome import plain_name
from actordbg.actor.rope_formulas import window_of
from actordbg.actor.session import ActorSession
from actordbg.locate.clean_models import bare_model, dtype_of, one_line
from actordbg.locate.operation_names import difference, named
from actordbg.locate.operations import Listing, TokenLayout, leaves_of, rerun
from actordbg.locate.places import layer_of
from actordbg.records.locate_record import INTO, Located, Operation, is_backward
from actordbg.store.payload import Dump

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
