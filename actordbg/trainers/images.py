"""Which image of a call belongs to which row: its placeholder tokens, its rows of `pixel_values` and its grid.

A model takes the images of a batch as one list, in the order of their placeholder tokens, row after row. So a call says nowhere
which row an image is of; the counts do. An image has as many placeholders as its grid has merged patches,

    grid = (frames, height, width) in patches        pixel_values has frames * height * width rows for it
    tokens = frames * height * width / spatial_merge_size**2

and without grids (Gemma 3) as many as the configuration says, with one entry of `pixel_values` each. Placeholders that do not fit
are the worst fault of such calls, since a batch in which only the sum is right runs: an image's features then lie in another
row.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actordbg.base.errors import Unsupported

PIXELS, GRID = "pixel_values", "image_grid_thw"
TYPES = ("mm_token_type_ids", "token_type_ids")
"""The argument that marks the placeholders [B, S] with 1: for positions in three dimensions, for attention inside of an image."""


@dataclass(frozen=True)
class Images:
    """The images of a call, in their order. rows: the row of each. marked: its placeholders, bool [B, S]. parts: how many entries
    of `pixel_values` each has.
    """

    rows: list[int]
    marked: list[Tensor]
    parts: list[int]

    def of_rows(self, tensors: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
        """Return pixels and grids of these rows, in their order; none if they have no images."""
        chosen = [image for row in rows for image, owner in enumerate(self.rows) if owner == row]
        if not chosen:
            return {}
        pixels = torch.split(tensors[PIXELS], self.parts)
        grids = {GRID: tensors[GRID][chosen]} if GRID in tensors else {}
        return {PIXELS: torch.cat([pixels[image] for image in chosen]), **grids}

    def repainted(self, tensors: Mapping[str, Tensor], where: Tensor) -> Tensor:
        """Return `pixel_values` with the sign changed of the images whose placeholders all lie in `where`, bool [B, S]."""
        pixels = torch.split(tensors[PIXELS], self.parts)
        inside = [bool(where[marked].all()) for marked in self.marked]
        return torch.cat([-part if changed else part for part, changed in zip(pixels, inside, strict=True)])


def images_of(config: Any, tensors: Mapping[str, Tensor]) -> Images | None:
    """Return the images of a call's tensors; None without images. Raises Unsupported if the placeholders do not fit."""
    if PIXELS not in tensors:
        return None
    grid, pixels = tensors.get(GRID), tensors[PIXELS]
    image = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if image is None:
        raise Unsupported(f"the call has {PIXELS}, and the model takes no images", hint="name the model of the run: --model")
    at = (tensors["sequences"] == image).cpu()
    if grid is None:
        parts = [1] * len(pixels)
        each = getattr(config, "mm_tokens_per_image", None) or int(at.sum()) // max(len(pixels), 1)
        sizes = [each] * len(pixels)
    else:
        parts = grid.prod(-1).tolist()
        sizes = [part // getattr(config.vision_config, "spatial_merge_size", 1) ** 2 for part in parts]
    rows, marked, left = [], [], list(sizes)
    for row, here in enumerate(at):
        columns, held = here.nonzero().flatten(), 0
        while left and held < len(columns):
            where = torch.zeros_like(at)
            where[row, columns[held : held + left[0]]] = True
            rows.append(row)
            marked.append(where)
            held += left.pop(0)
        if held != len(columns):
            raise _misfit(f"row {row} has {len(columns)} image tokens, and its images make {held}")
    if left or sum(parts) != len(pixels):
        raise _misfit(f"{len(sizes)} images make {sum(sizes)} tokens, and the rows have {int(at.sum())}")
    return Images(rows, marked, parts)


def pictures_of(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Images | None, str]:
    """Return the images of a call's inputs, None without any, and why they do not fit their tokens, or ""."""
    try:
        return images_of(model.config, inputs), ""
    except Unsupported as problem:
        return None, problem.message


def types_name(model: Any) -> str:
    """Return the name of the argument that marks placeholders, "" if the model takes none."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in TYPES if name in takes), "")


def types_of(config: Any, sequences: Tensor) -> Tensor:
    """Mark the placeholders, int32 [B, S]: 1 of images, 2 of videos, 0 elsewhere."""
    image = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    types = torch.zeros_like(sequences, dtype=torch.int32)
    for number, token in ((1, image), (2, getattr(config, "video_token_id", None))):
        types = types if token is None else types.masked_fill(sequences == token, number)
    return types


def _misfit(why: str) -> Unsupported:
    return Unsupported(f"the images do not fit their tokens: {why}", hint="compare the tokens with the processor's own")
