"""Damaged, forged and hostile dump files, by kind. Every mutant comes from a kind and a number, so a failure can be made again.

What a reader may do with a mutant is decided by the table that its kind is in:

- `loads is None`: it must be refused;
- else, if it loads at all, its tensors must be exactly these: the original's for damage (a flipped bit that no decoder looks
  at), or what a file that is consistent in itself now says (other values under a new hash);
- `verifies`: whether `dump verify` may find it good. A payload under another's hash may load, and must not verify.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import catalogcases as cases
import torch
import zstandard

from actordbg.formats import dumpfile
from actordbg.formats.dump_record import MAGIC, MAX_RECORD, DumpRecord
from actordbg.store import payload

CAP = 2**20
"""What readers have in the place of `dumpfile.DEFAULT_CAP`."""
Tensors = dict[str, torch.Tensor]
Chance = random.Random
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Mutant:
    """A file's bytes, and what may come of them (see the module)."""

    blob: bytes
    loads: Tensors | None
    verifies: bool = True


@dataclass(frozen=True)
class Original:
    """A sound dump, whole and in its parts: the record and the payload's header as JSON values, the tensors' bytes."""

    record: DumpRecord
    tensors: Tensors
    blob: bytes

    @classmethod
    def make(cls, seed: int, index: int = 4) -> Original:
        tensors = make_tensors(seed)
        record, blob = payload.encode(cases.record(index), tensors)
        return cls(record, tensors, blob)

    @property
    def end(self) -> int:
        """Where the record ends and the payload's frame begins."""
        return 8 + int.from_bytes(self.blob[4:8], "little")

    @property
    def plain(self) -> bytes:
        return dumpfile.unpack(self.blob)[1]

    def said(self) -> dict[str, Any]:
        """The record as a JSON value, to be changed."""
        return json.loads(self.record.to_json())

    def header(self) -> dict[str, Any]:
        """The payload's header as a JSON value, to be changed."""
        return json.loads(self.plain[8 : 8 + int.from_bytes(self.plain[:8], "little")])

    def data(self) -> bytes:
        return self.plain[8 + int.from_bytes(self.plain[:8], "little") :]


def make_tensors(seed: int) -> Tensors:
    """Every way in which tensors are stored and laid out; equal shapes and forms for every seed."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(70_000, 128_256, (2, 30), generator=g)
    return {
        "sequences": ids,
        "attention_mask": torch.tensor([[1] * 29 + [0], [0] + [1] * 29]),
        "action_mask": torch.randint(0, 2, (2, 7), generator=g).bool(),
        "float_mask": torch.tensor([[0.0, 1.0, 1.0]]),
        "small_ids": torch.randint(2, 9000, (3, 4), generator=g),
        "negative": torch.randint(-9, -1, (5,), generator=g),
        "wide": torch.randint(2**40, 2**41, (2,), generator=g),
        "sliced": torch.randn(4, 9, generator=g)[:, :5],
        "turned": torch.randn(3, 2, generator=g).t(),
        "expanded": torch.randn(1, 3, generator=g).expand(2, 3),
        "bf16": torch.randn(3, generator=g).bfloat16(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
    }


A, B = Original.make(1), Original.make(2)
"""The dump that is mutated (a test may put another in its place), and one of other values."""


# ---- building files; values that break programs are written as JSON ----


def frame(plain: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**{"write_checksum": True, "write_content_size": True, **options}).compress(plain)


def plain_of(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_line(line: bytes | str) -> bytes:
    """A's file with another line of JSON as its record, and the right CRC for it."""
    return cases.header_frame(line.encode() if isinstance(line, str) else line) + A.blob[A.end :]


def with_payload(plain: bytes, said: dict[str, Any] | None = None, *, hashed: bool = True) -> bytes:
    """A's file with another payload, and the right SHA-256 for it unless `hashed` is false."""
    said = said or A.said()
    if hashed:
        said["payload_sha256"] = hashlib.sha256(plain).hexdigest()
    return cases.header_frame(json.dumps(said).encode()) + frame(plain)


def with_frame(data: bytes) -> bytes:
    return A.blob[: A.end] + data


def with_more(fields: str | bytes) -> bytes:
    """A's file with more JSON at the end of its record."""
    return with_line(json.dumps(A.said())[:-1].encode() + b"," + (fields.encode() if isinstance(fields, str) else fields) + b"}")


def with_value(path: Path, new: str) -> bytes:
    """A's file with other JSON at a place of its record."""
    return with_line(told(A.said(), path, new))


