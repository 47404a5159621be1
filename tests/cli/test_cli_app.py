"""The command line's root: every failure is a message, a hint and an exit code, never a traceback; help and completion."""

import inspect
import re
import sys

import pytest
import typer
from commandline import invoke, offered, program
from roots import run_program

from actordbg.base.errors import UsageError
from actordbg.cli import app
from actordbg.cli.app import CONTENTS
from actordbg.cli.lazy import every_command
from actordbg.cli.options import command_line
from actordbg.replay.worker import Failure
from actordbg.replay.worker_logs import tail_of

COMMANDS = list(every_command(CONTENTS))
BROKEN = """
import actordbg.cli.patch as module
def broken(): raise PermissionError(13, "Permission denied", "/somewhere")
module.status = broken
"""


@pytest.mark.slow
def test_without_a_package_a_command_that_needs_it_says_so(tmp_path):
    store = str(tmp_path / "store")
    program("--store", store, "dump", "create", "--quiet", "--seq-len", "8")
    done = program("--store", store, "report", "--tokenizer", store, code="import sys; sys.modules['tokenizers'] = None")
    assert done.returncode == 4
    assert "error[environment]: this command needs tokenizers" in done.stderr and "hint:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words, code, exit_code, said",
    [
        (("status",), BROKEN, 4, "error[environment]: /somewhere: Permission denied"),
        (("--store", "/dev/null/store", "dump", "enable"), "", 4, "error["),
    ],
)
def test_a_failure_is_a_message_and_no_traceback(words, code, exit_code, said):
    done = program(*words, code=code)
    assert done.returncode == exit_code and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("ended", [KeyboardInterrupt, typer.Abort])
def test_a_command_that_is_interrupted_says_so(store, monkeypatch, capsys, ended):
    def interrupted(*_given, **_named):
        raise ended

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which `main` replaces
    monkeypatch.setattr(sys, "argv", ["actordbg", "--store", str(store.root), "index"])
    monkeypatch.setattr("actordbg.catalog.indexer.refresh", interrupted)
    with pytest.raises(SystemExit, match="130"):
        app.main()
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[-1] == "interrupted"


def test_a_missing_module_of_a_plain_installation_is_a_defect_and_not_hidden(store):
    words = ("--store", str(store.root), "dump", "ls", "--where", "rank=0")
    done = program(*words, code="import sys; sys.modules['sqlglot'] = None")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


def test_the_line_of_a_command_is_the_first_of_its_docstring():
    lines = {name: (command.line, (inspect.getdoc(command.function()) or "").splitlines()[0]) for name, command in COMMANDS}
    assert {name: pair for name, pair in lines.items() if pair[0] != pair[1] or len(pair[0]) > 62} == {}, "one line at 80 columns"


@pytest.mark.parametrize(
    "words, named",
    [
        ("dump ls --limit 1 --limit=2", "--limit"),
        ("report -f md --format md", "--format/-f"),
        ("replay --compile --no-compile", "--compile/--no-compile"),
        ("replay --resume a --resume b", "--resume"),
        ("dump ls --json --json --where rank=0 --where rank=1", None),
    ],
)
def test_an_option_that_takes_one_value_is_refused_when_it_is_given_twice(store, words, named):
    if named is None:
        assert invoke(store, *words.split()).exit_code == 5, "a flag and a condition may be repeated"
    else:
        with pytest.raises(UsageError, match=re.escape(f"{named} takes one value, but is given more than once")):
            invoke(store, *words.split())


def test_a_command_whose_values_are_clear_loads_no_pydantic_no_sqlalchemy_and_no_metadata_of_packages(store):
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules))"
    program("--store", str(store.root), "index")
    for words in (["status"], ["dump", "ls"], ["replay", "ls"], ["replay", "--help"]):
        loaded = set(program("--store", str(store.root), *words, code=code).stdout.splitlines()[-1].split())
        unneeded = {"pydantic", "sqlalchemy", "sqlglot", "alembic", "torch", "numpy", "importlib.metadata"}
        assert "actordbg.cli.app" in loaded and not loaded & unneeded


def test_the_help_has_every_entry_and_option_under_a_heading():
    lines = program("--help").stdout.splitlines()
    for section in CONTENTS[:-1]:
        start = lines.index(f"{section.heading}:")
        for number, entry in enumerate(section.entries, start + 1):
            assert re.split(r"  +", lines[number].strip()) == [entry.label or entry.name, entry.line]
    lines = program("replay", "--help-all").stdout.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings[-3:] == ["Options:", "Output:", "Commands:"] and "Inputs:" in headings
    assert lines.index("Inputs:") < next(n for n, line in enumerate(lines) if line.startswith("  --max-inputs"))


@pytest.mark.parametrize(
    "typed, found",
    [
        ("", "replay"),
        ("dump ", "ls"),
        ("dump ls --w", "--where"),
        ("replay l", "ls"),
        ("store f", "fsck"),
        ("replay ls --l", "--limit"),
    ],
)
def test_the_shell_completes_commands_and_their_options(typed, found):
    assert found in offered(typed)


def test_the_shell_completes_a_second_word_only_where_it_may_stand():
    assert offered("replay ") == ["ls"] and offered("replay --json l") == []


def test_the_completion_that_python_m_installs_leaves_python_alone(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    command = [sys.executable, "-m", "actordbg", "--show-completion", "bash"]
    done = run_program(command)
    assert done.stdout.splitlines()[-1].endswith(" _actordbg_completion actordbg"), done


def test_an_error_without_words_is_told_by_the_line_that_raised_it():
    with pytest.raises(StopIteration) as raised:
        next(iter(()))
    assert Failure.of(raised.value).error == f"next(iter(())) ({__file__}:{raised.tb.tb_lineno})"


def test_what_a_replay_keeps_of_its_command_and_of_errors_has_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDSECRET")
    monkeypatch.setattr(sys, "argv", ["actordbg", "replay", "--model", "https://me:hf_PLANTEDSECRET@hub/a model"])
    assert command_line() == "actordbg replay --model 'https://me:[hidden]@hub/a model'"
    failure = Failure.of(RuntimeError("401 for hf_PLANTEDSECRET"))
    (tmp_path / "rank0.log").write_text("sent hf_PLANTEDSECRET to the hub")
    for text in (failure.error, failure.trace, tail_of(tmp_path / "rank0.log")):
        assert "[hidden]" in text and "PLANTED" not in text
