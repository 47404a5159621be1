"""The table of contents of the command line: which command is which function, and the one place that catches errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from actordbg import __version__
from actordbg.base.errors import ActordbgError, EnvironmentProblem
from actordbg.cli import (
    actor_init,
    compare,
    compare_logs,
    curve,
    demo,
    doctor,
    dump_create,
    dump_export,
    dump_import,
    dump_ls,
    dump_pack,
    dump_prune,
    dump_recover,
    dump_show,
    dump_status,
    dump_switch,
    dump_unpack,
    dump_verify,
    index,
    matrix,
    noise,
    patch,
    replay,
    report,
    run,
    status,
    unpatch,
)
from actordbg.cli.optional_value import optional_values

OPTIONAL = {
    "torch",
    "numpy",
    "transformers",
    "deepspeed",
    "openrlhf",
    "ray",
    "datasets",
    "tokenizers",
    "peft",
    "accelerate",
}
"""What a plain `pip install actordbg` leaves out, because it belongs to the training environment."""

app = typer.Typer(
    name="actordbg",
    help="Record the actor inputs of an RLHF training run, query them, and replay them without the run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than everything else together
    context_settings={"help_option_names": ["-h", "--help"]},
)
dump_app = typer.Typer(
    name="dump",
    help="Record, bring in, look at, check, take out and drop dumps.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
actor_app = typer.Typer(
    name="actor", help="The standalone actor that replays use.", no_args_is_help=True, rich_markup_mode=None
)

curve_app = typer.Typer(
    name="curve",
    help="Memory and time by length, and what fits a budget.\n\nExample: actordbg curve memory --budget 80GB",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command("doctor", short_help="Will this machine and this OpenRLHF work?")(doctor.doctor)
app.command("demo", short_help="The whole way on a real training with a tiny model.")(demo.demo)
app.command("patch", short_help="Append the capture hook to OpenRLHF's actor.py.")(patch.patch)
app.command("unpatch", short_help="Take it out again, byte for byte.")(unpatch.unpatch)
app.command("status", short_help="Is actor.py patched, and is dumping enabled?")(status.status)
app.command("run", short_help="Record a job without patching it.", context_settings={"allow_interspersed_args": False})(
    run.run
)
app.add_typer(dump_app)
dump_app.command("enable", short_help="Start recording, in running jobs too.")(dump_switch.enable)
dump_app.command("disable", short_help="Stop recording.")(dump_switch.disable)
dump_app.command("status", short_help="What each rank recorded.")(dump_status.status)
dump_app.command("recover", short_help="Turn what dead processes had in hand into dumps.")(dump_recover.recover)
dump_app.command("import", short_help="Bring old pickles in, without executing them.")(dump_import.import_)
dump_app.command("create", short_help="Make random inputs of chosen shapes.")(dump_create.create)
dump_app.command("ls", short_help="List dumps.")(dump_ls.ls)
dump_app.command("show", short_help="Everything about one dump.")(dump_show.show)
dump_app.command("verify", short_help="Check dump files for damage.")(dump_verify.verify)
dump_app.command("export", short_help="Write dumps as .safetensors or .pt.")(dump_export.export)
dump_app.command("pack", short_help="Many dumps in one file, every row once.")(dump_pack.pack)
dump_app.command("unpack", short_help="Packed dumps as files of their own again.")(dump_unpack.unpack)
dump_app.command("prune", short_help="Remove dumps.")(dump_prune.prune)
app.command("index", short_help="Index what is new in the store.")(index.index)
app.add_typer(actor_app)
actor_app.command("init", short_help="Build the actor alone and run one forward.")(actor_init.init)
app.command(
    "replay",
    short_help="Replay what a query selects, without the training.",
    cls=optional_values(oracle="fp32", resume="last"),
)(replay.replay)
app.command("matrix", short_help="Which combinations of settings work, and which are right.")(matrix.matrix)
app.command(
    "compare", short_help="Does a replay agree with another, or with the truth?", cls=optional_values(noise="last")
)(compare.compare)
app.command("noise", short_help="How far a configuration moves by itself.", cls=optional_values(oracle="fp32"))(
    noise.noise
)
app.command("report", short_help="What passed, what failed and why, time and memory.")(report.report)

app.add_typer(curve_app)
curve_app.command("memory", short_help="Peak memory by length, and the longest that fits.")(curve.memory)
curve_app.command("time", short_help="Time by length, and the longest that fits.")(curve.time)
app.command("compare-logs", short_help="Do two trainings have the same loss, step by step?")(compare_logs.compare_logs)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"actordbg {__version__}")
        raise typer.Exit


@app.callback()
def root(
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="The store (default: ACTORDBG_STORE, actordbg.toml, ./store)."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True, help="What deepspeed adds.")] = None,
) -> None:
    """Record the actor inputs of an RLHF training run, query them, and replay them without the run.

    Exit codes: 0 good, 1 the answer is bad (a mismatch, a failed replay), 2 usage, 3 refused, 4 environment or
    store problem, 130 interrupted.
    """


def main() -> None:
    """Entry point of `actordbg`: runs the command, and turns every ActordbgError into a message, a hint and an exit code."""
    try:
        app()
    except ActordbgError as error:
        _give_up(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "check the path, its permissions and the free space of its disk"
        _give_up(EnvironmentProblem(f"{where}{error.strerror or error}", hint=hint))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        message = f"this command needs {error.name}, which is not installed in {sys.executable}'s environment"
        hint = "run it in the training environment, or: pip install 'actordbg[replay]'  (`actordbg doctor` shows what is missing)"
        _give_up(EnvironmentProblem(message, hint=hint))


def _give_up(error: ActordbgError) -> NoReturn:
    typer.echo(f"error[{error.code}]: {error.message}", err=True)
    if error.hint:
        typer.echo(f"hint: {error.hint}", err=True)
    sys.exit(error.exit_code)
