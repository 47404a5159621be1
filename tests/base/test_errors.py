"""Errors of workers are the same errors in the process that started them."""

import pytest

from actordbg.actor.signatures import signature_of
from actordbg.base.errors import LaunchProblem, Unsupported, error_named
from actordbg.replay.group import as_error


def test_an_error_keeps_its_class():
    room = "actordbg.base.errors"
    found = error_named(f"{room}.Unsupported", "cannot", "another way")
    assert isinstance(found, Unsupported)
    assert (found.message, found.hint) == ("cannot", "another way")
    assert {type(found).__module__, LaunchProblem.__module__} == {room}  # as journals name them
    broken = {"error_class": f"{room}.Unsupported", "error": "cannot", "hint": "another way"}
    assert type(as_error(broken, log="")) is Unsupported
    assert signature_of(f"{room}.CorruptDump", "cut off") == "damaged-dump"
    assert signature_of(f"{room}.StoreProblem", "no room") == "StoreProblem: no room"


@pytest.mark.parametrize(
    "name", ["ValueError", "torch.OutOfMemoryError", "other.errors.Unsupported", "actordbg.base.errors.ClassVar"]
)
def test_what_is_none_of_the_tree_is_a_launch_problem_with_its_class(name):
    assert error_named(name, "broken") is None
    found = as_error({"error_class": name, "error": "broken", "hint": ""}, log="the end")
    assert isinstance(found, LaunchProblem) and name in found.message


def test_a_known_failure_of_building_says_the_way_out_and_no_log():
    broken = {"error_class": "ValueError", "error": "M does not support an attention implementation through sdpa", "hint": ""}
    found = as_error(broken, log="Traceback")
    assert found.hint == "try: --attn eager" and not found.message.endswith("Traceback")
