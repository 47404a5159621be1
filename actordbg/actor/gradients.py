"""Parameters' gradients, small enough to keep: whole up to a limit, beyond it a fixed sample, and the norm of the whole.

In a replay's tensors they are `grad/<parameter>`, float32 and flat; the file's metadata `gradients` says of each
parameter how many elements it has and its L2 norm. The sample depends on the number of elements alone, so two configurations'
samples are of the same elements.

Example:
    >>> sample(torch.arange(200_000.0)).shape
    torch.Size([65536])
"""

from __future__ import annotations

import torch

GRADIENT_SAMPLE = 65_536
"""Elements of a parameter's gradient that are kept at most: those at floor(i * numel / GRADIENT_SAMPLE)."""
PREFIX = "grad/"


def sample(gradient: torch.Tensor) -> torch.Tensor:
    """The flattened gradient as float32 on the CPU: all of it, or GRADIENT_SAMPLE elements at fixed places."""
    flat = gradient.detach().reshape(-1)
    if flat.numel() > GRADIENT_SAMPLE:
        places = torch.arange(GRADIENT_SAMPLE, device=flat.device) * flat.numel() // GRADIENT_SAMPLE
        flat = flat[places]
    return flat.float().cpu().clone()


def norm(gradient: torch.Tensor) -> float:
    """L2 norm of the whole gradient, computed in float64."""
    return float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))
