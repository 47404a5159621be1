"""The habits of the house: tests measure no time, commits pass the checks that CI runs, and tests lie where a reader looks."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from roots import ROOT, SUPPORT

TESTS = ROOT / "tests"
CLOCK = r"\b(perf_counter|monotonic|process_time|time\.time)(_ns)?\("
CLOCKS = {
    "time",
    "perf_counter",
    "monotonic",
    "process_time",
    "thread_time",
    "time_ns",
    "perf_counter_ns",
    "monotonic_ns",
}


# ---- no test asserts a duration ----


def is_clock(node: ast.AST) -> bool:
    """Is this a call of a clock: `time.monotonic()`, `perf_counter()`?"""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr in CLOCKS and isinstance(function.value, ast.Name) and function.value.id == "time"
    return isinstance(function, ast.Name) and function.id in CLOCKS - {"time"}


def names_of(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def measured(tree: ast.AST) -> set[str]:
    """Names that hold elapsed time: assigned, or appended to, a difference with a clock in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and has_elapsed(node.value):
            found |= {name for target in node.targets for name in names_of(target)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            found |= names_of(node.func.value) if any(map(has_elapsed, node.args)) else set()
    return found


def has_elapsed(node: ast.AST) -> bool:
    """Is there a difference with a clock in it: `time.monotonic() - start`?"""
    differences = (one for one in ast.walk(node) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub))
    return any(is_clock(part) for one in differences for part in ast.walk(one))


def durations_asserted(source: str) -> list[int]:
    """Lines of the `assert`s that compare elapsed time, or a name that holds it.

    A deadline is no duration: `assert time.monotonic() < deadline` in a loop that waits says when to give up.
    """
    tree = ast.parse(source)
    elapsed = measured(tree)
    compared = (
        (node.lineno, one) for node in ast.walk(tree) if isinstance(node, ast.Assert)
        for one in ast.walk(node.test) if isinstance(one, ast.Compare)
    )  # fmt: skip
    return sorted({line for line, one in compared if has_elapsed(one) or names_of(one) & elapsed})


def programs_in(source: str) -> list[str]:
    """Python that a file holds as text for processes that its tests start; what `format` puts in is a number here."""
    texts = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [re.sub(r"\{\w+!r\}", "0", text) for text in texts if "\n" in text and re.search(CLOCK, text)]


def durations_in(path: Path) -> list[str]:
    """Where a file's tests, or the programs that they start, assert a duration."""
    source, found = path.read_text(encoding="utf-8"), []
    for text in [source, *programs_in(source)] if re.search(CLOCK, source) else []:
        with contextlib.suppress(SyntaxError):  # a text that is no program
            found += [f"{path.relative_to(TESTS)}: {text.splitlines()[line - 1].strip()}" for line in durations_asserted(text)]
    return found


def test_no_test_asserts_a_duration():
    """A duration says how busy the machine is. What is fast is a row of a benchmark; what is cut off is counted in steps."""
    tests = sorted(set(TESTS.rglob("*.py")) - {Path(__file__)})
    assert [one for path in tests for one in durations_in(path)] == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("start = time.monotonic()\nrun()\nassert time.monotonic() - start < 2", [3]),
        ("took = perf_counter() - start\nassert took < 1 and ok", [2]),
        ("took = []\ntook.append(time.time() - start)\nassert max(took) < 1", [3]),
        ("while not ready():\n    assert time.monotonic() < deadline", []),
        ("os.utime(path, (time.time() - 60,) * 2)\nassert path.exists()", []),
        ("assert result.forward_s > 0", []),
    ],
)
def test_the_scan_knows_a_duration_from_a_deadline(source: str, lines: list[int]):
    assert durations_asserted(source) == lines


# ---- what runs before a commit and after a push ----


def test_ci_runs_what_a_contributor_runs():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == ["make test"]


def makefile_rules() -> dict[str, tuple[list[str], str]]:
    """Prerequisites and recipe of every target."""
    text = (ROOT / "Makefile").read_text()
    found = re.findall(r"^([\w.$()/-]+):(?!=)([^\n]*)\n((?:\t[^\n]*\n)*)", text, re.MULTILINE)
    return {target: (needs.split(), recipe) for target, needs, recipe in found}


