"""Dumps without torch: the same bytes as torch makes, the same values back, and the commands in a process that has no torch."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchencoding
from catalogcases import record
from hypothesis import given, settings
from hypothesis import strategies as st
from roots import ROOT
from safetensors.torch import load_file

from actordbg.formats import dumpfile
from actordbg.formats.encoding import PlainTensor, array_dtype
from actordbg.store import payload
from actordbg.store.plain_tensors import encode_plain, numbers_of, strided

DTYPES = (
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "bool",
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
)
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
LARGEST = (1, 2, 200, 70_000, 2**25, 2**40)


def plain(tensor: torch.Tensor) -> PlainTensor:
    """The same tensor over its bytes; those of a strided one with the gaps."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    raw = torch.as_strided(tensor, (reach,), (1,)).contiguous().view(torch.uint8).numpy().tobytes() if reach else b""
    return strided(dtype, raw, tuple(tensor.shape), tuple(tensor.stride()))


@settings(max_examples=80, deadline=None)
@given(
    st.data(),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
    st.integers(1, 9),
    st.sampled_from(["plain", "slice", "turned", "expanded"]),
)
def test_a_dump_is_the_same_to_the_byte(data, dtype: str, rows: int, columns: int, how: str) -> None:
    kind = getattr(torch, dtype)
    high = data.draw(st.sampled_from(LARGEST))
    low = data.draw(st.sampled_from([0, -3]))
    ids = torch.randint(low, high + 1, (rows, columns), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    tensor = ids.to(kind) if "uint" not in dtype and dtype != "bool" else ids.abs().to(kind)
    tensor = {"plain": tensor, "slice": tensor[:, ::2], "turned": tensor.t(), "expanded": tensor[:, :1].expand(rows, 3)}[how]
    if dtype.startswith("float8") and how != "plain":
        return
    one, other = payload.encode(record(0), {"sequences": tensor}), encode_plain(record(0), {"sequences": plain(tensor)})
    assert one == other
    finished, data = torchencoding.serialize(record(0), {"sequences": tensor})
    assert vars(one[0]) == vars(finished) and one[1] == dumpfile.pack(finished, data)
    assert array_dtype(dtype).itemsize == tensor.element_size()


@pytest.mark.slow
def test_dumps_come_in_and_go_out_without_torch(tmp_path: Path) -> None:
    """Import, create, look, verify, pack and export, where torch is not installed."""
    content = {"sequences": torch.arange(24).reshape(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long),
               "action_mask": torch.ones(2, 4, dtype=torch.bfloat16), "return_output": False, "rank": 0, "batch_size": 2,
               "seq_len": 12, "timestamp": "20250619_052608_430740"}  # fmt: skip
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "actor_inputs_rank0_20250619_052608_430740.pkl").write_bytes(pickle.dumps(content))
    commands = (
        "dump import old --quiet", "dump create --seq-len 16 --quiet", "dump ls", "dump show last", "dump verify --quiet",
        "dump pack --quiet", "dump export --where rank=0 --out out --quiet", "fsck --quiet", "status --json", "replays --allow-empty",
    )  # fmt: skip
    program = (
        "import sys, shlex; sys.modules['torch'] = None\nfrom typer.testing import CliRunner\nfrom actordbg.cli.app import app\n"
        "for typed in sys.argv[1:]:\n    done = CliRunner().invoke(app, ['--store', 'store', *shlex.split(typed)])\n"
        "    print(typed, done.exit_code, repr(done.exception or ''))"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *commands], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    bad = [line for line in done.stdout.splitlines() if " 0 ''" not in line and not line.startswith(("status", "fsck"))]
    assert bad == [], done.stdout
    exported = [load_file(path) for path in sorted((tmp_path / "out").iterdir())]
    assert any(torch.equal(one["action_mask"], content["action_mask"]) for one in exported) and len(exported) == 2
    assert json.dumps([sorted(one) for one in exported])


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, "bfloat16", "float16"])
def test_every_value_of_a_dtype_that_numpy_lacks_is_the_number_that_torch_reads(dtype: str):
    every = torch.arange(2**8 if dtype in EIGHT_BITS else 2**16, dtype=torch.int32)
    bits = every.to(torch.uint8) if dtype in EIGHT_BITS else every.to(torch.int16)
    wanted = bits.view(getattr(torch, dtype)).float()
    found = numbers_of(PlainTensor(dtype, bits.numpy().view(array_dtype(dtype)), (1,)))
    assert torch.equal(torch.from_numpy(found.astype("float32")).nan_to_num(7.0), wanted.nan_to_num(7.0))
