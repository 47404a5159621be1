"""Sizes as options take them: one grammar for all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actordbg.base.errors import UsageError
from actordbg.base.units import parse_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7), ("7B", 7), ("10GB", 10**10), ("10 gib", 10 * 2**30), ("10G", 10**10), ("10Gi", 10 * 2**30),
        ("1.5k", 1500), ("2TiB", 2 * 2**40), (" 500 MB ", 500 * 10**6), ("0", 0), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes_are_read_in_both_kinds_of_units(text: str, size: int):
    assert parse_size("--keep", text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("2s", 2.0), ("500ms", 0.5), (" 1.5 ", 1.5), ("2m", 120.0), ("2 min", 120.0), ("30us", 3e-5), ("1H", 3600.0)]
)  # fmt: skip
def test_times_are_read(text: str, seconds: float):
    assert parse_seconds("--budget", text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_size, ["", "B", "GB", "-1", "1e3", "nan", "1.GB", "10 GBB", "10iB", "1 0", "9" * 400, "99999999TB"]),
        (parse_seconds, ["", "s", "0", "-1s", "1e3", "nan", "2 GB", "9" * 400]),
    ],
)
def test_anything_else_is_refused_with_the_name_of_the_option(parse: Callable[[str, str], float], texts: list[str]):
    for text in texts:
        with pytest.raises(UsageError, match=r"^--budget "):
            parse("--budget", text)
