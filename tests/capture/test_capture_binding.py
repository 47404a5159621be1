"""Binding: every signature that OpenRLHF had, by position and by name, and values that cannot be stored."""

import contextlib
import json

import pytest
import torch
from capturekit import SIGNATURES, ForkWithTypingDefault, ForkWithVisualInputs, SignatureD, SignatureH, ids, padded_mask

from actordbg.capture.facts import MAX_ARGUMENTS, MAX_STRING, Binder
from actordbg.capture.recorded_call import Layout
from actordbg.formats.dump_record import MAX_RECORD


def bind(actor, *args, **kwargs):
    return Binder(actor.forward).bind(args, kwargs)


@pytest.mark.parametrize("actor", SIGNATURES)
def test_position_and_name_give_the_same(actor):
    sequences, mask = ids(), padded_mask()
    counted = "num_actions" in actor.forward.__code__.co_varnames
    name, second = ("num_actions", 5) if counted else ("action_mask", torch.ones(2, 5, dtype=torch.bool))
    by_position = bind(actor, sequences, second, mask, True)
    by_name = bind(actor, **{"return_output": True, "attention_mask": mask, name: second, "sequences": sequences})
    assert by_position.tensors.keys() == by_name.tensors.keys() >= {"sequences", "attention_mask"}
    assert by_position.arguments == by_name.arguments and by_position.arguments["return_output"] is True
    assert by_position.extra == by_name.extra == {} and (not counted or by_position.arguments["num_actions"] == 5)
    assert Layout.of(list(by_position.tensors.values()), by_position.leading).shape == (2, 12)


def test_defaults_are_recorded_and_groups_apart():
    bound = bind(SignatureH, ids(), attention_mask=padded_mask())
    assert bound.arguments == {
        "action_mask": None, "return_output": False, "allgather_logits": False, "return_logprobs": False,
        "packed_seq_lens": None, "return_entropy": False,
    }  # fmt: skip
    assert bound.groups == {"ring_attn_group": None}


def test_lists_are_copied_numpy_scalars_are_plain_and_multimodal_tensors_go_by_their_own_name():
    numpy = pytest.importorskip("numpy")
    lengths, pixels = [3, 4], torch.rand(3, 4)
    bound = bind(SignatureD, ids(), lengths, return_output=numpy.bool_(True), packed_seq_lens=(5, 7))
    lengths.append(99)
    assert (bound.arguments["num_actions"], bound.arguments["packed_seq_lens"]) == ([3, 4], [5, 7])
    assert bound.arguments["return_output"] is True
    bound = bind(SignatureH, ids(), pixel_values=pixels, image_count=2)
    assert bound.tensors["pixel_values"] is pixels and bound.arguments["image_count"] == 2


def test_a_typing_object_as_default_is_left_to_the_replay():
    bound = bind(ForkWithTypingDefault, ids(), None, padded_mask(), torch.arange(12)[None])
    assert bound.extra == {} and "prompt_len" not in bound.arguments and "pos_ids" in bound.tensors
    assert bind(ForkWithTypingDefault, ids(), prompt_len=3).arguments["prompt_len"] == 3


class Secretive:
    def __repr__(self):
        raise AssertionError("never asked for its text")


@pytest.mark.parametrize(
    "value",
    [Secretive(), {"pixels": torch.zeros(1)}, float("nan"), {1: 2}, object, {"password": "hunter2\ud800"}, ["hunter2\ud800"], {"hunter2\ud800": 1}],
)  # fmt: skip
def test_of_what_cannot_be_stored_only_the_type_is_said(value):
    bound, kind = bind(ForkWithVisualInputs, ids(), visual_inputs=value), type(value)
    assert bound.extra == {"visual_inputs": f"an argument of type {kind.__module__}.{kind.__qualname__}"}
    assert "visual_inputs" not in bound.arguments


def entered():
    stack = contextlib.ExitStack()
    stack.callback(print)
    return stack


@pytest.mark.parametrize("value", [contextlib.ExitStack(), contextlib.AsyncExitStack(), contextlib.nullcontext()])
def test_a_context_that_does_nothing_is_recorded_by_its_type_and_leaves_a_call_replayable(value):
    bound = bind(ForkWithVisualInputs, ids(), visual_inputs=value)
    assert bound.extra == {} and "visual_inputs" not in bound.arguments
    assert bound.arguments["context.visual_inputs"].startswith(type(value).__name__)


