"""Tables of what was found about replays: comparisons and laws."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index
from sqlmodel import Field

from actordbg.catalog.models import Table, json_field


class ComparisonRun(Table, table=True):
    """A run of `actordbg compare A B`: its file under comparisons/, and its result over all dumps."""

    __tablename__ = "comparison_run"

    comparison_id: str = Field(primary_key=True)
    """its file under comparisons/"""
    created_at: str
    """UTC time"""
    replay_id: str
    """A, the replay that was judged; it may be gone"""
    against: str
    """B: golden, or the other replay's id; it may be gone"""
    against_kind: str
    """what B is: replay, truth or golden"""
    verdict: str
    """match, within-noise, mismatch or not-compared"""
    dumps: int
    """dumps of either side"""
    compared: int
    """dumps that were compared"""
    mismatches: int
    """dumps that are a mismatch"""
    within_noise: int
    """dumps that are outside the thresholds and inside the noise"""
    worst_dump: str | None
    """the worst dump; NULL if none was compared"""
    max_abs: float | None
    """largest absolute difference of a log-prob, nats; NULL if not finite"""
    mean_abs: float | None
    """mean absolute difference over all tokens, nats; NULL if not finite"""
    clip_share: float | None
    """share of all tokens whose ratio is outside 0.8 to 1.2"""
    grad_norm_rel: float | None
    """largest relative difference of a gradient norm"""
    label: str | None
    """A's configuration in words"""
    against_label: str | None
    """B's configuration in words"""
    thresholds_from: str | None
    """where the thresholds are from"""
    thresholds: dict[str, Any] = json_field()
    """the thresholds by measure"""
    noise_id: str | None
    """the noise floor that was applied; NULL without one"""
    reasons: str | None
    """reasons for the verdict as a whole, in words"""
    rounding_id: str | None
    """the replay whose rounding set the limits; NULL for flat ones"""
    origin: str | None
    """who wrote it, if it was imported or downloaded; NULL if it was made in this store"""
    excludes: dict[str, Any] = json_field()
    """by fault, the smallest size that would have been a mismatch"""


class Comparison(Table, table=True):
    """Distance of a replay's result for a dump from another replay or the recorded outputs, by `compare`."""

    __table_args__ = (Index("ix_comparison_dump", "dump_id", "created_at"),)

    comparison_id: str = Field(primary_key=True)
    """its file under comparisons/"""
    dump_id: str = Field(primary_key=True)
    """the dump"""
    replay_id: str
    """the replay; it may be gone"""
    against: str
    """golden: what the run itself recorded; else the other replay's id"""
    max_abs: float | None
    """largest absolute difference, nats; NULL if not finite"""
    created_at: str
    """UTC time of the comparison"""
    verdict: str
    """match, within-noise, mismatch or not-compared"""
    clip_share: float | None
    """share of tokens whose ratio is outside 0.8 to 1.2"""
    reasons: str | None
    """what made it a mismatch, or why it was not compared, in words"""


class LawAnswer(Table, table=True):
    """Verdict of a law on a dump in a replay."""

    __tablename__ = "law_answer"
    __table_args__ = (Index("ix_law_answer_dump", "dump_id", "verdict"),)

    replay_id: str = Field(primary_key=True, foreign_key="replay.replay_id", ondelete="CASCADE")
    """the replay"""
    dump_id: str = Field(primary_key=True)
    """the dump"""
    law: str = Field(primary_key=True)
    """the law: rerun, neighbour, padding, ...; also identity and local (`locate`), ranks (`--align same`)"""
    verdict: str
    """kept, within-rounding, broken, nondeterministic, not-checked, or raised: checking it raised an error"""
