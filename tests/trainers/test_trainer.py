"""The seam to the trainer: each thing that a trainer provides is asked for somewhere, and little else knows its name."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest
from roots import ROOT

from actordbg.trainers.find_adapter import BUILT_IN
from actordbg.trainers.openrlhf.adapter import OpenRlhf
from actordbg.trainers.rows_actor import ROWS, RowsActors
from actordbg.trainers.trainer import TRAINER, Actors, Trainer

PRODUCT = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "actordbg").rglob("*.py")}


def members(protocol: type) -> set[str]:
    return {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}


def test_each_member_of_the_protocols_has_a_caller_outside_of_the_trainers_room() -> None:
    asking = "\n".join(text for name, text in PRODUCT.items() if not name.startswith("actordbg/trainers/"))
    assert {name for name in members(Trainer) if f"TRAINER.{name}" not in asking} == set()
    assert {name for name in members(Actors) if f"ctors.{name}" not in asking and f"actors_of(choices).{name}" not in asking} == {
        "name"  # TRAINER.name is asked for
    }


def test_the_trainer_of_this_installation_has_every_member_and_no_other() -> None:
    assert isinstance(TRAINER, OpenRlhf)
    assert {name for name in vars(OpenRlhf) if not name.startswith("_")} == members(Trainer) | members(Actors)
    assert {name for name in vars(RowsActors) if not name.startswith("_")} == members(Actors) and ROWS.name == "rows"


@pytest.mark.parametrize("name", [name for name, one in vars(OpenRlhf).items() if "." in getattr(one, "__qualname__", "")])
def test_a_function_that_is_a_member_takes_what_the_protocol_says(name: str) -> None:
    module, function = vars(OpenRlhf)[name].__qualname__.split(".")
    if module != "OpenRlhf":
        given = inspect.signature(getattr(import_module(f"actordbg.trainers.openrlhf.{module}"), function))
        promised = inspect.signature(getattr(Trainer, name))
        assert [*given.parameters] == [*promised.parameters][1:]


def test_other_trainers_are_named_in_their_room_alone() -> None:
    names = {*BUILT_IN} - {"plain"} | {"slime", "areal", "nemo_rl", "prime_rl"}
    outside = {name: text for name, text in PRODUCT.items() if not name.startswith("actordbg/trainers/")}
    named = re.compile(rf"\b({'|'.join(names)})\b", re.IGNORECASE)
    assert [name for name, text in outside.items() if named.search(text)] == []
    for path in (ROOT / "actordbg" / "trainers").glob("*_adapter.py"):
        assert path.name == "find_adapter.py" or len(path.read_text().splitlines()) <= 60, path


def test_at_most_25_files_mention_the_trainer_by_name() -> None:
    mentioning = sorted(name for name, text in PRODUCT.items() if TRAINER.package in text.lower())
    assert len(mentioning) <= 25, mentioning