def test_check_is_test_without_what_is_slow():
    rules = makefile_rules()
    assert rules["check"][0] == ["lint", "types", "imports", "site", "fast"]
    assert rules["test"][0] == ["lint", "types", "imports", "site", "pytest"]
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


def rooms() -> set[str]:
    return {path.parent.name for path in (ROOT / "actordbg").glob("*/__init__.py")}


def test_every_folder_of_tests_is_a_room_of_the_product():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders - {"project", "support", "fuzz"} <= rooms()
    assert rooms() <= folders


def test_tests_and_their_helpers_do_not_mix():
    outside = [path for path in TESTS.rglob("*.py") if path.parent != SUPPORT]
    tests_only = {path for path in outside if path.name.startswith("test_")}
    targets = {TESTS / "fuzz" / name for name in ("run.py", "fuzzing.py")} | set((TESTS / "fuzz").glob("of_*.py"))
    programs = {TESTS / "project" / name for name in ("figures.py", "weight.py", "same.py", "compat.py", "once_more.py")}
    assert set(outside) - tests_only == {TESTS / "conftest.py", TESTS / "replay" / "conftest.py"} | programs | targets
    assert [path.name for path in SUPPORT.glob("test_*.py")] == []


def test_every_helper_says_what_it_is_for():
    for path in SUPPORT.glob("*.py"):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path.name
        silent = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not ast.get_docstring(node)]
        assert silent == [], f"{path.name}: a fake says which property it guarantees"


# ---- the figures ----


def weight_limits() -> dict[str, int]:
    """Returns the last row of the table in docs/decisions/weight.md, by the heading of its columns."""
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in (ROOT / "docs/decisions/weight.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]  # fmt: skip
    return {
        name: int(cell.replace(",", "")) for name, cell in zip(rows[0], rows[-1], strict=True) if cell.replace(",", "").isdigit()
    }


def test_the_house_weighs_no_more_than_the_decisions_allow():
    """The weight may fall, or rise with a row in docs/decisions/weight.md that says what it buys. A limit 2 % too high is lowered."""
    import weight

    product, tests = weight.weigh(weight.product(ROOT)), weight.weigh(weight.tests(ROOT))
    actual = {
        "product tokens": product.tokens, "test tokens": tests.tokens, "files": product.files, "large files": product.large_files,
        "rooms": len(weight.rooms(ROOT)), "floors": weight.floors(ROOT), "words": weight.markdown_words(ROOT),
    }  # fmt: skip
    limits = weight_limits()
    assert limits.keys() == actual.keys()
    assert {name: count for name, count in actual.items() if count > limits[name]} == {}, "lighten it, or say what it buys"
    assert {name: count for name, count in actual.items() if count < 0.98 * limits[name] - 1} == {}, "lower the limit"


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ('"""A module."""\n# a comment\nx = 1\n', 3),
        ('def f():\n    """Returns."""\n    return "text"\n', 7),
        ("x = (\n    1,\n)\n", 6),
    ],
)
def test_a_docstring_a_comment_and_layout_weigh_nothing(source: str, tokens: int):
    import weight

    assert weight.code_tokens(source) == tokens


def test_same_compares_what_does_not_change_from_run_to_run():
    import same

    before = {"ls: rows[0].id": "1", "ls: seconds": "0.1", "ls: gone": "x"}
    again, now = before | {"ls: seconds": "0.2"}, {"ls: rows[0].id": "2", "ls: seconds": "0.3", "ls: added": "y"}
    assert same.differences(before, again, now) == {
        "ls: rows[0].id": ("1", "2"), "ls: gone": ("x", "-"), "ls: added": ("-", "y")
    }  # fmt: skip
    accepted = same.accepted_lines("# why\n\nls: rows[0].*  # ids are longer\n")
    assert same.excused("ls: rows[0].id", accepted) and not same.excused("ls: rows[1].id", accepted)


def test_the_figures_of_the_house_can_be_printed(tmp_path: Path):
    sys.path.insert(0, str(TESTS / "project"))
    try:
        import figures
    finally:
        sys.path.pop(0)
    assert figures.settings(ROOT) > 10
    modules, every, lines = figures.trainer(ROOT)
    assert 0 < modules <= every and lines > 1000
    done = subprocess.run([sys.executable, figures.__file__, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "is no checkout" in done.stderr
