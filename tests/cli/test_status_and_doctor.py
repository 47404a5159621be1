"""`status` says how the store stands and what each line asks for; `doctor` begins with what is wrong."""

import pytest
from casefiles import json_cases
from commandline import in_json, invoke
from comparecases import write_replay
from replaycases import publish

from actordbg.base.errors import EnvironmentProblem
from actordbg.cli.dump_status_work import ProcessRow, ranks_apart
from actordbg.doctor import checkup
from actordbg.doctor.python_environment import bad, ok, warn
from actordbg.install import patch_target


def no_trainer(*given):
    raise EnvironmentProblem("there is no OpenRLHF here", hint="name its interpreter with --python")


def test_status_is_about_the_store_also_where_no_trainer_is(store, monkeypatch):
    monkeypatch.setattr(patch_target, "find_target", no_trainer)
    assert "next: actordbg dump enable" in invoke(store, "status").stderr
    inputs = publish(store, 3)
    assert "next: actordbg check" in invoke(store, "status").stderr
    write_replay(store, "r-01", inputs[:2], result=lambda index: {"status": "failed"} if index else {}, status="interrupted")
    said = invoke(store, "status").stdout
    for line in (
        "no patch found: there is no OpenRLHF here", "1 of 2 passed, interrupted: `actordbg replay --resume r-01`",
        "bad         1 dump whose last verdict is WRONG or FAILED: `actordbg replay --lf`", "not yet     1 dump never replayed",
    ):  # fmt: skip
        assert line in said, said
    held = in_json(store, "status")
    assert (held["state"], held["holds"]["dumps"], held["holds"]["bad"], held["holds"]["last"]) == (None, 3, 1, "r-01")
    with pytest.raises(EnvironmentProblem):
        invoke(store, "status --python /nope")


@pytest.mark.parametrize("calls, flying, told", json_cases("calls_apart"))
def test_ranks_that_wait_for_a_call_that_others_do_not_make(calls, flying, told):
    rows = [
        ProcessRow(
            "r", rank, "policy", "h", rank, "a", "on", count, count, 0, 0, 0, 0, 0, 1.0, "", None, {}, {}, in_flight_s=since
        )
        for rank, (count, since) in enumerate(zip(calls, flying, strict=True))
    ]
    assert list(ranks_apart(rows)) == ([f"unequal numbers of calls in {told}"] if told else [])


def test_doctor_begins_with_what_is_wrong_and_has_one_command_for_what_is_missing(store, monkeypatch):
    def checks(*given, **more):
        yield ok("python", "3.11")
        yield warn("torch", "not installed; replay needs it", "python -m pip install torch==2.13.0")
        yield bad("compiler", "none found", "install g++")
        yield warn(
            "openrlhf", "not installed; replay needs it", "python -m pip install --no-deps openrlhf==0.11.2 (its flash-attn)"
        )
        yield warn("peft", "not installed; replay needs it", "python -m pip install peft==0.21.2")
        yield bad("zstandard", "not installed; capture needs it", "python -m pip install zstandard")

    monkeypatch.setattr(checkup, "examine", checks)
    done = invoke(store, "doctor")
    lines = done.stdout.splitlines()
    assert lines[0] == "2 bad, 3 warn, 1 ok" and done.exit_code == 4
    assert lines[1].startswith("bad   compiler") and lines[-1].startswith("ok    python")
    assert "  python -m pip install torch==2.13.0 peft==0.21.2 zstandard" in lines
