"""Forged and hostile dump files: `A` is a sound one, and its parts, changed, are put together again under sums that are right.

What a reader may do with one of them stands beside it: refuse it, or give exactly these tensors. `dump verify` may find good only what
loads, unless the file lies about whose payload it has.
"""

import copy
import hashlib
import json
import struct
from dataclasses import dataclass

import catalogcases as cases
import torch
import zstandard
from casefiles import cases_of

from actordbg.formats import dumpfile
from actordbg.formats.dump_record import MAX_RECORD, DumpRecord
from actordbg.store import payload

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Mutant:
    """A file's bytes, and the tensors that it may give (None: it must be refused)."""

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
    def make(cls, seed, index=4):
        tensors = make_tensors(seed)
        record, blob = payload.encode(cases.record(index), tensors)
        return cls(record, tensors, blob)

    @property
    def end(self):
        """Where the record ends and the payload's frame begins."""
        return 8 + int.from_bytes(self.blob[4:8], "little")

    @property
    def plain(self):
        return dumpfile.unpack(self.blob)[1]

    def said(self):
        """The record as a JSON value, to be changed."""
        return json.loads(self.record.to_json())

    def header(self):
        """The payload's header as a JSON value, to be changed."""
        return json.loads(self.plain[8 : 8 + int.from_bytes(self.plain[:8], "little")])

    def data(self):
        return self.plain[8 + int.from_bytes(self.plain[:8], "little") :]


def make_tensors(seed):
    """Every way in which tensors are stored and laid out; equal shapes and forms for every seed."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(70_000, 128_256, (2, 30), generator=g)
    return {
        "sequences": ids,
        "attention_mask": torch.tensor([[1] * 29 + [0], [0] + [1] * 29]),
        "action_mask": torch.randint(0, 2, (2, 7), generator=g).bool(),
        "float_mask": torch.tensor([[0.0, 1.0, 1.0]]),
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
"""The dump that is changed, and one of other values."""


def frame(plain, **options):
    return zstandard.ZstdCompressor(**{"write_checksum": True, "write_content_size": True, **options}).compress(plain)


def plain_of(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_line(line):
    """A's file with another line of JSON as its record, and the right CRC for it."""
    return cases.header_frame(line.encode()) + A.blob[A.end :]


def with_payload(plain, said=None, *, hashed=True):
    """A's file with another payload, and the right SHA-256 for it unless `hashed` is false."""
    said = said or A.said()
    if hashed:
        said["payload_sha256"] = hashlib.sha256(plain).hexdigest()
    return cases.header_frame(json.dumps(said).encode()) + frame(plain)


def with_frame(data):
    return A.blob[: A.end] + data


def with_more(fields):
    """A's file with more JSON at the end of its record."""
    return with_line(f"{json.dumps(A.said())[:-1]},{fields}}}")


def raw_frame(content_size, blocks, *, descriptor=0xC4, window=b"\x50"):
    """A zstd frame by hand: magic, descriptor (8 bytes of size, a checksum), window, size, blocks."""
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + struct.pack("<Q", content_size) + blocks


def rle_block(size, *, last=False):
    """Four bytes that become `size` zeros."""
    return struct.pack("<I", (size << 3) | 2 | last)[:3] + b"\0"


def told(value, path, new):
    """A JSON value as text, with this JSON in the place `path`, whose steps are separated by slashes."""
    inside = value = copy.deepcopy(value)
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("/"))
    for step in steps:
        inside = inside[step]
    inside[last] = "@@"
    return json.dumps(value).replace('"@@"', new)


def forged(case):
    """The file that a case of `dump_files.test` describes."""
    (line,), (expected,) = case
    what, _, rest = line.partition(" ")
    path, _, new = rest.partition(" ")
    said = A.said()
    if what == "line":
        blob = with_line(rest)
    elif what == "tensors":
        said["tensors"][new] = said["tensors"].pop(path)
        said["tensors"].pop("-", None)
        blob = with_line(json.dumps(said))
    elif what == "header":
        blob = with_payload(plain_of(told(A.header(), path, new).encode(), A.data()))
    else:
        blob = with_more(new) if path == "+" else with_line(told(said, path, new))
    kind, *cast = expected.split()
    others = {cast[0]: A.tensors[cast[0]].to(getattr(torch, cast[1]))} if cast else {}
    return Mutant(blob, None if kind == "refused" else A.tensors | others)


def swapped_bytes():
    """Two tensors over the same bytes."""
    header = A.header()
    header["wide"]["data_offsets"] = header["negative"]["data_offsets"]
    return with_payload(plain_of(header, A.data()[:-16]))


def neither():
    """A mask with a byte that is neither true nor false."""
    data = bytearray(A.data())
    data[A.header()["attention_mask"]["data_offsets"][0]] = 2
    return with_payload(plain_of(A.header(), bytes(data)))


def renamed(old, new, parts=("",)):
    """A tensor by another name in record and payload alike."""
    header, said = A.header(), A.said()
    for part in parts:
        header[new + part] = header.pop(old + part)
    said["tensors"][new] = said["tensors"].pop(old)
    return with_payload(plain_of(header, A.data()), said)


