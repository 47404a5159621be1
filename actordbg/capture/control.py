"""The dump switch: `control.json` in the store, and how a running job notices that it changed.

`actordbg dump enable` and `disable` replace the file atomically; every capturing process looks at it from its own
`Actor.forward`, at most twice a second and with one `stat`, and parses it only when it changed. Nothing is sent to the
job, so the switch works from any host that sees the store.

Invariant: whatever is in the file, a training job goes on. A file that is missing means *off*; one that cannot be read,
or that a newer actordbg wrote, also means off, with one warning.

Limits are per recording process and actor instance (one model in one process), since ranks do not talk to each other,
and count from the last `dump enable` (its `generation`).

Example::

    {"format": 1, "enabled": true, "generation": 3, "run": "run-20261120T120854Z", "since": "2026-11-20T12:08:54.000000Z",
     "every": 1, "max_dumps": null, "max_bytes": null, "ranks": [0, 1], "min_seq_len": null, "max_seq_len": null,
     "free_floor_bytes": 5368709120, "level": 3, "with_outputs": false}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actordbg.errors import ActordbgError, NewerFormat, StoreProblem
from actordbg.record import is_plain_name
from actordbg.store import Store, atomic_write

CONTROL_FORMAT = 1
DEFAULT_FREE_FLOOR = 5 * 2**30
"""Capture stops while the store's file system has less free space than this, in bytes."""
POLL_SECONDS = 0.5
"""Least time between two looks at the file."""

_HINT = "write it again with `actordbg dump enable` or `actordbg dump disable`"


@dataclass(frozen=True)
class Control:
    """What to record. `None` is no limit.

    `every`: one call in so many, the first included. `max_dumps`, `max_bytes` (of files): per actor instance and process.
    `ranks`: only these. `min_seq_len`, `max_seq_len`: S of `sequences`, both included. `level`: of zstd.
    `with_outputs`: store what the call returned, too. `generation` counts the changes of this file.
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

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": CONTROL_FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

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
    "every": 1,
    "max_dumps": 0,
    "max_bytes": 0,
    "min_seq_len": 0,
    "max_seq_len": 0,
    "free_floor_bytes": 0,
    "level": 1,
}
_MAY_BE_NONE = {"max_dumps", "max_bytes", "min_seq_len", "max_seq_len"}


def _checked(data: dict[str, Any]) -> dict[str, Any]:
    unknown = data.keys() - Control.__dataclass_fields__.keys()
    if unknown:
        raise StoreProblem(f"control.json has unknown keys: {', '.join(sorted(unknown))}", hint=_HINT)
    for name, least in _COUNTS.items():
        value = data.get(name, least)
        if (value is None and name in _MAY_BE_NONE) or (type(value) is int and value >= least):
            continue
        raise StoreProblem(f"control.json: {name} is {value!r:.40}", hint=_HINT)
    if data.get("level", 3) > 22:
        raise StoreProblem(f"control.json: level is {data['level']}", hint=_HINT)
    if not isinstance(data.get("enabled"), bool) or not isinstance(data.get("with_outputs", False), bool):
        raise StoreProblem("control.json: enabled and with_outputs are true or false", hint=_HINT)
    if not isinstance(data.get("run"), str) or not is_plain_name(data["run"]) or not isinstance(data.get("since"), str):
        raise StoreProblem("control.json: run is not a plain name", hint=_HINT)
    ranks = data.get("ranks")
    if ranks is not None:
        if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise StoreProblem("control.json: ranks is not a list of ranks", hint=_HINT)
        data["ranks"] = tuple(ranks)
    return data


def read_control(store: Store) -> Control | None:
    """The store's switch, or None where it was never touched. Raises StoreProblem or NewerFormat."""
    try:
        return Control.from_json(store.control_path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreProblem(
            f"cannot read {store.control_path}: {error.strerror}", hint="check its permissions"
        ) from None


def write_control(store: Store, control: Control) -> None:
    """Replace the store's switch. Running jobs see it within about half a second of their next forward."""
    try:
        atomic_write(store.control_path, control.to_json().encode())
    except OSError as error:
        raise StoreProblem(
            f"cannot write {store.control_path}: {error.strerror}", hint="check the folder's permissions and free space"
        ) from None


class ControlWatcher:
    """The switch as a running process sees it. `poll` costs a clock read; at most twice a second a `stat` as well.

    `current` is the Control in force, or None while recording is off; `next_look` is when the file is looked at again
    (`time.monotonic`). `on_problem` is called with a sentence once for each change to an unreadable state; `problems`
    counts those changes.
    """

    def __init__(
        self, store: Store, on_problem: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.current: Control | None = None
        self.problems = 0
        self._store = store
        self._path = os.fspath(store.control_path)
        self._on_problem = on_problem
        self._clock = clock
        self.next_look = float("-inf")
        self._seen: tuple[int, int, int] | None = None
        self._problem: str | None = None

    def poll(self) -> Control | None:
        """The Control in force, looked up again if the last look is old enough. Raises nothing of the file's doing."""
        now = self._clock()
        if now < self.next_look:
            return self.current
        self.next_look = now + POLL_SECONDS
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            self._seen, self._problem, self.current = None, None, None
            return None
        except OSError as error:
            self._unreadable(f"cannot stat {self._path}: {error.strerror}")
            return None
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen != self._seen:
            self._reload(seen)
        return self.current

    def _reload(self, seen: tuple[int, int, int]) -> None:
        try:
            control = Control.from_json(Path(self._path).read_bytes())
            if control.enabled:
                self._store.require()
        except ActordbgError as error:
            self._seen = seen  # wait for the file to change; what it says now stays wrong
            self._unreadable(error.message)
        except OSError as error:
            self._seen = None  # it may become readable without changing: look again
            self._unreadable(f"cannot read {self._path}: {error.strerror}")
        else:
            self._seen, self._problem = seen, None
            self.current = control if control.enabled else None

    def _unreadable(self, problem: str) -> None:
        self.current = None
        if problem == self._problem:
            return
        self._problem = problem
        self.problems += 1
        if self._on_problem is not None:
            self._on_problem(f"recording is off: {problem}")
