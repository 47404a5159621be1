"""A pickle machine that cannot run anything: opcodes in, plain data out.

Python's own unpickler is a program interpreter: `REDUCE` calls whatever the file names. An allow-list of names does not
help here, because one of the three names in every genuine dump is `torch.storage._load_from_bytes`, and that function
is `torch.load(weights_only=False)`: it unpickles the bytes it is given, with no list at all. So this module interprets
the opcodes itself, and nothing in it looks a name up or calls a value that came from the file:

* a global becomes a `Name`, two strings, and only if the caller listed it;
* `REDUCE` becomes a `PickleCall`, a name beside its arguments, which the caller may recognize and translate;
* a persistent id becomes a `Persistent`; bytes become a `Span`, the place where they lie in the file, so that a file
  which claims terabytes allocates nothing;
* only the opcodes that `pickle.dump` writes for dicts, tensors, arrays and records exist; `BUILD` and `NEWOBJ` make notes.
  `INST`, `OBJ`, extension codes, buffers and text opcodes are refused by name.

Work is bounded before it is done: opcodes, length of strings and integers. Values may share or contain each other
through the memo (that is how a "billion laughs" is built), which costs nothing as long as nobody walks them: callers
look at known places only.

Example::

    machine = Machine(data, 0, len(data), frozenset({("collections", "OrderedDict")}))
    value = machine.run()          # dict, list, tuple, str, int, bool, None, Span, PickleCall, Persistent
    machine.position               # one past the STOP: where the next pickle or raw bytes begin

Standard library only: it runs in a child process that has nothing else (see `actordbg.dumps.decode_child`).
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

from actordbg.base.errors import CorruptDump, UnsafeInput
from actordbg.dumps.pickle_notes import Name, Persistent, PickleCall, Run, Span, corrupt, unsafe

MAX_OPCODES = 2**26
"""Most opcodes in one pickle: a trainer's debug file holds millions of values."""
KEYS = (str, int, bool, float, type(None))
"""Types that a dict's key may have; it becomes a text."""
MAX_TEXT = 4096
"""Longest string, in bytes."""
MAX_INT_BYTES = 16
"""Longest integer of arbitrary size, in bytes; the legacy storage format's magic number has 10."""
MAX_CLAIM = 2**31
"""A length above this was never written by a dump: it is an attack on the reader's memory, not a truncated file."""

SMALL, WHOLE, FLOATS = "small", "whole", "floats"
"""Kinds of numbers in a list: each `K.`; each one of `INTEGER`; each `G` and eight bytes, big-endian."""
RELEASED = 2**26
"""Bytes of a mapped file that are read before the memory of its pages is given back."""
INTEGER = re.compile(rb"K.|M..|J....", re.DOTALL)
_MANY = b"{16,}+" if sys.version_info >= (3, 11) else b"{16,1000000}"
"""Python 3.10 has no repeats that are never undone, and keeps 200 bytes of memory for each."""
_RUN = re.compile(rb"(?:((?:K.)%b)|((?:K.|M..|J....)%b)|((?:G.{8})%b))e" % (_MANY, _MANY, _MANY), re.DOTALL)
"""Opcodes of numbers up to that which appends them to a list."""

T = TypeVar("T")
Step: TypeAlias = "Callable[[Machine], None]"
"""What an opcode does."""


