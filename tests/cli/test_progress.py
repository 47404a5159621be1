"""The bar: its clock runs while work continues, it says what is done and since when, and it ends where the work does."""

import io
import os

import pytest
from rich.console import Console
from roots import SUPPORT
from supervised import Bench, make_spec

from actordbg.api.desk import counting
from actordbg.cli.progress_bar import Bar


class Clocked:
    """A bar in a terminal of so many columns, at a time that the test sets."""

    def __init__(self, total, width):
        self.now, self.screen = 0.0, io.StringIO()
        self.console = Console(file=self.screen, width=width, force_terminal=True, color_system=None, get_time=lambda: self.now)
        self.bar = Bar("replaying", total, self.console)

    def at(self, seconds, n=0, note=""):
        self.now = seconds
        self.bar.advance(n, note)
        with self.console.capture() as shown:
            self.console.print(self.bar.drawn)
        return shown.get().strip()


@pytest.fixture(autouse=True)
def fake_worker_is_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


@pytest.mark.parametrize("width", [80, 140])
def test_the_clock_runs_behind_the_last_step_and_says_what_takes_so_long(width):
    bar = Clocked(3, width)
    assert "0/3 0:00:04" in bar.at(4, note="starting the workers")
    bar.at(20, 1, "compiling: S 1861, 20250619T052608.430740Z-000000-4711-9f3a2c1b-and-more-than-fits")
    shown = bar.at(32, 1)
    assert "2/3 0:00:32 eta 0:00:12 [12 s] compiling: S 18" in shown and len(shown) <= width
    assert "3/3 0:00:40" in bar.at(40, 1, "stopping the workers")
    assert "3/3 0:01:40  [60 s] stopping the workers" in bar.at(100)


@pytest.mark.parametrize(
    "done, total, left",
    [(0, 3, ""), (3, 3, "3/3 0:00:09"), (2, None, "2/2 0:00:09"), (2, 3, "2/3 0:00:09  stopping the workers")],
)
def test_what_is_left_of_a_bar_says_what_was_done(done, total, left):
    """Not `0/3` where there was nothing to do, nor what was begun where it is over; of work that was left, how much."""
    bar = Clocked(total, 80)
    bar.at(9, done, "stopping the workers")
    bar.bar.end()
    with bar.console.capture() as shown:
        bar.console.print(bar.bar.drawn)
    assert shown.get().strip().endswith(left) and bool(shown.get().strip()) == bool(done)


def test_a_bar_without_a_step_leaves_no_line_in_a_pipe():
    piped = io.StringIO()
    bar = Bar("packing", None, Console(file=piped))
    with bar.drawn:
        bar.end()
    assert piped.getvalue() == ""


def test_a_replays_bar_says_the_input_that_compiles_and_that_workers_stop(store):
    notes = []
    counted = counting(lambda n=1, note="": notes.append(f"{n} {note}".strip()))
    Bench(store).run(make_spec(2, compile=True), {}, on_event=counted)
    assert notes == [
        "0 starting the workers", "0 compiling: S 8, d0", "1", "0 S 8, d1", "1", "0 stopping the workers",
    ]  # fmt: skip
