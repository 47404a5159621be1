"""Old pickles: whatever is in them, nothing runs. What the machine accepts is what Python's own disassembler reads."""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import pickletools
import sys
import threading

import torch
from fuzzing import Chance, Havoc, refused

from actordbg.base.errors import CorruptDump, UnsafeInput
from actordbg.dumps.child_pool import answer_to_dump
from actordbg.dumps.decode import LegacyDump, decode, parse_stamp
from actordbg.dumps.decode_child import dump_to_answer
from actordbg.dumps.importer import to_tensors
from actordbg.dumps.pickle_machine import MAX_OPCODES, Machine

PARSERS = (decode, parse_stamp, Machine.run, answer_to_dump)
NAMES = (b"os\nsystem\n", b"builtins\neval\n", b"collections\nOrderedDict\n", b"torch._utils\n_rebuild_tensor_v2\n")
WORDS = (
    *NAMES,
    b"c" + NAMES[0] + b"(X\x01\0\0\0xtR",
    b"\x8c\x02os\x8c\x06system\x93",
    b"\x80\x04",
    b"\x95" + bytes(8),
    b"\x94",
    b"h\0",
    b"Q",
)
QUIET = ("object.__getattr__", "sys._getframe", "code.__new__")
KNOWN = {("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes"), ("collections", "OrderedDict")}
_decoding, _seen = 0, []
"""The thread that decodes, if one does: what other threads of a test process do is theirs."""


def _watch(event: str, arguments: object) -> None:
    if _decoding == threading.get_ident() and event not in QUIET:
        _seen.append(event)


sys.addaudithook(_watch)


def seeds() -> dict[str, bytes]:
    content = {
        "sequences": torch.arange(6).view(2, 3), "action_mask": torch.ones(2, 2).bool(), "attention_mask": None, "return_output": False,
        "packed_seq_lens": [3, 3], "timestamp": "20250619_052608_430740", "rank": 3, "batch_size": 2, "seq_len": 3,
    }  # fmt: skip
    attack = pickle.dumps({**content, "sequences": eval}, 2)
    return {
        **{f"protocol-{n}": pickle.dumps(content, n) for n in (2, 4, 5)},
        "attack": attack,
        "os": b"cos\nsystem\n(X\x01\0\0\0xtR.",
    }


def one_input(data: bytes) -> None:
    global _decoding
    _seen.clear()
    _decoding = threading.get_ident()
    dump = None
    try:
        with refused(CorruptDump, UnsafeInput):
            dump = decode(data)
    finally:
        _decoding = 0
    assert _seen == [], f"decoding did something: {_seen}"
    if dump is not None:
        assert answer_to_dump(dump_to_answer(dump), len(data)) == dump
        assert all(0 <= one.start <= one.stop <= len(data) for one in dump.tensors.values())
        with refused(CorruptDump, UnsafeInput):
            to_tensors(data, dump)
        _as_python_reads(data, dump)


def _as_python_reads(data: bytes, dump: LegacyDump) -> None:
    """An accepted pickle has the opcodes of a pickle, one STOP at its very end, and nothing that could act but the three known calls."""
    found = list(pickletools.genops(data))
    assert len(found) <= MAX_OPCODES and found[-1][2] == len(data) - 1
    with contextlib.suppress(pickle.UnpicklingError):  # frames that end too early: the machine passes over frames
        theirs = _Inert(io.BytesIO(data)).load()
        assert (theirs["rank"], theirs["timestamp"]) == (dump.rank, dump.stamp)
        assert all(theirs[name] == value for name, value in dump.arguments.items())


class _Inert(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """Python's own, with names that do nothing. The one in Python: at a frame inside of a frame that in C reads on elsewhere."""

    def find_class(self, module: str, name: str) -> object:
        assert (module, name) in KNOWN, f"{module}.{name} was accepted"
        return lambda *arguments: (name, arguments)

    def persistent_load(self, _: object) -> object:
        return None


def mutate(data: bytes, chance: Chance, havoc: Havoc) -> bytes:
    """Opcodes go, come twice, change places or arguments; lengths of strings stay right."""
    starts = [place for _, _, place in pickletools.genops(data)] + [len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(starts)]
    at = chance.randrange(len(parts))
    kind = chance.randrange(4)
    if kind == 0:
        parts[at] = havoc(parts[at])
    elif kind == 1:
        del parts[at]
    elif kind == 2:
        parts[at:at] = [chance.choice(parts), *([chance.choice(WORDS)] if chance.random() < 0.3 else [])]
    else:
        parts[at] = chance.choice(
            (b"N", b"K\0", b"J\xff\xff\xff\xff", b"]", b"}", b")", b"\x88", b"h\1", b"\x8a\x08" + b"\xff" * 8)
        )
    return b"".join(parts)
