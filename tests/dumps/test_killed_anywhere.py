"""Commands that change a store are killed at their system calls, or have a failing disk there: nothing is lost, the next run finishes.

`make kills` takes every call, and a long time. Here each `EVERY`th is taken, beginning with the `OFFSET`th. `python tests/support/killed_commands.py COMMAND` is one command, with all that is wrong.
"""

import json
import sys

import pytest
from killed_commands import COMMANDS
from roots import SUPPORT, environment, run_program
from syscall_killer import why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "this machine can")]

EVERY, OFFSET = 2400, 61


@pytest.fixture(scope="module")
def reports(forked_workers):
    """What became of each command; one process makes all runs, since it is forked for each."""
    words = [sys.executable, SUPPORT / "killed_commands.py", "all", "--every", str(EVERY), "--offset", str(OFFSET)]
    done = run_program(words, env=environment())
    assert done.returncode in (0, 1), done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {report["command"]: report for report in found}


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_any_system_call_nothing_is_lost_and_the_next_run_finishes(reports, command):
    report = reports[command]
    assert report["wrong"] == []
    assert report["calls"] > 3 and sum(report["runs"].values()) >= report["calls"] // EVERY
    print({name: report[name] for name in ("calls", "runs", "states")})
