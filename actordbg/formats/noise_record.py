"""What `actordbg noise` measures: how far one configuration moves by itself, for each dump and each measure.

A record is one file, `store/noise/<noise_id>.json` (`actordbg.formats.stored_record`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from actordbg.formats.comparison_record import Figures
from actordbg.formats.stored_record import StoredRecord


@dataclass(frozen=True)
class NoiseVariant:
    """One way of running the same inputs again, and how far that moved them. `name`: repeat, repad, rebatch or reorder."""

    name: str
    replay_id: str
    log_probs: Figures | None = None
    grad_norm_rel: float | None = None


@dataclass(frozen=True)
class DumpNoise:
    """The floor for one dump: the largest movement over all variants, by the names of `Figures` and DumpComparison."""

    dump_id: str
    floor: dict[str, float]


@dataclass(frozen=True)
class NoiseRecord(StoredRecord):
    """`actordbg noise`: how far one configuration moves by itself. `replay_id`: the unchanged run. `config`: as asked for.

    `floor`: over all dumps, by the same names as a dump's. `reasons`: what could not be measured, or is a fault and no
    noise, and why.
    """

    what: ClassVar[str] = "noise floor"

    noise_id: str
    created_at: str
    replay_id: str
    config: dict[str, Any]
    label: str
    dtype: str | None
    variants: tuple[NoiseVariant, ...]
    dumps: tuple[DumpNoise, ...]
    floor: dict[str, float]
    reasons: tuple[str, ...] = ()
