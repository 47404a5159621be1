"""The dump switch: `control.json` in the store, and how a running job notices that it changed.

`actordbg dump enable` and `disable` replace the file atomically; a thread of every capturing process looks at it twice a
second, and parses it only when it changed. Nothing is sent to the job, so the switch works from any host that sees the store.

A job that has a name of its own (`actordbg run --run NAME`, or ACTORDBG_RUN=NAME) follows `controls/NAME.json` where that
file is there, so that several jobs with different limits can share a store; else it follows `control.json` like everybody.

Invariant: whatever is in the file, a training job goes on. A file that is missing means *off*; one that cannot be read,
or that a newer actordbg wrote, also means off, with one warning.

Limits are per recording process and actor instance (one model in one process), since ranks do not talk to each other,
and count from the last `dump enable` (its `generation`).

Example::

    {"format": 2, "enabled": true, "generation": 3, "run": "run-20261120T120854Z", "since": "2026-11-20T12:08:54.000000Z",
     "every": 1, "max_dumps": null, "max_bytes": null, "ranks": [0, 1], "min_seq_len": null, "max_seq_len": null,
     "free_floor_bytes": 5368709120, "level": 3, "with_outputs": false, "with_rng": false, "triggers": ["nan", "slow:3x"],
     "before": 0, "max_triggered": 100, "keep_bytes": null, "ring": 8, "ring_bytes": 67108864, "ring_dir": null}

A switch can name *triggers*, which make a call worth keeping after it ran: `dump enable --on nan,exception,slow:3x`.

| trigger | keeps a call when |
|---|---|
| `nan` | what it returned (log-probs, entropy; else the sum of its logits) has a NaN or an infinity |
| `exception` | it raised; out-of-memory is told apart (`oom`), with allocated and reserved bytes |
| `oom` | it raised because memory ran out |
| `slow:3x` | it took more than 3 times the running median of calls of its kind (same gradient mode, like size) |
| `logprobs:-40:0` | a log-prob of a token under the action mask lies outside of -40 to 0 nats |

`actordbg.capture.recorded_call` judges; this module knows the words. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from actordbg.base.errors import ActordbgError, NewerFormat, StoreProblem
from actordbg.formats.dump_record import is_plain_name
from actordbg.formats.store_files import StoreFiles, atomic_write

NAN, EXCEPTION, OOM, SLOW, LOGPROBS, BEFORE = "nan", "exception", "oom", "slow", "logprobs", "before"
FORMS = "nan, exception, oom, slow:3x, logprobs:LOW:HIGH"

_NUMBER = r"-?\d+(?:\.\d+)?|-?inf"
_SLOW = re.compile(r"slow:(\d+(?:\.\d+)?)x?\Z")
_LOGPROBS = re.compile(rf"logprobs:({_NUMBER})(?::|\.\.)({_NUMBER})\Z")


@dataclass(frozen=True)
class Triggers:
    """The parsed words. `slow`: the multiple of the median; `logprobs`: lowest and highest, nats, both allowed."""

    nan: bool = False
    exception: bool = False
    oom: bool = False
    slow: float | None = None
    logprobs: tuple[float, float] | None = None

    @property
    def of_outputs(self) -> bool:
        """Whether a call's outputs have to be looked at."""
        return self.nan or self.logprobs is not None

    @property
    def after_the_call(self) -> bool:
        """Whether anything has to be looked at when a call returned well."""
        return self.of_outputs or self.slow is not None


def parse(words: Sequence[str]) -> Triggers:
    """`("nan", "slow:3x")` as Triggers. ValueError, with the word and what there is, for anything else."""
    found: dict[str, bool | float | tuple[float, float]] = {}
    for word in words:
        text = word.strip().lower()
        if text in (NAN, EXCEPTION, OOM):
            found[text] = True
        elif match := _SLOW.match(text):
            found[SLOW] = float(match[1])
        elif match := _LOGPROBS.match(text):
            found[LOGPROBS] = (float(match[1]), float(match[2]))
        else:
            raise ValueError(f"{word!r:.40} is not a trigger; there are {FORMS}")
    slow, logprobs = found.get(SLOW), found.get(LOGPROBS)
    if isinstance(slow, float) and not (slow > 1 and math.isfinite(slow)):
        raise ValueError("slow takes a multiple over 1, like slow:3x")
    if isinstance(logprobs, tuple) and not logprobs[0] < logprobs[1]:
        raise ValueError("logprobs takes the lowest and the highest, like logprobs:-40:0")
    return Triggers(**found)  # type: ignore[arg-type]


