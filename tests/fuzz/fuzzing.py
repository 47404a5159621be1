"""What every fuzz target shares: which errors are allowed, values that break programs, and how JSON and bytes are mutated.

A target is a module `of_NAME.py` with

* `PARSERS`: the functions of the product that it feeds;
* `seeds()`: good inputs by name, made by the code that a real run uses;
* `one_input(data)`: hand these bytes to the parsers, and raise for anything that must not happen;
* `mutate(data, chance, havoc)`, where plain bytes would not get past a checksum: opens the format, changes a part, seals it again.
  `havoc` changes plain bytes;
* `WORDS`, where a grammar has words that chance does not find.
"""

import atexit
import contextlib
import copy
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

from actordbg.base.errors import ActordbgError, CorruptDump, NewerFormat, StoreProblem

Chance = random.Random
CAP = 2**20
"""What readers have in the place of `dumpfile.DEFAULT_CAP`, in bytes."""
_TEXTS = (
    "",
    "x",
    "../up",
    "a/b#c",
    "/abs",
    "\0",
    "\x1b]0;x\7",
    "\u202e",
    "\ud800",
    "é\U0001f4a5",
    "a" * 300,
    "NaN",
    "2025",
    "r.1",
)
_NUMBERS = (
    0,
    1,
    -1,
    255,
    256,
    2**31,
    2**32 - 1,
    2**48,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
    1e999,
    float("nan"),
)
NASTY = (*_TEXTS, *_NUMBERS, None, True, False, [], {}, [[]], [None, 1, "x"], {"": {}}, ["int64", "int64", [1]])


@contextlib.contextmanager
def refused(*kinds):
    """Lets pass an error that a user may meet: of these kinds, and short, with a hint. Any other comes through."""
    try:
        yield
    except ActordbgError as error:
        if kinds and not isinstance(error, kinds):
            raise AssertionError(f"not an error of this parser: {error!r}") from error
        assert error.message and error.hint is not None, f"{error!r} says nothing"
        assert len(error.message) < 2000, f"a message of {len(error.message)} characters: {error.message[:200]}"
        assert type(error) is not StoreProblem or "memory" not in error.message, error.message


def damage():
    """Lets pass what a reader of a store says of a file: damaged, or of a newer version."""
    return refused(CorruptDump, NewerFormat)


def work_folder():
    """A folder of this process, for parsers that want a file: in memory, where `run.py` or the machine has one."""
    memory = None if "TMPDIR" in os.environ or not os.access("/dev/shm", os.W_OK) else "/dev/shm"
    folder = tempfile.mkdtemp(prefix="actordbg-fuzz-", dir=memory)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def same_json(left, right):
    """Whether two values are the same JSON: 1, 1.0 and true are three values; NaN is itself."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


# ---- mutations ----


def havoc_of(chance, words=(), others=None):
    """Changes bytes in one to four ways: bits, bytes, numbers, runs that go, come or come twice, words, pieces of `others`."""

    def havoc(data):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            at, count = chance.randrange(len(changed) + 1), chance.choice((1, 1, 2, 4, 8, 32))
            kind = chance.randrange(8)
            if kind == 0 and at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            elif kind == 1:
                changed[at : at + count] = chance.randbytes(count)
            elif kind == 2:
                del changed[at : at + count]
            elif kind == 3:
                changed[at:at] = changed[at : at + count] * chance.choice((1, 1, 2, 50))
            elif kind == 4 and words:
                changed[at : at + chance.choice((0, count))] = chance.choice(words)
            elif kind == 5 and others:
                other = chance.choice(others)
                first = chance.randrange(len(other) + 1)
                changed[at : at + count] = other[first : first + 8 * count]
            elif kind == 6:
                changed[at : at + 4] = chance.choice((0, 1, 255, 2**16, 2**31, 2**32 - 1)).to_bytes(4, "little")
            else:
                changed[at:at] = bytes([chance.choice(b"0123456789.,:;[]{}()\"'\\/- \n\0e")])
        return bytes(changed)

    return havoc


def other_json(value, chance):
    """A JSON value with one change inside: a nasty value, a lost or doubled item, a moved value, one that is nested."""
    places = list(_places(value))
    if not places:
        return chance.choice(NASTY)
    changed = copy.deepcopy(value)
    path = chance.choice(places)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    kind = chance.randrange(6)
    if kind == 0:
        del inside[path[-1]]
    elif kind == 1:
        inside[path[-1]] = _at(value, chance.choice(places))
    elif kind == 2 and isinstance(inside, dict):
        inside[chance.choice([*map(str, NASTY), *(str(one[-1]) for one in places)])] = inside[path[-1]]
    elif kind == 3 and isinstance(inside[path[-1]], int | float):
        inside[path[-1]] += chance.choice((1, -1, 0.5, 2**31, -(2**40)))
    elif kind == 4:
        for _ in range(chance.choice((1, 3, 70, 3000))):
            inside[path[-1]] = [inside[path[-1]]] if chance.random() < 0.8 else {"a": inside[path[-1]]}
    else:
        inside[path[-1]] = copy.deepcopy(chance.choice(NASTY))
    return changed


def _places(value, path=()):
    """The path of every value inside, of the first 30 levels."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        if len(path) < 30:
            yield from _places(item, (*path, key))


def _at(value, path):
    for key in path:
        value = value[key]
    return copy.deepcopy(value)


def mutate_json(data, chance, havoc):
    """JSON as a value or as bytes: half of the changes keep it JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        if chance.random() < 0.6:
            return dumped(other_json(json.loads(data), chance))
    return havoc(data)


def dumped(value):
    return json.dumps(value, separators=(",", ":")).encode()
