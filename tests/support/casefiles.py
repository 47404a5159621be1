"""Cases in text, in the manner of DuckDB's sqllogictest: what goes in, `----`, what comes out. `tests/cases/NAME.test` has them.

# a comment, before the first case
case a mask with a hole
mask 1 1 0 1
----
mask TRAINER
"""

import json
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "cases"


class Case(NamedTuple):
    """A case's lines before and after `----`."""

    given: list[str]
    expected: list[str]


def cases_of(name):
    """Returns the cases of a file by their names, in order."""
    _, *parts = ("\n" + (FOLDER / f"{name}.test").read_text(encoding="utf-8")).split("\ncase ")
    found = {}
    for part in parts:
        title, _, body = part.partition("\n")
        given, line, expected = f"{body}\n".partition("----\n")
        assert line and title not in found, f"{name}: {title!r} has no ----, or is there twice"
        found[title] = Case(given.splitlines(), expected.strip().splitlines())
    return found


def json_cases(name):
    """The arguments of a test for each case: the values of its lines, which are JSON."""
    import pytest  # processes of planted faults read cases without it

    return [pytest.param(*map(json.loads, case.given + case.expected), id=title) for title, case in cases_of(name).items()]
