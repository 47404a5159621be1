"""control.json: round trip, refusals, and how a running process notices changes."""

import json
import os

import pytest
from casefiles import cases_of

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.capture import control as module
from actordbg.capture.control import Control, ControlWatcher
from actordbg.capture.switch_file import control_text, read_control, write_control

SINCE = "2026-11-20T12:00:00.000000Z"


@pytest.mark.parametrize(
    "control",
    [
        Control(True, "run-1", SINCE),
        Control(False, "r", SINCE, 7, 10, 5, 10**12, (0, 3), 1, 0, True),
        Control(True, "r", SINCE, ranks=(), calls=("forward", "loss")),
        Control(True, "r", SINCE, every=0, triggers=("nan", "slow:3x"), before=4, keep_bytes=10**10, ring=0, with_rng=True),
    ],
)
def test_what_is_written_is_read(store, control):
    write_control(store, control)
    assert read_control(store) == control
    assert os.stat(store.control_path).st_mode & 0o777 == 0o600


def text(**changes):
    return json.dumps({**json.loads(control_text(Control(True, "r", SINCE))), **changes})


NO_SWITCHES = [
    "",
    "[]",
    "{}",
    "not json",
    "[" * 100_000,
    *(text(**json.loads(fields)) for fields in cases_of("corrupt_switches")),
]


@pytest.mark.parametrize("wrong", NO_SWITCHES)
def test_what_is_not_a_control_file_is_refused(wrong):
    with pytest.raises(StoreProblem):
        Control.from_json(wrong)


def test_another_format_is_refused_with_the_remedy():
    with pytest.raises(NewerFormat) as caught:
        Control.from_json(text(format=3))
    assert "version" in caught.value.hint


def test_only_changes_are_parsed_and_an_unchanged_switch_stays_the_same_object(store, monkeypatch):
    write_control(store, Control(True, "r", SINCE))
    parses, parse = [], Control.from_json
    monkeypatch.setattr(module.Control, "from_json", lambda text: (parses.append(1), parse(text))[1])
    watcher = ControlWatcher(store)
    assert len({id(watcher.poll()) for _ in range(10)}) == len(parses) == 1


def test_a_named_job_follows_its_own_switch_where_there_is_one(store):
    own, everybody = ControlWatcher(store, job="night"), ControlWatcher(store)
    assert own.poll() is everybody.poll() is None
    write_control(store, Control(True, "r", SINCE))
    assert own.poll() == everybody.poll() == Control(True, "r", SINCE)
    write_control(store, Control(True, "night", SINCE, every=7), "night")
    assert own.poll() == Control(True, "night", SINCE, every=7)
    write_control(store, Control(False, "night", SINCE, 2), "night")
    assert own.poll() is None and everybody.poll() is not None


def test_a_switch_that_cannot_be_read_means_off_with_one_complaint_until_it_is_mended(store):
    said = []
    watcher = ControlWatcher(store, said.append)

    def newer_store():
        write_control(store, Control(True, "r", SINCE))
        store.format_path.write_text('{"format": 99}')

    spoilt = {
        "damaged": lambda: store.control_path.write_text("{"),
        "newer": lambda: store.control_path.write_text(text(format=99)),
        "a folder": lambda: (store.control_path.unlink(), store.control_path.mkdir()),
        "of a newer store": lambda: (store.control_path.rmdir(), newer_store()),
    }
    for count, spoil in enumerate(spoilt.values(), 1):
        if count < 4:
            write_control(store, Control(True, "r", SINCE, count))
            assert watcher.poll() is not None
        spoil()
        assert [watcher.poll() for _ in range(3)] == [None] * 3 and len(said) == count
