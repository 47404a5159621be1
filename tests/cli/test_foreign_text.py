"""No command lets foreign text reach the terminal, Markdown, CSV or a pasted command as anything but text."""

import ast
import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys

import commandline
import pexpect
import pytest
from comparecases import given as given_input, write_replay
from hostilestore import FORGED, FORMULA, HIDDEN, HOSTILE, forbidden, hostile_logs, hostile_store
from hypothesis import given, settings, strategies as st
from markdown_it import MarkdownIt
from roots import ROOT, read_json, write_json

from actordbg.base import foreign_text
from actordbg.document.blocks import Code, Grid, Heading, Items, Paragraph
from actordbg.document.renderings import as_markdown, as_text
from actordbg.records.journal import SPEC

LINKED = re.compile(r"(?i)(?<![\w`])@[a-z0-9]|[\w.+-]@[\w-]+\.|\b(?:https?|ftp)://|\bwww\.\w|#\d|\bgh-\d")
"""What GitHub makes a link of in text: mentions, e-mail addresses, addresses of pages, numbers of issues."""
OWN = re.compile(r"\x1b\[(?:\d+m|H|2J)")
"""What actordbg itself sends: colors, and an empty screen."""


class Terminal(io.StringIO):
    """What a terminal got; it says that it is one, so nobody strips anything for it."""

    isatty = staticmethod(lambda: True)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return hostile_store(tmp_path_factory.mktemp("hostile") / "store")


def typed(store, *arguments):
    """What a command sends to a terminal: standard output, standard error, exit code."""
    done = commandline.typed("--store", str(store.root), *arguments, screen=Terminal)
    return done.stdout, done.stderr, done.returncode


@pytest.fixture(autouse=True)
def colorless(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")


COMMANDS = """dump ls
dump ls --json
dump ls --limit 1
dump show 20250619
dump show 20250619T052608
dump show 20250619T052608 --json
dump status
dump status --all
dump status --json
dump verify --quiet
dump prune --damaged
dump prune --older-than 1d
dump pack --quiet
dump export 20250619T052608.430740Z-000000 --out {out} --quiet
dump recover
index --quiet
index --rebuild --quiet
index --json
status --target {evil}
report
report --all
report evil-01 evil-02 --format md
report evil-01 --format csv
report --json
report nothing
compare evil-01 evil-02 --quiet
compare evil-01 evil-02 --quiet --format md
compare evil-01 evil-02 --quiet --json
compare last truth --noise --quiet
compare evil-01 golden --quiet
matrix --resume matrix-1 --quiet
replay --where {where} --dry-run
replay --dry-run
replay --resume evil-01 --dry-run
replay --resume {evil}
replay --input-file {evil} --dry-run
check --where {where}
check --junit {evil}
dump import {evil} --quiet
dump ls --where {where}
dump {evil}
report --{evil}
dump ls --order {evil}
dump enable --run {evil}
dump disable --run {evil}
--store {evil} dump ls
--store {evil} dump status
dump create --run {evil} --quiet""".splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_sends_foreign_text_to_the_terminal_as_it_is(hostile, command, tmp_path):
    words = [word.format(out=tmp_path, evil=HOSTILE, where=f"role='{HOSTILE}'") for word in command.split()]
    out, err, _ = typed(hostile, *words)
    assert out + err
    assert forbidden(OWN.sub("", out) + err) == []
    if "--format" not in words:  # a fence and a quoted cell have lines
        lines = {line.strip() for line in [*out.splitlines(), *err.splitlines()]}
        assert "# heading" not in lines and FORGED not in lines
    if "--json" in words and out:
        json.loads(out)
    if "--format md" in command or "csv" in command:
        assert out.strip(), "the report is empty: this would prove nothing"


def test_json_still_says_what_was_there(hostile):
    record = json.loads(typed(hostile, "dump", "show", "20250619T052608.430740Z-000000", "--json")[0])["record"]
    assert record["role"] == HOSTILE and record["arguments"] == {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]}


def test_logs_of_a_training_and_their_names_are_foreign_too(hostile, tmp_path):
    logs = [str(path) for path in hostile_logs(tmp_path)]
    for options in ([], ["--metric", HIDDEN], ["--json"]):
        out, err, _ = typed(hostile, "compare-logs", *logs, *options)
        assert out + err and forbidden(out + err) == []


