"""A dead process's flight recorder: header, books, slots and kinds, and what `dump recover` makes of them.

A ring has 256 KiB before its first tensor, nearly all zeros. So an input is a list of pieces: 4 bytes of offset, 2 of length, the bytes.
Its first byte says which sums are made right before the ring is read (bits: header, identities, kinds, slots).
"""

import contextlib
import json
import shutil
import struct
import zlib

import torch  # noqa: F401 - `recover` imports it when it comes to tensors
from fuzzing import damage, dumped, other_json, work_folder

from actordbg.dumps.recover import recover
from actordbg.formats import ringfile
from actordbg.formats.encoding import tensors_in
from actordbg.formats.recording_reading import RingFile, read_ring
from actordbg.formats.ringfile import BOOK, BOOKS, COUNTS, DATA, HEAD, IDENTITY, KINDS_AT, SLOT, SLOT_SIZE, SLOTS_AT
from actordbg.store.layout import Store

PARSERS = (read_ring, tensors_in, recover, RingFile.bytes_at)
_FOLDER = work_folder()
_SIZE = DATA + 8192
_PIECE = struct.Struct("<IH")
_runs = 0
IDENTITIES = {
    "run": "r",
    "rank": 0,
    "world_size": 4,
    "host": "node-1",
    "pid": 7,
    "instance": "1-abc",
    "role": "policy",
    "since": "x",
}
FIELDS = {name: IDENTITIES[name] for name in ("run", "host", "pid", "instance", "rank", "world_size", "role")} | {
    "local_rank": 0, "training": True, "grad_enabled": False, "autocast_dtype": None, "packing_samples": False, "temperature": 1.0,
    "arguments": {"return_output": True}, "process_groups": {}, "extra": {}, "model_name": "tiny", "model_dtype": "float32", "actor": {},
}  # fmt: skip
TENSORS = [["sequences", "int64"], ["action_mask", "bool"]]
NUMBERS = (3, 1_750_310_768_430_740_000, 5, -1, 0xABC, 2, 3, 2, 2, 3, 3, 1, 0, 48, 2, 2, 1, 1, 1, 64, 2)

VALUES = bytes(range(64)) + b"\1\0" + bytes(62)


def seeds():
    kind = ringfile.sealed({"fields": FIELDS, "tensors": TENSORS})
    end = ringfile.sealed({"error": "ValueError", "message": "x"})
    book = ringfile.sealed(IDENTITIES).ljust(IDENTITY, b"\0") + struct.pack(f"<{len(COUNTS)}Q", 2, 1, *(0,) * (len(COUNTS) - 2))
    packed = struct.pack(f"<{len(NUMBERS)}q", *NUMBERS)
    size, at = ringfile.aligned(ringfile.head_bytes(len(NUMBERS)) + 128), DATA
    pieces = [
        (0, ringfile.header_bytes({"host": "node-1", "pid": 7, "versions": {"torch": "2"}})),
        (BOOKS, book),
        (KINDS_AT, kind),
    ]
    for place, (state, tail) in enumerate(((ringfile.IN_FLIGHT, b""), (ringfile.RAISED, end))):
        fixed = (0, place + 1, at, size, KINDS_AT, len(kind), len(NUMBERS))
        check = ringfile.slot_check(*fixed, NUMBERS)
        slot = SLOT.pack(state, ringfile.OPEN, 0, len(tail), place + 1, at, size, KINDS_AT, len(kind), len(NUMBERS), check)
        pieces += [
            (SLOTS_AT + place * SLOT_SIZE, slot),
            (at, packed + tail),
            (at + ringfile.head_bytes(len(NUMBERS)), VALUES),
        ]
        at += size
    return {"two": _joined(15, pieces), "one": _joined(15, pieces[:6]), "no books": _joined(0, pieces[:1] + pieces[2:])}


def _joined(flags, pieces):
    return bytes([flags]) + b"".join(_PIECE.pack(at % 2**32, len(data)) + data for at, data in pieces if len(data) < 2**16)


def _pieces(data):
    found, at = [], 1
    while at + _PIECE.size <= len(data):
        place, length = _PIECE.unpack_from(data, at)
        found.append((place, data[at + _PIECE.size : at + _PIECE.size + length]))
        at += _PIECE.size + length
    return found


