"""The result of a command as a value: its data, its verdict and its document, whoever asked for it.

    answer = store.check(where="seq_len>4096")       # `actordbg check --where ...` builds the same one
    answer.ok, answer.verdict, answer.sentence       # False, "WRONG", "WRONG: 3 of 8 dumps differ from the truth by ..."
    answer["max_abs"]                                # any key that `--json` prints
    answer.raise_if_wrong()                          # BadResult: the sentence, and the next command as its hint

The command line prints it, a notebook shows the first screen of its page, and a test raises it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from actordbg.base.errors import BadResult
from actordbg.base.foreign_text import in_json
from actordbg.config.replay_config import SETTINGS
from actordbg.document.blocks import Block, Heading, Verdict, as_data


@dataclass(frozen=True, eq=False, repr=False)
class CommandResult(Mapping[str, Any]):
    """The result of a command. ok: its exit code would be 0. data: what its JSON has beside the verdict. page: all blocks of its
    page, if that has more than the text; `blocks` are those of the text. title: heading of the page, if its blocks have none.
    """

    ok: bool
    data: Mapping[str, Any]
    blocks: Sequence[Block]
    page: Sequence[Block] = ()
    title: str = ""

    @property
    def on_page(self) -> list[Block]:
        """The blocks of its page."""
        return [*([Heading(self.title, 1)] if self.title else []), *(self.page or self.blocks)]

    @classmethod
    def of(cls, verdict: Verdict, data: Mapping[str, Any], *blocks: Block, title: str = "") -> CommandResult:
        """Build the result of a command whose verdict decides: it is ok if that is RIGHT. title: of its page."""
        return cls(verdict.good, {**data, "good": verdict.good}, [verdict, *blocks], title=title)

    def with_commands(self, spelled: Callable[[str], str]) -> CommandResult:
        """Return the result with its next command spelled so."""
        blocks, page = (
            [replace(block, next=spelled(block.next)) if isinstance(block, Verdict) else block for block in some]
            for some in (self.blocks, self.page)
        )
        return replace(self, blocks=blocks, page=page)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Everything that `--json` prints, as plain data. Times in seconds, memory in bytes, log-probs in nats."""
        record: dict[str, Any] = json.loads(self.to_json())
        return record

    def to_json(self, indent: int | None = None) -> str:
        """Return what `--json` prints."""
        return as_json_text({**self.data, **as_data(self.blocks)}, indent)

    @property
    def verdict(self) -> str:
        """RIGHT, WRONG, FAILED or NOT CHECKED; "" for a command that measures and does not judge."""
        return str(self.get("verdict", ""))

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with what was not checked. Options are named as Python arguments."""
        return in_python(str(self.get("sentence", "")))

    @property
    def figures(self) -> dict[str, str]:
        """The figures of the verdict by name, with their units, the deciding figure first."""
        return dict(self.get("figures", ()))

    @property
    def not_checked(self) -> tuple[str, ...]:
        """Everything that the verdict does not cover."""
        return tuple(map(in_python, self.get("not_checked", ())))

    @property
    def next(self) -> str:
        """The command to run next; "" for none."""
        return str(self.get("next", ""))

    def raise_if_wrong(self) -> None:
        """Raise BadResult unless the result is ok."""
        if not self.ok:
            raise BadResult(self.sentence, hint=self.next)

    def to_html(self) -> str:
        """Return the self-contained HTML page."""
        from actordbg.document.page import as_html

        return as_html(self.on_page)

    def to_markdown(self) -> str:
        """Return the text as Markdown."""
        from actordbg.document.renderings import as_markdown

        return as_markdown(self.blocks)

    def _repr_html_(self) -> str:
        """Return the page's first screen, which a notebook shows: everything before the second section."""
        from actordbg.document.page import as_fragment

        blocks = self.on_page
        return as_fragment([*blocks[:1], *takewhile(lambda block: not isinstance(block, Heading), blocks[1:])])

    def __str__(self) -> str:
        from actordbg.document.renderings import as_text

        return as_text(self.blocks)

    def __repr__(self) -> str:
        said = self.sentence or "an answer"
        return f"<{said}>"

    def __getitem__(self, name: str) -> Any:
        return self.record[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)


def as_json_text(answer: Any, indent: int | None = None) -> str:
    """Encode a result as JSON. A figure that is not finite is null, and the result, or its row of a list, has `not_finite`:
    the place of each such figure, such as `laws[1].violations[0].size`, with NaN, Infinity or -Infinity.
    """
    encode = partial(json.dumps, default=_plain, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        text = encode(answer)
    except ValueError:
        plain = json.loads(json.dumps(answer, default=_plain), parse_constant=_NotFinite)
        text = encode([_with_nulls(row) for row in plain] if isinstance(plain, list) else _with_nulls(plain))
    return in_json(text)


@dataclass(frozen=True)
class _NotFinite:
    """A figure that JSON has no number for. name: NaN, Infinity or -Infinity."""

    name: str


def _with_nulls(value: Any) -> Any:
    """Replace the figures of a result that are not finite by None, and name them under `not_finite`."""
    names: dict[str, str] = {}

    def replaced(held: Any, place: str) -> Any:
        if isinstance(held, _NotFinite):
            names[place] = held.name
            return None
        if isinstance(held, dict):
            return {key: replaced(item, f"{place}.{key}" if place else key) for key, item in held.items()}
        if isinstance(held, list):
            return [replaced(item, f"{place}[{at}]") for at, item in enumerate(held)]
        return held

    result = replaced(value, "")
    return result | {"not_finite": names} if names and isinstance(result, dict) else result


def _plain(value: Any) -> Any:
    if isinstance(getattr(value, "columns", None), dict):  # a row of the catalog, which this room does not know
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: held for name, held in fields.items() if not callable(held)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def in_python(text: str) -> str:
    """Replace options in parentheses by the arguments that the Python functions have: (--backward) by (backward=True)."""

    def argument(match: re.Match[str]) -> str:
        setting = next((each for each in SETTINGS.values() if each.option == match[1]), None)
        if setting is None:
            return match[0]
        value = True if setting.kind is bool else "..."
        return f"({setting.name}={value})"

    return re.sub(r"\(--([a-z-]+)\)", argument, text)
