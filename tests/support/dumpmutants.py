"""Damaged, forged and hostile dump files, by kind. Every mutant comes from a kind and a number, so a failure can be made again.

What a reader may do with a mutant is decided where it is made, by construction:

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
"""What the readers are given as `max_bytes`."""
Tensors = dict[str, torch.Tensor]
Chance = random.Random


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


# ---- building files ----


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


def raw_frame(content_size: int, blocks: bytes, *, descriptor: int = 0xC4, window: bytes = b"\x50") -> bytes:
    """A zstd frame by hand: magic, descriptor (8 bytes of size, a checksum), window, size, blocks."""
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + struct.pack("<Q", content_size) + blocks


def rle_block(size: int, *, last: bool = False) -> bytes:
    """Four bytes that become `size` zeros."""
    return struct.pack("<I", (size << 3) | 2 | last)[:3] + b"\0"


NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**48, 2**63, 2**64, -(2**70), 10**300, 1.0, 0.5, -0.0, 1e308, "", "x", "../../etc/passwd",
    "a/b#c", "\0", "\x1b[2J", "é", "\U0001f4a5", "a" * 5000, [], [[]], {}, {"": {}}, [None, 1, "x"], ["int64", "int64", [1]], "NaN", "2025",
)  # fmt: skip
NAMES = (
    "../../up",
    "a/b",
    "/abs",
    "a#b",
    "",
    ".",
    "..",
    "a\nb",
    "a\0b",
    "__metadata__",
    "output.",
    "rng.",
    "x" * 3000,
    "sequences.lo",
    "é",
)


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in [(*path, key), *spots(item, (*path, key))]]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with another one in the place `path`."""
    changed = copy.deepcopy(value)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = new
    return changed


# ---- bytes: damage as disks, networks and interrupted copies make it ----


def flipped_bits(chance: Chance) -> Mutant:
    blob = bytearray(A.blob)
    for _ in range(chance.choice((1, 1, 2, 8))):
        blob[chance.randrange(len(blob))] ^= 1 << chance.randrange(8)
    return Mutant(bytes(blob), A.tensors)


def flipped_bits_of_the_record(chance: Chance) -> Mutant:
    place = chance.randrange(A.end)
    blob = bytearray(A.blob)
    blob[place] ^= 1 << chance.randrange(8)
    return Mutant(bytes(blob), None)


def flipped_bits_of_the_frame_header(chance: Chance) -> Mutant:
    blob = bytearray(A.blob)
    blob[A.end + chance.randrange(16)] ^= chance.randrange(1, 256)
    return Mutant(bytes(blob), A.tensors)


def overwritten_run(chance: Chance) -> Mutant:
    first, length = chance.randrange(len(A.blob)), chance.choice((2, 16, 512))
    filling = chance.choice((bytes(length), chance.randbytes(length)))
    return Mutant((A.blob[:first] + filling + A.blob[first + length :])[: len(A.blob)], A.tensors)


def removed_run(chance: Chance) -> Mutant:
    first = chance.randrange(len(A.blob) - 1)
    return Mutant(A.blob[:first] + A.blob[first + chance.choice((1, 2, 8, 100)) :], None)


def inserted_run(chance: Chance) -> Mutant:
    first = chance.randrange(len(A.blob))
    return Mutant(A.blob[:first] + chance.randbytes(chance.choice((1, 4, 100))) + A.blob[first:], None)


def repeated_run(chance: Chance) -> Mutant:
    first, length = chance.randrange(len(A.blob) - 1), chance.choice((1, 8, 200))
    return Mutant(A.blob[: first + length] + A.blob[first : first + length] + A.blob[first + length :], None)


def truncated(chance: Chance) -> Mutant:
    return Mutant(A.blob[: chance.randrange(len(A.blob))], None)


def truncated_at_a_seam(chance: Chance) -> Mutant:
    ends = (0, 1, 3, 4, 7, 8, 9, A.end - 9, A.end - 1, A.end, A.end + 1, A.end + 4, A.end + 12, *range(-8, 0))
    return Mutant(A.blob[: chance.choice(ends)], None)


def trailing_bytes(chance: Chance) -> Mutant:
    tail = chance.choice((bytes(chance.choice((1, 4096))), chance.randbytes(chance.randrange(1, 99)), b"\n"))
    return Mutant(A.blob + tail, None)


