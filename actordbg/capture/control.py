"""The dump switch: `control.json` in the store, and how a running job notices that it changed.

`actordbg dump enable` and `disable` replace the file (`actordbg.capture.switch_file`); a thread of every capturing process
polls it twice a second. Nothing is sent to the job, so the switch works from any host that sees the store. A named job
(`actordbg run --run NAME`, or ACTORDBG_RUN=NAME) follows `controls/NAME.json` if that file exists.

Invariant: whatever the file contains, the training job continues. A missing file means *off*; a file that cannot be read,
or that a newer actordbg wrote, also means off, with one warning, until a later poll can read it.

Limits are per recording process and actor instance (one model in one process), since ranks do not talk to each other,
and count from the last `dump enable` (its `generation`).

*Triggers* make a call worth keeping after it ran: `dump enable --on nan,exception,slow:3x`. `recorded_call` judges.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from actordbg.base.fault import ActordbgError, NewerFormat, StoreProblem
from actordbg.formats.dump_record import FORWARD, is_plain_name, kinds_of
from actordbg.formats.store_files import StoreFiles, open_regular

NAN, EXCEPTION, OOM, SLOW, LOGPROBS, BEFORE = "nan", "exception", "oom", "slow", "logprobs", "before"
FORMS = "nan, exception, oom, slow:3x, logprobs:LOW:HIGH"
_NUMBER = r"-?\d+(?:\.\d+)?|-?inf"
_SLOW = re.compile(r"slow:(\d+(?:\.\d+)?)x?\Z")
_LOGPROBS = re.compile(rf"logprobs:({_NUMBER})(?::|\.\.)({_NUMBER})\Z")


@dataclass(frozen=True)
class Triggers:
    """The parsed triggers. `slow`: a multiple of the median; `logprobs`: lowest and highest allowed log-prob, in nats."""

    nan: bool = False
    exception: bool = False
    oom: bool = False
    slow: float | None = None
    logprobs: tuple[float, float] | None = None

    @cached_property
    def of_outputs(self) -> bool:
        """Check whether a trigger reads the call's outputs."""
        return self.nan or self.logprobs is not None


def parse(words: Sequence[str]) -> Triggers:
    """Parse words such as `("nan", "slow:3x")`. Raises ValueError, naming the word and the valid forms, for anything else."""
    values: dict[str, bool | float | tuple[float, float]] = {}
    for word in words:
        text = word.strip().lower()
        if text in (NAN, EXCEPTION, OOM):
            values[text] = True
        elif match := _SLOW.match(text):
            values[SLOW] = float(match[1])
        elif match := _LOGPROBS.match(text):
            values[LOGPROBS] = (float(match[1]), float(match[2]))
        else:
            raise ValueError(f"{word!r:.40} is not a trigger; the triggers are {FORMS}")
    slow, logprobs = values.get(SLOW), values.get(LOGPROBS)
    if isinstance(slow, float) and not (slow > 1 and math.isfinite(slow)):
        raise ValueError("slow takes a multiple over 1, such as slow:3x")
    if isinstance(logprobs, tuple) and not logprobs[0] < logprobs[1]:
        raise ValueError("logprobs takes the lowest and the highest, such as logprobs:-40:0")
    return Triggers(**values)  # type: ignore[arg-type]


CONTROL_FORMAT = 2
DEFAULT_RING = 8
"""Calls whose inputs stay in the ring after they returned."""
DEFAULT_RING_BYTES = 64 * 2**20
"""Most bytes that the ring keeps for those calls and for the call in flight."""
WRITERS = ("thread", "process")
DEFAULT_MAX_TRIGGERED = 100
DEFAULT_FREE_FLOOR = 5 * 2**30
"""Capture stops while the store's file system has less free space than this, in bytes."""
POLL_SECONDS = 0.5
"""Time between two polls of the file."""
LARGEST = 2**20
_HINT = "rewrite it with `actordbg dump enable` or `actordbg dump disable`"


