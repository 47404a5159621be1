"""The law `images`: the model gets the images of the call, each with its own tokens, and positions and types that fit.

What a model is given is looked at, in the call that the Actor makes: a fault between the captured call and the model is named by
what it did to pixels, grids, types or positions. What the model then makes of them, the truth and the other laws judge.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from actordbg.formats.dump_record import dtype_name
from actordbg.laws.judging import not_checked
from actordbg.records.finding import BROKEN, KEPT
from actordbg.records.replay_record import LawAnswer
from actordbg.trainers.images import GRID, PIXELS, TYPES, Images, types_name, types_of

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
