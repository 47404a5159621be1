"""Judge an inference server by the truth: a replay with `--backend endpoint`, and each way in which the server scored.

The ways (`actordbg.actor.endpoint_session`) split batch and cache apart. If `alone` is wrong, the bank's causes are fitted. If
only another way is wrong, its name says what is: the batch, the cache, or that the server does not repeat itself.

    explained = explain_engine(store, replay_id)
    explained.sentence   # "the engine (vLLM 0.32.0, ...) is right alone, reset, and wrong behind a cached prefix: ..."
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actordbg.base.errors import Unsupported
from actordbg.catalog import query
from actordbg.causes.fit import Array
from actordbg.document.blocks import RIGHT, WRONG, Block, Items, Verdict
from actordbg.judge.explain_outputs import MOST, explain_sides
from actordbg.judge.rollout_sides import is_wrong, side_blocks
from actordbg.judge.sides import ReplaySide, open_replay
from actordbg.records.comparison_record import ExplainedOutputs
from actordbg.store.layout import Store

ALONE = "alone"
_Side = Mapping[str, Array]
"""Arrays by dump id."""
_DIFFERS = {
    "together": "when rows share a request: the batch changes its numbers",
    "twice": "at the second request: its prefix cache is wrong, or it does not repeat itself",
    "cached": "behind a cached prefix: its prefix cache is stale",
    "reset": "after a reset of the cache: its weights changed meanwhile",
}
_UNCHECKED = {
    "together": "rows in one request were not scored for each input",
    "twice": "the same request was not repeated for each input",
    "cached": "its cache was not read for each input",
    "reset": "the cache was not reset for each input",
}
_FAR = 8.0
"""A token's log-prob moved if it differs by more than this, times the mean noise."""


@dataclass(frozen=True)
class ExplainedEngine:
    """How right a server is. server: "vLLM 0.32.0". ways: the explanation of each way of asking, `alone` first.

    moved: by way, where its log-probs begin to differ from those of `alone`, in words.
    """

    server: str
    ways: Mapping[str, ExplainedOutputs]
    moved: Mapping[str, str]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The ways of asking that are further from the truth than rounding, or in which a cause was found."""
        return tuple(name for name, side in self.ways.items() if is_wrong(side))

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Return what was not checked."""
        return tuple(text for way, text in _UNCHECKED.items() if way not in self.ways)

    @property
    def sentence(self) -> str:
        """Say whether the server is right, in which ways, and why not."""
        alone = self.ways[ALONE]
        who = f"the engine ({self.server}, raw logits at temperature 1)"
        right = [way for way in self.ways if way not in self.wrong]
        if not self.wrong:
            return f"{who} is right {', '.join(right)}: {alone.before:.3g} nats from the truth over {alone.tokens:,} tokens"
        if ALONE in self.wrong:
            causes = "; ".join(text.replace("recorded log-probs", "its log-probs") for text in alone.sentences)
            return f"{who} is wrong: {causes}"
        told = "; ".join(f"wrong {_DIFFERS[way]}{self.moved.get(way, '')}" for way in self.wrong)
        return f"{who} is right {', '.join(right)}, and {told}"

    @property
    def blocks(self) -> list[Block]:
        """Return what `actordbg explain` shows of a server."""
        lines = [f"{way}: {text}" for way, side in self.ways.items() for text in side.sentences]
        verdict = Verdict(WRONG if self.wrong else RIGHT, self.sentence, not_checked=self.unchecked)
        return [verdict, *side_blocks(self.ways), *([Items(tuple(lines))] if lines else [])]


def explain_engine(store: Store, replay_id: str, *, models: Sequence[str] = (), **callbacks: Any) -> ExplainedEngine:
    """Explain a replay by a server. models, callbacks, errors: see `explain_sides`."""
    ours = open_replay(query.open_fresh(store), replay_id)
    sides: dict[str, dict[str, Array]] = {ALONE: {}}
    masks: dict[str, Array] = {}
    why = "it has none"
    for dump_id in ours.inputs:
        if isinstance(values := ours.read(dump_id), str):
            why = values
        elif len(masks) < MOST:
            masks[dump_id] = values.mask
            for way, log_probs in {ALONE: values.log_probs, **ours.ways(dump_id)}.items():
                sides.setdefault(way, {})[dump_id] = log_probs
    if not masks:
        raise Unsupported(f"no input of replay {replay_id} has log-probs: {why}", hint="replay it again once the server scores")
    whole = {way: sides[way] for way in (ALONE, *_DIFFERS) if way in sides and sides[way].keys() == masks.keys()}
    explained = explain_sides(store, replay_id, whole, models=models, **callbacks)
    noise = explained[ALONE].noise
    moved = {way: words for way in whole if way != ALONE and (words := _moved(ours, whole[ALONE], whole[way], masks, noise))}
    return ExplainedEngine(str(ours.resolved.get("server")), explained, moved)


def _moved(ours: ReplaySide, alone: _Side, other: _Side, masks: _Side, noise: float) -> str:
    """Say where the log-probs of a way begin to differ from those of `alone`; "" if they do not."""
    for dump_id, mask in masks.items():
        apart = np.abs(other[dump_id] - alone[dump_id]) * mask
        rows, columns = (apart > max(_FAR * noise, 1e-6)).nonzero()
        if len(rows):
            column = int(columns.min())
            row = int(rows[columns.argmin()])
            length = ours.inputs[dump_id].seq_len - mask.shape[1] + column
            return f", from token {length} of row {row} of {dump_id} on, by up to {apart.max():.3g} nats (noise {noise:.2g})"
    return ""