@dataclass(frozen=True)
class Control:
    """What to record. `None` means unlimited.

    `every`: record one call in N, starting with the first; 0: only calls that a trigger keeps. `max_dumps`, `max_bytes` (of
    files): limits per actor instance and process. `ranks`: record only these; `steps`: only from this to that optimizer step.
    `min_seq_len`: the least S of `sequences`. `calls`: the capture points; forwards are always recorded. `with_outputs`: also
    store what the call returned; `with_rng`: the RNG state before it. `triggers`: see the module; `before`: calls kept from the
    ring before each triggered call; `max_triggered`: limit per actor and trigger since `dump enable`. `keep_bytes`: limit of the
    run's dumps in bytes; rotation removes the oldest unpinned ones first. `ring`, `ring_bytes`: the last calls kept in memory
    that outlives the process, 0 for no ring; `ring_dir`: its folder, None for the default. `writer`: what encodes and publishes,
    one of WRITERS. `generation`: counts changes of this file.
    """

    enabled: bool
    run: str
    since: str
    generation: int = 1
    every: int = 1
    max_dumps: int | None = None
    max_bytes: int | None = None
    ranks: tuple[int, ...] | None = None
    min_seq_len: int | None = None
    free_floor_bytes: int = DEFAULT_FREE_FLOOR
    with_outputs: bool = False
    with_rng: bool = False
    triggers: tuple[str, ...] = ()
    before: int = 0
    max_triggered: int | None = DEFAULT_MAX_TRIGGERED
    keep_bytes: int | None = None
    ring: int = DEFAULT_RING
    ring_bytes: int = DEFAULT_RING_BYTES
    ring_dir: str | None = None
    writer: str = "thread"
    calls: tuple[str, ...] = (FORWARD,)
    steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _ = self.on  # ValueError for unknown triggers

    @cached_property
    def on(self) -> Triggers:
        """Return the parsed triggers."""
        return parse(self.triggers)

    @cached_property
    def unlimited(self) -> bool:
        """Check whether every call of every rank is recorded."""
        limits = (self.max_dumps, self.max_bytes, self.ranks, self.min_seq_len)
        return self.every == 1 and limits == (None,) * len(limits)

    @classmethod
    def from_json(cls, text: str | bytes) -> Control:
        """Parse and check. Raises NewerFormat for another format, StoreProblem for anything that is not a control file."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StoreProblem(f"control.json is not JSON: {error}", hint=_HINT) from None
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise StoreProblem("control.json has no format", hint=_HINT)
        if data.pop("format") != CONTROL_FORMAT:
            hint = "use one version of actordbg in the shell and in the training environment"
            raise NewerFormat("control.json was written by another version of actordbg", hint=hint)
        try:
            return cls(**_checked(data))
        except ValueError as error:
            raise StoreProblem(f"control.json: {error}", hint=_HINT) from None


MAX_RING = 256
"""Most calls that a ring keeps."""
_TEXTS: dict[str, Callable[[str], bool]] = {"run": is_plain_name, "writer": WRITERS.__contains__}
_ITEMS: dict[str, Any] = {"ranks": int, "steps": int, "triggers": str, "calls": str}
_KINDS = kinds_of(Control)


def _checked(data: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a control file, each checked against the declared type of its field. Raises StoreProblem."""
    if unknown := data.keys() - _KINDS.keys():
        raise StoreProblem(f"control.json has unknown keys: {', '.join(sorted(unknown))}", hint=_HINT)
    for name, value in data.items():
        if name in _ITEMS and type(value) is list:
            value = data[name] = tuple(value)
        good = type(value) in _KINDS[name]
        if good and isinstance(value, tuple):
            good = all(type(item) is _ITEMS[name] and (isinstance(item, str) or item >= 0) for item in value)
        elif good and isinstance(value, str):
            good = _TEXTS.get(name, str.isprintable)(value)
        elif good and type(value) is int:
            good = 0 <= value <= (MAX_RING if name == "ring" else math.inf)
        if not good:
            most_calls = f", at most {MAX_RING} calls are kept" if name == "ring" else ""
            raise StoreProblem(f"control.json: {name} is {value!r:.40}{most_calls}", hint=_HINT)
    if missing := {"enabled", "run", "since"} - data.keys():
        raise StoreProblem(f"control.json has no {min(missing)}", hint=_HINT)
    return data


class ControlWatcher:
    """The switch as a running process sees it. `poll` opens and stats the file, and parses it only if it changed.

    It opens the file because a network file system may answer a bare `stat` from its cache for up to a minute, but asks the
    server on open. `job`: a switch of this name takes precedence over the store's. `current` is the Control in force, None while
    recording is off. `on_problem` is called with a sentence, once for each change to an unreadable state.
    """

    def __init__(self, store: StoreFiles, on_problem: Callable[[str], None] | None = None, job: str | None = None) -> None:
        self.current: Control | None = None
        self._store = store
        self._paths = [os.fspath(store.control_of(name)) for name in ((job, None) if job else (None,))]
        self._on_problem = on_problem
        self._seen: tuple[object, ...] | None = None
        self._problem: str | None = None

    def poll(self) -> Control | None:
        """Read the file now and return the Control in force. Never raises because of the file."""
        for path in self._paths:
            try:
                descriptor = open_regular(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._unreadable(f"cannot open {path}: {error.strerror}")
                return None
            try:
                return self._look(path, descriptor)
            finally:
                os.close(descriptor)
        self._seen, self._problem, self.current = None, None, None
        return None

    def _look(self, path: str, descriptor: int) -> Control | None:
        try:
            stat = os.fstat(descriptor)
            seen = (path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return self.current
            control = Control.from_json(os.read(descriptor, LARGEST))
            if control.enabled:
                self._store.require()
        except ActordbgError as error:
            self._seen = seen  # wait for the file to change; its present content stays wrong
            self._unreadable(error.message)
        except OSError as error:
            self._seen = None  # it may become readable without changing: retry
            self._unreadable(f"cannot read {path}: {error.strerror}")
        else:
            self._seen, self._problem = seen, None
            self.current = control if control.enabled else None
        return self.current

    def _unreadable(self, problem: str) -> None:
        self.current = None
        if problem == self._problem:
            return
        self._problem = problem
        if self._on_problem is not None:
            self._on_problem(f"recording is off: {problem}")