def record_size(size):
    return A.blob[:4] + struct.pack("<I", size) + A.blob[8:]


def content_size(size):
    return with_frame(raw_frame(size, struct.pack("<I", (len(A.plain) << 3) | 1)[:3] + A.plain + bytes(4)))


def header_size(size):
    return with_payload(size.to_bytes(8, "little") + A.plain[8:])


def forged_frames():
    """By name, files whose bytes, frames or sums are wrong, or whose JSON is endless; none of them may load."""
    cuts = (0, 3, 7, 8, A.end - 9, A.end, A.end + 1, A.end + 12, -8, -1)
    inserted = range(0, len(A.blob), len(A.blob) // 40)
    longer = {"another frame": A.blob[A.end :], "itself": A.blob, "an empty frame": frame(b""), "a record": A.blob[: A.end]}
    plain, most = A.plain, 2**64 - 1
    frames = {
        "no content size": frame(plain, write_content_size=False), "no checksum": frame(plain, write_checksum=False),
        "nothing": frame(b""), "a frame cut off": frame(plain)[:-4], "no frame": plain,
        "a dictionary": raw_frame(100, rle_block(100, last=True) + bytes(4), descriptor=0xC5),
        "a frame to be skipped": struct.pack("<II", 0x184D2A51, len(plain)) + plain,
        "a wide window": raw_frame(len(plain), rle_block(100, last=True) + bytes(4), window=b"\xff"),
    }  # fmt: skip
    text = json.dumps(A.header())[:-1]
    header = {
        "twice": f"{text}}}{text}}}", "a list": "[]", "nothing": "{}", "metadata only": '{"__metadata__":{}}', "half": text,
        "nested": text + ',"x":' + "[" * 100_000 + "]" * 100_000 + "}", "NaN": text + ',"x":NaN}',
        "a name that is no unicode": text + ',"\\ud800":{}}',
        "70,000 entries": text + "".join(f',"{n}":{{}}' for n in range(70_000)) + "}",
    }  # fmt: skip
    return {
        **{f"cut at {at}": A.blob[:at] for at in cuts},
        **{f"a byte more at {at}": A.blob[:at] + b"\x07" + A.blob[at:] for at in inserted},
        **{f"with {name} behind it": A.blob + more for name, more in longer.items()},
        **{f"a record of {size} bytes": record_size(size) for size in (0, 9, A.end - 9, A.end - 7, MAX_RECORD + 1, 2**32 - 1)},
        **{f"a payload of {size} bytes": content_size(size) for size in (0, len(plain) - 1, len(plain) + 1, 2**40, most)},
        **{f"a header of {size} bytes": header_size(size) for size in (0, 1, most, len(plain), len(plain) - 8, MAX_RECORD + 1)},
        **{f"in place of the frame {name}": with_frame(bytes_) for name, bytes_ in frames.items()},
        **{f"the header {name}": with_payload(plain_of(other.encode(), A.data())) for name, other in header.items()},
        "two tensors over the same bytes": swapped_bytes(), "neither true nor false": neither(),
        "a payload cut": with_payload(plain[:-1]), "a payload with more": with_payload(plain + b"x"), "no payload": with_payload(b""),
        "a tensor called metadata": renamed("sequences", "__metadata__", (".lo", ".hi")),
        "another CRC": A.blob[: A.end - 8] + b"00000000" + A.blob[A.end :],
        "nested 600,000 times": with_more('"unknown":' + "[" * 600_000 + "]" * 600_000),
        "a shape of 10,000 dimensions": with_line(told(A.said(), "tensors/sequences/2", str([2**47] * 10_000))),
    }  # fmt: skip


def mutants():
    """Every forged file by its name."""
    foreign = A.header() | {"__metadata__": {"actordbg": "dump d-7 of run ppo-1, rank 1, record version 1"}}
    others = {key if key != "wide" else "../../up": tensor for key, tensor in A.tensors.items()}
    return {
        **{name: forged(case) for name, case in cases_of("dump_files").items()},
        **{name: Mutant(blob, None) for name, blob in forged_frames().items()},
        "a number of 100,000 digits": Mutant(with_more(f'"unknown":1{"0" * 100_000}'), A.tensors),
        "a text of 100,000 letters": Mutant(with_more(f'"host":"{"a" * 100_000}"'), A.tensors),
        "a tensor that leads elsewhere": Mutant(renamed("wide", "../../up"), others),
        "other values under their hash": Mutant(with_payload(plain_of(A.header(), B.data())), B.tensors),
        "another's payload": Mutant(with_payload(plain_of(foreign, B.data())), None, verifies=False),
        "a payload under another's hash": Mutant(
            with_payload(plain_of(A.header(), B.data()), hashed=False), B.tensors, verifies=False
        ),
    }


# ---- files that ask for memory ----


def hungry(cap):
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


def sound(tensors):
    """What `encode` writes for these tensors, large ones too."""
    return payload.encode(A.record, tensors, level=1)[1]


def wide_tensors_of(stride):
    """Payload and record of two bytes that claim to lie `stride` apart."""
    said = A.said() | {"tensors": {"x": ["uint8", "uint8", [2], [stride]]}}
    return plain_of({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, bytes(2)), said
