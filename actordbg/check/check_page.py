"""The page of a check: its banner and the command that comes next, the comparison with the truth, the replay's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actordbg.actor.signatures import explain
from actordbg.check.check_document import RIGHT, UNJUDGED, CheckAnswer
from actordbg.check.run_check import CheckFound
from actordbg.formats.comparison_record import ComparisonRecord
from actordbg.report.blocks import BAD_TONE, GOOD_TONE, PART_TONE, Banner, Block, Chart, Heading, Items, Paragraph
from actordbg.report.comparison_document import document as comparison_blocks
from actordbg.report.replay_document import document
from actordbg.report.summary import summarise

_WORST = 10


def check_blocks(found: CheckFound, answer: CheckAnswer, charts: Sequence[Chart]) -> list[Block]:
    """The page as a document. charts: of the replay and its comparison."""
    summary = summarise([found.data], selection=answer.replay_id, now=found.data.spec.created_at, explain=explain)
    of_replay = document(summary, {one.label: charts for one in summary.replays})
    at = next(index for index, block in enumerate(of_replay) if isinstance(block, Banner))
    return [
        Heading("actordbg check", 1),
        Paragraph(f"{found.data.spec.command}; {found.data.spec.created_at}"),
        _banner(answer),
        Items((f"next: {answer.next}", f"configuration: {answer.configuration}")),
        *_compared(found.golden, "Against what the run itself got"),
        *_compared(found.comparison, "Against the truth"),
        *of_replay[at + 1 :],
    ]


def _banner(answer: CheckAnswer) -> Banner:
    tone = GOOD_TONE if answer.word == RIGHT else PART_TONE if answer.word == UNJUDGED else BAD_TONE
    return Banner(answer.word, answer.said, tone, tuple(_figure(name, text) for name, text in answer.figures), answer.not_judged)


def _figure(name: str, text: str) -> tuple[str, str]:
    """A figure for a headline: "forward, 2,323 tokens/s in one worker" over "0.597 s"."""
    number, unit, rest = (*text.split(" ", 2), "", "")[:3]
    return f"{name}{',' * bool(rest)} {rest}".strip(), f"{number} {unit}".strip(" ,")


def _compared(record: ComparisonRecord | None, against: str) -> list[Block]:
    if record is None:
        return []
    first, *rest = comparison_blocks(record, _WORST)
    assert isinstance(first, Heading)
    return [replace(first, level=2, text=f"{against}: {first.text}"), *rest]