class Machine:
    """Interprets one pickle in `data[start:end]`; globals outside `names` are refused. records: classes of objects."""

    released = 0

    def __init__(
        self,
        data: bytes | mmap.mmap,
        start: int,
        end: int,
        names: frozenset[tuple[str, str]],
        records: frozenset[str] = frozenset(),
    ) -> None:
        self.data, self.position, self.end, self.names, self.records = data, start, end, names, records
        self.stack: list[object]
        self.marks: list[list[object]]
        self.memo: dict[int, object]

    def run(self) -> object:
        """Return the next pickled value as plain data. Raises UnsafeInput or CorruptDump, and nothing else."""
        data, self.stack, self.marks, self.memo = self.data, [], [], {}
        for _ in range(MAX_OPCODES):
            if self.position >= self.end:
                raise corrupt("truncated: it ends before the pickle does")
            code = data[self.position : self.position + 1]
            self.position += 1
            if code == b".":
                return self._result()
            if code not in STEPS:
                raise _refused_opcode(code[0])
            STEPS[code](self)
        raise unsafe(f"more than {MAX_OPCODES} opcodes, which no actor dump has")

    def _result(self) -> object:
        if self.marks or len(self.stack) != 1:
            raise corrupt("the pickle stops with an unfinished value")
        return self.stack[0]

    def release(self) -> None:
        """Give back the memory of a mapped file's pages: they are read again where they are needed."""
        if self.position - self.released > RELEASED and isinstance(self.data, mmap.mmap):
            self.data.madvise(mmap.MADV_DONTNEED)
            self.released = self.position

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
    """Begin a tuple or the items of a list; numbers that are all of them are appended at once."""
    run = _RUN.match(m.data, m.position, m.end)
    if run is None:
        m.marks.append(m.stack)
        m.stack = []
        return
    kind = (SMALL, WHOLE, FLOATS)[run.lastindex - 1]  # type: ignore[operator]
    m.top(list).append(Run(kind, m.position, run.end() - 1))
    m.position = run.end()
    m.release()


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
        if type(key) not in KEYS or str(key) in target:
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


def _float(m: Machine) -> None:
    start = m.take(8)
    m.stack.extend(struct.unpack_from(">d", m.data, start))


def _reduce(m: Machine) -> None:
    arguments, function = m.pop(), m.pop()
    if type(function) is not Name or type(arguments) is not tuple:
        raise unsafe("asks to call something that is not a plain function")
    if str(function) == "collections.OrderedDict" and not arguments:
        m.stack.append({})
    elif str(function) == "torch.Size" and len(arguments) == 1:
        m.stack.append(arguments[0])
    else:
        m.stack.append(PickleCall(function, arguments))


def _new_object(m: Machine) -> None:
    _reduce(m)
    if str(m.top(PickleCall).function) not in m.records:
        raise unsafe("asks to make an object of a class")


def _build(m: Machine) -> None:
    state, note = m.pop(), m.pop()
    if not isinstance(note, PickleCall):
        raise unsafe("asks to set the state of something that is not an array")
    if type(state) is tuple and ">" in state:
        raise corrupt("an array was not written on a little-endian machine")
    keeps = str(note.function) in m.records or note.function.name == "_reconstruct"
    m.stack.append(PickleCall(note.function, (state,)) if keeps else note)


def _text(m: Machine) -> None:
    """Push a text, or the place of a long one or of the bytes of an archive, which protocol 2 writes as a text."""
    length = m.number(4)
    if length > MAX_TEXT or m.data[m.position : m.position + 4] == b"PK\3\4":
        start = m.take(length)
        m.stack.append(Span(start, start + length))
    else:
        m.stack.append(m.text(length))


def whole_numbers(opcodes: bytes) -> list[int]:
    """Return the numbers of `INTEGER`s."""
    return [int.from_bytes(each[1:], "little", signed=len(each) == 5) for each in INTEGER.findall(opcodes)]


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
    b"X": _text,
    b"G": _float,
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
    b"\x81": _new_object,
    b"b": _build,
    b"Q": lambda m: m.stack.append(Persistent(m.pop())),
}

_NAMES = (
    "INST OBJ PERSID DUP POP_MARK POP NEWOBJ_EX EXT1 EXT2 EXT4 LONG4 BINUNICODE8 BYTEARRAY8 NEXT_BUFFER "
    "READONLY_BUFFER EMPTY_SET ADDITEMS FROZENSET"
)
_REFUSED = dict(zip(b"ioP210\x92\x82\x83\x84\x8b\x8d\x96\x97\x98\x8f\x90\x91", _NAMES.split(), strict=True))
_TEXT_OPCODES = b"SVILFgpdl"


def _refused_opcode(code: int) -> UnsafeInput | CorruptDump:
    if code in _TEXT_OPCODES:
        return unsafe("uses opcodes of pickle protocol 0, which no actor dump needs")
    if code in _REFUSED:
        return unsafe(f"uses the opcode {_REFUSED[code]}, which no actor dump needs")
    return corrupt(f"not an actor dump: opcode 0x{code:02x}")