def parts(text):
    """Every token of Markdown, those inside of lines included."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return [*tokens, *(child for token in tokens for child in token.children or [])]


def runs(tokens):
    """The text between tokens, as a reader has it. GitHub looks in it for what it links, so a backslash in the source is not help."""
    found = [""]
    for token in tokens:
        if token.type.startswith("text"):
            found[-1] += token.content
        else:
            found.append("")
    return found


def test_markdown_has_no_link_image_html_or_heading_that_we_did_not_write(hostile):
    blocks = [Heading(HOSTILE, 2), Paragraph(HOSTILE), Paragraph("1. one"), Items((HOSTILE, "- x", "# y")), Code(HOSTILE),
              Grid(("a", HOSTILE), ((HOSTILE, "1"),), frozenset({"a"}))]  # fmt: skip
    reports = [typed(hostile, "report", "--all", "--format", "md")[0], as_markdown(blocks)]
    for text in reports:
        assert forbidden(text) == []
        found = parts(text)
        never = {"link_open", "image", "html_inline", "html_block", "hr", "blockquote_open", "ordered_list_open"}
        assert not {token.type for token in found} & never
        headings = [found[at + 1].content for at, token in enumerate(found) if token.type == "heading_open"]
        assert len(headings) == sum(line.startswith("#") for line in text.splitlines() if not line.startswith("# heading"))
        assert "heading" not in [one.strip("\\") for one in headings]
        assert [run for run in runs(found) if LINKED.search(run)] == []
        assert {token.content.strip("@/.#-") for token in found if token.type == "code_inline"} == {""}
    table = [token for token in parts(reports[1]) if token.type in ("tr_open", "td_open", "th_open")]
    assert [token.type for token in table] == ["tr_open", "th_open", "th_open", "tr_open", "td_open", "td_open"]
    assert "fence" in {token.type for token in parts(reports[1])}
    assert forbidden(as_text(blocks)) == []


def test_csv_has_no_formula_and_its_numbers_are_numbers(hostile):
    out = typed(hostile, "report", "evil-01", "--format", "csv")[0]
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 3 and rows[0]["error"].startswith(f"'{FORMULA}")
    assert not [cell for row in rows for cell in row.values() if cell[:1] in tuple("=+-@\t\r")]
    assert float(rows[1]["slot"]) == 1


@settings(max_examples=60)
@given(st.text() | st.sampled_from(["=1", "+1", "-1", "@x", "'=1", "''=1", "'quoted'", "it's", "a\nb", "naïve", "日本"]))
def test_each_output_keeps_ordinary_text_and_hides_nothing(text):
    for show in (foreign_text.in_lines, foreign_text.in_line, foreign_text.in_csv, foreign_text.in_shell):
        assert forbidden(show(text)) == []
    assert "\n" not in foreign_text.in_line(text) + foreign_text.in_markdown(text)
    assert json.loads(foreign_text.in_json(json.dumps(text, ensure_ascii=False))) == text
    assert foreign_text.in_lines(foreign_text.in_lines(text)) == foreign_text.in_lines(text)
    if foreign_text.in_lines(text) == text:
        cell = foreign_text.in_csv(text)
        assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
        assert (cell[1:] if re.match("'+[=+\\-@\t\n＝＋－＠]", cell) else cell) == text


def test_a_word_to_paste_is_one_word_for_a_shell():
    words = ["$(touch x)", "`touch x`", "a b", "'", "\\", "; rm x", "~", "", HOSTILE, "\udc80\x9b\n", "naïve", "-rf", "!x"]
    line = " ".join(foreign_text.in_shell(word) for word in words)
    assert forbidden(line) == [] and "\n" not in line
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]


def pasted(line, folder):
    """What a shell makes of a suggested command: the words of each call of actordbg. Whatever else it ran would leave a file."""
    functions = "actordbg() { printf '%s\\0' \"$@\"; printf '\\n\\0'; }; rm() { touch removed; }"
    done = subprocess.run(["bash", "-c", f"{functions}; {line}"], capture_output=True, cwd=folder)
    assert not list(folder.iterdir()), line
    return [os.fsdecode(call).split("\0")[:-1] for call in done.stdout.split(b"\n\0")[:-1]]


@pytest.mark.parametrize("evil", ["$(touch x)", "a b; touch x", "`touch x`", "'; touch x #", "\x1b[2J\n touch x"])
def test_a_suggested_command_runs_nothing_else(store, evil, tmp_path):
    (folder := tmp_path / "here").mkdir()
    inputs = [given_input(0)]
    write_replay(store, "evil-03", inputs, model=evil, command=shlex.join(["actordbg", "replay", "--model", evil]))
    shown = " ".join(typed(store, "report", "evil-03")[0].split())
    command = f"actordbg replay --model {foreign_text.in_shell(evil)}"
    assert f"command: {command}" in shown and pasted(command, folder) == [["replay", "--model", evil]]
    for foreign in (f"rm -rf {tmp_path} replay", "touch x; actordbg replay", "actordbg replay 'unended"):
        (folder_of := store.replays / "evil-03" / SPEC).write_text(json.dumps(read_json(folder_of) | {"command": foreign}))
        told = "".join(typed(store, "report", "evil-03")[:2])
        assert "rm -rf" not in told and "touch x; actordbg" not in told and "unended" not in told


def test_no_id_in_a_store_says_where_something_is_written(tmp_path):
    store = hostile_store(tmp_path / "deep" / "store")
    spec, matrix = store.replays / "evil-01" / SPEC, store.matrices / "matrix-1.json"
    write_json(spec, read_json(spec) | {"replay_id": "../../../escaped"})
    before = matrix.read_text()
    for changed in (before.replace('"matrix-1"', '"../../../escaped"'), before.replace('"evil-01"', '"../../../escaped"')):
        assert changed != before
        matrix.write_text(changed)
        assert typed(store, "matrix", "--resume", "matrix-1", "--quiet")[2] == 4
    assert typed(store, "replay", "--resume", "evil-01", "--quiet")[2] == 4
    assert [path.name for path in tmp_path.rglob("*escaped*")] == []


def test_progress_in_a_real_terminal_shows_names_as_they_are():
    program = (
        "import sys; from actordbg.cli.output import progress\n"
        "with progress(sys.argv[1], 2) as advance: advance(1, note=sys.argv[1])"
    )
    text = f"[red]name[/red] [link=http://e.vil]t[/link] [/] \x1b]0;owned\x07\x9b31m\u202e {'x' * 4}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "300"}
    job = pexpect.spawn(sys.executable, ["-c", program, text], env=environment, dimensions=(24, 300), encoding="utf-8")
    shown = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", job.read()).replace("\r", "")
    assert job.wait() == 0, shown
    assert "[red]name[/red] [link=http://e.vil]t[/link] [/] \\x1b]0;owned\\x07\\x9b31m\\u202e" in shown
    assert forbidden(shown) == []


WRITERS = {"print", "echo", "secho", "Console", "confirm", "prompt", "getpass", "input"}
ELSEWHERE = {
    "actordbg/base/fault.py", "actordbg/install", "actordbg/trainers/openrlhf", "actordbg/dumps/decode_child.py", "actordbg/replay/worker.py",
    "actordbg/debug/replay_stops.py", "actordbg/debug/stops.py", "actordbg/replay/rank_launcher.py", "actordbg/doctor/import_probe.py",
}  # fmt: skip
"""What runs in other processes: the training's, and children that write into pipes and logs."""


def test_nothing_is_printed_but_through_output():
    found = []
    for path in sorted((ROOT / "actordbg").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name in ("actordbg/cli/errors.py", "actordbg/cli/output.py", "actordbg/cli/progress_bar.py") or name.startswith(
            tuple(ELSEWHERE)
        ):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            word = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            text = ast.unparse(called) if called is not None else ""
            rich = isinstance(node, ast.ImportFrom | ast.Import) and re.search(r"\brich\b", ast.unparse(node))
            if word in WRITERS or re.fullmatch(r"sys\.std(out|err)(\.buffer)?\.write(lines)?", text) or rich:
                found.append(f"{name}: {ast.unparse(node)[:60]}")
    assert found == ["actordbg/cli/app.py: typer.echo(f'actordbg {__version__}')"]  # the help imports no more than it needs
