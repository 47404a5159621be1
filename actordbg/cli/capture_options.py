"""The options that say what to record, shared by `dump enable` and `run`, and how they become a Control."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from actordbg.base.errors import UsageError
from actordbg.base.option import Option
from actordbg.base.units import parse_size
from actordbg.cli.output import human_bytes, plural

if TYPE_CHECKING:
    from actordbg.capture.control import Control


_TRIGGERS, _RING = "Triggers", "Flight recorder"

Run = Annotated[str | None, Option("--run", help="Run name; dumps go under it (default: run-<utc>).", metavar="NAME")]


@dataclass(frozen=True)
class CaptureOptions:
    """What to record, as typed.

    Args:
        every: Record every Nth call; 0: only what --on keeps (default: 0 with --on, else 1).
        max_dumps: At most N dumps per actor and process.
        max_bytes (SIZE): At most this many bytes per actor and process, e.g. 10GB.
        keep (SIZE): Cap the run's dumps, deleting the oldest unprotected ones, e.g. 10GB.
        ranks (RANKS): Only these ranks, e.g. 0,1,4-7.
        min_seq_len: Only calls with S >= N.
        step (N..M): Only these optimizer steps, of all ranks: N or N..M.
        free_floor (SIZE): Drop calls while free disk is below this.
        calls (CALL,...): What to record: forward, or forward,loss.
        with_outputs: Also store the returned log-probs (and entropy).
        with_rng: Also store the RNG state before the call.
        on (TRIGGER,...): Keep and protect calls with: nan, exception, oom, slow:3x, logprobs:LOW:HIGH.
        before: Also keep the N calls before each --on hit.
        max_triggered: At most N per actor and trigger.
        ring: Keep the last N calls and the one in flight in shared memory that survives a kill; 0: off.
        ring_bytes: Size limit of the flight recorder in each process.
        ring_dir (DIR|store): Location of the flight recorder (default: shared memory; `store`: store/rings, which
            survives node loss).
        writer: Compress and write in a separate process (less step-time overhead) or in a thread.
    """

    every: Annotated[int | None, Option(min=0)] = None
    max_dumps: Annotated[int | None, Option(min=0)] = None
    max_bytes: str | None = None
    keep: str | None = None
    ranks: str | None = None
    min_seq_len: Annotated[int | None, Option(min=0, rank=20)] = None
    step: str | None = None
    free_floor: Annotated[str, Option(rank=30)] = "5GiB"
    calls: str = "forward"
    with_outputs: bool = False
    with_rng: Annotated[bool, Option(rank=30)] = False
    on: Annotated[str | None, Option(heading=_TRIGGERS, rank=1)] = None
    before: Annotated[int, Option(min=0, heading=_TRIGGERS)] = 0
    max_triggered: Annotated[int, Option(min=0, heading=_TRIGGERS, rank=30)] = 100
    ring: Annotated[int, Option("--recorder-calls", min=0, heading=_RING, rank=30)] = 8
    ring_bytes: Annotated[str, Option("--recorder-bytes", heading=_RING, rank=30)] = "64MiB"
    ring_dir: Annotated[str | None, Option("--recorder-dir", heading=_RING, rank=30)] = None
    writer: Annotated[Literal["process", "thread"], Option(rank=30)] = "process"


def control_from(options: CaptureOptions, run: str, generation: int) -> Control:
    """Build a Control that is on from now out of a command's options. Raises UsageError for conflicting or invalid options."""
    from actordbg.capture.control import FORMS, MAX_RING, Control, parse
    from actordbg.formats.dump_record import now_timestamp

    on, ring_dir = options.on, options.ring_dir
    words = tuple(word.strip() for word in on.split(",") if word.strip()) if on else ()
    try:
        parse(words)
    except ValueError as error:
        raise UsageError(f"--on: {error}", hint=f"for example --on nan,exception,slow:3x; triggers: {FORMS}") from None
    if on is not None and not words:
        raise UsageError("--on needs at least one trigger", hint=f"triggers: {FORMS}")
    if options.every == 0 and not words:
        raise UsageError("--every 0 without --on records nothing", hint="for example --every 0 --on nan,exception; or --every 1")
    if options.before and not words:
        raise UsageError("--before needs --on", hint="for example --on nan,exception --before 4")
    if options.before > options.ring:
        message = f"--before {options.before} needs more calls than --recorder-calls {options.ring} keeps"
        raise UsageError(message, hint="raise --recorder-calls")
    if options.ring > MAX_RING:
        message = f"--recorder-calls {options.ring} is too large: at most {MAX_RING} calls are kept"
        raise UsageError(message, hint="pass --every 1 to record every call")
    if ring_dir is not None and ring_dir != "store":
        ring_dir = str(Path(ring_dir).absolute())
    same = (
        "max_dumps", "min_seq_len", "with_outputs", "with_rng", "before", "max_triggered", "ring",
        "writer",
    )  # fmt: skip
    return Control(
        enabled=True,
        run=run,
        since=now_timestamp(),
        generation=generation,
        every=options.every if options.every is not None else 0 if words else 1,
        max_bytes=parse_size("--max-bytes", options.max_bytes) if options.max_bytes else None,
        keep_bytes=parse_size("--keep", options.keep) if options.keep else None,
        ranks=parse_ranks(options.ranks) if options.ranks else None,
        steps=_parse_steps(options.step) if options.step else None,
        free_floor_bytes=parse_size("--free-floor", options.free_floor),
        triggers=words,
        calls=_parse_calls(options.calls),
        ring_bytes=parse_size("--recorder-bytes", options.ring_bytes),
        ring_dir=ring_dir,
        **{name: getattr(options, name) for name in same},
    )


