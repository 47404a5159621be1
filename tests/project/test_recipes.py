"""The recipes of CONTRIBUTING.md can be followed: each names its files, and a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from roots import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Recipes")[2]
RECIPES: dict[str, str] = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", TEXT, re.MULTILINE | re.DOTALL))
STEP = re.compile(r"^(\d+)\. ", re.MULTILINE)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def named(text: str) -> list[str]:
    """The files and folders of the project in it; NAME stands for what the author adds."""
    return [one for one in re.findall(r"`((?:actordbg|docs|migrations|tests)/[\w./-]*)[^`]*`", text) if "NAME" not in one]


def functions(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def test_there_is_a_recipe_for_each_kind_of_change():
    assert [title.split()[1] for title in RECIPES] == ["setting", "column", "backend", "law", "parser", "report", "trainer"]


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_has_steps_in_order_and_ends_with_its_test(title: str):
    body = RECIPES[title]
    numbers = [int(number) for number in STEP.findall(body)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 3 <= len(numbers) <= 6
    assert re.search(r"\n\nTest: `tests/", body)


@pytest.mark.parametrize("title", RECIPES)
def test_the_files_of_a_recipe_exist(title: str):
    assert [one for one in named(RECIPES[title]) if not (ROOT / one).exists()] == []
    assert len(named(RECIPES[title])) >= 3


@pytest.mark.parametrize("title", RECIPES)
def test_the_test_of_a_recipe_exists(title: str):
    path, _, name = re.findall(r"^Test: `([^`]+)`", RECIPES[title], re.MULTILINE)[0].partition("::")
    assert functions(ROOT / path), path
    assert not name or name in functions(ROOT / path)


@pytest.mark.parametrize("target", re.findall(r"^\| `make (\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
def test_every_command_that_is_listed_is_a_target(target: str):
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_continuous_integration_runs_the_command_that_the_page_names():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert re.findall(r"run: (.+)", workflow) == ["make test"]


# ---- what the recipes say of the code ----


def test_a_setting_of_the_recipe_is_a_field_of_the_table():
    from actordbg.config.replay_config import SETTINGS, ReplayConfig

    assert list(SETTINGS) == list(ReplayConfig.__dataclass_fields__)
