"""Gather log-probs of many dumps into one `TokenSample`: the tokens that the masks select, row after row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from actordbg.causes.fit import Array, TokenSample

PREFIX = "cause/"
"""Prefix of the names of log-probs under a cause: PREFIX + "NAME=SIZE"."""
NOISE = "noise"
"""The name of draws of what rounding does, whose size is the seed."""


@dataclass(frozen=True)
class Piece:
    """A dump's log-probs [B, A] or [B, S-1], all of the mask's shape: recorded, the truth's, and the truth's under causes, by
    PREFIX + "NAME=SIZE". healthy: log-probs of real computations in the run's dtype. weights: of the truth with other weights.
    """

    recorded: Array
    mask: Array
    truth: Array
    causes: Mapping[str, Array]
    healthy: Sequence[Array] = ()
    weights: Mapping[str, Array] = field(default_factory=dict)


def sample_of(pieces: Sequence[Piece], own: Mapping[str, float]) -> TokenSample:
    """Gather pieces. A cause, a healthy computation or other weights that a piece lacks are left out of all."""

    def chosen(values: Sequence[Array]) -> Array:
        taken = [np.asarray(each, np.float64)[piece.mask] for each, piece in zip(values, pieces, strict=True)]
        return np.concatenate([np.zeros(0), *taken])

    rows, end = [], 0
    for piece in pieces:
        for count in piece.mask.sum(-1).tolist():
            rows.append((end, end + count))
            end += count
    truth = chosen([piece.truth for piece in pieces])
    curves: dict[str, list[tuple[float, Array]]] = {}
    drawn = []
    for full in sorted(set.intersection(*(set(piece.causes) for piece in pieces)) if pieces else ()):
        name, _, size = full.removeprefix(PREFIX).rpartition("=")
        values = chosen([piece.causes[full] for piece in pieces])
        if name == NOISE:
            drawn.append(values - truth)
        elif name in own:
            curves.setdefault(name, []).append((float(size), values))
    shared = min((len(piece.healthy) for piece in pieces), default=0)
    healthy = [chosen([piece.healthy[index] for piece in pieces]) - truth for index in range(shared)]
    others = set.intersection(*(set(piece.weights) for piece in pieces)) if pieces else set()
    return TokenSample(
        recorded=chosen([piece.recorded for piece in pieces]),
        truth=truth,
        rows=rows,
        healthy=np.stack(healthy) if healthy else np.zeros((0, end)),
        drawn=np.stack(drawn) if drawn else np.zeros((0, end)),
        curves=curves,
        own=own,
        weights={name: chosen([piece.weights[name] for piece in pieces]) for name in sorted(others)},
    )
