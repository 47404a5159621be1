"""The blocks of a document, independent of its format, and the formatting of figures.

Reports, comparisons, matrices and curves are lists of blocks. Table cells are already strings, in the units that the heading
names, so a renderer (`actordbg.document.renderings`) only lays them out. "-" means not measured.

Text and Markdown begin with the Verdict and end with its next command, wherever it stands in the list. They skip Chart and Cells,
which are for pages (`page`), because the blocks beside them have the same content. JSON has all of them as data: `as_data`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from actordbg.config.replay_config import TOY_MODEL
from actordbg.records.finding import Finding, NotChecked, unchecked_in_brief


@dataclass(frozen=True)
class Heading:
    """A title; level 1 for the report, 2 for a replay, 3 for its parts."""

    text: str
    level: int


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list; an item may hold several lines (an excerpt of a log), whose line breaks are kept."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text whose line breaks matter: the end of a log."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table; columns whose heading is in `left` are text, all others figures.

    wraps: in a narrow text, text columns wrap instead of being cut.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    wraps: bool = False


GOOD_TONE, BAD_TONE, PART_TONE, NO_TONE = "good", "bad", "part", "none"
"""Colors of a verdict: right, wrong, partial or not checked, nothing judged."""
RIGHT, WRONG, FAILED, UNCHECKED = "RIGHT", "WRONG", "FAILED", "NOT CHECKED"
"""The verdicts of every command."""
ROLLOUT, TRAINER, EITHER = "rollout", "trainer", "either side"
"""Sides that a verdict calls wrong."""
TONES = {
    word: tone
    for tone, words in {
        GOOD_TONE: (RIGHT, "passed", "match", "agrees", "kept", "within-rounding"),
        PART_TONE: (UNCHECKED, "within-noise", "partial", "unavailable", "not run", "not-compared", "not compared"),
        BAD_TONE: (
            WRONG, FAILED, "failed", "crashed", "hung", "mismatch", "DIVERGES", "broken", "BROKEN", "REGRESSED", "loss too far",
            "nondeterministic",
        ),
    }.items()
    for word in words
}  # fmt: skip
"""Verdict words that are shown in color, of commands and of rows."""


def tone_of(text: str) -> str | None:
    """Return the tone of a verdict word, or of a text that begins with one."""
    word = re.split(r"[:(]", text, maxsplit=1)[0].strip()
    return TONES.get(word) or TONES.get(word.partition(" ")[0])


@dataclass(frozen=True)
class Verdict:
    """The result of a command in one sentence.

    word: RIGHT, WRONG, FAILED or NOT CHECKED; "" if the command measures and does not judge. said: the rest of the sentence.
    figures: (name, value), the deciding figure first. not_checked: what the word does not cover. next: the command to run next.
    toy: whether the built-in toy model ran. whose: who else says so, if it rests on what this user did not compute.
    findings: what makes it WRONG or FAILED, the deciding finding first. right: which of several sides is. also: which sides are
    wrong beside that of the first finding. further: clauses that say more of it, below the first line.
    """

    word: str
    said: str
    figures: Sequence[tuple[str, str]] = ()
    not_checked: Sequence[NotChecked] = ()
    next: str = ""
    toy: bool = False
    findings: Sequence[Finding] = ()
    right: Sequence[str] = ()
    also: Sequence[str] = ()
    whose: str = ""
    further: Sequence[str] = ()

    @property
    def wrong(self) -> tuple[str, ...]:
        """The sides that are wrong, such as ROLLOUT, or EITHER; () if the first finding tells none."""
        return (*(finding.of_side for finding in self.findings[:1] if finding.of_side), *self.also)

    @property
    def tone(self) -> str:
        """The color of the word."""
        return TONES.get(self.word, NO_TONE)

    @property
    def good(self) -> bool:
        """Check whether the word is RIGHT, and this user's own."""
        return self.word == RIGHT and not self.whose

    @property
    def heading(self) -> str:
        """The word with its marks: a toy model ran, which side is wrong, somebody else says so: "WRONG (TOY MODEL; trainer)"."""
        marks = [TOY_MODEL] if self.toy else []
        if self.wrong:
            marks.append("rollout or trainer" if EITHER in self.wrong else " and ".join(self.wrong))
            marks += [f"{' and '.join(self.right)} right"] if self.right else []
        marks += [f"by {self.whose}"] if self.whose else []
        return f"{self.word} ({'; '.join(marks)})" if marks and self.word else self.word

    @property
    def headline(self) -> str:
        """Return the first line: the word, what is wrong, and where, in a few words."""
        return f"{self.heading}: {self.brief}" if self.word else self.brief

    @property
    def brief(self) -> str:
        """Return what follows the word in the first line."""
        if self.word != WRONG or not self.findings:
            return self.said
        first = self.findings[0]
        modules = (str(each.place["module"]) for each in self.findings if "module" in each.place)
        module = next(modules, "")
        beside = f" ({module})" if module and module not in first.what else ""
        where = f", in {first.where}" if first.where else ""
        return f"{first.what}{beside}{where}"

    @property
    def details(self) -> list[str]:
        """Return the lines under the first: the figures of what is wrong, and what to do."""
        if self.word != WRONG or not self.findings:
            return list(self.further)
        first = self.findings[0]
        said = [self._beside(first), f"do: {first.todo}" if first.todo else ""]
        return [line for line in said if line]

    def _beside(self, first: Finding) -> str:
        """Return what is said beside the first line, which has the clause of the first finding, unless in fewer words."""
        if self.told == first.what:
            return ""
        if first.what not in self.told:
            return self.told
        where = f", in {first.where}" if first.where else ""
        said = self.told.replace(f"{first.what}{where}", "").replace(first.what, "")
        clauses = (" ".join(clause.split()).removesuffix(":") for clause in said.split(";"))
        return "; ".join(filter(None, clauses))

    @property
    def told(self) -> str:
        """Everything that is said of what was checked."""
        return "; ".join([self.said.removesuffix("."), *self.further]) if self.further else self.said

    @property
    def left(self) -> str:
        """Return what was not checked, in a line; "" if all was."""
        return f"not checked: {'; '.join(unchecked_in_brief(self.not_checked))}" if self.not_checked else ""

    @property
    def sentence(self) -> str:
        """The whole verdict: "RIGHT (TOY MODEL): 8 of 8 dumps match the truth to fp32 rounding; not checked: your model"."""
        whole = f"{self.heading}: {self.told}" if self.word else self.told
        return f"{whole.removesuffix('.')}; {self.left}" if self.left else whole


