"""The recipes of CONTRIBUTING.md can be followed: each names its files, and a test that exists."""

import re

import pytest
from docpages import names_of_tests
from roots import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text().partition("## Recipes")[2]
RECIPES = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", TEXT, re.MULTILINE | re.DOTALL))
MAKEFILE = (ROOT / "Makefile").read_text()


def named(text):
    """The files and folders of the project in it; NAME stands for what the author adds."""
    return [one for one in re.findall(r"`((?:actordbg|docs|migrations|tests)/[\w./-]*)[^`]*`", text) if "NAME" not in one]


def test_there_is_a_recipe_for_each_kind_of_change():
    kinds = [
        "setting",
        "command",
        "column",
        "backend",
        "law",
        "instrument",
        "parser",
        "layout",
        "report",
        "chart",
        "adapter",
        "trainer",
    ]
    assert [title.split()[1] for title in RECIPES] == kinds


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_has_steps_in_order_files_that_exist_and_ends_with_its_test(title):
    body, files = RECIPES[title], named(RECIPES[title])
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", body, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and 3 <= len(numbers) <= 6
    assert len(files) >= 3 and [one for one in files if not (ROOT / one).exists()] == []
    path, _, name = re.findall(r"\n\nTest: `(tests/[^`]+)`", body)[0].partition("::")
    tests = names_of_tests(ROOT / path)
    assert tests and name in ("", *tests)


@pytest.mark.parametrize("target", re.findall(r"^\| `make (\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
def test_every_command_that_is_listed_is_a_target(target):
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_continuous_integration_runs_the_command_that_the_page_names():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert re.findall(r"run: (.+)", workflow) == ["make test"]
