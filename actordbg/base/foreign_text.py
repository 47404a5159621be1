r"""Escape foreign text for each output. Only this module knows what is dangerous where.

Foreign text is what others wrote: error messages, names of runs, roles and hosts, paths, argument values, lines of logs and
journals. It may contain escape sequences that a terminal obeys, bidi overrides that reorder text, invisible (zero-width and tag)
characters, Markdown links or HTML, and formulas that a spreadsheet runs.

| output | function | what it does |
|---|---|---|
| a terminal, a log | `in_lines`, and `in_line` where line breaks are ours | hidden characters are written out: `\x1b`, `\u202e` |
| JSON | `in_json` | hidden characters become JSON escapes, so that a program reads the original text |
| Markdown | `in_markdown`, `fenced` | nothing becomes a link, mention, image, HTML, a heading, or the end of a table or fence |
| HTML, SVG | `in_html`, `in_script` | nothing is a tag, an entity, or the end of an attribute or a script |
| CSV | `in_csv` | no cell is a formula |
| a command to paste | `in_shell` | one word, whatever is in it |

Invariant: the results contain no hidden character. Applying a function twice changes nothing more, except for Markdown, HTML,
CSV and shell. The output layers call them (`actordbg.cli.output`, `actordbg.document.renderings`, `actordbg.judge.exports`), so
that a command cannot forget it. The text's own backslashes stay: people read it, and `--json` is exact.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Callable

MOST_MARKS = 8
"""Combining marks on one character that are shown as they are; more would cover the lines above."""

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065\u3164\ufe00-\ufe0d\ufeff\uffa0"  # no width
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # direction
    "\u2028\u2029"  # lines and paragraphs that only some programs break
    "\ud800-\udfff"  # halves of surrogate pairs, and bytes of names that are not UTF-8
    "\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"  # other formats
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"  # formats and tags
)
_SURROGATE = re.compile("[\ud800-\udfff]")
# Every command compiles this pattern: a range up to the last character would take 40 times as long.
_MAY_FLOOD = re.compile(f"[^\x00-\u02ff]{{{MOST_MARKS + 1},}}")
_SPECIAL = re.compile(
    r"(?P<markup>[\\`*\[\]<|~&]|(?<![a-z0-9])_|_(?![a-z0-9]))"
    r"|(?P<linked>(?:@|(?<=:)//|(?<=www)\.|#(?=\d)|(?<=\bgh)-(?=\d))+)",  # mentions, addresses, numbers of issues
    re.IGNORECASE,
)
_LEADING = re.compile(r"^(?:([-+>#=])|(\d+)([.)]))")
_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")


def in_lines(text: str) -> str:
    """Escape `text` for a terminal, keeping line breaks and tabs. "\\r\\n" counts as a line break."""
    return _shown(text.replace("\r\n", "\n"))


def in_line(text: str) -> str:
    """Escape `text` for part of a terminal line: line breaks and tabs are also written out."""
    return text if _is_plain(text) else _shown(text).replace("\n", "\\n").replace("\t", "\\t")


def in_json(document: str) -> str:
    """Write the hidden characters of a JSON document as JSON escapes. A parser reads the same values."""
    return _shown(document, _units)


def in_markdown(text: str, *, leading: bool = False) -> str:
    """Escape `text` for a line of Markdown or a table cell, so that it is shown literally. `leading`: it begins a block.

    GitHub links mentions and addresses even if their characters are escaped, but not in code: so those characters become code.
    """
    escaped = _SPECIAL.sub(lambda match: f"`{match[0]}`" if match["linked"] else f"\\{match[0]}", in_line(text))
    return _LEADING.sub(r"\2\\\1\3", escaped.strip()) if leading else escaped


def fenced(text: str, language: str = "text") -> str:
    """Return `text` as a Markdown code block of a language, in a fence longer than any run of backticks in it."""
    shown = in_lines(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    return f"{fence}{language}\n{shown}\n{fence}"


def in_html(text: str) -> str:
    """Escape `text` for an element or an attribute of a page, keeping its line breaks."""
    import html  # imported here: it has a table of all entities

    return html.escape(in_lines(text))


def in_script(document: str) -> str:
    """Escape a JSON document for a page's script element, so that it cannot end the element. A parser reads the same values."""
    return in_json(document).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def in_csv(text: str) -> str:
    """Escape `text` for a CSV cell: put an apostrophe before what a spreadsheet would run as a formula.

    Text that already begins with `'=`, `'+`, `'-` or `'@` gets another, so removing one apostrophe always restores the text.
    """
    shown = in_lines(text)
    return f"'{shown}" if _FORMULA.match(shown) else shown


_MEANS_MORE = frozenset('"$`\\!')
"""Characters that a shell also interprets inside double quotes."""


def in_shell(text: str) -> str:
    """Quote `text` as one word of a command to paste. Hidden characters are written so that bash and zsh read them."""
    if in_line(text) == text:
        return f'"{text}"' if "'" in text and not _MEANS_MORE & set(text) else shlex.quote(text)
    errors = "surrogateescape" if all("\udc80" <= char <= "\udcff" for char in _SURROGATE.findall(text)) else "surrogatepass"
    return "$'" + "".join(_for_shell(byte) for byte in text.encode("utf-8", errors)) + "'"


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _shown(text: str, spell: Callable[[str], str] = _escaped) -> str:
    if _is_plain(text):
        return text
    return _MAY_FLOOD.sub(lambda match: _calmed(match[0], spell), _HIDDEN.sub(lambda match: spell(match[0]), text))


def _calmed(run: str, spell: Callable[[str], str]) -> str:
    """Escape the combining marks of a run of characters beyond MOST_MARKS on one character."""
    marks, calm = 0, []
    for char in run:
        marks = marks + 1 if unicodedata.category(char) in ("Mn", "Me") else 0
        calm.append(spell(char) if marks > MOST_MARKS else char)
    return "".join(calm)


def _units(char: str) -> str:
    return re.sub("....", r"\\u\g<0>", char.encode("utf-16-be", "surrogatepass").hex())


def _for_shell(byte: int) -> str:
    char = chr(byte)
    return f"\\{char}" if char in "\\'" else char if _is_plain(char) else f"\\x{byte:02x}"