def with_header(path: Path, new: str) -> bytes:
    """A's file with other JSON at a place of its payload's header."""
    return with_payload(plain_of(told(A.header(), path, new).encode(), A.data()))


def raw_frame(content_size: int, blocks: bytes, *, descriptor: int = 0xC4, window: bytes = b"\x50") -> bytes:
    """A zstd frame by hand: magic, descriptor (8 bytes of size, a checksum), window, size, blocks."""
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + struct.pack("<Q", content_size) + blocks


def rle_block(size: int, *, last: bool = False) -> bytes:
    """Four bytes that become `size` zeros."""
    return struct.pack("<I", (size << 3) | 2 | last)[:3] + b"\0"


def spots(value: Any, path: Path = ()) -> list[Path]:
    """The path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in [(*path, key), *spots(item, (*path, key))]]


def told(value: Any, path: Path, new: str) -> str:
    """A JSON value as text, with this JSON in the place `path`."""
    inside = value = copy.deepcopy(value)
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = "@@"
    return json.dumps(value).replace('"@@"', new)


def flipped(c: Chance) -> bytes:
    """A's file with one bit or some bits flipped."""
    blob = bytearray(A.blob)
    for _ in range(c.choice((1, 1, 8))):
        blob[c.randrange(len(blob))] ^= 1 << c.randrange(8)
    return bytes(blob)


def nested(c: Chance) -> str:
    opened, closed = c.choice((("[", "]"), ('{"a":', "}")))
    depth = c.choice((70, 990, 1010, 60_000, 600_000))
    return (opened * depth + "1" + closed * depth)[: MAX_RECORD - 5000]


LONG = "1" + "0" * 300
NASTY = [
    *['null', 'true', '0', '-1', '2147483648', '9223372036854775808', '1.0', '-0.0', '1e308', '""', '"x"', '"../../etc/passwd"', '"a/b#c"', '"\\u0000"', '"\\u001b[2J"', '"é"'],
    *['[]', '[[]]', '{}', '{"":{}}', '[null,1,"x"]', '["int64","int64",[1]]', '"NaN"', '"2025"'], f'"{"a" * 5000}"', LONG,
]  # fmt: skip
NAMES = ["../../up", "a#b", "", "..", "a\nb", "a\0b", "__metadata__", "output.", "rng.", "x" * 3000, "sequences.lo", "é"]
PLACES = ['"arguments"', '"unknown"', '"actor"', '"tensors"', '"rank"']
HUGE = str(2**47)
SHAPES = [
    *f"[{HUGE},{HUGE},0]|[{2**48}]|[-1]|[-2,-30]|[2.0,30.0]|[true,60]|[[2],30]|null|{{}}|[{LONG}]|[30,2]|[60]|[2,30,1]".split("|"),
    '"ab"', '["2","30"]', "[2,30,0]", str([2] * 64), str([2**47] * 10_000), str([0] * 200_000),
]  # fmt: skip
STRIDES = [*f"[0,1]|[1,1]|[{HUGE},1]|[-30,1]|[30]|[]|[30,1,1]|[30.0,1]|[29,1]".split("|"), '"ab"', str([2**47] * 99_999)]
ENTRY_SHAPES = ["[2.0,30.0]", "[-2,-30]", "[60]", "[2,30,1]", "[[2,30]]", '"ab"', str([1] * 20 + [2, 30]), str([2**47] * 20_000)]
DTYPES = ['"complex64"', '"int65"', '""', '"float8_e9m9"', '"object"', '"uint64"', '"bool"', "7", "null", '["int64"]']
STORED = ['"int64"', '"uint8"', '"uint25"', '"float32"', '"int16"', '""', "7", "null", '"float64"']
Maker = Callable[[Chance], bytes]


def overwritten(c: Chance) -> bytes:
    first, length = c.randrange(len(A.blob)), c.choice((2, 16, 512))
    return (A.blob[:first] + c.choice((bytes(length), c.randbytes(length))) + A.blob[first + length :])[: len(A.blob)]


def without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key != name}


def hostile_header(c: Chance) -> str:
    text, depth = json.dumps(A.header()), c.choice((80, 990, 100_000))
    added = (
        "[" * depth + "]" * depth,
        "NaN",
        '{"dtype":"U8"}',
        '{},"\\ud800":{}',
        ",".join(f'{{}},"{n}":{{}}' for n in range(70_000)),
    )
    other = (text * 2, "[]", "{}", '{"__metadata__":{}}', text[:-1], text.replace("U8", "U9"), text.replace('"U8"', '["U8"]'))
    return c.choice((*(f'{text[:-1]},"x":{more}}}' for more in added), *other))


