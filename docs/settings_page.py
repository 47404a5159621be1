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
    lines += [
        f"| `{setting.flag}` | {values(setting)} | {default(setting)} | {cell(setting.help)} |" for setting in SETTINGS.values()
    ]
    lines += ["", FACTS, "| Setting | Variable | Backends | Commands | Axis | Numbers | Cost | Switched |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for setting in SETTINGS.values():
        backends, commands = ", ".join(setting.backends) or "all", ", ".join(setting.commands) or "none"
        variable = "only by flag" if setting.flag_only else f"`{setting.variable}`"
        marks = " | ".join("yes" if fact else "" for fact in (setting.axis, setting.numbers, setting.cost, setting.switchable))
        lines.append(f"| `{setting.flag}` | {variable} | {backends} | {commands} | {marks} |")
    return "\n".join(lines) + "\n"


def values(setting: Setting) -> str:
    """List a setting's possible values."""
    if setting.values:
        return ", ".join(f"`{value}`" for value in setting.values)
    return "on, off" if setting.kind is bool else "text" if setting.kind is str else setting.hint


def default(setting: Setting) -> str:
    """Format a setting's default; "open" if the record decides."""
    return "open" if setting.default is None else f"`{setting.typed(setting.default)}`"


def cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")