CONTROL_FORMAT = 2
_READABLE = (1, 2)
"""Format 1 had no triggers and no ring; what it says is understood."""
DEFAULT_RING = 8
"""Calls whose inputs stay in the ring after they returned."""
DEFAULT_RING_BYTES = 64 * 2**20
"""Most bytes that the ring keeps for them and for the call in flight."""
DEFAULT_MAX_TRIGGERED = 100
DEFAULT_FREE_FLOOR = 5 * 2**30
"""Capture stops while the store's file system has less free space than this, in bytes."""
POLL_SECONDS = 0.5
"""Time between two looks at the file."""
_LARGEST = 2**20

_HINT = "write it again with `actordbg dump enable` or `actordbg dump disable`"


@dataclass(frozen=True)
class Control:
    """What to record. `None` is no limit.

    `every`: one call in so many, the first included; 0: only what a trigger keeps. `max_dumps`, `max_bytes` (of files): per
    actor instance and process.
    `ranks`: only these. `min_seq_len`, `max_seq_len`: S of `sequences`, both included. `level`: of zstd.
    `with_outputs`: store what the call returned, too; `with_rng`: the generator states before it. `triggers`: see
    the module; `before`: with each triggered call, so many before it (out of the ring); `max_triggered`: per
    actor and trigger, since `dump enable`. `keep_bytes`: rotation, the run's dumps take at most so much, the oldest unpinned go
    first. `ring`, `ring_bytes`: the last calls kept in memory that outlives the process, 0 for no ring; `ring_dir`: where, None
    for the default. `generation` counts the changes of this file.
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
    max_seq_len: int | None = None
    free_floor_bytes: int = DEFAULT_FREE_FLOOR
    level: int = 3
    with_outputs: bool = False
    with_rng: bool = False
    triggers: tuple[str, ...] = ()
    before: int = 0
    max_triggered: int | None = DEFAULT_MAX_TRIGGERED
    keep_bytes: int | None = None
    ring: int = DEFAULT_RING
    ring_bytes: int = DEFAULT_RING_BYTES
    ring_dir: str | None = None
    on: Triggers = field(default=Triggers(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "on", parse(self.triggers))

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": CONTROL_FORMAT, **self.to_dict()}, indent=1, allow_nan=False) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "on"}

    @classmethod
    def from_json(cls, text: str | bytes) -> Control:
        """Parse and check. Raises NewerFormat for another format, StoreProblem for anything that is not a control file."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StoreProblem(f"control.json is not JSON: {error}", hint=_HINT) from None
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise StoreProblem("control.json has no format", hint=_HINT)
        if data.pop("format") not in _READABLE:
            raise NewerFormat(
                "control.json was written by another version of actordbg",
                hint="use one version of actordbg in the shell and in the training environment",
            )
        return cls(**_checked(data))

    def admits_seq_len(self, seq_len: int) -> bool:
        """Whether the limits on S let this length pass."""
        if self.min_seq_len is not None and seq_len < self.min_seq_len:
            return False
        return self.max_seq_len is None or seq_len <= self.max_seq_len

    def admits_rank(self, rank: int) -> bool:
        """Whether this rank is asked to record."""
        return self.ranks is None or rank in self.ranks


_COUNTS = {  # field: least value
    "generation": 0,
    "every": 0,
    "max_dumps": 0,
    "max_bytes": 0,
    "min_seq_len": 0,
    "max_seq_len": 0,
    "free_floor_bytes": 0,
    "level": 1,
    "before": 0,
    "max_triggered": 0,
    "keep_bytes": 0,
    "ring": 0,
    "ring_bytes": 0,
}
_MAY_BE_NONE = {"max_dumps", "max_bytes", "min_seq_len", "max_seq_len", "max_triggered", "keep_bytes"}
_FLAGS = ("enabled", "with_outputs", "with_rng")
MAX_RING = 256
"""Most calls that a ring keeps."""


