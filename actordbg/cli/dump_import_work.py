"""The answers of `actordbg dump import` and `dump create`."""

from __future__ import annotations

from dataclasses import dataclass

from actordbg.cli import output
from actordbg.legacy.importer import ImportSummary

SHOWN = 50


@dataclass
class ImportAnswer(ImportSummary):
    """What an import did; `refused` names each file that was skipped, with the error code and the reason."""

    store: str = ""
    seconds: float = 0.0


@dataclass
class CreateAnswer:
    """The dumps that were made: their ids, and bytes on disk."""

    store: str
    run: str
    created: int
    bytes_stored: int
    dump_ids: list[str]


def say_imported(answer: ImportAnswer) -> None:
    for refusal in answer.refused[:SHOWN]:
        output.note(f"refused[{refusal.code}]: {refusal.path}: {refusal.reason}")
    if len(answer.refused) > SHOWN:
        output.note(f"... and {len(answer.refused) - SHOWN} more; --json lists them all")
    output.say(
        f"{output.plural(answer.added, 'dump')} added, {answer.present:,} already there, "
        f"{len(answer.refused):,} refused, in {answer.seconds:.1f} s"
    )
    if answer.added:
        read, stored = output.human_bytes(answer.bytes_read), output.human_bytes(answer.bytes_stored)
        ratio = answer.bytes_read / answer.bytes_stored
        output.say(f"run {', '.join(answer.runs)}: {read} of pickles became {stored} ({ratio:.1f} times smaller)")


def say_created(answer: CreateAnswer) -> None:
    made, size = output.plural(answer.created, "dump"), output.human_bytes(answer.bytes_stored)
    output.say(f"made {made} in run {answer.run} ({size})")
    output.say(f"see them with: actordbg dump ls --where \"run='{answer.run}'\"")
