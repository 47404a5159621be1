"""Files that the user names: what no file may take the place of."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from actordbg.base.errors import EnvironmentProblem
from actordbg.cli.page_file import check_page, write_file


@pytest.mark.parametrize("kind", ["a FIFO", "a link to a device", "a name in /dev"])
def test_no_page_takes_the_place_of_a_device_or_pipe(tmp_path: Path, kind: str) -> None:
    """For root a new file takes any place: `check --html /dev/null` left a machine without /dev/null."""
    path = tmp_path / "page.html" if "/dev" not in kind else Path("/dev/actordbg-page.html")
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a link to a device":
        path.symlink_to("/dev/zero")
    for write in (check_page, lambda path: write_file(path, "text")):
        with pytest.raises(EnvironmentProblem, match="take the place of a device or pipe"):
            write(path)
    assert kind != "a FIFO" or stat.S_ISFIFO(path.stat().st_mode)
    assert path.exists() is ("/dev" not in kind)


def test_a_page_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    for text in ("old", "new"):
        check_page(tmp_path / "page.html")
        write_file(tmp_path / "page.html", text)
        assert (tmp_path / "page.html").read_text() == text
