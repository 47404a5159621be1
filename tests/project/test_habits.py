"""The habits of the house: tests measure no time, commits pass the checks that CI runs, and tests lie where a reader looks."""

import ast
import re
from pathlib import Path

import figures
import pytest
import same
import yaml
from casefiles import cases_of
from roots import ROOT

TESTS = ROOT / "tests"
ELAPSED = r"\b(?:perf_counter|monotonic|process_time|time\.time)(?:_ns)?\(\) - \w"
"""A difference with a clock in it: `time.monotonic() - start`."""


# ---- no test asserts a duration ----


def durations_asserted(source):
    """The `assert`s that compare elapsed time, or a name that holds it, also in programs that a test holds as text.

    A deadline is not a duration: `assert time.monotonic() < deadline` in a loop that waits says when to give up.
    """
    held = re.findall(rf"^ *(?:(\w+) = |(\w+)\.append\().*{ELAPSED}", source, re.MULTILINE)
    names = "|".join(name for names in held for name in names if name)
    compared = rf"assert\b.*{ELAPSED}" + (
        rf"|assert\b.*\b(?:{names})\b\)* *[<>]|assert\b.*[<>]=? *\w*\(?(?:{names})\b" if names else ""
    )
    return [line.strip() for line in source.splitlines() if re.search(compared, line)]


def test_no_test_asserts_a_duration():
    """A duration says how busy the machine is. What is fast is a row of a benchmark; what is cut off is counted in steps."""
    tests = sorted(set(TESTS.rglob("*.py")) - {Path(__file__)})
    found = {path.name: lines for path in tests if (lines := durations_asserted(path.read_text()))}
    assert found == {}


# ---- what runs before a commit and after a push ----


def makefile_rules():
    """Prerequisites and recipe of every target."""
    text = (ROOT / "Makefile").read_text()
    found = re.findall(r"^([\w.$()/-]+):(?!=)([^\n]*)\n((?:\t[^\n]*\n)*)", text, re.MULTILINE)
    return {target: (needs.split(), recipe) for target, needs, recipe in found}


def test_check_is_test_without_what_is_slow():
    rules = makefile_rules()
    assert (rules["check"][0], rules["test"][0]) == (["static", "fast"], ["static", "pytest"])
    assert rules["static"][1].split()[-5:] == ["lint", "types", "imports", "site", "bytecode"]
    all_of_them, once_more = rules["pytest"][1].strip().splitlines()[-1].strip().split(" || ")
    assert rules["fast"][1].strip() == all_of_them + ' -m "not slow"'
    assert once_more == "$(BIN)/python tests/project/once_more.py $$?"


def test_every_hook_of_a_commit_runs_out_of_the_environment_of_the_checkout():
    """Nothing is fetched when somebody commits, and the versions are those of `make test`."""
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    programs = {hook["entry"].split()[0] for hook in local["hooks"]}
    assert programs == {f".venv/bin/{name}" for name in ("ruff", "mypy", "lint-imports")}
    recipes = "".join(recipe for _, recipe in makefile_rules().values())
    assert all(f"$(BIN)/{Path(program).name}" in recipes for program in programs)


# ---- where tests lie ----


def test_every_folder_of_tests_is_a_room_of_the_product():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders - {"project", "support", "fuzz"} == {*figures.rooms(ROOT)}


# ---- the figures ----


def weight_limits():
    """Returns the last row of the table in docs/decisions/weight.md, by the heading of its columns."""
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in (ROOT / "docs/decisions/weight.md").read_text().splitlines() if line.startswith("|")
    ]  # fmt: skip
    return {
        name: int(cell.replace(",", "")) for name, cell in zip(rows[0], rows[-1], strict=True) if cell.replace(",", "").isdigit()
    }


def test_the_house_weighs_no_more_than_the_decisions_allow():
    """The weight may fall, or rise with a row in docs/decisions/weight.md that says what it buys. A limit 2 % too high is lowered."""
    product, tests = figures.weigh(figures.product(ROOT)), figures.weigh(figures.tests(ROOT))
    actual = {
        "product tokens": product.tokens, "test tokens": tests.tokens, "files": product.files, "large files": product.large_files,
        "rooms": len(figures.rooms(ROOT)), "floors": figures.floors(ROOT), "words": figures.markdown_words(ROOT),
    }  # fmt: skip
    limits = weight_limits()
    assert limits.keys() == actual.keys()
    assert {name: count for name, count in actual.items() if count > limits[name]} == {}, (
        "lighten it, or say in docs/decisions/weight.md what it buys"
    )
    assert {name: count for name, count in actual.items() if count < 0.98 * limits[name] - 1} == {}, "lower the limit"


def test_no_control_flow_hides_in_expressions():
    hidden = {path.name: figures.dense(path.read_text()) for path in figures.product(ROOT)}
    assert {name: places for name, places in hidden.items() if any(places.values())} == {}
    nested = figures.depths(figures.product(ROOT))
    assert nested[len(nested) * 9 // 10] <= 5, "give the steps of the deepest expressions names"


def test_no_pattern_needs_python_3_11():
    """Possessive repeats and atomic groups came with it; `requires-python` is 3.10."""
    for path in figures.product(ROOT):
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and "compile" in ast.dump(node.func)
        ]
        given = [node.value for call in calls for node in ast.walk(call) if isinstance(node, ast.Constant)]
        assert not [text for text in given if re.search(r"(?<!\\)[+*?}]\+|\(\?>", str(text))], path


def dense(source):
    return "\n".join(" ".join([name, *map(str, sorted(lines))]) for name, lines in figures.dense(source).items() if lines)


SCANS = {"durations": lambda source: len(durations_asserted(source)), "weight": figures.code_tokens, "dense": dense}


@pytest.mark.parametrize("case", [case for case in cases_of("scans").values() if case.given[0] in SCANS], ids=str)
def test_a_scan_sees_what_it_is_for(case):
    assert str(SCANS[case.given[0]]("\n".join(case.given[1:]))) == "\n".join(case.expected)


def test_same_compares_what_does_not_change_from_run_to_run():
    before = {"ls: rows[0].id": "1", "ls: seconds": "0.1", "ls: gone": "x"}
    again, now = before | {"ls: seconds": "0.2"}, {"ls: rows[0].id": "2", "ls: seconds": "0.3", "ls: added": "y"}
    assert same.differences(before, again, now) == {
        "ls: rows[0].id": ("1", "2"), "ls: gone": ("x", "-"), "ls: added": ("-", "y")
    }  # fmt: skip
