"""The page of the settings of a replay, from the table of settings."""

from __future__ import annotations

from actordbg.config.replay_config import SETTINGS
from actordbg.config.setting import Setting

INTRODUCTION = """\
# Settings of a replay

Each setting is declared once, in `actordbg/config/replay_config.py`. Options, files, variables, labels and this page
follow from it. The first source counts that sets it: a flag, a `--config` file, the environment variable,
[`actordbg.toml`](settings.md#actordbgtoml), the default. A source that names the backend silences what weaker
sources say for another backend.

## Which backend

If nothing sets `--backend`, the first dump of the selection decides, in every command that replays dumps:

| The dump | Backend |
|---|---|
| of a DeepSpeed engine | `deepspeed`, at the ZeRO stage as recorded |
| an imported old pickle | `deepspeed`: the jobs that wrote such pickles ran under it |
| any other, or DeepSpeed is not installed | `plain` |

Where `deepspeed` is known to fail and `plain` is not (fp16 on a CPU without it), `plain` runs. The first line of the output says
which and why: `not from the command line: backend deepspeed (as recorded), zero-stage 2 (as recorded)`. The configurations of
`train-check` and the backend of `actor init` follow no dump.

## The settings
"""
USUAL = SETTINGS["backend"].commands
FACTS = f"""\
Commands: {", ".join(USUAL)}, unless the setting names others. In parentheses: the values, the default (*open*: the
record decides), the environment variable, and

- *numbers*, *cost*: it changes what comes out; time or memory. Two replays are alike when they agree in all of these.
- *axis*: a matrix can list several values. *switched*: a loaded Actor takes it without a rebuild.
"""


def settings_markdown() -> str:
    """The whole page."""
    lines = [INTRODUCTION, FACTS]
    for setting in SETTINGS.values():
        facts = {"axis": setting.axis, "numbers": setting.numbers, "cost": setting.cost, "switched": setting.switchable}
        variable = "only by flag" if setting.flag_only else f"`{setting.variable}`"
        marks = ["; ".join([values(setting), default(setting), variable, *(name for name, fact in facts.items() if fact)])]
        marks += [f"only {', '.join(setting.backends)}"] if setting.backends else []
        place = f" In {', '.join(setting.commands) or 'no command'}." * (setting.commands != USUAL)
        lines.append(f"- `{setting.flag}` ({'; '.join(marks)}): {setting.help}{place}")
    return "\n".join(lines) + "\n"


def values(setting: Setting) -> str:
    """List a setting's possible values."""
    if setting.values:
        return ", ".join(f"`{value}`" for value in setting.values)
    return "on, off" if setting.kind is bool else "text" if setting.kind is str else setting.hint


def default(setting: Setting) -> str:
    """Format a setting's default; "open" if the record decides."""
    return "open" if setting.default is None else f"`{setting.typed(setting.default)}`"
