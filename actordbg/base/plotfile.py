"""Pictures of curves as files: .png, .svg or .pdf, drawn by matplotlib where it is installed (the extra `plot`).

matplotlib is imported only when a picture is asked for, and never through pyplot: no window system, no global state.

Example::

    check("--plot", path)                      # before the work that the picture is of
    figure = new_figure(8, 5)
    figure.subplots().plot([1, 2], [3, 4])
    save(figure, path)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from actordbg.base.errors import EnvironmentProblem, UsageError, require_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which people with any kind of colour vision can tell apart."""


def check(option: str, path: Path) -> None:
    """Whether a picture could be written there: UsageError for the suffix, EnvironmentProblem for folder or matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{option} {path}: no picture has the suffix {path.suffix or 'that this name lacks'!r}",
            hint=f"name a file that ends with {', '.join(SUFFIXES)}",
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EnvironmentProblem(f"cannot write {path}", hint="name a file in a folder that is there and may be written")
    require_package(option, "matplotlib")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Axes) -> None:
    """A light grid behind the data, and no frame above and beside it."""
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write the picture; its suffix is its format. EnvironmentProblem where the disk does not take it."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {path}: {error.strerror or error}", hint="make room, or name another file"
        ) from None