@dataclass(frozen=True)
class Chart:
    """A picture as data: a Vega-Lite specification with its values inside, and a table of the same figures.

    says: what the picture shows, in a sentence or two (also its text for screen readers). note: what was omitted or merged.
    half: two such charts are placed side by side if there is room.
    """

    title: str
    says: str
    specification: dict[str, Any]
    table: Grid
    note: str = ""
    half: bool = False


@dataclass(frozen=True)
class Cell:
    """A field of a heat map: its text, the reason, and the command that shows more."""

    text: str
    figure: str = ""
    tone: str = NO_TONE
    why: str = ""
    command: str = ""


@dataclass(frozen=True)
class Cells:
    """A heat map whose fields can be hovered over, reached by keyboard and clicked. None: no such combination."""

    title: str
    says: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]


Picture = Chart | Cells
Block = Heading | Paragraph | Items | Code | Grid | Verdict | Picture


def section(title: str, lines: Iterable[str]) -> list[Block]:
    """Build a list under a heading, if there is a title; nothing without lines."""
    items = tuple(lines)
    return [*([Heading(title, 3)] if title else []), Items(items)] if items else []


def verdict_in(blocks: Iterable[Block]) -> Verdict | None:
    """Return the verdict of a document."""
    return next((block for block in blocks if isinstance(block, Verdict)), None)


class SentenceData(TypedDict):
    """The part of a result's JSON that every command has that does not list rows. verdict: "" where nothing is judged."""

    verdict: str
    sentence: str
    next: str


class VerdictData(SentenceData, total=False):
    """The part of a result's JSON that every judging command has, with the fields of `Verdict`.

    verdict: its word. sentence: the whole verdict. headline: its first line. findings: rule, key, side, place, size and limit of
    each. not_checked: what the word does not cover, in words; unchecked: the same with rule and remedy. charts: title, words and
    Vega-Lite specification of each. good: whether the exit code is 0, which the command adds.
    wrong, right: absent where no side is judged. whose: absent if it is this user's own. not_finite: the places of figures that
    are null because they are NaN or infinite, with their names; absent without one.
    """

    headline: str
    figures: Sequence[tuple[str, str]]
    not_checked: Sequence[str]
    unchecked: Sequence[dict[str, str]]
    findings: Sequence[dict[str, Any]]
    charts: Sequence[dict[str, Any]]
    good: bool
    wrong: Sequence[str]
    right: Sequence[str]
    not_finite: dict[str, str]
    whose: str


def as_data(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the parts of a document that are added to its JSON (`VerdictData`)."""
    verdict = verdict_in(blocks) or Verdict("", next((block.text for block in blocks if isinstance(block, Paragraph)), ""))
    of_sides = {name: value for name in ("wrong", "right", "whose") if (value := getattr(verdict, name))}
    charts = [block for block in blocks if isinstance(block, Chart)]
    return of_sides | {
        "verdict": verdict.word,
        **{name: getattr(verdict, name) for name in ("sentence", "headline", "figures", "next")},
        "findings": [finding.data for finding in verdict.findings],
        "not_checked": unchecked_in_brief(verdict.not_checked),
        "unchecked": [each.data for each in verdict.not_checked],
        "charts": [{name: getattr(chart, name) for name in ("title", "says", "specification")} for chart in charts],
    }


def number(value: float | None, digits: int = 4) -> str:
    """Format a figure with `digits` significant digits; with an exponent only below 0.0001 or above ten million."""
    if value is None:
        return "-"
    short = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in short and 1 <= abs(value) < 1e7 else short


def seconds(value: float | None) -> str:
    """Format seconds with three significant digits, keeping zeros: 2.00, 0.950, 123."""
    if value is None or value >= 1000 or 0 < value < 0.001:
        return number(value, 3)
    return f"{value:#.3g}".rstrip(".") if value else "0"


def rate(value: float | None) -> str:
    """Format a rate; without decimals from 100 up."""
    return f"{value:,.0f}" if value is not None and value >= 100 else number(value, 3)


def setting(value: Any) -> str:
    """Format a setting's value: on or off for booleans, commas in large numbers."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10**4 else str(value)
