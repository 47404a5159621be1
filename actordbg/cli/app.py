"""The table of contents of the command line: which command is which function, and the one place that catches errors.

Commands are imported when they are called (`actordbg.cli.lazy`). To add a command, add a line here, and a method of
`PlainCommands` or a function in a module of this package; the line repeats the first line of its docstring.
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer

from actordbg import __version__
from actordbg.base.errors import ActordbgError, EnvironmentProblem, reason_of
from actordbg.cli.lazy import Command, CommandGroup, Section, every_command, group_class

ACTION, LIST = "quiet json", "file csv quiet json"
FACTS, DOCUMENT = "file quiet json", "file html md format quiet json"
CHARTS = f"{DOCUMENT} plot"
"""The output options of commands that do something, list rows, show facts, or show a document, without charts and with them."""
DUMP = CommandGroup(
    "dump",
    "Record, import, inspect, verify and delete dumps.",
    (
        Command("Start recording, even in running jobs.", "dump_recording:enable"),
        Command("Stop recording, even in running jobs.", "dump_recording:disable"),
        Command("Show calls captured and dropped by each process.", "dump_recording:status", FACTS),
        Command("Recover dead processes' last calls as dumps.", "dump_recording:recover"),
        Command("Import a run's files, old pickles, bundles; execute nothing.", "dump_files:import_"),
        Command("Create random inputs of given shapes.", "dump_files:create"),
        Command("List dumps, newest first.", "dump_ls:ls", f"empty {LIST}"),
        Command("List the columns, functions and operators of --where.", "dump_ls:columns", LIST),
        Command("Show one dump: its record, its tensors, its results.", "dump_ls:show", FACTS),
        Command("Check dump files for damage.", "index:verify", f"empty {FACTS}"),
        Command("Write dumps as .safetensors files.", "dump_files:export", f"empty {ACTION}"),
        Command("Move dumps into packs, which deduplicate rows.", "dump_files:pack", f"empty {ACTION}"),
        Command("Take dumps out of their packs, byte for byte.", "dump_files:unpack", f"empty {ACTION}"),
        Command("Remove dumps.", "dump_files:prune", f"empty {ACTION}"),
    ),
)
MEMORY = CommandGroup(
    "memory",
    "Track process memory over time; find where two diverge.",
    (
        Command("Sample the memory of running processes over time.", "memory:watch", f"csv {DOCUMENT}"),
        Command("Find where two runs' memory diverges.", "memory:compare", DOCUMENT),
    ),
)
STORE = CommandGroup(
    "store",
    "Show, browse, index, verify and sync a store.",
    (
        Command("Verify a store's integrity.", "index:fsck", FACTS),
        Command("Download new files of a remote store into a folder.", "remote_store:pull"),
        Command("Upload a folder's new files to a remote store.", "remote_store:push"),
    ),
    label="status, index, store",
)
INIT = Command("Build the actor alone and run one forward.", ":build_actor", FACTS, called="init", settings_of="actor init")
CONTENTS = (
    Section(
        "Install",
        (
            Command("Check this machine and this Python environment.", "patch:doctor", FACTS, label="doctor, actor"),
            Command("Record and replay a real training of a tiny model.", "patch:demo", ""),
            Command("Add the capture hook to actor.py; unpatch removes it.", "patch:patch", label="patch, unpatch"),
        ),
    ),
    Section(
        "Record",
        (
            Command(
                "Run a job and record it, without patching actor.py.",
                "run:run",
                "",
                label="run, adapters",
                settings={"allow_interspersed_args": False},
            ),
            DUMP,
            STORE,
        ),
    ),
    Section(
        "Replay",
        (
            Command("Check recorded data against laws, without a model.", ":lint", f"empty {DOCUMENT}"),
            Command("Replay a few dumps: do they run? Are they right?", "check:check", f"empty {DOCUMENT}"),
            Command(
                "Replay recorded inputs outside the job.",
                "replay:replay",
                f"empty {FACTS}",
                label="replay, attach",
                also=(
                    Command("List replays, newest first, with short handles.", "report:replays", f"empty {LIST}", called="ls"),
                ),
            ),
            Command(
                "Find which setting combinations run and are right.",
                ":matrix",
                f"empty {DOCUMENT}",
                label="matrix, train-check",
                on_cluster=True,
            ),
        ),
    ),
    Section(
        "Judge",
        (
            Command("Explain what is wrong with a replay, and since when.", ":explain", CHARTS, label="explain, locate"),
            Command("Reduce a wrong replay to the smallest faulty case.", ":reduce", DOCUMENT, label="reduce, repro, bundle"),
            Command(
                "Compare a replay with another, or with the truth.",
                ":compare",
                DOCUMENT,
                label="compare, compare-logs",
            ),
            Command("Replay an optimizer step: loss, norm, known faults.", ":step", DOCUMENT, label="step, turns, weights"),
            Command(
                "Report passes, failures and causes, time and memory.",
                "report:report",
                "csv file html md forms quiet json",
                label="report, ui",
            ),
            Command(
                "Measure a configuration's own numerical noise.",
                ":noise",
                f"empty {DOCUMENT}",
                label="noise, memory",
                on_cluster=True,
            ),
        ),
    ),
    Section(
        "",
        (
            Command("Remove the capture hook, byte for byte.", "patch:unpatch"),
            Command("List trainer adapters and whether each one works here.", "patch:adapters", LIST),
            CommandGroup("actor", "Build the actor alone.", (INIT,)),
            Command("Show patch, recording, dump and replay status.", "patch:status", FACTS),
            Command("Browse the store in a local web page.", "attach:ui", ""),
            Command("Index new files in the store.", "index:index"),
            Command("Attach to a rank at a breakpoint.", "attach:attach", ""),
            Command("Name the module in which a configuration goes wrong.", ":locate", f"empty {DOCUMENT}"),
            Command("Write one script that shows the fault, without actordbg.", ":repro"),
            Command("Pack dumps, replays and comparisons into one archive.", ":bundle"),
            Command("Check that the sampled ids are those that were trained on.", ":turns", DOCUMENT),
            Command("Check that rollout engines got the weights that were sent.", ":weights", DOCUMENT),
            Command(
                "Train a few steps under each configuration and compare.", ":train_check", f"empty {CHARTS}", on_cluster=True
            ),
            Command("Compare training losses step by step.", ":compare_logs", CHARTS),
            MEMORY,
        ),
    ),
)

OPTIONAL = frozenset(
    ["torch", "numpy", "transformers", "deepspeed", "openrlhf", "ray", "datasets", "tokenizers", "peft", "accelerate"]
)
"""Packages that a plain `pip install actordbg` leaves out, because they belong to the training environment."""

_COMPLETED = "actordbg"
"""The program name that shell completion is installed for: under `python -m actordbg` it would be the user's `python`."""
_PIPE_CLOSED = 141
"""The exit code that a shell shows for a program killed by a closed pipe: 128 + SIGPIPE."""
MISTYPED: Any = typer.BadParameter.__mro__[2]
"""click's class of command-line errors; typer may bundle its own copy of click."""