@pytest.mark.parametrize("value", [entered(), contextlib.nullcontext(5), type("Own", (contextlib.ExitStack,), {})()])
def test_a_context_that_may_do_something_is_of_an_unknown_type(value):
    assert "visual_inputs" in bind(ForkWithVisualInputs, ids(), visual_inputs=value).extra


class NotLookedAt(dict):
    def __iter__(self):
        raise AssertionError("the training thread would wait for it")


def nested(depth):
    inner = []
    for _ in range(depth):
        inner = [inner]
    return inner


def endless():
    loop = []
    loop.append(loop)
    return loop


LARGE = {
    "many long strings": ["x" * MAX_STRING] * 1_000_000,
    "many numbers": list(range(20_000)),
    "strings that JSON makes longer": ["\N{GRINNING FACE}" * MAX_STRING] * 30,
    "a long key": {"k" * (MAX_STRING + 1): 1},
    "a long number": 10**5000,
    "a long string": "x" * 5000,
    "a container of too many": NotLookedAt(dict.fromkeys(range(20_000))),
    "a deep list": nested(100),
    "a list in itself": endless(),
}


@pytest.mark.parametrize("kind", LARGE)
def test_arguments_that_are_too_large_are_extra_with_the_reason(kind):
    bound = bind(SignatureH, ids(), images=LARGE[kind], return_output=True)
    assert type(LARGE[kind]).__qualname__ in bound.extra["images"] and "too large" in bound.extra["images"]
    assert "images" not in bound.arguments and bound.arguments["return_output"] is True
    assert bound.argument_bytes < 1000, "what was not stored costs nothing"


@pytest.mark.parametrize(
    "value",
    [list(range(10**12, 10**12 + 13_000)), ["\0\N{GRINNING FACE}" * 2000] * 28, [{"a": [1.5e-300, None, True]}] * 2000, nested(20)],
    ids=["numbers", "strings", "dicts", "deep"],
)  # fmt: skip
def test_what_an_argument_costs_is_no_less_than_its_json(value):
    bound = bind(SignatureH, ids(), images=value)
    assert bound.extra == {} and bound.arguments["images"] == value
    assert len(json.dumps(value)) <= bound.argument_bytes <= MAX_ARGUMENTS


def test_the_arguments_of_a_call_have_one_bound_together():
    some = ["x" * MAX_STRING] * 20
    bound = bind(SignatureH, ids(), **{f"a{i}": some for i in range(60)})
    stored = [name for name in bound.arguments if name.startswith("a") and name[1:].isdigit()]
    assert 0 < len(stored) < 60 and len(stored) + len(bound.extra) == 60
    assert len(json.dumps(bound.arguments)) < 1.01 * MAX_ARGUMENTS < MAX_RECORD / 2
    assert bind(SignatureH, ids()).argument_bytes < 1000, "one call's arguments are not charged to the next"


def test_tensors_that_no_file_can_hold_and_arguments_without_a_name_are_extra():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, 5))
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex64), fake):
        bound = bind(SignatureH, ids(), odd=tensor)
        assert "odd" in bound.extra and "odd" not in bound.tensors
    assert "FakeTensor" in bound.extra["odd"] and "rest" in bind(ForkWithVisualInputs, ids(), *[None] * 6, 1, 2).extra


def test_a_real_process_group_becomes_size_and_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        bound = bind(SignatureH, ids(), ring_attn_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert bound.groups == {"ring_attn_group": {"size": 1, "rank": 0}}
    assert bound.extra == {}


def test_keys_that_are_alike_without_secrets_all_stay(monkeypatch):
    secrets = {f"SECRET_{n}": f"planted-{n}-secret" for n in range(40)}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    given = {value: n for n, value in enumerate(secrets.values())} | {"[hidden]": "own", "[hidden] 3": "own", "other": {}}
    found = bind(SignatureH, ids(), given=given).arguments["given"]
    assert list(found.values()) == list(given.values()) and "planted" not in json.dumps(found)
    monkeypatch.setenv("SECRET_0", "another-one")  # the environment changed: what was hidden is not, what is now is
    assert bind(SignatureH, ids(), given="planted-0-secret another-one").arguments["given"] == "planted-0-secret [hidden]"
