"""A test that failed is tried once more, alone: what passes then is named, what fails again fails the run, and many are not tried."""

import os
import sys
from pathlib import Path

import pytest
from roots import run_program

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
    "bad, unsteady, code, words",
    [
        (0, 2, 0, "UNSTEADY: test_these.py::test_unsteady[1] failed beside other tests and passed alone"),
        (1, 1, 1, "1 failed, 1 passed"),
        (0, 3, 1, ""),
    ],
)
def test_only_what_passes_alone_is_forgiven(tmp_path, bad, unsteady, code, words):
    (tmp_path / "test_these.py").write_text(TESTS.format(bad=bad, unsteady=unsteady))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    first = run(tmp_path, "-m", "pytest", "-q")
    assert first.returncode == 1
    second = run(tmp_path, str(ONCE_MORE), "1")
    assert second.returncode == code and words in second.stdout
    assert ("UNSTEADY" in second.stdout) == (code == 0)


@pytest.mark.parametrize("left", ["{", '{"tests/fuzz/test_these.py::test_unsteady[0]": true}'])
@pytest.mark.parametrize("code", [1, 2])
def test_what_cannot_be_or_need_not_be_tried_again_keeps_its_code(tmp_path, left, code):
    """Interrupted; a list that a full disk cut off; and what fails by chance: other inputs would be drawn, the finding be gone."""
    listed = tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
    listed.parent.mkdir(parents=True)
    listed.write_text(left)
    again = run(tmp_path, str(ONCE_MORE), str(code))
    assert (again.returncode, again.stdout) == (code, "")
    told = "nothing can be tried again: pytest left no list of the tests that failed"
    assert again.stderr.startswith(told) is (code == 1 and left == "{") and "Traceback" not in again.stderr


def run(folder, *words):
    own = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run_program([sys.executable, *words], cwd=folder, env=own)