app = typer.Typer(
    name="actordbg",
    cls=group_class(CONTENTS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than everything else together
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _errors() -> ModuleType:
    from actordbg.cli import errors  # not needed for --help

    return errors


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"actordbg {__version__}")
        raise typer.Exit


@app.callback()
def root(
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="DIR|URL", help="The store (default: ACTORDBG_STORE, actordbg.toml, ./store)."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True, help="Added by the deepspeed launcher.")] = None,
) -> None:
    """Record the actor inputs of an RLHF training run, query them, and replay them offline.

    Exit codes: 0 success; 1 bad result (failed replay, mismatch, damaged dump); 2 usage; 3 refused; 4 environment or store;
    5 nothing to do; 130 interrupted.
    """


def main() -> None:
    """Run the command line (entry point of `actordbg`); print an ActordbgError with its hint, and exit with its code."""
    gc.set_threshold(50_000, 20, 20)  # most objects that a command creates are modules, and modules stay
    sys.excepthook = lambda *what: _errors().say_traceback(*what)
    try:
        code = app(standalone_mode=False, prog_name=_COMPLETED if any("-completion" in word for word in sys.argv) else None)
        sys.exit(code if isinstance(code, int) else 0)
    except MISTYPED as error:
        _errors().say_usage(error, [name for name, _ in every_command(CONTENTS)])
        sys.exit(error.exit_code)
    except ActordbgError as error:
        _give_up(error)
    except (KeyboardInterrupt, typer.Abort):  # at a question
        _errors().output.note("interrupted")
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the reader closed the pipe (`| head`): not a failure
            sys.exit(_PIPE_CLOSED)
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "check the path, its permissions and the free space of its disk"
        _give_up(EnvironmentProblem(f"{where}{reason_of(error)}", hint=hint))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        message = f"this command needs {error.name}, which is not installed in {sys.executable}'s environment"
        hint = "run it in the training environment, or: pip install 'actordbg[replay]'  (`actordbg doctor` shows what is missing)"
        _give_up(EnvironmentProblem(message, hint=hint))


def _give_up(error: ActordbgError) -> NoReturn:
    _errors().say_error(error)
    sys.exit(error.exit_code)
