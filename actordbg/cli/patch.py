"""`actordbg patch` and `unpatch`: add the capture hook to the trainer's actor.py, and remove it. `status`, `doctor`, `adapters`
and `demo`: check the patch, this machine and the trainer.

`patch`, `unpatch` and `status` find the file by --target, else in the environment of --python, else in this interpreter's.
"""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.base.option import Option
from actordbg.base.units import ago, listed
from actordbg.cli.options import require_good, store_of
from actordbg.cli.output import (
    cell,
    emit,
    human_bytes,
    note,
    plural,
    progress,
    rows_as_json,
    say,
    say_facts,
    say_lines,
    say_next,
    say_wrapped,
    table,
)

if TYPE_CHECKING:
    from actordbg.catalog.selections import Holdings
    from actordbg.doctor.python_environment import Check
    from actordbg.install.patching import Outcome, Status


Python = Annotated[Path | None, Option(metavar="EXE", help="Interpreter of the training environment (default: current).")]
TargetFile = Annotated[Path | None, Option(metavar="FILE", help="Path of the actor.py, instead of --python.")]
DryRun = Annotated[bool, Option(help="Print the diff; change nothing.")]


def patch(ctx: typer.Context, *, python: Python = None, target: TargetFile = None, dry_run: DryRun = False) -> None:
    """Add the capture hook to actor.py; unpatch removes it.

    Jobs that start from now on can record actor inputs; nothing is recorded until `actordbg dump enable`. Leaves the existing
    lines unchanged; `actordbg unpatch` removes the hook. Succeeds only after the interpreter has run the hook.

    Example: actordbg --store /data/store patch --python /opt/train/bin/python
    """
    from actordbg.install import patching as operate
    from actordbg.install.patch_target import find_target

    answer = operate.patch(find_target(python, target), store_of(ctx), dry_run=dry_run)
    emit(answer, _say_outcome)
    if not dry_run:
        say_next("actordbg dump enable")


def unpatch(ctx: typer.Context, *, python: Python = None, target: TargetFile = None, dry_run: DryRun = False) -> None:
    """Remove the capture hook, byte for byte.

    Restores the bytes, mode and modification time of OpenRLHF's actor.py, and keeps edits made to the file after patching. If the
    hook cannot be separated with certainty, leaves the file unchanged and prints a workaround. Running jobs keep the hook until
    they end.

    Exit code: 3 if the hook could not be removed.

    Example: actordbg unpatch --dry-run
    """
    from actordbg.install import patching as operate
    from actordbg.install.patch_target import find_target

    emit(operate.unpatch(find_target(python, target), dry_run=dry_run), _say_outcome)


def _say_outcome(outcome: Outcome) -> None:
    """Print the outcome of patch or unpatch: the diff (dry run), a line, details, and notes on standard error."""
    if outcome.diff:
        say_lines(outcome.diff)
    how = "dry run, " if outcome.dry_run else ""
    say(f"{how}{outcome.action}: {outcome.file}")
    same = outcome.sha256_before == outcome.sha256_after
    facts = {
        "openrlhf": outcome.openrlhf_version,
        "store": outcome.store,
        "sha256": f"{outcome.sha256_after} (unchanged)" if same else outcome.sha256_before,
        "     ->": "" if same else outcome.sha256_after,
    }
    say_facts(facts, 8)
    for line in outcome.notes:
        note(f"note: {line}")


