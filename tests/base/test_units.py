"""Sizes and times as options take them: one grammar for all of them."""

import pytest
from casefiles import cases_of

from actordbg.base.errors import UsageError
from actordbg.base.units import parse_seconds, parse_size

CASES = cases_of("units")


@pytest.mark.parametrize("text", ["", *CASES])
def test_a_size_or_a_time_is_read_and_anything_else_refused_with_the_name_of_the_option(text):
    for line in CASES[text].expected if text else ("no size", "no time"):
        what, _, value = line.partition(" ")
        if what == "no":
            with pytest.raises(UsageError, match=r"^--budget "):
                (parse_size if value == "size" else parse_seconds)("--budget", text)
        elif what == "bytes":
            assert parse_size("--budget", text) == int(value)
        else:
            assert parse_seconds("--budget", text) == pytest.approx(float(value))
