"""Laws of what a model is given beside tokens: images, and recorded experts.

`images`: the model gets the images of the call, each with its own tokens, and positions and types that fit. What a model is given
is looked at, in the call that the Actor makes: a fault between the captured call and the model is named by what it did to pixels,
grids, types or positions. What the model then makes of them, the truth and the other laws judge.

`routing`: the recorded experts are those of these tokens, in these layers of this model, and their gates add up. A rollout engine
and a trainer choose nearly the same experts, where they run the same weights. So in each layer the recorded experts are compared
with those that the router itself chooses there, after layers that ran with the recorded ones. Few in common prove nothing:
weights may have moved on. But if they fit far better one token or layer further, in another row, or under other names, they were
recorded or passed on wrongly. Chance is the overlap k / E of k experts drawn of E.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.routing import EXPERTS, Seen, blocks_of, experts_of, layers_of
from actordbg.formats.dump_record import dtype_name
from actordbg.laws.judging import not_checked
from actordbg.records.finding import BROKEN, KEPT
from actordbg.records.replay_record import LawAnswer
from actordbg.store.payload import Dump
from actordbg.trainers.images import GRID, PIXELS, TYPES, Images, types_name, types_of
from actordbg.trainers.rows_actor import text_config

WITH_IMAGES = (PIXELS, GRID, *TYPES, "position_ids")
"""Inputs beside text that the laws take in a call with images."""
Faults = Iterator[tuple[str, int | None]]
"""What is wrong, and the row of the image that shows it."""
_TOWERS = ("visual", "vision_tower", "vision_model")


def judge_images(model: Any, inputs: Mapping[str, Tensor], given: Mapping[str, Any], pictures: Images) -> LawAnswer:
    """Build the answer of `images`. given: the arguments that the Actor called its model with, by name."""
    if not pictures.rows:
        return not_checked("images", "the call has no images")
    wrong = next(_wrong(model, inputs, given, pictures), None)
    if wrong is None:
        return LawAnswer("images", KEPT, count=0, looked_at=len(pictures.rows))
    words, row = wrong
    return LawAnswer("images", BROKEN, words, row=row, looked_at=len(pictures.rows))


def _wrong(model: Any, inputs: Mapping[str, Tensor], given: Mapping[str, Any], pictures: Images) -> Faults:
    """Yield what is wrong, and the row of the image that shows it, the most telling first."""
    yield from _pixels(inputs[PIXELS], given.get(PIXELS), pictures)
    yield from _grids(inputs.get(GRID), given.get(GRID), pictures)
    types, name = types_of(model.config, inputs["sequences"]), types_name(model)
    yield from _positions(model, inputs, given.get("position_ids"), types)
    if name and (given.get(name) is None or not torch.equal(given[name].cpu().to(types.dtype), types)):
        missing = given.get(name) is None
        yield (f"the model is called without {name}" if missing else f"{name} do not mark the image tokens"), None
    yield from _tower(model)


def _pixels(call: Tensor, given: Any, pictures: Images) -> Faults:
    if not isinstance(given, Tensor):
        yield f"the model is called without {PIXELS}", pictures.rows[0]
        return
    got, own = given.detach().cpu(), call.to(given.dtype)
    if got.shape != own.shape:
        yield f"{PIXELS} are {list(got.shape)} for the model, {list(own.shape)} in the call", pictures.rows[0]
    elif not torch.equal(got, own):
        parts, ours = torch.split(got, pictures.parts), torch.split(own, pictures.parts)
        image = next(number for number, (left, right) in enumerate(zip(parts, ours, strict=True)) if not torch.equal(left, right))
        row = pictures.rows[image]
        other = next((number for number, each in enumerate(ours) if torch.equal(parts[image], each)), None)
        if other is not None:
            yield f"image {image}, of row {row}, reaches the model as image {other}, of row {pictures.rows[other]}", row
            return
        wide, by = call.double(), given.detach().cpu().double()
        factor = float((by * wide).sum() / (wide * wide).sum())
        scaled = torch.allclose(by, factor * wide, rtol=4 * torch.finfo(given.dtype).eps, atol=1e-6)
        yield (f"{PIXELS} reach the model times {factor:.4g}" if scaled else f"{PIXELS} reach the model as other numbers"), row


def _grids(call: Tensor | None, given: Any, pictures: Images) -> Faults:
    if call is None or (isinstance(given, Tensor) and torch.equal(given.cpu(), call)):
        return
    if not isinstance(given, Tensor) or given.shape != call.shape:
        yield f"the model does not get the call's {GRID}", pictures.rows[0]
        return
    differs = (given.cpu() != call).any(-1)
    image = int(differs.nonzero()[0])
    got, own, row = given[image].tolist(), call[image].tolist(), pictures.rows[image]
    turned = got == [own[0], own[2], own[1]]
    words = "has height and width exchanged" if turned else "is another"
    yield f"the grid of image {image}, of row {row}, {words}: {got} for {own}", row


def _positions(model: Any, inputs: Mapping[str, Tensor], given: Any, types: Tensor) -> Faults:
    """Compare given positions with the model's own where it counts in three dimensions. A row may begin at any position."""
    counts = next((module.get_rope_index for module in model.modules() if hasattr(module, "get_rope_index")), None)
    if not isinstance(given, Tensor) or GRID not in inputs or counts is None:
        return
    if given.dim() == 2:
        yield "positions are one-dimensional, and the model's own count images in three dimensions", None
        return
    known = {**inputs, "input_ids": inputs["sequences"], TYPES[0]: types}
    own = counts(**{name: known[name] for name in inspect.signature(counts).parameters if name in known})[0]
    apart = given.detach().cpu()[-3:] - own
    real = inputs["attention_mask"] != 0
    first = real.long().argmax(-1)[None, :, None].expand(3, -1, 1)
    differs = (apart != apart.gather(-1, first)) & real
    moved = differs.any(0).any(-1)
    if bool(moved.any()):
        row = int(moved.nonzero()[0])
        yield f"the positions of row {row} are not those of its grids", row


