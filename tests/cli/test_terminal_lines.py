"""In a terminal lines are broken between words; in a pipe, and in a command to paste, nowhere."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from comparecases import given, write_replay

from actordbg.cli import output
from actordbg.cli.app import app
from actordbg.cli.replay_work import answer_of, render
from actordbg.dumps.create import create_dumps
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

FOLDER = "/a/path/" + "that-is-longer-than-a-line/" * 4
CONFIGURATION = "a model with a long name, bf16 sdpa, packed, deepspeed ZeRO 3, 8 processes, on NVIDIA H100 80GB HBM3"
INPUTS = [given(0), given(1)]


@pytest.fixture
def answer(store: Store) -> dict[str, Any]:
    write_replay(store, "20250619T052608-4fdcae", INPUTS)
    answer = answer_of(store, load_spec(store, "last"), 0)
    return answer | {"configuration": CONFIGURATION, "folder": FOLDER, "kept_bytes": 7}


class Screen(io.StringIO):
    isatty = staticmethod(lambda: True)


def screen_of(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> Screen:
    """What standard output is from now on; no fixture, since pytest puts its own in place between the two."""
    shown = Screen()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", str(columns))
    return shown


def test_facts_of_an_answer_are_broken_between_words_and_go_on_below_themselves(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    screen = screen_of(monkeypatch)
    render(answer)
    lines = screen.getvalue().splitlines()
    broken = [line for line in lines if line.startswith(" " * 17)]
    assert broken and all(len(line) <= 80 for line in lines if "longer-than-a-line" not in line and "`" not in line)
    assert f"  journals, logs {FOLDER}" in lines, "a path is whole, beside its name"
    words = " ".join(screen.getvalue().split())
    assert CONFIGURATION in words and f"`actordbg compare {answer['replay_id']} truth`" in screen.getvalue()


def test_a_dump_is_shown_in_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    screen = screen_of(monkeypatch)
    create_dumps(store, 1, batch_size=1, seq_len=8)
    app(["--store", str(store.root), "dump", "show", "last"], standalone_mode=False)
    lines = screen.getvalue().splitlines()
    arguments = next(number for number, line in enumerate(lines) if line.startswith("  arguments"))
    assert lines[arguments + 1].startswith(" " * 17 + "return_")
    assert [line for line in lines if len(line) > 80] == [line for line in lines if ".safetensors.zst" in line or "`" in line]


@pytest.mark.parametrize("columns", [1, 10, 20])
def test_a_terminal_may_be_narrow(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    screen = screen_of(monkeypatch, columns)
    output.say_fact("  name", "some words of a fact", 16)
    output.say_fact("  empty", "", 16)
    assert screen.getvalue().split() == ["name", "some", "words", "of", "a", "fact", "empty"]


def test_a_pipe_gets_one_line_for_each_fact(capsys: pytest.CaptureFixture[str], answer: dict[str, Any]) -> None:
    render(answer)
    assert f"  {'configuration':<14} {CONFIGURATION}\n" in capsys.readouterr().out
