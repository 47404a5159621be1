"""The reference page of what `actordbg fsck` checks and finds, from the tables in `actordbg/dumps/`."""

from __future__ import annotations

from actordbg.dumps.checking import CHECKS
from actordbg.dumps.finding import KINDS


def fsck_markdown() -> str:
    """The page: every check, every kind of finding."""
    lines = [
        "# What fsck finds",
        "",
        "[`actordbg fsck`](cli.md#actordbg-fsck) makes these checks.",
        "See [how to check and repair a store](../how-to/check-and-repair-a-store.md).",
        "",
        "| Check | Looks at |",
        "|---|---|",
        *(f"| {one.name} | {one.about} |" for one in CHECKS),
        "",
        "Damage is lost or cannot be used, a leftover is in the way. The last column is what `--repair` does.",
        "",
        "| Kind | Severity | Meaning | `--repair` |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{code}` | {kind.severity} | {kind.meaning} | {kind.repair.value or 'nothing'} |" for code, kind in KINDS.items()
    ]
    return "\n".join(lines) + "\n"
