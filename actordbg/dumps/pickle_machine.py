"""A pickle machine that cannot run anything: opcodes in, plain data out.

Python's own unpickler is a program interpreter: `REDUCE` calls whatever the file names. An allow-list of names does not
help here, because one of the three names in every genuine dump is `torch.storage._load_from_bytes`, and that function
is `torch.load(weights_only=False)`: it unpickles the bytes it is given, with no list at all. So this module interprets
the opcodes itself, and nothing in it looks a name up or calls a value that came from the file:

* a global becomes a `Name`, two strings, and only if the caller listed it;
* `REDUCE` becomes a `PickleCall`, a name beside its arguments, which the caller may recognize and translate;
* a persistent id becomes a `Persistent`; bytes become a `Span`, the place where they lie in the file, so that a file
  which claims terabytes allocates nothing;
* only the opcodes that `pickle.dump` writes for such dicts exist. `BUILD`, `INST`, `OBJ`, `NEWOBJ`, extension codes,
  buffers and text opcodes are refused by name.

Work is bounded before it is done: opcodes, length of strings and integers. Values may share or contain each other
through the memo (that is how a "billion laughs" is built), which costs nothing as long as nobody walks them: callers
look at known places only.

Example::

    machine = Machine(data, 0, len(data), frozenset({("collections", "OrderedDict")}))
    value = machine.run()          # dict, list, tuple, str, int, bool, None, Span, PickleCall, Persistent
    machine.position               # one past the STOP: where the next pickle or raw bytes begin

Standard library only: it runs in a child process that has nothing else (see `actordbg.dumps.decode_child`).
"""

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from actordbg.base.errors import CorruptDump, UnsafeInput

MAX_OPCODES = 100_000
"""Most opcodes in one pickle; a genuine dump has about 140, plus one for each entry of `packed_seq_lens`."""
MAX_TEXT = 4096
"""Longest string, in bytes."""
MAX_INT_BYTES = 16
"""Longest integer of arbitrary size, in bytes; the legacy storage format's magic number has 10."""
MAX_CLAIM = 2**31
"""A length above this was never written by a dump: it is an attack on the reader's memory, not a truncated file."""

T = TypeVar("T")
Step: TypeAlias = "Callable[[Machine], None]"
"""What an opcode does."""


def unsafe(message: str) -> UnsafeInput:
    """Make the error for a file that asks for something that no dump needs."""
    return UnsafeInput(message, hint="nothing in it was executed; do not open this file with pickle or torch.load")


def corrupt(message: str) -> CorruptDump:
    """Make the error for a file that is not a dump of the old recorder."""
    return CorruptDump(message, hint="copy the file again from where it was written; it is not complete or not an actor dump")


# What a pickle is turned into: plain data, and these four kinds of note about its requests. None of them does anything.
# They compare by identity and print nothing of what they hold, because a hostile file may make them contain themselves.


@dataclass(frozen=True, eq=False, repr=False)
class Span:
    """A bytes object of the pickle, as its place `[start, end)` in the file."""

    start: int
    end: int


@dataclass(frozen=True, eq=False, repr=False)
class Name:
    """A global that the pickle mentions. Two strings; it is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False, repr=False)
class PickleCall:
    """A call that the pickle asks for. It is never made."""

    function: Name
    arguments: tuple[object, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Persistent:
    """A persistent id: how a storage header names its storage."""

    identity: object


class Machine:
    """Interprets one pickle in `data[start:end]`; mentions of globals outside `names` are refused."""

    most_opcodes = MAX_OPCODES
    keys: tuple[type, ...] = (str,)
    """Types that a dict's key may have; it becomes a text."""

    def __init__(self, data: bytes | mmap.mmap, start: int, end: int, names: frozenset[tuple[str, str]]) -> None:
        self.data, self.position, self.end, self.names = data, start, end, names
        self.stack: list[object]
        self.marks: list[list[object]]
        self.memo: dict[int, object]

    def run(self) -> object:
        """Return the next pickled value as plain data. Raises UnsafeInput or CorruptDump, and nothing else."""
        data, self.stack, self.marks, self.memo = self.data, [], [], {}
        for _ in range(self.most_opcodes):
            if self.position >= self.end:
                raise corrupt("truncated: it ends before the pickle does")
            code = data[self.position : self.position + 1]
            self.position += 1
            if code == b".":
                return self._result()
            if code not in self.steps:
                raise _refused_opcode(code[0])
            self.steps[code](self)
        raise unsafe(f"more than {self.most_opcodes} opcodes, which no actor dump has")

    @property
    def steps(self) -> Mapping[bytes, Step]:
        """Return what each opcode does; others are refused."""
        return STEPS

    def _result(self) -> object:
        if self.marks or len(self.stack) != 1:
            raise corrupt("the pickle stops with an unfinished value")
        return self.stack[0]

    def take(self, count: int) -> int:
        """Advance over `count` bytes and return where they begin; refuses lengths that are not there."""
        start = self.position
        if count > self.end - start:
            if count > MAX_CLAIM:
                raise unsafe(f"claims {count} bytes where {self.end - start} are left")
            raise corrupt(f"truncated: {count} bytes announced, {self.end - start} left")
        self.position = start + count
        return start

    def number(self, size: int, *, signed: bool = False) -> int:
        """Read the next `size` bytes as a little-endian integer."""
        start = self.take(size)
        return int.from_bytes(self.data[start : start + size], "little", signed=signed)

    def text(self, length: int) -> str:
        """Read the next `length` bytes as UTF-8."""
        if length > MAX_TEXT:
            raise unsafe(f"a string of {length} bytes, which no actor dump has")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise corrupt("a string is not UTF-8") from None

    def pop(self) -> object:
        """Pop the top of the stack."""
        if not self.stack:
            raise corrupt("the pickle pops a value that is not there")
        return self.stack.pop()

    def top(self, kind: type[T]) -> T:
        """Return the top of the stack, which must be of this kind."""
        value = self.stack[-1] if self.stack else None
        if not isinstance(value, kind):
            raise corrupt(f"the pickle adds to something that is not a {kind.__name__}")
        return value

    def pop_mark(self) -> list[object]:
        """Pop the last mark and everything above it."""
        if not self.marks:
            raise corrupt("the pickle refers to a mark that is not there")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def put(self, index: int) -> None:
        """Remember the top of the stack under `index`."""
        if not self.stack:
            raise corrupt("the pickle memoizes a value that is not there")
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        """Push what was remembered under `index`."""
        if index not in self.memo:
            raise corrupt(f"the pickle recalls value {index}, which it never stored")
        self.stack.append(self.memo[index])

    def name(self, module: str, name: str) -> None:
        """Push a mention of a global, if the caller expects it."""
        if (module, name) not in self.names:
            raise unsafe(f"asks for {module[:80]}.{name[:80]}, which no actor dump needs")
        self.stack.append(Name(module, name))


