"""Pickles of `torch.save` archives: whatever is in them, nothing runs, and the tree is plain data of a bounded size."""

from __future__ import annotations

import io
import pickletools
import zipfile
from typing import Any

import numpy as np
import of_pickle
import torch
from fuzzing import refused

from actordbg.base.errors import CorruptDump, UnsafeInput
from actordbg.dumps.pickle_tree import LEFT_OUT, TENSOR, TreeMachine, tree

PARSERS = (tree, TreeMachine.run)
WORDS = (*of_pickle.WORDS, b"G\x7f\xf8" + bytes(6), b"b", b"ctorch\nFloatStorage\n", b"(X\x07\0\0\0storage")
mutate = of_pickle.mutate


def _pickled(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def seeds() -> dict[str, bytes]:
    sample = {"tokens": [3, 2**40], "log_probs": [-0.5, float("nan")], "status": "completed", "reward": None, "ok": True}
    return {
        "samples": _pickled({"rollout_id": 3, "samples": [sample]}),
        "tensors": _pickled({"tokens": torch.arange(6).view(2, 3).t(), "half": torch.ones(2).bfloat16()}),
        "numpy": _pickled({"metadata": {1: np.ones(2), "x": np.float64(1)}}),
        "os": b"\x80\x02cos\nsystem\nX\x01\0\0\0x\x85R.",
    }


def one_input(data: bytes) -> None:
    of_pickle._seen.clear()
    of_pickle._decoding = of_pickle.threading.get_ident()
    value = None
    try:
        with refused(CorruptDump, UnsafeInput):
            value = tree(data)[0]
    finally:
        of_pickle._decoding = 0
    assert of_pickle._seen == [], f"decoding did something: {of_pickle._seen}"
    assert_plain(value)
    if value is not None:
        assert any(code.name == "STOP" for code, _, _ in pickletools.genops(data))


def assert_plain(value: Any) -> None:
    """Only what JSON has, tensors as places, and notes of what was left out."""
    if isinstance(value, dict):
        assert {*map(type, value)} <= {str}
        if value.keys() == {TENSOR}:
            key, dtype, elements, offset, shape, strides = value[TENSOR]
            assert isinstance(key, str) and isinstance(dtype, str) and min([elements, offset, *shape, *strides]) >= 0
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
