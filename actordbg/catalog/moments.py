"""Times and durations as `--where` and `dump prune` take them.

`parse_moment("2025-06-19 05:26")` is an aware datetime (UTC unless the text says otherwise), `parse_duration("2h30m")` a
timedelta. Everything that `--where` refuses is refused through `refusal`, so that messages and hints look alike.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any

from actordbg.base.errors import WhereError

_HINT = (
    'an expression like "seq_len>4096 and rank=0" or "timestamp > now() - \'2h\'"; '
    "`actordbg dump ls --help` names the columns"
)
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[wdhms])+\Z")
_PIECE = re.compile(r"(\d+(?:\.\d+)?)([wdhms])")
_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)?(Z|[+-]\d\d:?\d\d)?\Z")


def parse_moment(text: Any) -> datetime | None:
    """An ISO date or time as a moment; UTC unless it says otherwise; None for anything else."""
    match = _DATE.match(text) if isinstance(text, str) else None
    if match is None:
        return None
    date, minutes, seconds, fraction, zone = match.groups()
    zone = "+00:00" if zone in (None, "Z") else zone if ":" in zone else f"{zone[:3]}:{zone[3:]}"
    try:
        moment = datetime.fromisoformat(f"{date}T{minutes or '00:00'}:{seconds or '00'}.{fraction or '0':0<6}{zone}")
        return moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def parse_duration(text: Any) -> timedelta:
    """'7d', '2h30m' as a timedelta; WhereError otherwise."""
    compact = text.replace(" ", "") if isinstance(text, str) else ""
    if not _DURATION.match(compact) or len(compact) > 40:
        raise refusal(
            f"{shortened(str(text))!r} is not a duration", "like '30m', '2h', '2h30m', '1d' (units w, d, h, m, s)"
        )
    try:
        return timedelta(seconds=sum(float(count) * _UNITS[unit] for count, unit in _PIECE.findall(compact)))
    except OverflowError:
        raise refusal(f"{shortened(compact)!r} is too long a duration") from None


def refusal(message: str, hint: str = "") -> WhereError:
    """The error for an expression that is not allowed."""
    return WhereError(message, hint=hint or _HINT)


def shortened(text: str) -> str:
    """At most 60 characters of a text, for a message."""
    return text if len(text) <= 60 else f"{text[:57]}..."