def _parse_steps(text: str) -> tuple[int, int]:
    """Parse `3` or `3..5` into the first and the last step. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"--step {text:.40} is not a range of steps", hint="write it like 3 or 3..5")
    return int(match[1]), int(match[2] or match[1])


def _parse_calls(text: str) -> tuple[str, ...]:
    """Parse `forward,loss`. Raises UsageError."""
    from actordbg.formats.dump_record import FORWARD, POINTS

    calls = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    why = "" if FORWARD in calls else "forward is missing"
    if unknown := {*calls} - {*POINTS}:
        why = f"there is no {min(unknown)}"
    if why:
        raise UsageError(f"--calls {text!r}: {why}", hint="pass --calls forward or --calls forward,loss")
    return calls


def checked_run_name(run: str | None) -> str | None:
    """Return `run` if it is a valid run name or None. Raises UsageError otherwise."""
    from actordbg.formats.dump_record import is_plain_name

    if run is not None and not is_plain_name(run):
        raise UsageError(f"{run!r} is not a valid run name", hint="use letters, digits and ._+- only, at most 128")
    return run


def default_run_name() -> str:
    """Return a run name made of the current UTC time, like `run-20261120T120854Z`."""
    return f"run-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse `0,1,4-7` into (0, 1, 4, 5, 6, 7). Raises UsageError."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise UsageError(f"--ranks {text!r} is not a list of ranks", hint="write it like 0,1,4-7")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(ranks))


def limits_in_words(control: dict[str, Any]) -> str:
    """Describe in one line what a control (as plain data) records."""
    every, triggers, before, ranks = (control[name] for name in ("every", "triggers", "before", "ranks"))
    least, dumps, size = (control[name] for name in ("min_seq_len", "max_dumps", "max_bytes"))
    listed, most, steps = ranks or (), dumps or 0, control.get("steps") or ()
    texts = {
        "every call" if every == 1 else f"one call in {every}": every,
        f"on {', '.join(triggers)}": triggers,
        f"with the {before} calls before": triggers and before,
        "nothing": not (every or triggers),
        f"ranks {','.join(map(str, listed))}": ranks is not None,
        f"steps {'..'.join(map(str, steps))}": bool(steps),
        f"if seq_len is {least} or more": least is not None,
        f"at most {plural(most, 'dump')} per actor": dumps is not None,
        f"at most {human_bytes(size)} per actor": size is not None,
        f"the newest {human_bytes(control['keep_bytes'])}": control["keep_bytes"] is not None,
        f"last {plural(control['ring'], 'call')} buffered" if control["ring"] else "no calls buffered": True,
        f"minimum free disk {human_bytes(control['free_floor_bytes'])}": True,
        "with losses": "loss" in control.get("calls", ()),
        "with outputs": control["with_outputs"],
        "with RNG state": control["with_rng"],
    }
    return ", ".join(text for text, holds in texts.items() if holds)
