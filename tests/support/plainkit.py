"""Tensors without torch (`store.plain_tensors`) as torch has them, to compare the two."""

from __future__ import annotations

import numpy as np
import torch

from actordbg.formats.encoding import PlainTensor


def as_torch(plain: PlainTensor) -> torch.Tensor:
    """The same dtype, values and strides."""
    dtype = getattr(torch, plain.dtype)
    values = torch.from_numpy(np.ascontiguousarray(plain.values).copy()).view(dtype)
    laid_out = torch.empty_strided(values.shape, plain.strides, dtype=dtype)
    if 0 in plain.strides and values.numel():
        return torch.as_strided(values.flatten(), values.shape, plain.strides)
    return laid_out.copy_(values)
