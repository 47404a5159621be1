"""A backend is a module with a class and a line in two tables: what CONTRIBUTING's recipe says, tried with a fake one."""

import sys
from dataclasses import replace
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from actorcases import main, make_dump, opened, run_scenario

from actordbg.actor.backends.backend import CLASSES, Backend
from actordbg.actor.backends.deepspeed import DeepspeedBackend
from actordbg.actor.backends.fsdp2 import Fsdp2Backend
from actordbg.config.replay_config import BACKENDS, ENDPOINT, SETTINGS


def test_every_backend_that_can_be_asked_for_has_its_class():
    assert set(CLASSES) | {ENDPOINT} == set(BACKENDS)
    assert all(issubclass(resolve_name(place), Backend) for place in CLASSES.values())


class FakeBackend(Backend):
    def facts(self):
        return super().facts() | {"backend": "fake"}

    def averaged_over(self, dump_id):
        return ["dump", "another", "dump"]  # the third lane fills in


def fake(cache):
    """What a replay on the plain backend and on the fake one gives."""
    CLASSES["fake"] = "__main__:FakeBackend"
    SETTINGS["backend"] = replace(SETTINGS["backend"], values=(*SETTINGS["backend"].values, "fake"))
    found = {}
    for name in ("plain", "fake"):
        with opened(cache, backend=name, seed=7) as session:
            outcome = session.run(make_dump(), backward=True)
            found[name] = [session.resolved["backend"], outcome.gradient_over, outcome.log_probs.tolist(), outcome.grad_norm]
    return found


@pytest.mark.forked
def test_a_replay_runs_on_a_backend_that_a_test_adds(tmp_path):
    (found,) = run_scenario("fake", tmp_path, program=__file__, TORCHDYNAMO_DISABLE="1")
    assert found["fake"] == ["fake", ["another", "dump", "dump"], *found["plain"][2:]]
    assert found["plain"][1] == []


def test_norms_are_summed_in_float64(monkeypatch):
    """In a first step of Adam all weights move alike: in float32 a norm over 200,000 of them is off by 5e-5, over 250 million by 1 %."""
    weight = torch.zeros(200_000, requires_grad=True)
    weight.grad = torch.full((200_000,), 1e-3)
    exact = 1e-3 * 200_000**0.5
    optimizer = torch.optim.SGD([weight], lr=1.0)
    measured = SimpleNamespace(_moved=torch.zeros((), dtype=torch.float64))
    DeepspeedBackend._measured(measured, optimizer)()  # type: ignore[arg-type]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)
    mesh = {"shard": SimpleNamespace(get_group=lambda: None)}
    sharded = SimpleNamespace(device=torch.device("cpu"), _mesh=mesh, _split=None)
    total = Fsdp2Backend._total(sharded, [weight.grad])  # type: ignore[arg-type]
    assert [float(measured._moved) ** 0.5, total] == pytest.approx([exact, exact], rel=1e-6)


if __name__ == "__main__":
    main(sys.argv[1:], globals())
