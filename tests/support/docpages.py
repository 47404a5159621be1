"""Reading the project's Markdown: pages, links, headings, and the blocks of code that tests run.

A block ```console holds what a user types (after `$ `) and what may come back. In a page, the comment
`<!-- run: NAME -->` before a block means that the tests execute it; with a blank line and text after it, all console blocks below.
Blocks of one name run in order, in one temporary folder, and what the page shows as output is compared with what came (figures aside,
see `comparable`). A command whose output begins with `error[` has to fail.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from roots import FORKED, ROOT, script

_BLOCK = re.compile(r"(?:<!--\s*(run(?:-python)?):\s*(\S+)\s*-->\s*\n+)?^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FROM_HERE = re.compile(r"^<!--\s*run:\s*(\S+)\s*-->\s*\n+(?!```)", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Command:
    """One line after `$ `, continuation lines joined, and the lines of output that the page shows below it."""

    text: str
    output: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and how (`run`, `run-python`) and under which name it is executed."""

    page: Path
    language: str
    text: str
    mode: str
    name: str

    @property
    def commands(self) -> list[Command]:
        """The commands of a console block."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if found and found[-1][0].endswith("\\") and not found[-1][1]:
                found[-1] = (found[-1][0][:-1].rstrip() + " " + line.strip().removeprefix("> "), [])
            elif line.startswith("$ "):
                found.append((line[2:], []))
            elif found:
                found[-1][1].append(line)
        return [Command(text, tuple(output)) for text, output in found]


def pages() -> list[Path]:
    """README, CONTRIBUTING and everything below docs/, with the pages of store/ and examples/, in Markdown."""
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    top += [ROOT / "store" / "README.md", ROOT / "examples" / "README.md"]
    return [path for path in top if path.is_file()] + sorted((ROOT / "docs").rglob("*.md"))


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    text = page.read_text()
    below = _FROM_HERE.search(text)
    found = []
    for m in _BLOCK.finditer(text):
        everything = below is not None and m.start() > below.start() and m[3] == "console"
        mode, name = ("run", below[1]) if below and everything else (m[1] or "", m[2] or "")
        found.append(Block(page, m[3], m[4], mode, name))
    return found


def names_of_tests(file: Path) -> list[str]:
    """The names of a file's tests."""
    return re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)


def prose() -> str:
    """All pages that people write: the generated reference does not count."""
    generated = {"cli.md", "catalog.md"}
    return "\n".join(page.read_text() for page in pages() if page.name not in generated)


def links(page: Path) -> Iterator[str]:
    """The targets of the links in a page, code left out."""
    text = _BLOCK.sub("", page.read_text())
    yield from (match[1] for match in _LINK.finditer(re.sub(r"`[^`\n]*`", "``", text)))


def invocations(command: str) -> list[list[str]]:
    """The arguments of every `actordbg ...` in a shell line, also behind `&&`, a pipe, an assignment, or inside quotes."""
    found = []
    for words in _simple_commands(command):
        while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("sudo", "time", "exec")):
            words = words[1:]
        if words and Path(words[0]).name == "actordbg":
            found.append(words[1:])
        found += [one for word in words[1:] if re.match(r"actordbg .", word) for one in invocations(word)]
    return found


def _simple_commands(command: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for word in lexer:
        if set(word) <= set("();|&"):
            yield words
            words = []
        elif set(word) <= set("<>&"):
            skip = True
        elif skip:
            skip = False
        else:
            words.append(word)
    yield words


def comparable(line: str) -> list[str]:
    """The words of a line of output that must come again: without figures, ids, paths, and what only draws."""
    words = re.findall(r"\S+", line)
    return [word for word in words if not re.search(r"[\d/\\]", word) and re.search(r"[A-Za-z]", word)]


def run_blocks(blocks: Iterable[Block], work: Path, **variables: str) -> None:
    """Execute the commands of blocks in `work`, with this checkout's `actordbg`; each has to end well and show what its page shows."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
    environment |= {"PATH": _programs(work.with_name("bin")), "COLUMNS": "200", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    for command in (command for block in blocks for command in block.commands):
        done = subprocess.run(
            ["bash", "-c", command.text], cwd=work, env=environment | variables, capture_output=True, text=True, timeout=900
        )  # fmt: skip
        fails = bool(command.output) and command.output[0].startswith("error[")
        assert bool(done.returncode) == fails, f"$ {command.text}\n{done.stdout}{done.stderr}"
        came = comparable(done.stdout + done.stderr)
        expected = [word for line in command.output for word in comparable(line)]
        assert [word for word in expected if word not in came] == [], f"$ {command.text}\n{done.stdout}"


def _programs(folder: Path) -> str:
    """PATH with a folder in front whose `actordbg` is this checkout's, whatever is installed."""
    start = f'PYTHONPATH={shlex.quote(f"{FORKED}:{ROOT}")} exec {shlex.quote(sys.executable)} -m actordbg "$@"'
    script(folder / "actordbg", start)
    return f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def parse(arguments: list[str]) -> None:
    """Parse a command line as `actordbg` would, without running the command."""
    import typer

    from actordbg.cli.app import app

    command, context = typer.main.get_command(app), None
    while True:
        context = command.make_context(command.name or "actordbg", list(arguments), parent=context, resilient_parsing=False)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not hasattr(command, "commands"):
            return
        name, command, arguments = command.resolve_command(context, rest)
        assert command is not None, name
