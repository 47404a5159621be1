"""The page of the settings of a replay, from the table of settings."""

from __future__ import annotations

from actordbg.config.replay_config import SETTINGS
from actordbg.config.setting import Setting

INTRODUCTION = """\
# Settings of a replay

Each setting is declared once, in `actordbg/config/replay_config.py`. Options, files, variables, labels and this page
follow from it. A flag wins over the environment variable, the variable over the
[settings file](settings.md#actordbgtoml), the file over the default. A source that names the backend silences what weaker
sources say for another backend.
"""
FACTS = """\
*Numbers* says whether a setting changes what comes out, *cost* whether it changes time or memory. Two replays are
alike when they agree in all of these. *Switched* says whether a loaded Actor takes the setting without being built again.
"""


def settings_markdown() -> str:
    """The whole page."""
    lines = [INTRODUCTION, "| Setting | Values | Default | Meaning |", "|---|---|---|---|"]
    lines += [f"| `{one.flag}` | {values(one)} | {default(one)} | {cell(one.help)} |" for one in SETTINGS.values()]
    lines += ["", FACTS, "| Setting | Variable | Backends | Commands | Axis | Numbers | Cost | Switched |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for one in SETTINGS.values():
        backends, commands = ", ".join(one.backends) or "all", ", ".join(one.commands) or "none"
        variable = "only by flag" if one.flag_only else f"`{one.variable}`"
        marks = " | ".join("yes" if fact else "" for fact in (one.axis, one.numbers, one.cost, one.switchable))
        lines.append(f"| `{one.flag}` | {variable} | {backends} | {commands} | {marks} |")
    return "\n".join(lines) + "\n"


def values(one: Setting) -> str:
    """List a setting's possible values."""
    if one.values:
        return ", ".join(f"`{value}`" for value in one.values)
    return "on, off" if one.kind is bool else "text" if one.kind is str else one.hint


def default(one: Setting) -> str:
    """Format a setting's default; "open" if the record decides."""
    return "open" if one.default is None else f"`{one.typed(one.default)}`"


def cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")