def forged_crc(c: Chance, line: bytes) -> bytes:
    crc = c.choice((b"00000000", b"%08X" % zlib.crc32(line + b" "), b"", b"zzzzzzzz", b"%7x" % (zlib.crc32(line) >> 4)))
    header = line + c.choice((b"\n", b"\r", b" ", b"")) + crc
    return MAGIC + struct.pack("<I", len(header)) + header + A.blob[A.end :]


def other_tensors(c: Chance) -> dict[str, Any]:
    """A's record with a tensor more, one less, or one by another name."""
    said = A.said()
    name = c.choice(sorted(said["tensors"]))
    spec = said["tensors"].pop(name) if c.random() < 0.7 else said["tensors"][name]
    said["tensors"][c.choice((*NAMES, f"{name}2"))] = spec
    return said


def hostile_offsets(c: Chance) -> bytes:
    name = c.choice(sorted(set(A.header()) - {"__metadata__", "empty"}))
    first, last = A.header()[name]["data_offsets"]
    changes = (
        [first + 1, last + 1], [first, last + 1], [first - 1, last], [last, first], [float(first), float(last)], [first], [first, last, last],
        [0, last] if first else [0, last, 0], [first, 2**62], [str(first), str(last)], [None, None], {}, [[first], [last]],
    )  # fmt: skip
    return with_header((name, "data_offsets"), json.dumps(c.choice(changes)))


def overlapping(c: Chance) -> bytes:
    """Two tensors over the same bytes, the rest moved up so that there is no gap."""
    header = A.header()
    header["wide"]["data_offsets"] = header[c.choice(("negative", "sliced", "small_ids"))]["data_offsets"]
    return with_payload(plain_of(header, A.data()[: len(A.data()) - c.choice((0, 10, 16))]))


def neither(c: Chance) -> bytes:
    data = bytearray(A.data())
    first, last = A.header()[c.choice(("attention_mask", "action_mask", "float_mask"))]["data_offsets"]
    data[c.randrange(first, last)] = c.randrange(2, 256)
    return with_payload(plain_of(A.header(), bytes(data)))


def parts_that_differ(c: Chance) -> bytes:
    """Token ids whose low and high halves do not belong together: shapes, dtypes, one missing, or a tensor of a part's name."""
    header, said, change = A.header(), A.said(), c.randrange(4)
    if change == 0:
        header["sequences.lo"]["dtype"] = c.choice(("I16", "BF16", "U8"))
    elif change == 1:
        header["sequences.mid"] = header.pop("sequences.hi")
    elif change == 2:
        said["tensors"]["sequences.lo"] = ["uint16", "uint16", [2, 30]]
    else:
        said["tensors"]["sequences"][2] = [2, 15]
    return with_payload(plain_of(header, A.data()), said)


def renamed(old: str, new: str, parts: tuple[str, ...] = ("",)) -> bytes:
    """A tensor by another name in record and payload alike."""
    header, said = A.header(), A.said()
    for part in parts:
        header[new + part] = header.pop(old + part)
    said["tensors"][new] = said["tensors"].pop(old)
    return with_payload(plain_of(header, A.data()), said)


def retold_dtype(name: str, dtype: str) -> Mutant:
    """Another logical dtype that the stored form can stand for: a record of another call, whose values are these."""
    return Mutant(with_value(("tensors", name, 0), f'"{dtype}"'), A.tensors | {name: A.tensors[name].to(getattr(torch, dtype))})


