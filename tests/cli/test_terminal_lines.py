"""In a terminal lines are broken between words; in a pipe, and in a command to paste, nowhere."""

import io
import sys

import pytest

from actordbg.cli import output
from actordbg.cli.app import app
from actordbg.document.blocks import Verdict
from actordbg.document.command_result import CommandResult
from actordbg.dumps.create import create_dumps
from actordbg.records.finding import Finding, Rule


class Screen(io.StringIO):
    isatty = staticmethod(lambda: True)


def screen_of(monkeypatch, columns=80):
    """What standard output is from now on; no fixture, since pytest puts its own in place between the two."""
    shown = Screen()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", str(columns))
    return shown


def test_a_verdict_is_colored_and_broken_between_words_in_a_terminal_alone(monkeypatch):
    monkeypatch.setattr(output, "wanted", output.OutputOptions())
    found = [Finding(Rule("words"), "word " * 40)]
    blocks = [Verdict("WRONG", found[0].said, toy=True, next="actordbg report last", findings=found)]
    for no_color, terminal in (("", "xterm"), ("1", "xterm"), ("", "dumb")):
        screen = screen_of(monkeypatch)
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", terminal)
        output.say_answer(CommandResult(True, {}, blocks))
        lines = screen.getvalue().splitlines()
        assert lines[0].startswith(
            "WRONG (TOY MODEL): word" if no_color or terminal == "dumb" else "\x1b[31mWRONG\x1b[0m (TOY MODEL): word"
        )
        assert len(lines) > 2 and lines[-1] == "next: actordbg report last"


def test_a_dump_is_shown_in_the_width_of_the_terminal(monkeypatch, store):
    screen = screen_of(monkeypatch)
    create_dumps(store, 1, batch_size=1, seq_len=8)
    app(["--store", str(store.root), "dump", "show", "last"], standalone_mode=False)
    lines = screen.getvalue().splitlines()
    arguments = next(number for number, line in enumerate(lines) if line.startswith("  arguments"))
    assert lines[arguments + 1].startswith(" " * 17 + "return_")
    assert [line for line in lines if len(line) > 80] == [line for line in lines if ".safetensors.zst" in line]


@pytest.mark.parametrize("columns", [1, 10, 20])
def test_a_terminal_may_be_narrow(monkeypatch, columns):
    screen = screen_of(monkeypatch, columns)
    output.say_facts({"name": "some words of a fact", "empty": ""}, 14)
    assert screen.getvalue().split() == ["name", "some", "words", "of", "a", "fact"]
