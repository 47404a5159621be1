"""A test that failed is tried once more, alone: what passes then is named, what fails again fails the run, and many are not tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ONCE_MORE = Path(__file__).with_name("once_more.py")
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range({bad}))
def test_bad(number):
    assert False, "as always"

@pytest.mark.parametrize("number", range({unsteady}))
def test_unsteady(number):
    tried = pathlib.Path(f"tried-{{number}}")
    seen = tried.exists()
    tried.touch()
    assert seen, "for the first time"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "unsteady", "code", "words"),
    [
        (0, 2, 0, "UNSTEADY: test_these.py::test_unsteady[1] failed beside other tests and passed alone"),
        (1, 1, 1, "1 failed, 1 passed"),
        (0, 3, 1, ""),
    ],
)
def test_only_what_passes_alone_is_forgiven(tmp_path: Path, bad: int, unsteady: int, code: int, words: str) -> None:
    (tmp_path / "test_these.py").write_text(TESTS.format(bad=bad, unsteady=unsteady))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    first = run(tmp_path, "-m", "pytest", "-q")
    assert first.returncode == 1
    second = run(tmp_path, str(ONCE_MORE), "1")
    assert second.returncode == code and words in second.stdout
    assert ("UNSTEADY" in second.stdout) == (code == 0)


@pytest.mark.slow
def test_what_fails_by_chance_has_found_something(tmp_path: Path) -> None:
    """Other inputs would be drawn, and the finding would be gone."""
    folder = tmp_path / "tests" / "fuzz"
    folder.mkdir(parents=True)
    (folder / "test_these.py").write_text(TESTS.format(bad=0, unsteady=1))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    assert run(tmp_path, "-m", "pytest", "-q").returncode == 1
    again = run(tmp_path, str(ONCE_MORE), "1")
    assert (again.returncode, again.stdout) == (1, "")


def test_what_is_no_failed_test_is_not_tried_again(tmp_path: Path) -> None:
    """Interrupted, a wrong option, nothing collected: pytest's code stays."""
    for code in (0, 2, 3, 4, 5):
        again = run(tmp_path, str(ONCE_MORE), str(code))
        assert (again.returncode, again.stdout, again.stderr) == (code, "", "")


@pytest.mark.parametrize("left", [None, "", "{"])
def test_without_a_list_of_what_failed_it_says_so(tmp_path: Path, left: str | None) -> None:
    """A run with `-p no:cacheprovider` leaves none, a full disk an empty one."""
    if left is not None:
        listed = tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
        listed.parent.mkdir(parents=True)
        listed.write_text(left)
    again = run(tmp_path, str(ONCE_MORE), "1")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("nothing can be tried again: pytest left no list of the tests that failed")
    assert "Traceback" not in again.stderr


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
