"""The command line, in this process and as a program."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from roots import json_of, run_program
from typer.testing import CliRunner

from actordbg.base.errors import ActordbgError
from actordbg.cli import output
from actordbg.cli.app import CONTENTS, app, main
from actordbg.cli.lazy import every_command


def program(*words, code="", **environment):
    """`actordbg WORDS` in a process of its own; `code` runs before it."""
    main = f"{code}\nimport sys; sys.argv[0] = 'actordbg'\nfrom actordbg.cli.app import main; main()"
    command = [sys.executable, "-c", main, *words]
    return run_program(command, env=os.environ | environment)


def typed(line, *words, screen=io.StringIO):
    """`actordbg LINE WORDS` here, all the way: errors as a user sees them. screen: what standard output and error are."""
    words = [*line.split(), *words]
    out, err, code = screen(), screen(), 0
    here = patch.multiple(sys, argv=["actordbg", *words], excepthook=sys.excepthook)
    with here, patch.object(output, "answered_json", False), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def run_here(*words, **how):
    """`actordbg WORDS` in this process."""
    return CliRunner().invoke(app, [*map(str, words)], **how)


def tried(store, line, *words):
    """`actordbg LINE WORDS` on this store here, the line as it is typed."""
    return run_here(*line.split(), *words, env={"ACTORDBG_STORE": str(store.root)})


def invoke(store, line, *words):
    """As `tried`; an error of actordbg's own is raised."""
    result = tried(store, line, *words)
    if isinstance(result.exception, ActordbgError):
        raise result.exception
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def in_json(store, line, *words):
    """What a command answers under --json."""
    return json_of(invoke(store, line, *words, "--json"))


def function_of(name):
    """The function of a command, with all its options: "dump ls"."""
    return dict(every_command(CONTENTS))[name].function()


def offered(typed, **environment):
    """What bash is offered where `typed` ends."""
    words = f"actordbg {typed}"
    asked = {"_ACTORDBG_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    return run_here(prog_name="actordbg", env=asked | environment).stdout.split()