def status(ctx: typer.Context, *, python: Python = None, target: TargetFile = None) -> None:
    """Show patch, recording, dump and replay status.

    Prints the interpreter, the OpenRLHF version and the store that the hook writes to; then what this store holds, the last
    replay, failures, and what to do about them.

    Example: actordbg status --json
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.catalog.selections import holdings
    from actordbg.install.patch_target import find_target
    from actordbg.install.patching import inspect_target

    store = store_of(ctx)
    patch, why = None, ""
    try:
        patch = inspect_target(find_target(python, target), store)
    except EnvironmentProblem as problem:
        if python is not None or target is not None or not store.exists():
            raise
        why = problem.message
    held = holdings(open_fresh(store)) if store.exists() else None
    answer = (vars(patch) if patch else {"state": None, "reason": why}) | {"holds": held}
    emit(answer, lambda _: _say(patch, why, held))


def _say(patch: Status | None, no_patch: str, held: Holdings | None) -> None:
    from actordbg.install.trailer import State

    if patch is None:
        say(f"no patch found: {no_patch}")
    else:
        state = "not patched, so nothing is recorded (run `actordbg patch`)" if patch.state is State.CLEAN else patch.state.value
        say(f"{state}: {patch.file}")
        if patch.reason:
            say_wrapped(f"  {patch.reason}", "    ")
        facts = {
            "openrlhf": patch.openrlhf_version,
            "python": patch.python,
            "sha256": patch.sha256,
            "original": patch.original_sha256,
            "store": patch.store,
            "hook seen": patch.hooked,
            "recording": "on" if patch.enabled else "off",
            "new jobs": "record" if patch.armed else "do not record",
        }
        say_facts({name: cell(value) for name, value in facts.items()}, 11)
    if held is None:
        note("no store here yet: `actordbg dump enable`, `dump import` or `dump create` creates one")
    else:
        say()
        say_facts(dict(_held_in_words(held)), 11)
    for line in patch.notes if patch else ():
        note(f"note: {line}")
    if held is not None and held.never_replayed == held.dumps:
        switch = "actordbg dump status" if patch is not None and patch.enabled else "actordbg dump enable"
        say_next("actordbg check" if held.dumps else held.reader or switch)


def _held_in_words(held: Holdings) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each fact of the store, with the command to run next."""
    yield "store", held.store
    newest = f", the newest {ago(held.newest)}" if held.newest else ""
    yield (
        "dumps",
        f"{held.dumps:,} in {human_bytes(held.bytes)}{newest}" + (f"; {held.in_packs:,} in packs" if held.in_packs else ""),
    )
    if held.only:
        yield "only", f"{held.only}: `{held.reader}` reads them"
    if len(held.trainers) > 1:
        yield "trainers", ", ".join(f"{name} {count:,}" for name, count in held.trainers.items())
    loose = held.dumps - held.in_packs
    if loose >= 100:
        yield "unpacked", f"{plural(loose, 'dump')}: `actordbg dump pack` makes them much smaller"
    if held.damaged:
        yield "damaged", f"{plural(held.damaged, 'file')}: `actordbg store fsck` lists each"
    others = f", and {held.other_replays:,} that other commands ran" if held.other_replays else ""
    yield "replays", f"{held.replays:,}{others}" + (": `actordbg replay ls`" if held.replays else "")
    if held.last:
        ended = "" if held.last_status == "complete" else f", {held.last_status}: `actordbg replay --resume {held.last}`"
        yield "last", f"{held.last}, {ago(str(held.last_at))}, {held.last_passed} of {held.last_inputs} passed{ended}"
    if held.bad:
        again = "actordbg lint" if held.bad_losses == held.bad else "actordbg replay --lf"
        yield "bad", f"{plural(held.bad, 'dump')} whose last verdict is WRONG or FAILED: `{again}`"
    if held.never_replayed:
        yield "not yet", f"{plural(held.never_replayed, 'dump')} never replayed"


_NAME = 19


def render(check: Check) -> str:
    """Format a check in at most 80 columns (longer paths are not broken), with its remedy below."""
    from actordbg.document.renderings import wrap
    from actordbg.trainers.trainer import TRAINER

    name = check.name.removeprefix(f"import {TRAINER.package}.")  # the line says "imported"
    head = f"{check.status:<4}  {name.ljust(_NAME)}  "
    blank = " " * len(head)
    lines = wrap(" ".join(check.detail.split()), head, blank)
    if check.remedy and check.status != "ok":
        lines += "\n" + wrap(" ".join(check.remedy.split()), f"{blank[3:]}-> ", blank)
    return lines


def doctor(
    ctx: typer.Context, *, quick: bool = False, timeout: Annotated[float, Option(min=1)] = 180.0, findings: bool = False
) -> None:
    """Check this machine and this Python environment.

    Run it with the actordbg of the environment that trains or replays. Checks versions, imports, the C++ compiler, GPU,
    flash-attn, disk, store, catalog and patch, and prints a fix for each problem. Warnings are about parts that you may not need,
    or untested versions.

    Exit code: 4 if a check fails.

    Example: actordbg doctor --quick

    Args:
        quick: Skip the slow checks: imports.
        timeout: Time limit for importing a module, in seconds.
        findings: Only list what trainers' libraries surprisingly do, in which versions, and which of these are installed.
    """
    from actordbg.doctor.checkup import examine, exit_code

    if findings:
        _list_findings()
        return
    checks: list[Check] = []
    with progress("examining", None, quiet=not sys.stderr.isatty()) as advance:
        for check in examine(store_of(ctx), quick=quick, timeout=timeout):
            checks.append(check)
            advance(1, note=check.name)
    first = "actordbg status" if store_of(ctx).exists() else "actordbg demo"
    emit({"checks": checks}, lambda _: _render_all(checks, first))
    raise typer.Exit(exit_code(checks))