def _ring(data):
    memory = bytearray(_SIZE)
    for at, piece in _pieces(data):
        memory[at : at + len(piece)] = piece[: max(0, _SIZE - at)]
    flags = data[0] if data else 0
    _sum_header(memory) if flags & 1 else None
    for number in range(ringfile.MAX_LEDGERS) if flags & 2 else ():
        _sum_json(memory, BOOKS + number * BOOK, len(memory[BOOKS + number * BOOK :][:IDENTITY].rstrip(b"\0")))
    slots = [SLOTS_AT + place * SLOT_SIZE for place in range(8)] if flags & 12 else []
    for at in slots:
        _sum_slot(memory, at, flags)
    return bytes(memory)


def _sum_header(memory):
    end = HEAD.size + min(HEAD.unpack_from(memory)[2], ringfile.HEADER - HEAD.size - 4)
    struct.pack_into("<I", memory, end, zlib.crc32(memory[:end]))


def _sum_json(memory, at, length):
    if 8 < length <= _SIZE - at:
        memory[at + length - 8 : at + length] = b"%08x" % zlib.crc32(memory[at : at + length - 8])


def _sum_slot(memory, at, flags):
    _, _, ledger, end, sequence, offset, size, kind_at, kind_len, count, _ = SLOT.unpack_from(memory, at)
    if flags & 4 and kind_at >= KINDS_AT:
        _sum_json(memory, kind_at, kind_len)
        _sum_json(memory, offset + 8 * count, end)
    if flags & 8:
        inside = count < 1024 and offset + 8 * count <= len(memory)
        numbers = struct.unpack_from(f"<{count}q", memory, offset) if inside else ()
        struct.pack_into(
            "<I",
            memory,
            at + SLOT.size - 4,
            ringfile.slot_check(ledger, sequence, offset, size, kind_at, kind_len, count, numbers),
        )


def one_input(data):
    global _runs
    path = _FOLDER / "x.ring"
    path.write_bytes(_ring(data))
    with damage():
        ring = read_ring(path)
        for slot in ring.slots:
            assert slot.offset >= DATA and slot.offset + slot.size <= _SIZE
    store = Store(_FOLDER / "store")
    if _runs % 100 == 0:
        shutil.rmtree(store.root, ignore_errors=True)
        store.create()
    _runs += 1
    (report,) = recover(store, [path])
    assert report.problem is None or (report.problem and len(report.problem) < 2000)
    for found in report.dumps:
        assert (store.root / found.path).resolve().is_relative_to(store.dumps), "a dump outside of the store"


def mutate(data, chance, havoc):
    """One piece changes: as JSON with its sum behind it, as numbers, or as bytes."""
    pieces = _pieces(data)
    if not pieces:
        return havoc(data)
    at = chance.randrange(len(pieces))
    place, piece = pieces[at]
    flags = data[0] if chance.random() < 0.1 else 15
    first, last = piece.find(b"{"), piece.rfind(b"}") + 1
    with contextlib.suppress(ValueError, RecursionError):
        if 0 <= first < last and chance.random() < 0.7:
            text = dumped(other_json(json.loads(piece[first:last]), chance))
            return _joined(flags, [*pieces[:at], (place, _with_text(piece, first, last, text)), *pieces[at + 1 :]])
    if chance.random() < 0.5 and len(piece) >= 8:
        spot = chance.randrange(0, len(piece) - 7, 4)
        number = chance.choice((0, 1, -1, 7, 64, DATA, 2**31, 2**40, 2**62, -(2**63)))
        piece = piece[:spot] + struct.pack("<q", number) + piece[spot + 8 :]
    else:
        piece = havoc(piece)
    return _joined(flags, [*pieces[:at], (place, piece), *pieces[at + 1 :]])


def _with_text(piece, first, last, text):
    """The piece with other JSON, in the room that the old one had where there is a length before it or counts behind it."""
    if piece[:8] == ringfile.MAGIC:
        return HEAD.pack(ringfile.MAGIC, ringfile.VERSION, len(text)) + text
    room = len(piece[first:].split(b"\0")[0]) if len(piece) == IDENTITY + 8 * len(COUNTS) else last - first + 8
    text = text[: IDENTITY - 8] + bytes(8) if room != last - first + 8 else text + bytes(8)
    return piece[:first] + text.ljust(room, b" ") + piece[first + room :]
