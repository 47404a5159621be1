"""What the commands that replay inputs share: resolving inputs and configuration, checking both, and the progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import typer

from actordbg.actor.hub_model import looks_like_path
from actordbg.actor.model_code import require_consent
from actordbg.actor.rules import RuleHit
from actordbg.api import planning
from actordbg.api.planning import recorded_model, settings_given, to_judge, why_nothing, with_affordable_laws
from actordbg.base.errors import ActordbgError, NothingToDo, Unsupported
from actordbg.cli import output
from actordbg.cli.options import command_line, settings_of, store_of
from actordbg.cli.output import note, plural, progress
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.setting_options import selecting
from actordbg.config.choices import is_local
from actordbg.config.replay_config import SETTINGS, TINY, ReplayConfig
from actordbg.config.sources import Asked, build_config
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.launch import surrounding_launcher
from actordbg.replay.plan import Plan
from actordbg.store.layout import Store
from actordbg.store.places import dump_id_of


def flags_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given settings plus those implied by a launcher around this command.

    Under `deepspeed -m actordbg replay ...` this command runs once per rank. Rank 0 supervises, and the other ranks exit. Rank 0
    starts as many workers as the launcher started processes, with the deepspeed backend if that launcher is deepspeed's.
    """
    flags = dict(settings)
    launcher = surrounding_launcher(os.environ)
    if launcher is None:
        return flags
    if launcher.local_size < launcher.world_size:
        raise Unsupported(
            "a replay starts its own ranks, but this launcher started processes on more than one machine",
            hint="drop the launcher: run `actordbg replay --nproc N`, with --engine ray for several machines",
        )
    if launcher.rank > 0:
        raise typer.Exit
    flags["nproc"] = flags.get("nproc") or launcher.world_size
    if launcher.deepspeed:
        flags["backend"] = flags.get("backend") or "deepspeed"
    return flags


def opened(ctx: typer.Context, inputs: ChosenInputs, *, writes: bool = True) -> tuple[Store, ChosenInputs]:
    """Open the store, and import each input pickle into it as a dump (decoded without unpickling).

    Creates a missing store if a pickle is given. writes: refuse a read-only store now, because results will be written.
    """
    store = store_of(ctx)
    narrowed = inputs.selection.narrowed(
        store, failed=inputs.failed, longest=inputs.longest, slowest=inputs.slowest, diverse=inputs.diverse
    )
    selection, dumps = narrowed.imported(store)
    if not dumps:
        store = store.require_writable() if writes else store.require()
    for path, dump in dumps.items():
        note(f"{path} is dump {dump_id_of(str(dump))} of {store.root}")
    return store, replace(inputs, where=selection.where, input_file=list(selection.files))


def asked_for(ctx: typer.Context, flags: Mapping[str, Any]) -> Asked:
    """Build this invocation's configuration, and note settings that are not from the command line.

    Raises UnsafeInput for a model that ships code, without consent.
    """
    requested = build_config(settings_of(ctx), flags)
    require_consent(requested.config.model)
    if requested.sources:
        note(f"not from the command line: {requested.in_words}")
    return requested


def config_of(ctx: typer.Context, flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables of a --config file that reproduces this invocation: the options that select inputs, and the settings."""
    requested, chosen = asked_for(ctx, flags), {}
    for name, option in selecting(ctx).items():
        if (value := ctx.params[option.name]) not in (None, False, [], (), option.default):
            chosen[name] = [str(path.absolute()) for path in value] if isinstance(value, list) else value
    settings = {SETTINGS[name].option: getattr(requested.config, name) for name in {**flags, **requested.sources}}
    return {"inputs": chosen, "replay": settings}


def asked_and_planned(
    ctx: typer.Context, store: Store, flags: dict[str, Any], inputs: ChosenInputs, *, judged: bool, ask: bool
) -> tuple[Asked, Plan, str | None]:
    """Return this invocation's configuration, its plan, and, unless a model was given, the model that the dumps recorded.

    judged: add what a judgement needs (`to_judge`). ask: at a terminal, ask which model to replay if the recorded one is here.
    """

    def made(*answers: str) -> tuple[Asked, Plan]:
        requested = asked_for(ctx, flags)
        plan = planned(store, to_judge(requested, flags) if judged else requested.config, inputs, answers)
        return requested, with_affordable_laws(plan, requested, flags) if judged else plan

    requested, plan = made()
    own = None if "model" in settings_given(requested, flags) else recorded_model(store, plan.spec)
    if own is None or not ask or (looks_like_path(own) and not is_local(own)):
        return requested, plan, own
    model = output.answered(f"The dumps were recorded with {own}. Which model to replay? ({TINY}: a toy)", own)
    if model in (None, TINY):
        return requested, plan, own
    flags["model"] = model
    return *made("--model", str(model)), None


def planned(store: Store, config: ReplayConfig, inputs: ChosenInputs, answered: Sequence[str] = ()) -> Plan:
    """Plan the replay of the selected dumps. answered: options to add to the recorded command line, from a question."""
    return planning.planned(store, config, inputs.selection, command_line(answered))


def say_skipped(skipped: Mapping[str, int]) -> None:
    """Print how many dumps a plan skips, and why."""
    for reason, count in skipped.items():
        note(f"skipped {plural(count, 'dump')}: {reason}")


def require_runnable(store: Store, spec: ReplaySpec, *, announce: bool = True) -> list[RuleHit]:
    """Refuse a configuration that is known to fail, or whose trainer or model is missing. Returns the findings about it.

    announce: print the findings, unless the user wants only the result.
    """
    findings = planning.require_runnable(store, spec)
    say_findings(findings if announce and not output.wanted.silent else [])
    return findings


def say_findings(findings: Sequence[RuleHit]) -> None:
    """Print the findings about a configuration."""
    for finding in findings:
        note(f"{finding.severity}[{finding.id}]: {finding.message}")


def nothing_to(purpose: str, store: Store, inputs: ChosenInputs) -> Exception:
    """Return the exception to raise if no input was selected: NothingToDo, or, with --allow-empty, an exit with code 0."""
    reason = f"nothing to {purpose}: {why_nothing(store, inputs.where)}"
    if not output.wanted.allow_empty:
        return NothingToDo(reason, hint="select dumps with --where or --input-file, or pass --allow-empty")
    note(reason)
    return typer.Exit(0)


@contextmanager
def replaying(store: Store, label: str, total: int, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Provide a progress bar (`output.progress`). The catalog is up to date afterwards, even after Ctrl-C."""
    try:
        with progress(label, total, quiet=quiet) as advance:
            yield advance
    finally:
        settle(store)


def settle(store: Store) -> None:
    """Index new results. If that fails, print a note; the next command will index them."""
    from actordbg.catalog.indexer import refresh

    try:
        refresh(store)
    except (ActordbgError, OSError) as problem:  # a locked catalog, a full disk: the results are in their files
        note(f"the catalog could not be updated ({problem}); the results are in {store.root}")
