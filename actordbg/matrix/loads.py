"""How often an Actor was built for a replay, how long that took, and whose load it shared: read from its journals.

A group of workers that starts together builds one Actor; plain workers are groups of one. A worker that took over a loaded Actor
says so in its `ready` event (`load_shared_with`), so what was loaded is counted where it happened, after crashes and over a
resumed matrix too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.journal import Event, rank_journal, read_events
from actordbg.replay.launch import groups_of


@dataclass(frozen=True)
class Loads:
    """`count` Actors were built in `seconds` (the slowest rank of each group, added up). `shared_with`: the replay whose
    Actor was used, None where every one was built for this replay.
    """

    count: int = 0
    seconds: float = 0.0
    shared_with: str | None = None


def loads_of(folder: Path, config: ReplayConfig) -> Loads:
    """What the journals in a replay's folder say."""
    count, seconds, shared = 0, 0.0, None
    for group in groups_of(config):
        attempts: dict[int, list[float]] = {}
        for rank in group.ranks:
            for event in _ready(rank_journal(folder, rank)):
                resolved = event.get("resolved") or {}
                if (whose := resolved.get("load_shared_with")) is not None:
                    shared = shared or whose
                else:
                    attempts.setdefault(event.get("attempt", 0), []).append(float(resolved.get("load_s") or 0.0))
        count += len(attempts)
        seconds += sum(max(ranks) for ranks in attempts.values())
    return Loads(count, seconds, shared)


def _ready(path: Path) -> list[Event]:
    return [event for event in read_events(path) if event["event"] == "ready"]
