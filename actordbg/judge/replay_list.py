"""List replays with their verdicts: for `actordbg replays`, `report --all` and `actordbg ui`.

The verdicts come from the catalog alone, so a thousand replays take no longer than ten.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actordbg.base.units import plural
from actordbg.catalog import query
from actordbg.catalog.query import Catalog, ReplayRow
from actordbg.config.as_ran import as_ran, label
from actordbg.document.blocks import UNCHECKED, Block, Grid, Heading, Paragraph, Verdict, number
from actordbg.judge.load_replays import page_of
from actordbg.judge.sides import TRUTH
from actordbg.judge.verdicts import word_of_row
from actordbg.records.replay_record import BROKEN, NONDETERMINISTIC


@dataclass(frozen=True)
class ListedReplay:
    """A replay of the list. handle: "@1", ...; None for what other commands and users ran. word: of its verdict.

    truth: its newest verdict against the truth, max_abs the largest difference from it, in nats.
    """

    row: ReplayRow
    handle: str | None
    word: str
    truth: str | None
    max_abs: float | None

    @property
    def configuration(self) -> str:
        """The configuration in words."""
        return label(as_ran(self.row.config, self.row.resolved))

    @property
    def name(self) -> str | None:
        """The name that `--name` gave it."""
        return str(self.row.config.get("name") or "") or None

    @property
    def data(self) -> dict[str, Any]:
        """The replay as data, for JSON."""
        of_row = ("replay_id", "created_at", "status", "inputs", "passed", "command")
        own = {"handle": self.handle, "name": self.name, "verdict": self.word, "truth": self.truth, "max_abs": self.max_abs}
        return own | {"configuration": self.configuration} | {name: getattr(self.row, name) for name in of_row}

    @property
    def passed(self) -> str:
        """How many inputs passed, and the status unless the replay is complete: "3/8 interrupted"."""
        return f"{self.row.passed}/{self.row.inputs}" + f" {self.row.status}" * (self.row.status != "complete")


def listed(catalog: Catalog, *, everything: bool = False) -> list[ListedReplay]:
    """Return this user's replays, newest first; with `everything` also truths, variations, matrix cells and other users'."""
    own = query.list_own_replays(catalog)
    handles = {row.replay_id: f"@{number}" for number, row in enumerate(own, 1)}
    truths = {row.replay_id: row for row in reversed(query.comparisons(catalog)) if row.against_kind == "truth"}
    lawless: dict[str, set[str]] = {BROKEN: set(), NONDETERMINISTIC: set()}
    for verdict, found in lawless.items():
        rows = query.answers(catalog, "SELECT DISTINCT replay_id FROM law_answer WHERE verdict = ?", (verdict,))
        found.update(replay_id for (replay_id,) in rows)
    replays = []
    for row in query.list_replays(catalog) if everything else own:
        truth = truths.get(row.replay_id)
        failed = any(row.replay_id in ids for verdict, ids in lawless.items() if verdict != row.config.get("accept"))
        word, apart = word_of_row(row, truth, failed), truth.max_abs if truth else None
        word = TRUTH if word == UNCHECKED and row.config.get("oracle") else word
        replays.append(ListedReplay(row, handles.get(row.replay_id), word, truth.verdict if truth else None, apart))
    return replays


def index_document(catalog: Catalog, beside: Path | None = None) -> list[Block]:
    """Build the index of this user's replays. beside: the file of the index as a page, to which links are relative."""
    replays, total = listed(catalog), len(query.list_replays(catalog))
    counts = ", ".join(f"{count} {word}" for word, count in Counter(replay.word for replay in replays).items())
    command = f"actordbg report {replays[0].row.replay_id}" if replays else "actordbg replay --max-inputs 3"
    others = f"{plural(total - len(replays), 'other')} (truths, variations, matrix cells, other users'): `actordbg replays --all`"
    rows = [
        (replay.handle or "", replay.word, number(replay.max_abs, 2), replay.passed, replay.row.created_at[:16].replace("T", " "),
         replay.configuration, f"actordbg report {replay.row.replay_id}" if beside else replay.row.replay_id)
        for replay in replays
    ]  # fmt: skip
    columns = ("", "verdict", "max diff", "passed", "when (UTC)", "configuration", "command" if beside else "replay")
    return [
        Heading("actordbg report", 1),
        Verdict("", f"{plural(len(replays), 'replay')}: {counts}" if replays else "nothing was replayed yet", next=command),
        Grid(columns, rows, {"", "verdict", "command", "configuration"}, _pages(catalog, replays, beside), "page"),
        Paragraph("max diff: largest log-prob difference from the truth, nats."),
        *([Paragraph(others)] if total > len(replays) else []),
    ]


def _pages(catalog: Catalog, replays: Sequence[ListedReplay], beside: Path | None) -> list[str]:
    """Return the path of each replay's page, relative to the index; "" for none."""
    if beside is None:
        return []
    pages = [page_of(catalog.store, replay.row.replay_id) for replay in replays]
    folder = beside.resolve().parent
    return [os.path.relpath(page.resolve(), folder) if page.is_file() else "" for page in pages]
