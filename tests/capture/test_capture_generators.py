"""The states of torch's generators, read around a call."""

from __future__ import annotations

import hashlib

import pytest
import torch

from actordbg.capture.facts import digests, states


class FakeGenerator:
    """A GPU's generator without a GPU: its state is its number. Guarantees: counts how often it is asked."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    def get_state(self) -> torch.Tensor:
        self.asked += 1
        return torch.full((16,), self.number, dtype=torch.uint8)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeGenerator]:
    """A process that has initialised CUDA, with three GPUs, the second of them current."""
    generators = [FakeGenerator(number) for number in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(generators))
    return generators


def test_the_cpu_state_is_torchs_and_setting_it_draws_the_same_numbers():
    torch.manual_seed(5)
    before = states()
    assert list(before) == ["cpu"] and torch.equal(before["cpu"], torch.get_rng_state())
    drawn = torch.rand(7)
    torch.set_rng_state(before["cpu"])
    assert torch.equal(torch.rand(7), drawn)


def test_reading_draws_nothing_and_a_state_does_not_change_afterwards():
    before = states()
    kept = before["cpu"].clone()
    assert digests(states()) == digests(before)
    torch.rand(3)
    assert torch.equal(before["cpu"], kept) and digests(states()) != digests(before)


def test_digests_are_of_the_states_bytes():
    state = torch.arange(16, dtype=torch.uint8)
    assert digests({"cuda:0": state}) == {"cuda:0": hashlib.sha256(bytes(range(16))).hexdigest()}
    assert digests({}) == {}


def test_cuda_is_not_initialised_for_it(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError("asked CUDA")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("_lazy_init", "current_device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, fail)
    assert list(states([torch.device("cuda", 0)])) == ["cpu"]


def test_the_generators_of_the_given_gpus_are_read_else_the_current_ones(gpus: list[FakeGenerator]):
    assert list(states()) == list(states([torch.device("cpu")])) == ["cpu", "cuda:1"]
    given = states([torch.device("cuda", 2), torch.device("cuda"), torch.device("cpu"), torch.device("cuda", 2)])
    assert {name: int(state[0]) for name, state in given.items() if name != "cpu"} == {"cuda:1": 1, "cuda:2": 2}
    assert [generator.asked for generator in gpus] == [0, 3, 1]


def test_no_gpu_is_asked_while_a_graph_is_captured(gpus: list[FakeGenerator], monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert list(states([torch.device("cuda", 0)])) == ["cpu"]
    assert not any(generator.asked for generator in gpus)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_real_gpus_state_is_torchs_and_is_left_out_of_a_graph_capture():
    torch.cuda.init()  # `states` leaves a CUDA that nobody uses alone
    torch.cuda.manual_seed(3)
    before = states([torch.device("cuda", 0)])["cuda:0"]
    assert before.device.type == "cpu" and torch.equal(before, torch.cuda.get_rng_state(0))
    drawn = torch.rand(7, device="cuda:0")
    assert digests(states()) != digests({"cuda:0": before})
    torch.cuda.set_rng_state(before, 0)
    assert torch.equal(torch.rand(7, device="cuda:0"), drawn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert list(states()) == ["cpu"]