def two_frames(chance: Chance) -> Mutant:
    tail = chance.choice((A.blob[A.end :], A.blob, B.blob[B.end :], frame(b""), A.blob[: A.end]))
    return Mutant(A.blob + tail, None)


def frame_between(chance: Chance) -> Mutant:
    filler = chance.randbytes(chance.randrange(20))
    skipped = struct.pack("<II", 0x184D2A50 + chance.randrange(16), len(filler)) + filler
    return Mutant(with_frame(skipped + A.blob[A.end :]), None)


def another_file(chance: Chance) -> Mutant:
    kinds = (
        chance.randbytes(chance.randrange(2000)),
        A.plain,
        A.blob[A.end :],
        b"\x80\x05}.",
        b"PK\x03\x04" + bytes(50),
        bytes(9000),
    )
    return Mutant(chance.choice(kinds), None)


# ---- sizes that lie ----


def forged_record_size(chance: Chance) -> Mutant:
    true = A.end - 8
    size = chance.choice((0, 1, 8, 9, true - 1, true + 1, true + 9, MAX_RECORD, MAX_RECORD + 1, 2**31, 2**32 - 1))
    return Mutant(A.blob[:4] + struct.pack("<I", size) + A.blob[8:], None)


def forged_content_size(chance: Chance) -> Mutant:
    size = chance.choice((0, 1, len(A.plain) - 1, len(A.plain) + 1, CAP, CAP + 1, 2**32, 2**40, 2**63, 2**64 - 1, 2**64 - 2))
    blocks = struct.pack("<I", (len(A.plain) << 3) | 1)[:3] + A.plain + chance.randbytes(4)
    return Mutant(with_frame(raw_frame(size, blocks)), None)


def bomb(chance: Chance) -> Mutant:
    """A small file that is honest about being large."""
    return Mutant(with_frame(BOMBS[chance.randrange(len(BOMBS))]), None)


def lying_bomb(chance: Chance) -> Mutant:
    """A frame that claims little and holds 128 KiB of zeros for every 4 bytes."""
    blocks = rle_block(2**17) * chance.choice((1, 40, 2000)) + rle_block(1, last=True) + bytes(4)
    return Mutant(with_frame(raw_frame(chance.choice((1, 100, len(A.plain), CAP)), blocks)), None)


def wide_window(chance: Chance) -> Mutant:
    window = bytes([chance.choice((0xA8, 0xB0, 0xF8, 0xFF))])
    return Mutant(with_frame(raw_frame(len(A.plain), rle_block(100, last=True) + bytes(4), window=window)), None)


def other_frame_options(chance: Chance) -> Mutant:
    """No size, no checksum, a dictionary's number, or nothing inside."""
    kinds = (
        frame(A.plain, write_content_size=False), frame(A.plain, write_checksum=False), frame(b""), frame(A.plain)[:-4], frame(bytes(8)),
        raw_frame(100, rle_block(100, last=True) + bytes(4), descriptor=0xC5), raw_frame(100, b"", descriptor=0xCC), A.plain,
        struct.pack("<II", 0x184D2A51, len(A.plain)) + A.plain,
    )  # fmt: skip
    return Mutant(with_frame(chance.choice(kinds)), None)


BOMBS = [frame(bytes(size), level=level) for size in (CAP + 1, 4 * CAP, 64 * CAP) for level in (1, 9)]


# ---- records that were written by somebody else, with the right CRC ----


def other_value(chance: Chance) -> Mutant:
    """Any value of the record but its tensors replaced by a nasty one."""
    said = A.said()
    places = [path for path in spots(said) if path[0] != "tensors"]
    return Mutant(with_line(json.dumps(put(said, chance.choice(places), chance.choice(NASTY)))), A.tensors)


def other_field(chance: Chance) -> Mutant:
    """A field that the record leaves out, or does not know, with a nasty value."""
    known = [name for name in DumpRecord.__dataclass_fields__ if name != "tensors"]
    said = A.said() | {chance.choice([*known, "unknown", "_", "__class__"]): chance.choice(NASTY)}
    return Mutant(with_line(json.dumps(said)), A.tensors)


def lost_field(chance: Chance) -> Mutant:
    said = A.said()
    del said[
        chance.choice(("dump_id", "run", "rank", "timestamp", "batch_size", "seq_len", "tokens", "format_version", "tensors"))
    ]
    return Mutant(with_line(json.dumps(said)), None)


