"""The bar while something runs: how far it is, a clock that never stops, when it may end, and what is being done since when.

    checking ━━━━━━━━━━━━━━━━━━━━  7/16 0:01:23 eta 0:01:40 [12 s] compiling: S 1861, 20250619T0...

Steps are often long and few, so the time that is left follows from all of them, the first one left out: it waited for workers.
The clock runs on behind the last step, because stopping workers and judging take time as well. Imported when a bar is drawn.
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
"""Columns of a terminal from which on the bar is long."""
_TOLD_AFTER_S = 3.0
"""From when on it is said how long something has been continuing."""


class Going(ProgressColumn):
    """Time since the bar began, which continues behind the last step; about how long the steps that are left will take, from the
    second step on; what is being done, and for how long."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        note, since = task.fields["note"]
        lasts = task.get_time() - since
        left = f"eta {_told(task.time_remaining)}" if task.time_remaining else ""
        return Text(f"{_told(task.elapsed or 0)} {left} {f'[{lasts:.0f} s] ' * (lasts >= _TOLD_AFTER_S and note > '')}{note}")


class Bar:
    """A bar with one line. `advance` says how many steps are done, what begins, and how many there are in all."""

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
        """`n` steps are done; `note`: what begins now. drawn: False while the terminal is somebody else's, True from then on.

        known: how many steps there are in all (`total`), and how many are done (`completed`).
        """
        if drawn is not None:
            (self.drawn.start if drawn else self.drawn.stop)()
        now, task, note = self.drawn.get_time(), self.drawn.tasks[0], in_line(note)
        fields: dict[str, Any] = {"note": (note, now)} if note and note != task.fields["note"][0] else {}
        self.drawn.update(self._task, advance=n, **known, **fields)

    def end(self) -> None:
        """All is done: nothing begins any more, and if there was nothing to do, there is nothing to show."""
        task = self.drawn.tasks[0]
        if not task.completed:
            self.drawn.live.transient = True
            self.drawn.update(self._task, visible=False)
        elif task.total is None or task.completed >= task.total:
            self.drawn.update(self._task, total=task.completed, note=("", self.drawn.get_time()))


def _told(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