def _proto(m: Machine) -> None:
    version = m.number(1)
    if not 2 <= version <= 5:
        raise corrupt(f"unknown pickle protocol {version}")


def _frame(m: Machine) -> None:
    length = m.number(8)
    m.take(length)
    m.position -= length


def _long1(m: Machine) -> None:
    size = m.number(1)
    if size > MAX_INT_BYTES:
        raise unsafe(f"an integer of {size} bytes, which no actor dump has")
    m.stack.append(m.number(size, signed=True))


def _bytes(width: int) -> Step:
    def step(m: Machine) -> None:
        length = m.number(width)
        start = m.take(length)
        m.stack.append(Span(start, start + length))

    return step


def _constant(value: object) -> Step:
    return lambda m: m.stack.append(value)


def _empty(kind: type) -> Step:
    return lambda m: m.stack.append(kind())


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _tuple(m: Machine) -> None:
    items = m.pop_mark()
    m.stack.append(tuple(items))


def _tuple_of(count: int) -> Step:
    return lambda m: m.stack.append(tuple([m.pop() for _ in range(count)][::-1]))


def _append(m: Machine) -> None:
    value = m.pop()
    m.top(list).append(value)


def _appends(m: Machine) -> None:
    values = m.pop_mark()
    m.top(list).extend(values)


def _set(m: Machine, pairs: list[object]) -> None:
    target = m.top(dict)
    if len(pairs) % 2:
        raise corrupt("a dict entry without a value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if type(key) not in m.keys or str(key) in target:
            raise corrupt("a dict key is of another kind or appears twice")
        target[str(key)] = value


def _set_item(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    _set(m, [key, value])


def _global(m: Machine) -> None:
    words = []
    for _ in range(2):
        stop = m.data.find(b"\n", m.position, min(m.end, m.position + MAX_TEXT))
        if stop < 0:
            raise corrupt("the name of a global has no end")
        words.append(m.text(stop - m.position))
        m.position += 1
    m.name(*words)


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        raise unsafe("asks for a global whose name is computed")
    m.name(module, name)


def _reduce(m: Machine) -> None:
    arguments, function = m.pop(), m.pop()
    if type(function) is not Name or type(arguments) is not tuple:
        raise unsafe("asks to call something that is not a plain function")
    m.stack.append(PickleCall(function, arguments))


STEPS: Mapping[bytes, Step] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": lambda m: m.stack.append(m.number(1)),
    b"M": lambda m: m.stack.append(m.number(2)),
    b"J": lambda m: m.stack.append(m.number(4, signed=True)),
    b"\x8a": _long1,
    b"\x8c": lambda m: m.stack.append(m.text(m.number(1))),
    b"X": lambda m: m.stack.append(m.text(m.number(4))),
    b"C": _bytes(1),
    b"B": _bytes(4),
    b"\x8e": _bytes(8),
    b"}": _empty(dict),
    b"]": _empty(list),
    b")": _empty(tuple),
    b"(": _mark,
    b"t": _tuple,
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": lambda m: _set(m, m.pop_mark()),
    b"q": lambda m: m.put(m.number(1)),
    b"r": lambda m: m.put(m.number(4)),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.get(m.number(1)),
    b"j": lambda m: m.get(m.number(4)),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"Q": lambda m: m.stack.append(Persistent(m.pop())),
}

_NAMES = (
    "BUILD INST OBJ PERSID BINFLOAT DUP POP_MARK POP NEWOBJ NEWOBJ_EX EXT1 EXT2 EXT4 LONG4 BINUNICODE8 BYTEARRAY8 NEXT_BUFFER "
    "READONLY_BUFFER EMPTY_SET ADDITEMS FROZENSET"
)
_REFUSED = dict(zip(b"bioPG210\x81\x92\x82\x83\x84\x8b\x8d\x96\x97\x98\x8f\x90\x91", _NAMES.split(), strict=True))
_TEXT_OPCODES = b"SVILFgpdl"


def _refused_opcode(code: int) -> UnsafeInput | CorruptDump:
    if code in _TEXT_OPCODES:
        return unsafe("uses opcodes of pickle protocol 0, which no actor dump needs")
    if code in _REFUSED:
        return unsafe(f"uses the opcode {_REFUSED[code]}, which no actor dump needs")
    return corrupt(f"not an actor dump: opcode 0x{code:02x}")