def _checked(data: dict[str, Any]) -> dict[str, Any]:
    unknown = data.keys() - Control.__dataclass_fields__.keys() | ({"on"} & data.keys())
    if unknown:
        raise StoreProblem(f"control.json has unknown keys: {', '.join(sorted(unknown))}", hint=_HINT)
    for name, least in _COUNTS.items():
        value = data.get(name, least)
        if (value is None and name in _MAY_BE_NONE) or (type(value) is int and value >= least):
            continue
        raise StoreProblem(f"control.json: {name} is {value!r:.40}", hint=_HINT)
    if data.get("level", 3) > 22:
        raise StoreProblem(f"control.json: level is {data['level']}", hint=_HINT)
    if data.get("ring", 0) > MAX_RING:
        raise StoreProblem(f"control.json: ring is {data['ring']}, at most {MAX_RING} calls are kept", hint=_HINT)
    if not all(isinstance(data.get(name, name != "enabled"), bool) for name in _FLAGS):
        raise StoreProblem(f"control.json: {', '.join(_FLAGS)} are true or false", hint=_HINT)
    if not isinstance(data.get("ring_dir"), str | None):
        raise StoreProblem("control.json: ring_dir is not a folder", hint=_HINT)
    if not isinstance(data.get("run"), str) or not is_plain_name(data["run"]) or not isinstance(data.get("since"), str):
        raise StoreProblem("control.json: run is not a plain name", hint=_HINT)
    ranks = data.get("ranks")
    if ranks is not None:
        if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise StoreProblem("control.json: ranks is not a list of ranks", hint=_HINT)
        data["ranks"] = tuple(ranks)
    triggers = data.get("triggers", [])
    if not isinstance(triggers, list) or not all(isinstance(word, str) for word in triggers):
        raise StoreProblem("control.json: triggers is not a list of words", hint=_HINT)
    try:
        parse(triggers)
    except ValueError as error:
        raise StoreProblem(f"control.json: {error}", hint=_HINT) from None
    data["triggers"] = tuple(triggers)
    return data


def read_control(store: StoreFiles, job: str | None = None) -> Control | None:
    """The store's switch, or that of one named job; None where it was never touched. Raises StoreProblem or NewerFormat."""
    path = store.control_of(job)
    try:
        return Control.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None


def write_control(store: StoreFiles, control: Control, job: str | None = None) -> None:
    """Replace the store's switch, or that of one named job. Running jobs see it within about half a second."""
    path = store.control_of(job)
    try:
        atomic_write(path, control.to_json().encode())
    except OSError as error:
        raise StoreProblem(
            f"cannot write {path}: {error.strerror}", hint="check the folder's permissions and free space"
        ) from None


class ControlWatcher:
    """The switch as a running process sees it. `poll` opens and stats the file, and parses it only if it changed.

    It is opened, not only looked at: a network file system may answer a `stat` from what it remembers, for up to a minute, but
    asks the server when a file is opened. `job`: a switch of this name comes before the store's own. `current` is the Control in
    force, None while recording is off. `on_problem` is called with a sentence once for each change to an unreadable state;
    `problems` counts those changes.
    """

    def __init__(self, store: StoreFiles, on_problem: Callable[[str], None] | None = None, job: str | None = None) -> None:
        self.current: Control | None = None
        self.problems = 0
        self._store = store
        self._paths = [os.fspath(store.control_of(name)) for name in ((job, None) if job else (None,))]
        self._on_problem = on_problem
        self._seen: tuple[object, ...] | None = None
        self._problem: str | None = None

    def poll(self) -> Control | None:
        """The Control in force, looked up now. Raises nothing of the file's doing."""
        for path in self._paths:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
            control = Control.from_json(os.read(descriptor, _LARGEST))
            if control.enabled:
                self._store.require()
        except ActordbgError as error:
            self._seen = seen  # wait for the file to change; what it says now stays wrong
            self._unreadable(error.message)
        except OSError as error:
            self._seen = None  # it may become readable without changing: look again
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
        self.problems += 1
        if self._on_problem is not None:
            self._on_problem(f"recording is off: {problem}")