def _tower(model: Any) -> Faults:
    """Compare the dtype of the vision tower with the rest's: a wider one loses nothing."""
    tower = next((module for name, module in model.named_modules() if name.rpartition(".")[2] in _TOWERS), None)
    if tower is None:
        return
    ours = {weight.dtype for weight in tower.parameters() if weight.is_floating_point()}
    rest = {weight.dtype for name, weight in model.named_parameters() if not any(f"{part}." in name for part in _TOWERS)}
    for narrow, other in ((dtype, other) for dtype in ours for other in rest):
        if torch.promote_types(narrow, other) is not narrow:
            yield f"the vision tower is in {dtype_name(narrow)}, the rest of the model in {dtype_name(other)}", None


BETTER = 0.2
"""How much larger the overlap under another reading has to be; and it has to be nearer to 1 than to chance."""
_GATES = 0.02
"""How far the gates of a token may be from 1: eight of bf16 add up to less."""


def judge_routing(model: Any, dump: Dump, seen: Seen | None, places: Tensor) -> LawAnswer:
    """Build the answer of `routing`. seen: the routers of a forward of `dump`, whose positions have these places [T, 2]."""
    blocks, experts = blocks_of(model), experts_of(dump.tensors, free=True)
    if experts is None or seen is None or not seen.free:
        return not_checked("routing", "the model routes to no experts, or its routers were not seen")
    real = dump.inputs["attention_mask"] != 0
    experts = experts.masked_fill(~real[..., None, None], -1)
    if why := _repeated(dump.tensors[EXPERTS].long(), real) or _gates(model, seen):
        return LawAnswer("routing", BROKEN, why)
    layers = dict(zip(layers_of([*blocks], experts.shape[2]), blocks.values(), strict=True))
    inside = places[:, 0] >= 0
    rows, columns = places[inside].unbind(1)
    worst, looked_at = "", 0
    for layer, free in sorted(seen.free.items()):
        chosen = torch.full((*experts.shape[:2], free.shape[-1]), -2)
        chosen[rows, columns] = free[inside]
        own = _overlap(experts[:, :, layer], chosen)
        if own is None or experts.shape[-1] != free.shape[-1]:
            continue
        looked_at += int((experts[:, :, layer, 0] >= 0).sum())
        total = getattr(getattr(layers[layer], "experts", None), "num_experts", 0) or int(free.max()) + 1
        readings = [(share, words) for share, words in _readings(experts, layer, chosen, total) if share is not None]
        best, words = max(readings, default=(0.0, ""))
        if best >= own + BETTER and best >= (1 + free.shape[-1] / total) / 2:
            worst = f"in layer {layer} {own:.0%} of the recorded experts are the router's own, and {best:.0%} {words}"
            break
    if worst:
        return LawAnswer("routing", BROKEN, worst, looked_at=looked_at)
    if not looked_at:
        return not_checked("routing", "no token has experts of as many as the router chooses")
    return LawAnswer("routing", KEPT, count=0, looked_at=looked_at)


