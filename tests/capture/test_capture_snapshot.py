"""Copies: private, strides kept, complete when the writer looks. The CUDA path runs here on a device made of CPU tensors."""

import mmap
from unittest import mock

import pytest
import torch
from capturekit import LaterDevice

from actordbg.capture.ring import Arena
from actordbg.capture.snapshot import Copier


@pytest.fixture
def on_device():
    """Within this, every tensor says that it is on a CUDA device: on this one."""
    with mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True)):
        yield LaterDevice()


@pytest.fixture
def arena():
    return Arena(mmap.mmap(-1, 2**20), 0, 2**20, None)


def layouts():
    base, whole = torch.arange(2 * 3 * 8).reshape(2, 3, 8), torch.arange(24.0).view(4, 6)
    return {
        "contiguous": base.clone(), "slice": base[:, 1:, 2:5], "column": base[0, :, :1], "transposed": base[0].t(), "empty": base[:0],
        "expanded": base[0, :1].expand(4, 8), "scalar": torch.tensor(7), "bools": base[0] > 5, "halves": base.bfloat16()[..., ::2],
        "negative": torch.view_as_complex(whole.view(12, 2)).conj().imag, "with a gradient": (whole.requires_grad_() * 2)[:, 1:],
    }  # fmt: skip


@pytest.mark.parametrize("name", layouts())
def test_an_output_of_any_layout_is_kept_as_it_was_with_its_strides_and_no_graph(name):
    tensor = layouts()[name]
    before = tensor.detach().clone()
    taken = Copier().outputs({"x": tensor})
    with torch.no_grad():
        (tensor._base if tensor._base is not None else tensor).zero_()  # what training may do right afterwards
    copy = taken.tensors()["x"]
    assert torch.equal(copy, before) and not copy.requires_grad
    assert taken.strides.get("x", copy.stride()) == tensor.stride()


@pytest.mark.parametrize("name", [name for name in layouts() if name != "negative"])
def test_on_a_device_only_contiguous_spans_are_copied_when_the_writer_waits(name, on_device, arena):
    tensor, copier = layouts()[name].detach(), Copier(lambda _: on_device)
    taken = copier.outputs({"x": tensor, "y": torch.ones(4)})
    assert on_device.copies == 0
    taken.wait()
    taken.wait()
    assert on_device.copies == 3, "two tensors, and the mark that says that they are complete"
    copy = taken.tensors()["x"]
    assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
    assert copy.data_ptr() != tensor.data_ptr() or tensor.numel() == 0
    copier.place([tensor], arena, 64, [0]).land(arena)
    assert bytes(arena.memory[64 : 64 + tensor.nbytes]) == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_during_a_graph_capture_nothing_may_be_queued(on_device):
    copier = Copier(lambda _: on_device)
    assert copier.may_copy([torch.ones(1)])
    on_device.graph = True
    assert not copier.may_copy([torch.ones(1)])


@pytest.mark.parametrize("tensor", [torch.ones(4, 4), torch.ones(4, 4).t(), torch.ones(4, 4)[:, 1:], torch.ones(9, 9)[:, ::9]])
def test_a_tensor_whose_memory_is_gone_does_not_crash_the_process(tensor, arena):
    tensor.untyped_storage().resize_(0)
    for copy in (lambda: Copier().outputs({"x": tensor}), lambda: Copier().place([tensor], arena, 0, [0])):
        with pytest.raises(ValueError, match="freed"):
            copy()


@pytest.mark.parametrize("lost_after, trusted", [(3, True), (2, False)])
def test_copies_are_trusted_if_they_were_complete_before_the_device_was_lost(on_device, arena, lost_after, trusted):
    on_device.lost_after = lost_after
    taken = Copier(lambda _: on_device).place([torch.arange(5), torch.ones(3, dtype=torch.bool)], arena, 0, [0, 64])
    if trusted:
        taken.land(arena)
        assert arena.tensor[:40].view(torch.int64).tolist() == [0, 1, 2, 3, 4]
    else:
        with pytest.raises(RuntimeError, match="CUDA"):
            taken.land(arena)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_copy_sees_the_values_of_the_call_and_allocates_nothing_there():
    tensors = {"x": torch.arange(2**20, device="cuda").reshape(1024, 1024)[:, :512], "y": torch.ones(5, device="cuda")}
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(50_000_000)  # work that is queued when the call comes
    taken = Copier().outputs(tensors)
    assert torch.cuda.memory_allocated() == before
    for tensor in tensors.values():
        tensor.zero_()  # what training may do right afterwards
    taken.wait()
    assert all(torch.equal(taken.tensors()[name], expected[name]) for name in tensors)
    assert taken.tensors()["x"].stride() == tensors["x"].stride()