def other_identity(chance: Chance) -> Mutant:
    """The record of another dump before this payload."""
    changes = {"dump_id": "d-2", "run": chance.choice(("ppo-2", "other")), "rank": chance.randrange(1, 9)}
    name = chance.choice(sorted(changes))
    return Mutant(with_line(json.dumps(A.said() | {name: changes[name]})), None, verifies=False)


def other_version(chance: Chance) -> Mutant:
    version = chance.choice((0, 2, 99, -1, 10**4000, True, 1.0, "1", None, [1]))
    return Mutant(with_line(json.dumps(A.said() | {"format_version": version})), None)


def not_finite(chance: Chance) -> Mutant:
    number = chance.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e400", "[1e309]", '{"a":NaN}'))
    place = chance.choice(('"temperature"', '"arguments"', '"actor"', '"rank"', '"unknown"'))
    return Mutant(with_line(json.dumps(A.said())[:-1] + f",{place}:{number}}}"), None)


def not_unicode(chance: Chance) -> Mutant:
    text = chance.choice(
        (
            b"\xff",
            b"\xed\xa0\x80",
            b"\\ud800",
            b"\\uDFFF x",
            b"\xc3",
            b"\\udc00\\ud800",
            b"\\ud83d",
            b"\xf5\x80\x80\x80",
        )
    )
    place = chance.choice((b'"host"', b'"role"', b'"unknown"', b'"origin":{"name"', b'"extra":{"x"'))
    close = b"}" if b"{" in place else b""
    return Mutant(with_line(json.dumps(A.said())[:-1].encode() + b"," + place + b':"' + text + b'"' + close + b"}"), None)


