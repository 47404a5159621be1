"""The command line's root: every failure is a message, a hint and an exit code, never a traceback; help and completion."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commandline import offered, program

from actordbg.base.errors import UsageError
from actordbg.cli.app import CONTENTS
from actordbg.cli.lazy import UNCLEAR, Command, every_command, plain_value
from actordbg.cli.options import command_line
from actordbg.replay.worker import Failure
from actordbg.replay.worker_logs import tail_of
from actordbg.store.layout import Store

COMMANDS = list(every_command(CONTENTS))
EVERY = pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
BROKEN = """
import actordbg.cli.patch as module
def broken(): raise PermissionError(13, "Permission denied", "/somewhere")
module.status = broken
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("dump", "show", "last", "--values"), ("dump", "export", "--where", "rank=0", "--format", "pt")]
)
def test_without_torch_a_command_that_needs_it_says_so(tmp_path: Path, command: tuple[str, ...]):
    store = str(tmp_path / "store")
    program("--store", store, "dump", "create", "--quiet", "--seq-len", "8")
    done = program("--store", store, *command, code="import sys; sys.modules['torch'] = None")
    assert done.returncode == 4
    assert "error[environment]: this command needs torch" in done.stderr and "hint:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "exit_code", "said"),
    [
        (("status",), BROKEN, 4, "error[environment]: /somewhere: Permission denied"),
        (("--store", "/dev/null/store", "dump", "enable"), "", 4, "error["),
        (("rpelay",), "", 2, "Did you mean 'replay'"),
        (("dump", "lss"), "", 2, "Did you mean 'ls'"),
    ],
)
def test_a_failure_is_a_message_and_no_traceback(words: tuple[str, ...], code: str, exit_code: int, said: str):
    done = program(*words, code=code)
    assert done.returncode == exit_code and said in done.stderr and "Traceback" not in done.stderr


def test_a_missing_module_of_a_plain_installation_is_a_defect_and_not_hidden(store: Store):
    words = ("--store", str(store.root), "dump", "ls", "--where", "rank=0")
    done = program(*words, code="import sys; sys.modules['sqlglot'] = None")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


@EVERY
def test_the_line_of_a_command_is_the_first_of_its_docstring(name: str, command: Command):
    assert (inspect.getdoc(command.function()) or "").splitlines()[0] == command.line
    assert len(command.line) <= 62  # one line of `--help` at 80 columns


@EVERY
def test_an_option_that_takes_one_value_is_refused_when_it_is_given_twice(name: str, command: Command):
    built = command.build()
    options = [option for option in built.params if option.param_type_name == "option"]
    assert {option.name for option in options if option.multiple} <= {"input_file", "at", "pid", "adapter", "runtime_env"}
    for option in options:
        for first, second in itertools.product([*option.opts, *option.secondary_opts], repeat=2):
            words = [first, second] if option.is_flag else [first, "1", f"{second}=2" if second[1] == "-" else f"{second}2"]
            harmless = option.multiple or option.name == "where" or (option.is_flag and not option.secondary_opts)
            try:
                built.make_context(name, words)
            except UsageError as error:
                assert ("more than once" in error.message) is not harmless
                assert harmless or (first in error.message and error.exit_code == 2)
            except (Exception, SystemExit):  # noqa: BLE001 - what such values do otherwise is not asked here
                assert harmless, words
            else:
                assert harmless, words


@EVERY
def test_a_value_that_is_taken_at_once_is_the_one_that_typer_makes(name: str, command: Command, tmp_path: Path):
    built = command.build()
    context = typer.Context(built, info_name=name)
    for option in built.get_params(context):
        several = option.multiple or option.nargs == -1
        for value in (
            None,
            option.default,
            *([text, "7"] if several else text for text in ("", "7", "0.25", "text", str(tmp_path))),
        ):
            if (taken := plain_value(option, value)) is not UNCLEAR:
                made = option.get_runtime_param().coerce(value, param=option, ctx=context)
                assert (taken, type(taken)) == (made, type(made)), (option.name, value)
    assert program("dump", "ls", "--limit", "-1").returncode == 2, "what is wrong is refused as ever"


def test_a_command_whose_values_are_clear_loads_no_pydantic_and_no_sqlalchemy(store: Store):
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules))"
    program("--store", str(store.root), "index")
    for words in (["status"], ["dump", "ls"], ["replays"], ["replay", "--help"]):
        loaded = set(program("--store", str(store.root), *words, code=code).stdout.splitlines()[-1].split())
        assert "actordbg.cli.app" in loaded and not loaded & {"pydantic", "sqlalchemy", "sqlglot", "alembic", "torch", "numpy"}


def test_the_help_has_every_command_and_option_under_a_heading():
    lines = program("--help").stdout.splitlines()
    for section in CONTENTS:
        start = lines.index(f"{section.heading}:")
        for number, entry in enumerate(section.entries, start + 1):
            assert lines[number].split(maxsplit=1) == [entry.name, entry.line]
    lines = program("replay", "--help").stdout.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings[-1] == "Options:" and "The inputs:" in headings
    assert lines.index("The inputs:") < next(n for n, line in enumerate(lines) if line.startswith("  --max-inputs"))


@pytest.mark.parametrize(("typed", "found"), [("", "replay"), ("dump ", "ls"), ("dump ls --w", "--where")])
def test_the_shell_completes_commands_and_their_options(typed: str, found: str):
    assert found in offered(typed)


def test_the_completion_that_python_m_installs_leaves_python_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    command = [sys.executable, "-m", "actordbg", "--show-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].endswith(" _actordbg_completion actordbg"), done


def test_an_error_without_words_is_told_by_the_line_that_raised_it():
    with pytest.raises(StopIteration) as raised:
        next(iter(()))
    assert Failure.of(raised.value).error == f"next(iter(())) ({__file__}:{raised.tb.tb_lineno})"


def test_what_a_replay_keeps_of_its_command_and_of_errors_has_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDSECRET")
    monkeypatch.setattr(sys, "argv", ["actordbg", "replay", "--model", "https://me:hf_PLANTEDSECRET@hub/a model"])
    assert command_line() == "actordbg replay --model 'https://me:[hidden]@hub/a model'"
    failure = Failure.of(RuntimeError("401 for hf_PLANTEDSECRET"))
    (tmp_path / "rank0.log").write_text("sent hf_PLANTEDSECRET to the hub")
    for text in (failure.error, failure.trace, tail_of(tmp_path / "rank0.log")):
        assert "[hidden]" in text and "PLANTED" not in text
