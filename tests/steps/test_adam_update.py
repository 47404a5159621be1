"""The update of a step is Adam's, or what broke it is named, from samples before and after; else it is named as not checked."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from actordbg.capture.ledger import Identity
from actordbg.capture.snapshot import Copier
from actordbg.formats.weight_hashes import STATE_SAMPLED, step_weights
from actordbg.steps.adam_update import of_update, unchecked

WHO = Identity("r", 0, 1, "host", 1, "actor0")
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def recorded(
    change=lambda optimizer: None,
    *,
    after=lambda optimizer: None,
    made=torch.optim.AdamW,
    bias=False,
    **settings,
):
    """Three steps of an Adam, as the recorder sees their borders; `change` and `after` happen around the last."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(40, 8), torch.nn.Linear(8, 40, bias=bias))
    optimizer = made(model.parameters(), **{**ADAM, **settings})
    records = []

    def border():
        taken = step_weights(model, Copier().outputs, hashed=False, optimizer=SimpleNamespace(optimizer=optimizer))
        records.append(taken.record(WHO))

    for step in range(3):
        border()
        optimizer.zero_grad()
        model(torch.randint(0, 40, (4, 6))).log_softmax(-1)[..., 0].mean().backward()
        if step == 2:
            change(optimizer)
        optimizer.step()
    after(optimizer)
    border()
    facts = {f"adam.{name}": value for name, value in ADAM.items()}
    return SimpleNamespace(states=((records[2], records[3]),), fact=facts.get, micro_batches=())


def lose(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def setting(**values):
    return lambda optimizer: optimizer.param_groups[0].update(values)


def cut(optimizer):
    torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 2e-4)


def push(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data += 1e-4


@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("lr", [1e-3, 1e-6])
def test_a_healthy_update_breaks_no_law(made, lr):
    step = recorded(made=made, lr=lr)
    step.fact = {"adam.lr": lr}.get
    assert not list(of_update(step)) and not unchecked(step)


FAULTS = {
    "moments zeroed before the step": ("Adam's state", {"change": lose}),
    "a state that begins anew": ("Adam's state", {"change": lambda optimizer: optimizer.state.clear()}),
    "moments zeroed after the step": ("Adam's state", {"after": lose}),
    "a learning rate three times the optimizer's": ("update", {"change": setting(lr=3e-3)}),
    "parameters that something else moves": ("update", {"after": push}),
    "ten times the trainer's learning rate": ("learning rate", {"lr": 1e-2}),
    "a weight decay of 5 that comes late": ("update", {"change": setting(weight_decay=5.0)}),
    "a weight decay of all groups": (
        "weight decay",
        {"made": lambda of, **more: torch.optim.AdamW([{"params": [each]} for each in of], **more)},
    ),
    "a weight decay of the one group, which has biases": ("weight decay", {"bias": True}),
    "no weight decay": ("weight decay", {"weight_decay": 0.0}),
    "a gradient that is cut at a value": ("clipped by value", {"change": cut}),
    "other betas": ("betas", {"betas": (0.9, 0.999)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_an_update_is_named(fault):
    name, how = FAULTS[fault]
    assert name in [finding.rule.name for finding in of_update(recorded(**how))]


def test_an_update_that_was_not_recorded_on_both_sides_or_did_not_reach_a_parameter_is_not_checked():
    step = recorded(bias=True)
    before, after = (each.parameters for each in step.states[0])
    after["1.weight"] = before["1.weight"]
    assert "1.weight" in unchecked(step) and not unchecked(step, lost=True)
    for change in ({"dtype": "bfloat16"}, {"frozen": True}):  # whose rounding takes such a step away; which is not trained
        before["1.weight"] = after["1.weight"] = replace(after["1.weight"], **change)
        assert not unchecked(step)
    step.states = ()
    assert unchecked(step) and not list(of_update(step))


def test_a_state_of_no_adam_is_not_sampled_and_a_skipped_step_breaks_nothing():
    model = torch.nn.Linear(4, 4)
    taken = step_weights(model, Copier().outputs, hashed=False, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert not taken.record(WHO).optimizer
    step = recorded()
    step.states = ((step.states[0][0], replace(step.states[0][0])),)
    assert not list(of_update(step))


def test_an_optimizer_of_thousands_of_parameters_is_sampled_within_what_a_record_may_hold():
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2)) for _ in range(5000)])
    taken = step_weights(model, Copier().outputs, hashed=False, optimizer=torch.optim.Adam(model.parameters()))
    [state] = taken.record(WHO).optimizer
    assert 0 < len(state.sample) <= 48 * STATE_SAMPLED


@pytest.mark.parametrize("odd", ["meta", "freed", "sparse", "settings", "rate"])
def test_what_cannot_be_sampled_leaves_the_rest_sampled(odd):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    if odd == "meta":
        model.more = torch.nn.Parameter(torch.empty(3, device="meta"))
        optimizer = torch.optim.Adam(model.parameters())
    elif odd == "freed":
        model.weight.untyped_storage().resize_(0)
    elif odd == "sparse":
        model.more = torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    elif odd == "rate":
        optimizer.param_groups[0]["lr"] = float("nan")
    else:
        optimizer = SimpleNamespace(param_groups=[{"params": [model.bias], "betas": (0.9, 0.9)}], state={})
    record = step_weights(model, Copier().outputs, hashed=False, optimizer=optimizer).record(WHO)
    assert record.parameters["bias"].sample and bool(record.optimizer) == (odd not in ("settings", "rate"))
    assert all(bool(each.sample) != bool(each.why_not) for each in record.parameters.values())


def test_a_rank_samples_its_shard_without_the_other_ranks():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        model = torch.nn.Linear(4, 6)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with CommDebugMode() as spoken:
            record = step_weights(model, Copier().outputs, hashed=False).record(WHO)
        assert not spoken.get_total_counts()
        assert {name: each.part for name, each in record.parameters.items()} == {"weight": (12, 12), "bias": (3, 3)}
    finally:
        torch.distributed.destroy_process_group()