def _overlap(recorded: Tensor, chosen: Tensor) -> float | None:
    """Return the share of recorded experts [B, S, K] that are among the chosen ones; None if no token has both."""
    both = (recorded >= 0).all(-1) & (chosen >= 0).all(-1)
    if not bool(both.any()):
        return None
    shared = (recorded[..., :, None] == chosen[..., None, :]).any(-1)
    return float(shared[both].double().mean())


def _readings(experts: Tensor, layer: int, chosen: Tensor, total: int) -> Iterator[tuple[float | None, str]]:
    """Yield the overlap of the choices of a layer [B, S, K] with other readings of recorded experts [B, S, L, K], in words."""
    here = experts[:, :, layer]
    for step in (1, -1):
        moved = here.roll(-step, 1)
        moved[:, -1 if step > 0 else 0] = -1
        yield _overlap(moved, chosen), f"if they are shifted by {step:+d} token"
        if 0 <= layer + step < experts.shape[2]:
            yield _overlap(experts[:, :, layer + step], chosen), f"if they are those of layer {layer + step}"
    for other in range(1, len(experts)):
        yield _overlap(here.roll(-other, 0), chosen), f"if they are those of the row {other} further"
    both = (here >= 0).all(-1) & (chosen >= 0).all(-1)
    pairs = torch.zeros(total, total)
    for left in here[both].unbind(-1):
        for right in chosen[both].unbind(-1):
            pairs.index_put_((left.clamp(max=total - 1), right), torch.ones(len(left)), accumulate=True)
    names = pairs.argmax(1)
    if len(set(names.tolist())) == total and int(both.sum()) >= 8 * total:
        yield _overlap(names[here.clamp(0, total - 1)].masked_fill(here < 0, -1), chosen), "if experts are numbered otherwise"


def _repeated(experts: Tensor, real: Tensor) -> str:
    """Return that most tokens have the same expert twice, as if only the first was recorded, or ""."""
    ordered = experts.sort(-1).values
    known = (experts >= 0).all(-1).all(-1) & real
    known[:, -1] = False  # an engine has none for the last token, and some trainers fill in zeros
    again = ordered[..., 1:] == ordered[..., :-1]
    repeated = again.any(-1).any(-1) & known
    share = float(repeated.sum()) / max(int(known.sum()), 1)
    return f"{share:.0%} of the tokens have the same expert more than once" if share > 0.5 else ""


def _gates(model: Any, seen: Seen) -> str:
    """Return that gates were not renormalized, where the configuration wants that, or ""."""
    config = text_config(model)
    renormalized = getattr(config, "norm_topk_prob", config.model_type == "mixtral")
    whole = getattr(config, "routed_scaling_factor", None) or 1.0
    for layer, sums in sorted(seen.gates.items() if renormalized else ()):
        at = int((sums - whole).abs().argmax())
        furthest = float(sums[at])
        if abs(furthest - whole) > _GATES * whole:
            return f"the gates of a token in layer {layer} add up to {furthest:.3g}, not {whole:g}: they were not renormalized"
    return ""
