"""The stand-in for flash-attn's padding helpers: exact index arithmetic, and gradients flow."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from roots import ROOT

from actordbg.trainers.openrlhf.flash_attn_standin import pad_input, unpad_input


def _mask(lengths: list[int], width: int, left: bool) -> torch.Tensor:
    rows = [[0] * (width - n) + [1] * n if left else [1] * n + [0] * (width - n) for n in lengths]
    return torch.tensor(rows)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    left=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32]),
)
def test_padding_taken_out_and_put_back_gives_the_masked_input(lengths: list[int], left: bool, dtype: torch.dtype):
    mask = _mask(lengths, 9, left).to(dtype)
    hidden = torch.randn(len(lengths), 9, 3)
    flat, indices, cu_seqlens, longest, used = unpad_input(hidden, mask)
    assert flat.shape == (sum(lengths), 3) and flat.dtype == hidden.dtype
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert longest == max(lengths) and used.tolist() == lengths
    assert torch.equal(pad_input(flat, indices, len(lengths), 9), hidden * mask.bool().unsqueeze(-1))


def test_gradients_reach_the_tokens_and_not_the_padding():
    hidden = torch.randn(2, 4, 1, requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    flat, indices, *_ = unpad_input(hidden, mask)
    (pad_input(flat, indices, 2, 4) ** 2).sum().backward()
    assert torch.equal(hidden.grad, 2 * hidden.detach() * mask.unsqueeze(-1))


ALL_GATHER = """
import os, socket, torch, torch.distributed as dist
from actordbg.trainers.openrlhf.flash_attn_standin import all_gather
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
rank = 0 if (child := os.fork()) else 1
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
tensor = torch.full((2, 1), float(rank + 1), requires_grad=True)
gathered = all_gather(tensor, None)
(gathered * torch.arange(4.0).view(4, 1)).sum().backward()
assert gathered.flatten().tolist() == [1, 1, 2, 2], gathered
assert tensor.grad.flatten().tolist() == ([0, 2] if rank == 0 else [4, 6]), tensor.grad
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both ranks agree")
"""


@pytest.mark.slow
def test_all_gather_concatenates_and_its_gradient_sums_over_the_ranks():
    """Two ranks, each weighting row i of the gathered tensor with i: row gradients are 2 * i (the sum over both ranks)."""
    done = subprocess.run([sys.executable, "-c", ALL_GATHER], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "both ranks agree", done.stderr
