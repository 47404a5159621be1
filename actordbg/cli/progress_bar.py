"""The progress bar: completed steps, elapsed time, estimated time left, and the current step with its duration.

    checking ━━━━━━━━━━━━━━━━━━━━  7/16 0:01:23 eta 0:01:40 [12 s] compiling: S 1861, 20250619T0...

Steps are often long and few, so the estimate uses all of them except the first, which waits for the workers. The clock keeps
running after the last step, because stopping workers and judging also take time. Imported only when a bar is drawn.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from actordbg.base.foreign_text import in_line

WIDE = 110
"""Terminal width from which the bar is long."""
_TOLD_AFTER_S = 3.0
"""Seconds after which the duration of the current step is shown."""


class Going(ProgressColumn):
    """A column with the elapsed time, the estimated time left (after the first step), and the current step and its duration."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        note, began = task.fields["note"]
        lasts = task.get_time() - began
        left = f"eta {_told(task.time_remaining)}" if task.time_remaining else ""
        since = f"[{lasts:.0f} s] " if note and lasts >= _TOLD_AFTER_S else ""
        elapsed = task.elapsed or 0
        return Text(f"{_told(elapsed)} {left} {since}{note}")


class Bar:
    """A progress bar of a single line, updated by `advance`."""

    def __init__(self, label: str, total: float | None, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)
        self.drawn = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(20 if console.width >= WIDE else 10),
            MofNCompleteColumn(),
            Going(table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            expand=True,
            speed_estimate_period=math.inf,
        )
        self._task = self.drawn.add_task(label, total=total, note=("", self.drawn.get_time()))

    def advance(self, n: float = 1, note: str = "", drawn: bool | None = None, **known: Any) -> None:
        """Complete `n` steps; `note`: what begins now. drawn: hide the bar (False) or show it again (True).

        known: `total`, the number of steps, and `completed`, the number of completed steps.
        """
        if drawn is not None:
            (self.drawn.start if drawn else self.drawn.stop)()
        now, task, note = self.drawn.get_time(), self.drawn.tasks[0], in_line(note)
        fields: dict[str, Any] = {"note": (note, now)} if note and note != task.fields["note"][0] else {}
        self.drawn.update(self._task, advance=n, **known, **fields)

    def end(self) -> None:
        """Finish the bar: clear its note, and hide it if no step was completed."""
        task = self.drawn.tasks[0]
        if not task.completed:
            self.drawn.live.transient = True
            self.drawn.update(self._task, visible=False)
            self.drawn.console.quiet = not self.drawn.console.is_terminal  # rich ends a bar in a pipe with a line
        elif task.total is None or task.completed >= task.total:
            self.drawn.update(self._task, total=task.completed, note=("", self.drawn.get_time()))


def _told(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
