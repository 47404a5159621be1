"""List replays with their verdicts: for `actordbg replay ls`, `report --all` and `actordbg ui`.

The verdicts come from the catalog alone, so a thousand replays take no longer than ten.
"""

from collections import Counter, defaultdict
from typing import Any

from actordbg.base.owners import marked, whose
from actordbg.base.units import passed_of, plural
from actordbg.catalog import query
from actordbg.catalog.query import Catalog
from actordbg.compare.sides import GOLDEN, TRUTH, own_comparisons
from actordbg.config.as_ran import as_ran, label
from actordbg.document.blocks import UNCHECKED, WRONG, Block, Grid, Heading, Paragraph, Verdict, number
from actordbg.judge.verdicts import word_of_row
from actordbg.records.finding import BROKEN, RAISED
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import NONDETERMINISTIC


def listed(catalog: Catalog, *, everything: bool = False) -> list[dict[str, Any]]:
    """Return this user's replays, newest first; with `everything` also truths, variations, matrix cells and other users'.

    handle: "@1", ...; None for what other commands and users ran. verdict: the word. whose: who else wrote it.
    truth: the newest verdict of a comparison with the truth, max_abs the largest difference from it, in nats.
    """
    own = query.list_own_replays(catalog)
    handles = {row.replay_id: f"@{number}" for number, row in enumerate(own, 1)}
    compared = {(row.replay_id, row.against_kind): row for row in reversed(own_comparisons(catalog))}
    answered = defaultdict(set)
    sql = "SELECT DISTINCT replay_id, verdict FROM law_answer WHERE verdict IN (?, ?, ?)"
    for replay_id, answer in query.answers(catalog, sql, (BROKEN, NONDETERMINISTIC, RAISED)):
        answered[replay_id].add(answer)
    replays = []
    for row in query.list_replays(catalog) if everything else own:
        truth, recorded = compared.get((row.replay_id, TRUTH)), compared.get((row.replay_id, GOLDEN))
        word = word_of_row(row, truth, recorded, answered[row.replay_id])
        replays.append(
            {
                "handle": handles.get(row.replay_id),
                "name": str(row.config.get("name") or "") or None,
                "verdict": TRUTH if word == UNCHECKED and row.config.get("oracle") else word,
                "whose": whose(catalog.store.replays / row.replay_id / SPEC) or None,
                "truth": truth.verdict if truth else None,
                "max_abs": truth.max_abs if truth else None,
                "configuration": label(as_ran(row.config, row.resolved)),
                **{name: getattr(row, name) for name in ("replay_id", "created_at", "status", "inputs", "passed", "command")},
            }
        )
    return replays


def index_document(catalog: Catalog, *, commands: bool) -> list[Block]:
    """Build the index of this user's replays. commands: show commands to copy, not ids."""
    replays, total = listed(catalog), len(query.list_replays(catalog))
    counts = ", ".join(f"{count} {word}" for word, count in Counter(replay["verdict"] for replay in replays).items())
    command = f"actordbg report {replays[0]['replay_id']}" if replays else "actordbg status"
    wrong = [replay["replay_id"] for replay in replays if replay["verdict"] == WRONG and not replay["whose"]]
    if wrong:
        command = f"actordbg explain {wrong[0]}"
    others = f"{plural(total - len(replays), 'other')} (truths, variations, matrix cells, other users'):"
    others += " `actordbg replay ls --all`"
    rows = [
        (replay["handle"] or "", marked(replay["verdict"], replay["whose"]), number(replay["max_abs"], 2), passed_of(replay),
         replay["configuration"], f"actordbg report {replay['replay_id']}" if commands else replay["replay_id"])
        for replay in replays
    ]  # fmt: skip
    columns = ("", "verdict", "max diff", "passed", "configuration", "command" if commands else "replay")
    return [
        Heading("actordbg report", 1),
        Verdict("", f"{plural(len(replays), 'replay')}: {counts}" if replays else "nothing was replayed yet", next=command),
        Grid(columns, rows, {"", "verdict", "command", "configuration", "replay"}, wraps=True),
        Paragraph(
            "max diff: largest log-prob difference from the truth, nats. A replay's id begins with its date and time, UTC."
        ),
        *([Paragraph(others)] if total > len(replays) else []),
    ]
