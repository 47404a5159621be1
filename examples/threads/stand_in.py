"""Shared parts of the demonstrations: a small random model, a batch with padding on both sides, and plain log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY, ROWS, LENGTH, ANSWER = 4096, 3, 24, 12
"""Shape of the batch: rows, positions per row, and how many of the last positions are the answer."""


def model_in(folder: Path) -> Path:
    """Return the folder of a small random Llama, creating it if it does not exist."""
    from actordbg.actor.models import ensure_tiny

    return ensure_tiny(folder)


def loaded(folder: Path) -> Any:
    """Load the model in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [ROWS, LENGTH] and their attention mask: the first row is padded on the left, the second on the right."""
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, -5:] = 0, 0
    return ids * mask, mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Count positions from each row's first real token."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of each label."""
    return logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy at each position."""
    logs = logits.float().log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)