HARMED: dict[str, Maker] = {
    "flipped bits": flipped,
    "overwritten run": overwritten,
    "other value": lambda c: with_value(c.choice([path for path in spots(A.said()) if path[0] != "tensors"]), c.choice(NASTY)),
    "other field": lambda c: with_more(
        f'"{c.choice([*(n for n in DumpRecord.__dataclass_fields__ if n != "tensors"), "_", "__class__"])}":{c.choice(NASTY)}'
    ),
    "a number that is long": lambda c: with_more(
        f"{c.choice(PLACES)}:{c.choice(('', '-'))}1{'0' * c.choice((400, 4301, 100_000))}"
    ),
    "a text that is long": lambda c: with_more(f'"{c.choice(("host", "unknown", "dump_id"))}":"{c.choice("aé") * 100_000}"'),
    "other value of the header": lambda c: with_header(c.choice(spots(A.header())), c.choice(NASTY)),
    "hostile text of the header": lambda c: with_payload(plain_of(hostile_header(c).encode(), A.data())),
}
"""Kinds that, if they load at all, hold exactly A's tensors."""
REFUSED: dict[str, Maker] = {
    "inserted run": lambda c: A.blob[: (at := c.randrange(len(A.blob)))] + c.randbytes(c.choice((1, 4, 100))) + A.blob[at:],
    "truncated": lambda c: A.blob[: c.randrange(len(A.blob))],
    "truncated at a seam": lambda c: A.blob[: c.choice((0, 3, 4, 7, 8, A.end - 9, A.end - 1, A.end, A.end + 1, A.end + 12, -8, -1))],
    "two frames": lambda c: A.blob + c.choice((A.blob[A.end :], A.blob, B.blob[B.end :], frame(b""), A.blob[: A.end])),
    "forged record size": lambda c: (
        A.blob[:4] + struct.pack("<I", c.choice((0, 9, A.end - 9, A.end - 7, MAX_RECORD, MAX_RECORD + 1, 2**32 - 1))) + A.blob[8:]
    ),
    "forged content size": lambda c: with_frame(raw_frame(
        c.choice((0, len(A.plain) - 1, len(A.plain) + 1, CAP, CAP + 1, 2**40, 2**63, 2**64 - 1, 2**64 - 2)),
        struct.pack("<I", (len(A.plain) << 3) | 1)[:3] + A.plain + c.randbytes(4),
    )),
    "a wide window": lambda c: with_frame(
        raw_frame(len(A.plain), rle_block(100, last=True) + bytes(4), window=c.choice((b"\xa8", b"\xb0", b"\xff")))
    ),
    "other options of the frame": lambda c: with_frame(c.choice((
        frame(A.plain, write_content_size=False), frame(A.plain, write_checksum=False), frame(b""), frame(A.plain)[:-4], A.plain,
        raw_frame(100, rle_block(100, last=True) + bytes(4), descriptor=0xC5), struct.pack("<II", 0x184D2A51, len(A.plain)) + A.plain,
    ))),
    "lost field": lambda c: with_line(json.dumps(without(A.said(), c.choice(("dump_id", "run", "rank", "timestamp", "tokens", "tensors"))))),
    "other version": lambda c: with_value(("format_version",), c.choice(["0", "2", "-1", "true", "1.0", '"1"', "null", "1" + "0" * 4000])),
    "not finite": lambda c: with_more(f"{c.choice(PLACES)}:{c.choice(('NaN', 'Infinity', '-1e400', '[1e309]'))}"),
    "not unicode": lambda c: with_more(
        b'"%b":"%b"' % (c.choice((b"host", b"unknown")), c.choice((b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\uDFFF x", b"\xc3", b"\\udc00\\ud800")))
    ),
    "nested deeply": lambda c: with_more(f"{c.choice(PLACES)}:{nested(c)}"),
    "not a record": lambda c: with_line(c.choice(("", "null", "[]", "{}", "{", json.dumps(A.said()) * 2, "\0", "{'a':1}"))),
    "forged CRC": lambda c: forged_crc(c, A.record.to_json().encode()),
    "hostile shape": lambda c: with_value(("tensors", "sequences", 2), c.choice(SHAPES)),
    "hostile strides": lambda c: with_value(
        ("tensors", name := c.choice(("sequences", "attention_mask"))), f"{json.dumps(A.said()['tensors'][name])[:-1]},{c.choice(STRIDES)}]"
    ),
    "wrong dtype": lambda c: with_value(("tensors", c.choice(("sequences", "negative")), 0), c.choice(DTYPES)),
    "wrong form": lambda c: with_value(("tensors", c.choice(("sequences", "negative", "attention_mask")), 1), c.choice(STORED)),
    "not a spec": lambda c: with_value(("tensors", c.choice(sorted(A.tensors))), c.choice([*NASTY[:-5], '["int64"]', '["a","a",[1],[1],[1]]'])),
    "other tensors": lambda c: with_line(json.dumps(other_tensors(c))),
    "hostile offsets": hostile_offsets,
    "hostile shape of an entry": lambda c: with_header(("sequences.hi", "shape"), c.choice(ENTRY_SHAPES)),
    "true for one": lambda c: with_header(("float_mask", "shape"), c.choice(("[true,3]", "[1.0,3]", "[1,3.0]"))),
    "overlapping entries": overlapping,
    "forged header size": lambda c: with_payload(
        c.choice((0, 1, 2**64 - 1, len(A.plain), len(A.plain) - 8, MAX_RECORD + 1)).to_bytes(8, "little") + A.plain[8:]
    ),
    "cut payload": lambda c: with_payload(c.choice((A.plain[: c.randrange(len(A.plain))], A.plain + c.randbytes(9), b"", b"\0" * 8))),
    "neither true nor false": neither,
    "parts that differ": parts_that_differ,
    "a tensor called metadata": lambda c: renamed("sequences", "__metadata__", (".lo", ".hi")),
}  # fmt: skip
"""Kinds that must be refused."""
OTHERS: dict[str, Callable[[Chance], Mutant]] = {
    "other identity": lambda c: Mutant(
        with_value(*c.choice(((("dump_id",), '"d-2"'), (("run",), '"ppo-2"'), (("rank",), "5")))), None, verifies=False
    ),
    "another dtype": lambda c: retold_dtype(*c.choice((
        ("sequences", "int32"), ("attention_mask", "bool"), ("attention_mask", "bfloat16"), ("float_mask", "int64"), ("action_mask", "uint8"),
    ))),
    "renamed everywhere": lambda c: (
        lambda name: Mutant(renamed("wide", name), {name if key == "wide" else key: tensor for key, tensor in A.tensors.items()})
    )(c.choice([name for name in NAMES if name != "__metadata__"])),
    "other values": lambda c: Mutant(with_payload(plain_of(A.header(), B.data())), B.tensors),
    "another's payload": lambda c: Mutant(with_payload(
        plain_of(A.header() | {"__metadata__": {"actordbg": f"dump d-{c.randrange(9)} of run ppo-1, rank 1, record version 1"}}, B.data()),
        hashed=c.random() < 0.5,
    ), None, verifies=False),
    "a payload under another's hash": lambda c: Mutant(with_payload(plain_of(A.header(), B.data()), hashed=False), B.tensors, verifies=False),
}  # fmt: skip
"""Kinds of which something else comes: a dump that is consistent in itself, or one that loads and must not verify."""
KINDS = (*HARMED, *REFUSED, *OTHERS)


def mutant(kind: str, number: int) -> Mutant:
    """The mutant of this kind and number, always the same."""
    chance = random.Random(f"{kind} {number}")
    if kind in OTHERS:
        return OTHERS[kind](chance)
    return Mutant(HARMED[kind](chance), A.tensors) if kind in HARMED else Mutant(REFUSED[kind](chance), None)


# ---- files that ask for memory ----


def hungry(cap: int) -> dict[str, tuple[bytes, bool]]:
    """By name, files that are large or become so, for readers with this cap; and whether they load."""
    most = cap // 32 * 31
    endless = A.said()
    endless["tensors"]["sequences"][2] = [2**47] * 250_000
    header = A.header()
    header["sequences.hi"]["shape"] = [2**47] * 200_000
    values = json.dumps(A.said())[:-1] + ',"unknown":['
    return {
        "a payload of zeros": (sound({"x": torch.zeros(most // 4)}), True),
        "masks that become eight times as large": (sound({"x": torch.ones(cap // 8, dtype=torch.int64)}), True),
        "masks that become too large": (sound({"x": torch.ones(most, dtype=torch.int64)}), False),
        "narrow ids and wide strides": (sound({"x": torch.ones(9, cap // 80, dtype=torch.int64)[:, ::9]}), True),
        "strides over a terabyte": (with_payload(*wide_tensors_of(2**40)), False),
        "an honest bomb": (with_frame(frame(bytes(64 * cap))), False),
        "a bomb that lies": (with_frame(raw_frame(cap, rle_block(2**17) * 9000 + rle_block(1, last=True) + bytes(4))), False),
        "a payload behind a long record": (with_line(json.dumps(A.said() | {"host": "h" * 4_000_000})), True),
        "lists in lists": (with_line(json.dumps(A.said())[:-1] + ',"unknown":' + "[" * 2_000_000 + "]" * 2_000_000 + "}"), False),
        "a million lists": (with_line(values + "[]," * 1_300_000 + "0]}"), False),
        "a shape without end in the record": (with_line(json.dumps(endless)), False),
        "a shape without end in the header": (with_payload(plain_of(header, A.data())), False),
        "a file of trailing zeros": (A.blob + bytes(16 * cap), False),
    }  # fmt: skip


def sound(tensors: Tensors) -> bytes:
    """What `encode` writes for these tensors, large ones too."""
    return payload.encode(A.record, tensors, level=1)[1]


def wide_tensors_of(stride: int) -> tuple[bytes, dict[str, Any]]:
    """Payload and record of two bytes that claim to lie `stride` apart."""
    said = A.said() | {"tensors": {"x": ["uint8", "uint8", [2], [stride]]}}
    return plain_of({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, bytes(2)), said
