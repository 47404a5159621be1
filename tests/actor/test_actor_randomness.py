"""Where a replayed forward's random numbers come from, and when their end can be compared with the run's."""

from dataclasses import replace

import pytest
import torch
from capturekit import with_gpus

from actordbg.actor.randomness import Randomness, check, restore
from actordbg.capture.facts import digests
from actordbg.formats.dump_record import DumpRecord
from actordbg.store.payload import Dump

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeGpu:
    """A GPU's generator without a GPU. Guarantees: keeps the state that it was given, and counts what was drawn in its last byte."""

    def __init__(self):
        self.state = torch.zeros(16, dtype=torch.uint8)

    def get_state(self):
        return self.state.clone()

    def set_state(self, state):
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        self.state = state.clone()

    def draw(self):
        self.state[15] += 1


@pytest.fixture
def gpu(monkeypatch):
    """The one GPU of this process."""
    generator = FakeGpu()
    with_gpus(monkeypatch, (generator,), 0)
    return generator


def recorded(*, drawn=3, **gpus):
    """A dump of a run that drew `drawn` numbers on its CPU, and on each GPU (by name, `_` for `:`) the number given."""
    torch.manual_seed(77)
    tensors = {"rng.cpu": torch.get_rng_state()}
    torch.rand(drawn)
    after = {"cpu": torch.get_rng_state()}
    for name, count in gpus.items():
        key = name.replace("_", ":")
        tensors[f"rng.{key}"], after[key] = torch.full((2, 16), 9, dtype=torch.uint8)
        after[key][15] += count
    torch.manual_seed(0)
    record = DumpRecord("d", "r", 0, "2025-06-19T05:26:08.430740Z", 1, 1, 1, rng=digests(after))
    return Dump(record, tensors)


def replayed(dump, device, *, draws=3, seed=None):
    """What comes of a forward that draws `draws` numbers on the CPU."""
    before = restore(dump, device, seed)
    torch.rand(draws)
    return before and check(before, dump, device)


def test_a_dump_without_states_says_nothing_and_a_seed_that_was_asked_for_wins_over_recorded_ones():
    dump = recorded()
    state = torch.get_rng_state()
    assert restore(Dump(dump.record, {}), CPU, None) is None
    assert restore(dump, CPU, 0) == Randomness(why="seed 0 was requested instead of the recorded RNG states")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gpus_state_is_set_on_whichever_gpu_the_replay_has(gpu):
    dump = recorded(cuda_3=2)
    before = restore(dump, GPU, None)
    assert before == Randomness(("cpu", "cuda:3")) and torch.equal(gpu.state, dump.rng["cuda:3"])
    torch.rand(3)
    assert check(before, dump, GPU).match is False
    gpu.draw()
    gpu.draw()
    assert check(before, dump, GPU) == Randomness(("cpu", "cuda:3"), True)


def test_of_several_gpus_the_one_that_is_called_alike_is_meant(gpu):
    before = restore(recorded(cuda_0=0, cuda_1=0), GPU, None)
    assert before == Randomness(("cpu", "cuda:0"))
    before = restore(recorded(cuda_1=0, cuda_2=0), GPU, None)
    assert before.restored == ("cpu",) and "not of cuda:0" in before.why


WHY = "the run drew its random numbers on {}, the replay on a {}"


@pytest.mark.parametrize(
    "gpus, device, draws, after, match, why",
    [
        ({}, CPU, 3, True, True, ""),
        ({}, CPU, 40, True, False, ""),
        ({"cuda_3": 2}, CPU, 3, True, None, WHY.format("cuda:3", "CPU")),
        ({}, GPU, 3, True, None, WHY.format("a CPU", "GPU")),
        ({}, CPU, 3, False, None, "the run recorded no RNG states after the call"),  # it raised
    ],
)
def test_the_recorded_state_is_set_on_the_cpu_and_its_end_compared_where_it_can_be(gpu, gpus, device, draws, after, match, why):
    dump = recorded(**gpus)
    if not after:
        dump = Dump(replace(dump.record, rng={}), dump.tensors)
    assert replayed(dump, device, draws=draws) == Randomness(("cpu",), match, why)


@pytest.mark.parametrize("state", [torch.zeros(7, dtype=torch.uint8), torch.zeros(5056, dtype=torch.uint8), torch.zeros(5056)])
def test_a_state_that_this_torch_does_not_take_is_a_reason_not_a_failure(state):
    dump = recorded()
    before = torch.get_rng_state()
    found = replayed(Dump(dump.record, {"rng.cpu": state}), CPU, draws=0)
    assert (found.restored, found.match) == ((), None)
    assert found.why.startswith("the recorded RNG state of cpu is invalid for this torch: ")
    assert torch.equal(torch.get_rng_state(), before)
