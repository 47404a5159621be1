"""control.json: round trip, refusals, and how a running process notices changes."""

from __future__ import annotations

import json
import os

import pytest

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.capture import control as module
from actordbg.capture.control import Control, ControlWatcher, control_text, read_control, write_control
from actordbg.store.layout import Store

SINCE = "2026-11-20T12:00:00.000000Z"


@pytest.mark.parametrize(
    "control",
    [
        Control(True, "run-1", SINCE),
        Control(False, "r", SINCE, 7, 10, 5, 10**12, (0, 3), 1, 4096, 0, 19, True),
        Control(True, "r", SINCE, ranks=()),
        Control(True, "r", SINCE, every=0, triggers=("nan", "slow:3x"), before=4, keep_bytes=10**10, ring=0, with_rng=True),
    ],
)
def test_what_is_written_is_read(store: Store, control: Control):
    write_control(store, control)
    assert read_control(store) == control
    assert os.stat(store.control_path).st_mode & 0o777 == 0o600


def text(**changes: object) -> str:
    return json.dumps({**json.loads(control_text(Control(True, "r", SINCE))), **changes})


@pytest.mark.parametrize(
    "wrong",
    [
        "", "[]", "{}", "not json", "[" * 100_000, text(every=-1), text(every="2"), text(every=True), text(max_dumps=-1),
        text(ranks=[-1]), text(ranks="0"), text(run="../x"), text(run=None), text(level=23), text(enabled="yes"),
        text(surprise=1), text(free_floor_bytes=None), text(with_outputs=1), text(with_rng="no"),
        text(triggers="nan"), text(triggers=["slow:0.5x"]), text(triggers=["often"]), text(ring=257), text(ring_dir=3), text(on={}),
    ],
)  # fmt: skip
def test_what_is_not_a_control_file_is_refused(wrong: str):
    with pytest.raises(StoreProblem):
        Control.from_json(wrong)


def test_another_format_is_refused_with_the_remedy():
    with pytest.raises(NewerFormat) as caught:
        Control.from_json(text(format=3))
    assert "version" in caught.value.hint


def test_a_running_process_sees_enable_and_disable(store: Store):
    watcher = ControlWatcher(store)
    assert watcher.poll() is None
    on = Control(True, "r", SINCE)
    write_control(store, on)
    assert watcher.poll() == on
    write_control(store, Control(False, "r", SINCE, 2))
    assert watcher.poll() is None


def test_only_changes_are_parsed_and_an_unchanged_switch_stays_the_same_object(store: Store, monkeypatch: pytest.MonkeyPatch):
    write_control(store, Control(True, "r", SINCE))
    parses, parse = [], Control.from_json
    monkeypatch.setattr(module.Control, "from_json", lambda text: (parses.append(1), parse(text))[1])
    watcher = ControlWatcher(store)
    assert len({id(watcher.poll()) for _ in range(10)}) == len(parses) == 1


def test_a_named_job_follows_its_own_switch_where_there_is_one(store: Store):
    own, everybody = ControlWatcher(store, job="night"), ControlWatcher(store)
    write_control(store, Control(True, "r", SINCE))
    assert own.poll() == everybody.poll() == Control(True, "r", SINCE)
    write_control(store, Control(True, "night", SINCE, every=7), "night")
    assert own.poll() == Control(True, "night", SINCE, every=7)
    write_control(store, Control(False, "night", SINCE, 2), "night")
    assert own.poll() is None and everybody.poll() is not None


def test_a_damaged_file_means_off_with_one_complaint_until_it_is_mended(store: Store):
    said: list[str] = []
    watcher = ControlWatcher(store, said.append)
    write_control(store, Control(True, "r", SINCE))
    assert watcher.poll() is not None
    store.control_path.write_text("{")
    for _ in range(5):
        assert watcher.poll() is None
    assert len(said) == 1
    write_control(store, Control(True, "r", SINCE, 2))
    assert watcher.poll() is not None
    store.control_path.write_text(text(format=99))
    assert watcher.poll() is None
    assert len(said) == 2


def test_a_switch_of_the_first_format_is_understood(store: Store):
    first = {"format": 1, "enabled": True, "run": "r", "since": SINCE, "generation": 3, "every": 2, "max_dumps": None}
    store.control_path.write_text(json.dumps(first))
    assert ControlWatcher(store).poll() == Control(True, "r", SINCE, 3, 2)


def test_a_store_of_a_newer_format_is_not_written_to(store: Store):
    write_control(store, Control(True, "r", SINCE))
    store.format_path.write_text('{"format": 99}')
    said: list[str] = []
    watcher = ControlWatcher(store, on_problem=said.append)
    assert watcher.poll() is None
    assert len(said) == 1


def test_a_folder_in_place_of_the_file_means_off(store: Store):
    store.control_path.mkdir()
    said: list[str] = []
    watcher = ControlWatcher(store, on_problem=said.append)
    assert watcher.poll() is None
    assert len(said) == 1
