"""Whether ranks that ran the same input came to the same: from results' `extra["lane"]` to figures, and to words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actordbg.base.units import plural
from actordbg.formats.replay_record import PASSED, ReplayConfig, ResultRecord
from actordbg.report.arithmetic import finite
from actordbg.report.report_model import RankAgreement, RankDifference
from actordbg.report.words import number

_FIGURES = ("logprob_mean", "loss", "grad_norm")


def agreement_of(results: Sequence[ResultRecord], config: ReplayConfig) -> RankAgreement | None:
    """None where every rank runs an input of its own."""
    passed = [one for one in results if one.status == PASSED]
    if config.lane_width == 1 or not passed:
        return None
    lanes = [(one, one.extra["lane"]) for one in passed if isinstance(one.extra.get("lane"), dict)]
    differing = [
        _difference(one, int(rank), answer) for one, lane in lanes for rank, answer in lane.get("differ", {}).items()
    ]
    return RankAgreement(
        lane_width=config.lane_width,
        results=len(passed),
        checked=len(lanes),
        agree=sum(not lane.get("differ") for _, lane in lanes),
        differ=tuple(differing),
    )


def ranks_in_words(agreement: RankAgreement | None) -> list[str]:
    """A line on what was checked, and one for each rank of each input that differs (at most five of them)."""
    if agreement is None:
        return []
    a = agreement
    unchecked = a.results - a.checked
    rest = f"; of {plural(unchecked, 'input')} not every rank answered" if unchecked else ""
    if not a.differ:
        agreed = f"{a.lane_width} ranks agree on {plural(a.agree, 'input')}, log-probs bit for bit"
        return [agreed + rest if a.checked else f"not compared: not every rank of a group of {a.lane_width} answered"]
    lines = [f"DIFFER on {a.checked - a.agree:,} of {plural(a.checked, 'input')}{rest}"]
    lines += [_in_words(one) for one in a.differ[:5]]
    return lines + ([f"... and {len(a.differ) - 5:,} more"] if len(a.differ) > 5 else [])


def _difference(one: ResultRecord, rank: int, answer: dict[str, Any]) -> RankDifference:
    moved = {}
    for name in _FIGURES:
        there, here = finite([answer.get(name)]), finite([getattr(one, name)])
        if there and here:
            moved[name] = there[0] - here[0]
    same = answer.get("output_digest") == one.output_digest
    return RankDifference(one.dump_id, one.worker, rank, same, moved)


def _in_words(one: RankDifference) -> str:
    what = "the same log-probs" if one.same_log_probs else "other log-probs"
    names = {"logprob_mean": "their mean", "loss": "loss", "grad_norm": "gradient norm"}
    by = ", ".join(f"{names[name]} {number(value)}" for name, value in one.moved.items() if value)
    return f"{one.dump_id}: rank {one.rank} has {what} than rank {one.first}{f' (moved: {by})' if by else ''}".replace(
        "the same log-probs than", "the same log-probs as"
    )