def other_encoding(chance: Chance) -> Mutant:
    line = json.dumps(A.said()).encode(chance.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-32-be")))
    return Mutant(with_line(line), None)


def deep_nesting(chance: Chance) -> Mutant:
    depth = chance.choice((70, 300, 900, 960, 990, 1000, 1010, 5000, 60_000, 600_000))
    opened, closed = chance.choice((("[", "]"), ('{"a":', "}")))
    text = (opened * depth + "1" + closed * depth)[: MAX_RECORD - 5000]
    return Mutant(with_line(json.dumps(A.said())[:-1] + f",{chance.choice(PLACES)}:{text}}}"), None)


def many_values(chance: Chance) -> Mutant:
    item = chance.choice(("[]", "{}", "1", "null", '"ab"', "257", "0.5"))
    text = ",".join([item] * ((3_900_000 if chance.random() < 0.05 else 400_000) // (len(item) + 1)))
    return Mutant(with_line(json.dumps(A.said())[:-1] + f",{chance.choice(PLACES)}:[{text}]}}"), None)


def long_number(chance: Chance) -> Mutant:
    number = chance.choice(("1", "-1")) + "0" * chance.choice((20, 400, 4299, 4301, 100_000)) + chance.choice(("", ".5", "e5"))
    return Mutant(with_line(json.dumps(A.said())[:-1] + f",{chance.choice(PLACES)}:{number}}}"), A.tensors)


def long_text(chance: Chance) -> Mutant:
    said = A.said() | {chance.choice(("host", "role", "unknown", "dump_id", "timestamp")): chance.choice("a\n\\é") * 100_000}
    return Mutant(with_line(json.dumps(said)), A.tensors)


def duplicate_keys(chance: Chance) -> Mutant:
    name = chance.choice(("rank", "run", "tokens", "host", "tensors", "format_version"))
    line = json.dumps(A.said())[:-1] + f', "{name}": {json.dumps(chance.choice((*NASTY, A.said().get(name))))}}}'
    return Mutant(with_line(line), A.tensors)


def not_a_record(chance: Chance) -> Mutant:
    return Mutant(
        with_line(chance.choice(("", "null", "[]", "1", '"x"', "{}", "{", "[{}]", json.dumps(A.said()) * 2, "\0", "{'a':1}"))),
        None,
    )


def forged_crc(chance: Chance) -> Mutant:
    line = A.record.to_json().encode()
    crc = chance.choice((b"00000000", b"%08X" % zlib.crc32(line + b" "), b"", b"zzzzzzzz", b"%7x" % (zlib.crc32(line) >> 4)))
    header = line + chance.choice((b"\n", b"\r", b" ", b"")) + crc
    return Mutant(MAGIC + struct.pack("<I", len(header)) + header + A.blob[A.end :], None)


PLACES = ('"arguments"', '"unknown"', '"actor"', '"tensors"', '"origin"', '"rank"')


# ---- tensors as the record describes them ----


def hostile_shape(chance: Chance) -> Mutant:
    shapes = (
        [2**47, 2**47, 0], [2**48], [2**40, 2**40], [-1], [-2, -30], [2.0, 30.0], [True, 60], [[2], 30], "ab", None, {}, [10**300], [2] * 64,
        [1] * 16, [2**47] * 16 + [0], [2**47] * 10_000, [0] * 200_000, [30, 2], [60], [2, 30, 1], [1e308], ["2", "30"], [2, 30, 0],
    )  # fmt: skip
    return _with_spec(chance, 2, chance.choice(shapes))


def hostile_strides(chance: Chance) -> Mutant:
    strides = (
        [0, 1],
        [1, 1],
        [0, 0],
        [2**47, 1],
        [2**40, 2**40],
        [-30, 1],
        [30],
        [],
        [30, 1, 1],
        [30.0, 1],
        "ab",
        [2**47] * 99_999,
        [29, 1],
    )
    return _with_spec(chance, 3, chance.choice(strides), ("sequences", "attention_mask"))


def wrong_dtype(chance: Chance) -> Mutant:
    """A logical dtype under which the stored form was never written."""
    dtypes = (
        "complex64",
        "int65",
        "",
        "float8_e9m9",
        "object",
        "uint64",
        "uint16",
        "bool",
        "qint8",
        7,
        None,
        ["int64"],
    )
    return _with_spec(chance, 0, chance.choice(dtypes), ("sequences", "negative"))


def wrong_stored(chance: Chance) -> Mutant:
    kinds = ("int64", "uint8", "uint25", "float32", "int16", "uint32", "", "complex64", 7, None, "float64")
    return _with_spec(chance, 1, chance.choice(kinds), ("sequences", "negative", "small_ids", "attention_mask"))


def not_a_spec(chance: Chance) -> Mutant:
    said = A.said()
    said["tensors"][chance.choice(sorted(A.tensors))] = chance.choice(
        (*NASTY[:-3], ["int64"], ["int64", "int64", [1], [1], [1]], {"a": 1})
    )
    return Mutant(with_line(json.dumps(said)), None)


def other_tensors(chance: Chance) -> Mutant:
    """The record knows a tensor more, one less, or one by another name than the payload."""
    said = A.said()
    name = chance.choice(sorted(said["tensors"]))
    spec = said["tensors"][name]
    if chance.random() < 0.7:
        del said["tensors"][name]
    if name not in said["tensors"] or chance.random() < 0.5:
        said["tensors"][chance.choice(NAMES)] = spec
    else:
        said["tensors"][name + "2"] = spec
    return Mutant(with_line(json.dumps(said)), None)


def retold_dtype(chance: Chance) -> Mutant:
    """Another logical dtype that the stored form can stand for: a record of another call, whose values are these."""
    name, dtype = chance.choice((
        ("sequences", "int32"), ("small_ids", "int32"), ("attention_mask", "int8"), ("attention_mask", "bool"),
        ("attention_mask", "bfloat16"), ("float_mask", "int64"), ("float_mask", "float64"), ("action_mask", "uint8"), ("scalar", "int32"),
    ))  # fmt: skip
    said = A.said()
    said["tensors"][name][0] = dtype
    told = A.tensors | {name: A.tensors[name].to(getattr(torch, dtype))}
    return Mutant(with_line(json.dumps(said)), told)


def retold_strides(chance: Chance) -> Mutant:
    """The same values laid out in another way."""
    said = A.said()
    strides = chance.choice(([1, 2], [40, 1], [1, 40], [3, 7 * 3]))
    said["tensors"]["sequences"] = [*said["tensors"]["sequences"][:3], strides]
    laid_out = torch.empty_strided((2, 30), strides, dtype=torch.int64).copy_(A.tensors["sequences"])
    return Mutant(with_line(json.dumps(said)), A.tensors | {"sequences": laid_out})


def _with_spec(chance: Chance, index: int, value: Any, names: tuple[str, ...] = ("sequences",)) -> Mutant:
    said = A.said()
    spec = said["tensors"][chance.choice(names)]
    spec[index : index + 1] = [value]
    return Mutant(with_line(json.dumps(said)), None)


# ---- the payload: a safetensors file of somebody else's, with the right checksum and hash ----


def hostile_header_value(chance: Chance) -> Mutant:
    """Any value of the header replaced by a nasty one; what is said about the whole file (its metadata) may be anything."""
    header = A.header()
    changed = put(header, chance.choice(spots(header)), chance.choice(NASTY))
    return Mutant(with_payload(plain_of(changed, A.data())), A.tensors)


def hostile_offsets(chance: Chance) -> Mutant:
    header = A.header()
    name = chance.choice(sorted(set(header) - {"__metadata__", "empty"}))
    first, last = header[name]["data_offsets"]
    changes = (
        [first + 1, last + 1], [first, last + 1], [first - 1, last], [last, first], [-first - 1, last], [float(first), float(last)], [first], [],
        [first, last, last], [0, last] if first else [0, last, 0], [first, 2**62], [str(first), str(last)], [None, None], [first, 10**300], {}, [[first], [last]],
        [0, last - first] if first else [last, 2 * last],
    )  # fmt: skip
    header[name]["data_offsets"] = chance.choice(changes)
    return Mutant(with_payload(plain_of(header, A.data())), None)


def hostile_entry_shape(chance: Chance) -> Mutant:
    """Shapes that are equal to the record's in Python, and not in torch; and those that need long to multiply."""
    header = A.header()
    shapes = (
        [2.0, 30.0],
        [2, 30.0],
        [-2, -30],
        [60],
        [2, 30, 1],
        [[2, 30]],
        "ab",
        [1] * 20 + [2, 30],
        [2**47] * 20_000,
        [0] * 1000,
        [10**300, 0],
    )
    header["sequences.hi"]["shape"] = chance.choice(shapes)
    if chance.random() < 0.3:
        header["scalar"]["shape"] = chance.choice(([True], [1.0], [1], False))
    return Mutant(with_payload(plain_of(header, A.data())), None)


def true_for_one(chance: Chance) -> Mutant:
    """`true` and `1.0` are 1 in Python; the record says [1, 3]."""
    header = A.header()
    header["float_mask"]["shape"] = [chance.choice((True, 1.0)), chance.choice((3, 3.0))]
    if chance.random() < 0.3:
        header["empty"]["data_offsets"] = [float(n) for n in header["empty"]["data_offsets"]]
    return Mutant(with_payload(plain_of(header, A.data())), None)


def overlapping_entries(chance: Chance) -> Mutant:
    """Two tensors over the same bytes, the rest moved up so that there is no gap."""
    header, size = A.header(), A.header()["negative"]["data_offsets"]
    header["wide"]["data_offsets"] = header[chance.choice(("negative", "sliced", "small_ids"))]["data_offsets"]
    cut = chance.choice((0, size[1] - size[0], 16))
    return Mutant(with_payload(plain_of(header, A.data()[: len(A.data()) - cut])), None)


def hostile_header_text(chance: Chance) -> Mutant:
    text = json.dumps(A.header())
    depth = chance.choice((80, 990, 5000, 100_000))
    kinds = (
        text[:-1] + ',"x":' + "[" * depth + "]" * depth + "}", text[:-1] + ',"x":NaN}', text[:-1] + ',"__metadata__":1e999}', text * 2, "[]", "null",
        "{}", '{"__metadata__":{}}', text[:-1], text.replace("int", "INT"), text.replace('"dtype"', '"DTYPE"'), text.replace("U8", "U9"),
        text.replace('"U8"', '["U8"]'), text.replace('"U8"', "null"), text[:-1] + ',"\\ud800":{}}', text[:-1] + ',"x":{"dtype":"U8"}}',
        text[:-1] + "," + ",".join(f'"{n}":{{}}' for n in range(70_000)) + "}",
    )  # fmt: skip
    return Mutant(with_payload(plain_of(chance.choice(kinds).encode(), A.data())), A.tensors)


def not_utf8_header(chance: Chance) -> Mutant:
    text = json.dumps(A.header()).encode()
    bad = chance.choice(
        (
            text[:-1] + b',"\xff":{}}',
            text.decode().encode("utf-16"),
            text[:-1] + b',"__metadata__":"\xed\xa0\x80"}',
            b"\xff" * 50,
        )
    )
    return Mutant(with_payload(plain_of(bad, A.data())), None)


def forged_header_size(chance: Chance) -> Mutant:
    size = chance.choice((0, 1, 2**63, 2**64 - 1, len(A.plain), len(A.plain) - 8, MAX_RECORD + 1, len(A.plain) - 9))
    return Mutant(with_payload(size.to_bytes(8, "little") + A.plain[8:]), None)


def cut_payload(chance: Chance) -> Mutant:
    cut = chance.choice(
        (A.plain[: chance.randrange(len(A.plain))], A.plain + chance.randbytes(chance.randrange(1, 20)), b"", b"\0" * 8)
    )
    return Mutant(with_payload(cut), None)


def neither_true_nor_false(chance: Chance) -> Mutant:
    header, data = A.header(), bytearray(A.data())
    first, last = header[chance.choice(("attention_mask", "action_mask", "float_mask"))]["data_offsets"]
    data[chance.randrange(first, last)] = chance.randrange(2, 256)
    return Mutant(with_payload(plain_of(header, bytes(data))), None)


def parts_that_differ(chance: Chance) -> Mutant:
    """Token ids whose low and high halves do not belong together: shapes, dtypes, one missing, or a tensor of a part's name."""
    header, said = A.header(), A.said()
    low, high = header["sequences.lo"], header["sequences.hi"]
    change = chance.randrange(5)
    if change == 0:
        high["shape"] = chance.choice(([60], [30, 2], [1, 60], [2, 30, 1]))
    elif change == 1:
        low["dtype"] = chance.choice(("I16", "BF16", "F16", "U8"))
    elif change == 2:
        header["sequences.mid"] = header.pop("sequences.hi")
    elif change == 3:
        said["tensors"]["sequences.lo"] = ["uint16", "uint16", [2, 30]]
    else:
        said["tensors"]["sequences"][2] = [2, 15]
    return Mutant(with_payload(plain_of(header, A.data()), said), None)


def renamed_metadata(chance: Chance) -> Mutant:
    """A tensor that is called what safetensors calls its metadata; its two parts have names that nobody minds."""
    header, said = A.header(), A.said()
    for part in ("lo", "hi"):
        header[f"__metadata__.{part}"] = header.pop(f"sequences.{part}")
    said["tensors"]["__metadata__"] = said["tensors"].pop("sequences")
    return Mutant(with_payload(plain_of(header, A.data()), said), None)


def renamed_everywhere(chance: Chance) -> Mutant:
    """A tensor by a nasty name in record and payload alike: consistent, so it may load, by that name."""
    header, said, name = A.header(), A.said(), chance.choice([name for name in NAMES if name != "__metadata__"])
    header[name], said["tensors"][name] = header.pop("wide"), said["tensors"].pop("wide")
    told = {name if key == "wide" else key: tensor for key, tensor in A.tensors.items()}
    return Mutant(with_payload(plain_of(header, A.data()), said), told)


def other_values(chance: Chance) -> Mutant:
    """Other values of the same shapes, hashed again: a dump like any other."""
    return Mutant(with_payload(plain_of(A.header(), B.data())), B.tensors)


def other_payload(chance: Chance) -> Mutant:
    """B's payload, which says that it is B's (here: of another rank), behind A's record and under A's hash."""
    header = A.header()
    header["__metadata__"] = {"actordbg": f"dump d-{chance.randrange(9)} of run ppo-1, rank 1, record version 1"}
    return Mutant(with_payload(plain_of(header, B.data()), hashed=chance.random() < 0.5), None, verifies=False)


def unhashed_payload(chance: Chance) -> Mutant:
    """B's values forged to be A's, under A's hash. Loading does not compute the hash; `dump verify` does."""
    return Mutant(with_payload(plain_of(A.header(), B.data()), hashed=False), B.tensors, verifies=False)


def forged_hash(chance: Chance) -> Mutant:
    said = A.said() | {
        "payload_sha256": chance.choice(("", "0" * 64, "x", A.record.payload_sha256.upper(), A.record.payload_sha256[:-1]))
    }
    return Mutant(with_line(json.dumps(said)), A.tensors, verifies=False)


def wide_tensors(chance: Chance) -> Mutant:
    """A payload under the cap whose tensors are over twice as large: masks that become 8 bytes an element, or far strides."""
    if chance.random() < 0.5:
        return Mutant(with_payload(*wide_tensors_of(2 ** chance.randrange(22, 47))), None)
    count = CAP - chance.randrange(4096, 9000)
    said = A.said() | {"tensors": {"x": ["int64", "bool", [count]]}}
    header = {"x": {"dtype": "BOOL", "shape": [count], "data_offsets": [0, count]}}
    return Mutant(with_payload(plain_of(header, bytes(count)), said), None)


KINDS: dict[str, Callable[[Chance], Mutant]] = {
    function.__name__: function
    for function in (
        flipped_bits, flipped_bits_of_the_record, flipped_bits_of_the_frame_header, overwritten_run, removed_run, inserted_run, repeated_run,
        truncated, truncated_at_a_seam, trailing_bytes, two_frames, frame_between, another_file, forged_record_size, forged_content_size, bomb,
        lying_bomb, wide_window, other_frame_options, other_value, other_field, lost_field, other_identity, other_version, not_finite, not_unicode,
        other_encoding, deep_nesting, many_values, long_number, long_text, duplicate_keys, not_a_record, forged_crc, hostile_shape, hostile_strides,
        wrong_dtype, wrong_stored, not_a_spec, other_tensors, retold_dtype, retold_strides, hostile_header_value, hostile_offsets,
        hostile_entry_shape, true_for_one, overlapping_entries, hostile_header_text, not_utf8_header, forged_header_size,
        cut_payload, neither_true_nor_false, parts_that_differ, renamed_metadata, renamed_everywhere, other_values, other_payload, unhashed_payload, forged_hash,
        wide_tensors,
    )
}  # fmt: skip


def mutant(kind: str, number: int) -> Mutant:
    """The mutant of this kind and number, always the same."""
    return KINDS[kind](random.Random(f"{kind} {number}"))


# ---- files that ask for memory ----


def hungry(cap: int) -> dict[str, tuple[bytes, bool]]:
    """By name, files that are large or become so, for readers with this cap; and whether they load."""
    most = cap // 32 * 31
    chance = random.Random(0)
    endless = A.said()
    endless["tensors"]["sequences"][2] = [2**47] * 250_000
    header = A.header()
    header["sequences.hi"]["shape"] = [2**47] * 200_000
    values = json.dumps(A.said())[:-1] + ',"unknown":['
    return {
        "a payload of zeros": (sound({"x": torch.zeros(most // 4)}), True),
        "a payload that does not compress": (sound({"x": torch.frombuffer(bytearray(chance.randbytes(most)), dtype=torch.uint8)}), True),
        "masks that become eight times as large": (sound({"x": torch.ones(cap // 8, dtype=torch.int64)}), True),
        "masks that become too large": (sound({"x": torch.ones(most, dtype=torch.int64)}), False),
        "narrow ids and wide strides": (sound({"x": torch.ones(9, cap // 80, dtype=torch.int64)[:, ::9]}), True),
        "strides over a terabyte": (with_payload(*wide_tensors_of(2**40)), False),
        "an honest bomb": (with_frame(frame(bytes(64 * cap))), False),
        "a bomb at the cap": (with_frame(frame(bytes(cap))), False),
        "a bomb that lies": (with_frame(raw_frame(cap, rle_block(2**17) * 9000 + rle_block(1, last=True) + bytes(4))), False),
        "a size of 2**62": (with_frame(raw_frame(2**62, rle_block(9, last=True) + bytes(4))), False),
        "a payload behind a long record": (with_line(json.dumps(A.said() | {"host": "h" * 4_000_000})), True),
        "lists in lists": (with_line(json.dumps(A.said())[:-1] + ',"unknown":' + "[" * 2_000_000 + "]" * 2_000_000 + "}"), False),
        "a million lists": (with_line(values + "[]," * 1_300_000 + "0]}"), False),
        "a million texts": (with_line(values + '"ab",' * 800_000 + "0]}"), False),
        "a shape without end in the record": (with_line(json.dumps(endless)), False),
        "a shape without end in the header": (with_payload(plain_of(header, A.data())), False),
        "lists in the header": (with_payload(plain_of(json.dumps({"x": [[]] * 900_000}).encode(), b"")), False),
        "a file of trailing zeros": (A.blob + bytes(16 * cap), False),
    }  # fmt: skip


def sound(tensors: Tensors) -> bytes:
    """What `encode` writes for these tensors, large ones too."""
    return payload.encode(A.record, tensors, level=1)[1]


def wide_tensors_of(stride: int) -> tuple[bytes, dict[str, Any]]:
    """Payload and record of two bytes that claim to lie `stride` apart."""
    said = A.said() | {"tensors": {"x": ["uint8", "uint8", [2], [stride]]}}
    return plain_of({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, bytes(2)), said
