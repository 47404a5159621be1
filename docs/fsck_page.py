"""The reference page of what `actordbg store fsck` checks and finds, from the tables in `actordbg/dumps/`."""

from __future__ import annotations

from actordbg.dumps.checking import CHECKS
from actordbg.dumps.finding import KINDS

LOOKS_AT = {
    "format": "FORMAT",
    "layout": "names, types, permissions, owners, leftovers",
    "dumps": "each dump file: header, name, payload, checksums, tensors",
    "packs": "each pack: index, and each dump in it",
    "doubles": "dumps that lie in a pack and in a file",
    "replays": "specifications, journals, results, kept tensors",
    "comparisons": "comparisons of two sides",
    "lints": "what lints said of dumps",
    "noise": "noise floors",
    "matrices": "matrices and their cells",
    "switches": "dump switches",
    "counters": "counters of recording processes",
    "weights": "hashes of the weights that recorded calls met",
    "turns": "token ids of rollouts, turn by turn",
    "syncs": "hashes of the weights that rollout engines were sent and got",
    "rings": "rings of this machine",
    "models": "models that actordbg built",
    "catalog": "the database, its revision, its rows",
}
"""What each check reads, by its name; a check without a row fails the build of the page."""


def fsck_markdown() -> str:
    """The page: every check, every kind of finding."""
    lines = [
        "# What fsck finds",
        "",
        "[`actordbg store fsck`](cli.md#actordbg-store-fsck) makes these checks.",
        "See [how to check and repair a store](../how-to/look-after-a-store.md#check-and-repair).",
        "",
        *(f"- {name}: {LOOKS_AT[name]}" for name in CHECKS),
        "",
        "Damage is lost or cannot be used, a leftover is in the way. In parentheses: what `--repair` does.",
        "",
    ]
    lines += [f"- `{code}`, {kind.severity}: {kind.meaning} ({kind.repair.value or 'nothing'})" for code, kind in KINDS.items()]
    return "\n".join(lines) + "\n"
