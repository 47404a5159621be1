"""Pickles, of the old recorder and of `torch.save` archives: whatever is in them, nothing runs, and what comes is plain data."""

import io
import itertools
import pickle
import pickletools
import sys
import threading
import zipfile

import numpy as np
import torch
from fuzzing import refused
from oldpickles import decode

from actordbg.base.errors import CorruptDump, UnsafeInput
from actordbg.dumps.archives import pickle_value
from actordbg.dumps.decode import old_call, parse_stamp
from actordbg.dumps.pickle_machine import Machine
from actordbg.dumps.pickle_tree import LEFT_OUT, TENSOR, tree

PARSERS = (tree, Machine.run, pickle_value, old_call, parse_stamp)
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
    b"G\x7f\xf8" + bytes(6),
    b"b",
    b"ctorch\nFloatStorage\n",
    b"(X\x07\0\0\0storage",
)
QUIET = ("object.__getattr__", "sys._getframe", "code.__new__")
_decoding, _seen = 0, []
"""The thread that decodes, if one does: what other threads of a test process do is theirs."""


def _watch(event, arguments):
    if _decoding == threading.get_ident() and event not in QUIET:
        _seen.append(event)


sys.addaudithook(_watch)


def _pickled(value):
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def seeds():
    sample = {"tokens": [3, 2**40], "log_probs": [-0.5, float("nan")], "status": "completed", "reward": None, "ok": True}
    content = {
        "sequences": torch.arange(6).view(2, 3), "action_mask": torch.ones(2, 2).bool(), "attention_mask": None, "return_output": False,
        "packed_seq_lens": [3, 3], "timestamp": "20250619_052608_430740", "rank": 3, "batch_size": 2, "seq_len": 3,
    }  # fmt: skip
    return {
        **{f"protocol-{n}": pickle.dumps(content, n) for n in (2, 4, 5)},
        "attack": pickle.dumps({**content, "sequences": eval}, 2),
        "samples": _pickled({"rollout_id": 3, "samples": [sample]}),
        "tensors": _pickled({"tokens": torch.arange(6).view(2, 3).t(), "half": torch.ones(2).bfloat16()}),
        "numpy": _pickled({"metadata": {1: np.ones(2), "x": np.float64(1)}}),
        "os-2": b"cos\nsystem\n(X\x01\0\0\0xtR.",
        "os": b"\x80\x02cos\nsystem\nX\x01\0\0\0x\x85R.",
    }


def one_input(data):
    global _decoding
    _seen.clear()
    _decoding = threading.get_ident()
    value = None
    try:
        with refused(CorruptDump, UnsafeInput):
            value = tree(data)
    finally:
        _decoding = 0
    assert _seen == [], f"decoding did something: {_seen}"
    assert_plain(value)
    if value is not None:
        assert [*pickletools.genops(data)][-1][2] == len(data) - 1, "a pickle has one STOP, at its very end"
    with refused(CorruptDump, UnsafeInput):
        for tensor in decode(data).tensors.values():
            assert tensor.values.nbytes == 0 or tensor.values.sum() is not None


def assert_plain(value):
    """Only what JSON has, tensors as places, and notes of what was left out."""
    if isinstance(value, dict):
        assert {*map(type, value)} <= {str}
        if value.keys() == {TENSOR}:
            key, dtype, elements, offset, shape, strides = value[TENSOR]
            assert isinstance(key, (str, int, list)) and isinstance(dtype, str) and min([elements, offset, *shape, *strides]) >= 0
        elif value.keys() == {LEFT_OUT}:
            assert isinstance(value[LEFT_OUT], str)
        else:
            for part in value.values():
                assert_plain(part)
    elif isinstance(value, list):
        for part in value:
            assert_plain(part)
    else:
        assert value is None or type(value) in (bool, int, str) or (type(value) is float and np.isfinite(value))


def mutate(data, chance, havoc):
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
