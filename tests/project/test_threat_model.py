"""The threat model names a test in each row, and each test that it names is there."""

import re

import pytest
from docpages import names_of_tests
from roots import ROOT

PAGE = (ROOT / "docs" / "what-is-trusted.md").read_text()
TABLE = re.findall(r"^\| (?!What \|)(.+) \|$", PAGE, re.MULTILINE)
ROWS = {cells[0]: cells for cells in (row.split(" | ") for row in TABLE)}
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_the_table_is_found_and_has_what_people_ask_for():
    assert len(ROWS) == len(TABLE) > 20
    for word in (
        "actordbg.toml",
        "model's folder",
        "pickles",
        "spec.json",
        "catalog.db",
        "control.json",
        "rings",
        "hook",
        "may not write",
        "store fsck --repair",
        "kill at any system call",
    ):
        assert any(word in row for row in ROWS), word


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_its_tests_and_they_are_there(row):
    cells = ROWS[row]
    named = NAMED.findall(cells[-1])
    assert len(cells) == 5 and named, cells
    for file, test in named:
        assert test in names_of_tests(ROOT / file), f"{file} has no {test}"
    assert re.sub(NAMED, "", cells[-1]).strip(" ,") == ""
