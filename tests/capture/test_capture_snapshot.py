"""Snapshots: private copies, strides kept, pinned memory bounded. The CUDA path runs here on a device made of CPU tensors."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from capturekit import LaterDevice

from actordbg.capture.recorded_call import Item
from actordbg.capture.ring import Arena
from actordbg.capture.snapshot import Copier, Pool, PoolExhausted, Snapshot, cost, near, span, span_bytes


@pytest.fixture
def on_device():
    """Within this, every tensor says that it is on a CUDA device."""
    with mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True)):
        yield


def layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(2 * 3 * 8).reshape(2, 3, 8)
    return {
        "contiguous": base.clone(),
        "slice": base[:, 1:, 2:5],
        "column": base[0, :, :1],
        "transposed": base[0].t(),
        "expanded": base[0, :1].expand(4, 8),
        "empty": base[:0],
        "scalar": torch.tensor(7),
        "bools": base[0] > 5,
        "halves": base.to(torch.bfloat16)[..., ::2],
    }


def test_a_copy_is_not_touched_by_what_training_does_later():
    tensor = torch.ones(3, 3)
    taken = Copier().snapshot({"x": tensor})
    tensor.zero_()
    assert taken.tensors()["x"].sum() == 9


def test_a_copy_has_no_graph_and_makes_none():
    leaf = torch.ones(3, requires_grad=True)
    taken = Copier().snapshot({"x": leaf * 2, "y": leaf})
    assert not any(t.requires_grad for t in taken.tensors().values())


@pytest.mark.parametrize("name", layouts())
def test_values_and_strides_of_every_layout_are_kept(name: str):
    tensor = layouts()[name]
    taken = Copier().snapshot({"x": tensor})
    assert torch.equal(taken.tensors()["x"], tensor)
    assert taken.strides.get("x", taken.tensors()["x"].stride()) == tensor.stride()


@pytest.mark.parametrize("name", layouts())
def test_on_a_device_only_contiguous_spans_are_copied_and_values_and_strides_are_kept(name: str, on_device: None):
    tensor, device = layouts()[name], LaterDevice()
    taken = Copier(make_device=lambda _: device).snapshot({"x": tensor})
    taken.wait()
    assert torch.equal(taken.tensors()["x"], tensor)
    assert taken.tensors()["x"].stride() == tensor.stride()
    assert taken.tensors()["x"].data_ptr() != tensor.data_ptr() or tensor.numel() == 0


def test_nobody_waits_for_the_device_until_the_writer_does(on_device: None):
    device = LaterDevice()
    taken = Copier(make_device=lambda _: device).snapshot({"x": torch.ones(4), "y": torch.ones(4)})
    assert device.copies == 0
    taken.wait()
    taken.wait()
    assert device.copies == 3, "two tensors, and the mark that says that they are complete"


def test_pinned_buffers_are_used_again(on_device: None):
    device = LaterDevice()
    copier = Copier(lambda _: device)
    for _ in range(50):
        taken = copier.snapshot({"x": torch.ones(100), "y": torch.ones(5000)})
        taken.wait()
        taken.release()
    assert device.allocated == 2**15


def test_a_full_pool_says_so_at_once_and_takes_nothing(on_device: None):
    device = LaterDevice()
    copier = Copier(lambda _: device, 2**16)
    first = copier.snapshot({"x": torch.ones(2**13)})
    with pytest.raises(PoolExhausted):
        copier.snapshot({"small": torch.ones(10), "x": torch.ones(2**13)})
    first.wait()
    first.release()
    again = copier.snapshot({"x": torch.ones(2**13)})
    again.wait()
    assert again.tensors()["x"].sum() == 2**13
    assert device.allocated <= 2**16


def test_a_pool_makes_room_for_a_larger_buffer(on_device: None):
    copier = Copier(lambda _: LaterDevice(), 2**17)
    for elements in (10, 2**14, 10, 2**13, 2**14):
        taken = copier.snapshot({"x": torch.ones(elements)})
        taken.wait()
        assert taken.tensors()["x"].sum() == elements
        taken.release()


def test_a_failing_allocation_is_not_held_against_the_pool(on_device: None):
    class Failing(LaterDevice):
        fails = True

        def pinned(self, nbytes: int) -> torch.Tensor:
            if self.fails:
                raise MemoryError
            return super().pinned(nbytes)

    device = Failing()
    copier = Copier(lambda _: device, 2**15)
    for _ in range(5):
        with pytest.raises(MemoryError):
            copier.snapshot({"x": torch.ones(10)})
    device.fails = False
    assert copier.snapshot({"x": torch.ones(10)}).tensors().keys() == {"x"}


def test_during_a_graph_capture_nothing_may_be_queued(on_device: None):
    device = LaterDevice()
    copier = Copier(make_device=lambda _: device)
    assert copier.may_copy([torch.ones(1)])
    device.graph = True
    assert not copier.may_copy([torch.ones(1)])


def test_a_pool_keeps_little_of_what_it_does_not_need():
    pool = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    buffers = [pool.take(2**24) for _ in range(8)]
    for buffer in buffers:
        pool.give_back(buffer)
    assert pool._idle == pool._held == 2**25
    assert {pool.take(2**24).data_ptr() for _ in range(2)} <= {buffer.data_ptr() for buffer in buffers}


def test_host_buffers_are_used_again():
    copier, tensor = Copier(), torch.ones(5000)
    for value in range(20):
        taken = copier.snapshot({"x": tensor.fill_(value)})
        assert taken.tensors()["x"].unique().tolist() == [value]
        taken.release()
    assert copier._host._held == 2**15


def test_a_tensor_whose_memory_is_gone_does_not_crash_the_process():
    for layout in (torch.ones(4, 4), torch.ones(4, 4).t(), torch.ones(4, 4)[:, 1:]):
        layout.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="freed"):
            Copier().snapshot({"x": layout})


@pytest.fixture
def arena() -> Arena:
    memory = mmap.mmap(-1, 2**20)
    return Arena(memory, 0, 2**20, None)


@pytest.mark.parametrize("name", layouts())
def test_copies_of_a_device_land_in_the_ring(name: str, on_device: None, arena: Arena):
    tensor, device = layouts()[name], LaterDevice()
    taken = Copier(lambda _: device).place({"x": tensor}, arena, 64, [0])
    assert taken.on_its_way and device.copies == 0
    taken.land()
    assert not taken.on_its_way and torch.equal(taken.tensors()["x"], tensor)
    assert taken.strides["x"] == tensor.stride()
    assert bytes(arena.memory[64 : 64 + tensor.nbytes]) == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_copies_that_were_complete_before_the_device_was_lost_are_good(on_device: None, arena: Arena):
    device = LaterDevice()
    device.lost_after = 3
    copier = Copier(lambda _: device)
    taken = copier.place({"x": torch.arange(5), "y": torch.ones(3, dtype=torch.bool)}, arena, 0, [0, 64])
    taken.land()
    assert taken.tensors()["x"].tolist() == [0, 1, 2, 3, 4]


def test_copies_that_were_not_complete_are_not_trusted(on_device: None, arena: Arena):
    device = LaterDevice()
    device.lost_after = 2
    taken = Copier(lambda _: device).place({"x": torch.arange(5), "y": torch.ones(3)}, arena, 0, [0, 64])
    with pytest.raises(RuntimeError, match="CUDA"):
        taken.land()


def test_a_span_reaches_from_the_first_to_the_last_element():
    base = torch.arange(24).reshape(4, 6)
    assert span(base[1:3, 2:4]).tolist() == list(range(8, 16))
    assert span_bytes(base[:0]) == 0
    assert span(torch.tensor(5)).tolist() == [5]
    assert cost({"x": base[:, :1]}) == 4 * 8


def test_an_empty_snapshot_is_nothing():
    taken = Snapshot()
    taken.wait()
    taken.release()
    assert taken.tensors() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_copy_sees_the_values_of_the_call_and_allocates_nothing_there():
    copier = Copier()
    tensors = {"x": torch.arange(2**20, device="cuda").reshape(1024, 1024)[:, :512], "y": torch.ones(5, device="cuda")}
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(50_000_000)  # work that is queued when the call comes
    taken = copier.snapshot(tensors)
    assert torch.cuda.memory_allocated() == before
    for tensor in tensors.values():
        tensor.zero_()  # what training may do right afterwards
    taken.wait()
    assert all(torch.equal(taken.tensors()[name], expected[name]) for name in tensors)
    assert taken.tensors()["x"].stride() == tensors["x"].stride()


def test_small_outputs_of_any_strides_are_copied_by_the_memory_that_they_span():
    whole = torch.arange(24.0).view(4, 6)
    freed = torch.ones(9)
    freed.untyped_storage().resize_(0)
    kinds = {
        "sliced": whole[:, :-1], "transposed": whole.t(), "expanded": whole[:1].expand(3, 6), "a number": whole[2, 3],
        "bf16": whole.bfloat16()[1:, ::2], "bool": whole > 7, "with a gradient": (whole.requires_grad_() * 2)[:, 1:],
    }  # fmt: skip
    copies = {name: near(tensor, 96) for name, tensor in kinds.items()}
    assert None not in copies.values()
    before = {name: tensor.detach().clone() for name, tensor in kinds.items()}
    with torch.no_grad():
        whole.fill_(-1)
    item: Any = SimpleNamespace(near=copies, outputs=None)
    for name, tensor in Item.returned(item).items():
        assert torch.equal(tensor, before[name]) and tensor.stride() == kinds[name].stride(), name
    others = (
        whole[:0], whole[:, 2:2], freed, whole.detach().to_sparse(), torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64).conj().imag, torch.arange(25.0), torch.ones(100)[::33],
    )  # fmt: skip
    assert [near(tensor, 96) for tensor in others] == [None] * len(others)
    item.near = {"no dtype of a dump": near(torch.ones(2, dtype=torch.complex64), 96)}
    assert Item.returned(item) == {}