def _list_findings() -> None:
    """Print what is known of libraries: those that are installed here first."""
    from actordbg.doctor.python_environment import installed, known_findings
    from actordbg.document.renderings import wrap

    here = installed()
    rows = [{"here": finding.is_in(here), **vars(finding)} for finding in known_findings()]
    if rows_as_json(rows):
        return
    for finding in sorted(known_findings(), key=lambda finding: not finding.is_in(here)):
        where = "installed" if finding.is_in(here) else "not installed"
        say(f"{finding.name} ({finding.ran_with}, {where})")
        say_lines(wrap(f"{finding.outcome}. Guess: {finding.guess}. Seen as: {finding.seen_as}.", "  ", "  "))


def _render_all(checks: list[Check], first: str) -> None:
    """Print the counts, the bad checks, the warnings, a command that installs everything missing, and the passed checks.

    first: the command to begin with, if nothing is missing.
    """
    from actordbg.doctor.checkup import install_command

    levels = ("bad", "warn", "ok")
    say(", ".join(f"{sum(check.status == level for check in checks)} {level}" for level in levels))
    missing = install_command(checks)
    for level in levels:
        for check in checks:
            if check.status == level:
                say_lines(render(check))
        if level == "warn" and missing:
            say_lines(f"to install what is missing at once:\n  {missing}")
    say_next(missing or first)


def adapters(ctx: typer.Context, named: list[str] | None = None, *, template: bool = False) -> None:
    """List trainer adapters and whether each one works here.

    OpenRLHF needs no adapter. An adapter fits if its trainer is installed, and has the functions and arguments that the adapter
    uses; the trainer is not imported to check this. Use an adapter with `run --adapter NAME`.

    Exit code: 1 if an adapter given by name does not fit.

    Example: actordbg adapters my_adapter:MyTrainer

    Args:
        named (ADAPTER): Only these adapters: names, or module:Class.
        template: Print a template for your own adapter.
    """
    from actordbg.trainers import adapter_template
    from actordbg.trainers.fitting import fit_of, fits

    if template:
        for line in inspect.getsource(adapter_template).splitlines():
            say(line)
        return
    known = [fit_of(name) for name in named] if named else fits()
    if not rows_as_json(known):
        columns = ("adapter", "package", "installed", "tried", "fits")
        table(columns, [(fit.name, fit.package, fit.version or "-", listed(fit.tried) or "-", fit.answer) for fit in known])
        for fit in known:
            for why in fit.differs:
                note(f"{fit.name}: {why}")
    require_good(not named or all(fit.fits for fit in known))


def demo(ctx: typer.Context, *, trainer: Literal["ppo", "sft"] = "ppo", keep: Path | None = None) -> None:
    """Record and replay a real training of a tiny model.

    Patches a private copy of the installed trainer, trains, turns recording on during training, indexes, replays, reports,
    unpatches and checks. Prints the command of each step. Keeps its folder if all steps end well. Takes one to two minutes on
    two cores, without a GPU.

    Example: actordbg demo --trainer sft --keep /tmp/demo

    Args:
        trainer: Training to run. ppo: train_ppo_ray under Ray; sft: train_sft under deepspeed, in half the time.
        keep (DIR): Work in DIR (new or empty; default: a temporary folder).
    """
    from shutil import rmtree
    from tempfile import mkdtemp

    from actordbg.demo.demo_training import Demo

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interruption: the training's processes and the files go first
    store = Path(given) if (given := ctx.find_root().params.get("store")) else None
    for folder in filter(None, (keep, store)):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is not empty", hint="pass a new or empty folder")
    if keep is None:
        directory = Path(mkdtemp(prefix="actordbg-demo-"))
    else:
        keep.mkdir(parents=True, exist_ok=True)
        directory = keep.resolve()
    try:
        Demo(trainer, directory, say_lines, "store" if store is None else str(store.absolute())).run()
    except BaseException:
        if keep is None:
            rmtree(directory, ignore_errors=True)
        raise
    note(f"kept: {directory}  (run the next command there, or remove the folder)")
