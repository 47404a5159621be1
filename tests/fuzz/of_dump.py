"""A whole dump file: frames, record, payload; our reading of the payload beside the safetensors library's."""

import contextlib
import hashlib
import json
from unittest.mock import patch

import safetensors
import torch
from catalogcases import header_frame
from dumpmutants import A, frame, plain_of
from fuzzing import CAP, damage, dumped, mutate_json, other_json, work_folder
from of_record import seeds as records
from plainkit import bits

from actordbg.base.errors import StoreProblem
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import SAFETENSORS_DTYPES
from actordbg.formats.dumpfile import check
from actordbg.formats.record_reading import strict_header
from actordbg.store import payload

PARSERS = (
    dumpfile.read_file,
    dumpfile.unpack,
    dumpfile.parse_line,
    dumpfile.read_line,
    dumpfile.read_record,
    dumpfile.read_payload,
    dumpfile.payload_entries,
    strict_header,
    check,
    payload.widen_plain,
)
_FILE = work_folder() / "dump"
_TENSORS = {
    "sequences": torch.tensor([[70_000, 3], [5, 128_255]]),
    "mask": torch.ones(2, 2).t(),
    "x": torch.ones(1, 3).expand(2, 3),
}


def seeds():
    small = payload.encode(A.record, {**_TENSORS, "empty": torch.zeros(0, 3), "half": torch.randn(3).bfloat16()})[1]
    return {"small": small, "all": A.blob, "none": header_frame(records()["plain"]) + frame(plain_of({}, b""))}


@patch.object(dumpfile, "DEFAULT_CAP", CAP)
def one_input(data):
    _FILE.write_bytes(data)
    head = found = None
    with damage():
        head = dumpfile.read_record(_FILE)
    with damage():
        found = dumpfile.read_payload(_FILE, hash_too=False)
    assert found is None or head == found[0], "two readers, two records"
    with damage():
        if found:
            _whole(*found)


def _whole(record, stored):
    entries = check(record, stored)
    theirs = {
        name: (value["dtype"], tuple(value["shape"]), bytes(value["data"])) for name, value in safetensors.deserialize(stored)
    }
    codes = {name: code for code, (name, _) in SAFETENSORS_DTYPES.items()}
    assert {name: value[:2] for name, value in theirs.items()} == {
        name: (codes[one.dtype], one.shape) for name, one in entries.items()
    }
    for name, one in entries.items():
        assert stored[one.offset :].startswith(theirs[name][2]), f"other bytes in {name!r}"
    _again(record, {name: payload.as_torch(plain) for name, plain in payload.widen_plain(record, stored).items()})


@patch.object(dumpfile, "DEFAULT_CAP", 2 * CAP)
def _again(record, tensors):
    """Write what was read, and read it again: the same tensors, to the bit."""
    again = payload.widen_plain(*dumpfile.unpack(payload.encode(record, tensors, 1)[1]))
    for name, tensor in tensors.items():
        other = payload.as_torch(again[name])
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape) and bits(tensor) == bits(other), name


@patch.object(dumpfile, "DEFAULT_CAP", CAP)
def mutate(data, chance, havoc):
    """Record, header and tensors under right sums; or the sums themselves."""
    with contextlib.suppress(StoreProblem, ValueError, KeyError, TypeError):
        if chance.random() < 0.8:
            line, stored = dumpfile.line_of(data), dumpfile.unpack(data, hash_too=False)[1]
            return _resealed(line, stored, chance, havoc)
    return havoc(data)


def _resealed(line, stored, chance, havoc):
    end = 8 + int.from_bytes(stored[:8], "little")
    header, data, kind = stored[8:end], stored[end:], chance.randrange(5)
    if kind == 0:
        line = mutate_json(line, chance, havoc)
    elif kind == 1:
        header = mutate_json(header, chance, havoc)
    elif kind == 2:
        data = havoc(data)
    elif kind == 3:
        said = json.loads(line)
        line = dumped(said | {"tensors": other_json(said["tensors"], chance)})
    else:
        said, listed = json.loads(line), json.loads(header)
        name = chance.choice([*said["tensors"], "new"])
        said["tensors"][name] = [
            *(chance.choice(("uint8", "bool", "int64", "float16")),) * 2,
            [chance.randrange(3), len(data) % 7],
        ]
        line, header = dumped(said), dumped(other_json(listed, chance)) if listed else header
    plain = plain_of(header, data)
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        line = dumped(json.loads(line) | {"payload_sha256": hashlib.sha256(plain).hexdigest()})
    return header_frame(line) + frame(plain)
