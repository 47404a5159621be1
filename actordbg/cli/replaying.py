"""What the commands that replay inputs share: resolving inputs and configuration, checking both, and the progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import typer

from actordbg.actor.hub_model import find_model, looks_like_path, versions_of
from actordbg.actor.model_code import require_consent
from actordbg.actor.rules import RuleHit, check_config, find_trainer, refuse_hits
from actordbg.base.errors import ActordbgError, NothingToDo, Unsupported, UsageError
from actordbg.base.units import MOST_NAMED
from actordbg.catalog import selections
from actordbg.catalog.query import count_dumps, dump_extent, open_fresh, select_dumps
from actordbg.catalog.selections import no_match
from actordbg.cli import output
from actordbg.cli.options import command_line, settings_of, store_of
from actordbg.cli.output import note, plural, progress
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.setting_options import selecting
from actordbg.config.choices import is_local
from actordbg.config.replay_config import SETTINGS, TINY, USUAL_LAWS, ReplayConfig
from actordbg.config.sources import Asked, build_config
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.launch import surrounding_launcher
from actordbg.replay.plan import Plan, affordable_laws, make_plan
from actordbg.replay.selection import PICKLES, defaults_of, require_one_trainer, rows_of
from actordbg.replay.supervise import Progress
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
    files, store = inputs.input_file or [], store_of(ctx)
    presets = {name: count for name in ("longest", "slowest", "diverse") if (count := getattr(inputs, name)) is not None}
    if (presets or inputs.failed) and (len(presets) > 1 or files):
        given = [f"--{name}" for name in (*["input-file"] * bool(files), *presets)]
        raise UsageError(f"{' and '.join(given or ['--failed'])} cannot be combined", hint="use only one")
    where = selections.joined(inputs.where, selections.FAILED) if inputs.failed else inputs.where
    for name, count in presets.items():  # as part of --where, so that the record's selection can be repeated
        where = getattr(selections, name)(open_fresh(store.require(), where), where, count)
    inputs = replace(inputs, where=where)
    pickles = [path for path in files if path.suffix in PICKLES]
    if not pickles:
        return store.require_writable() if writes else store.require(), inputs
    from actordbg.dumps.importer import dumps_of

    for path in pickles:
        if not path.is_file():
            raise UsageError(f"--input-file {path} is not a file", hint="pass an existing pickle")
    if store.exists():
        store.require_writable()
    dumps = dict(zip(pickles, dumps_of(store, pickles), strict=True))
    for path, dump in dumps.items():
        note(f"{path} is dump {dump_id_of(str(dump))} of {store.root}")
    return store, replace(inputs, input_file=[dumps.get(path, path) for path in files])


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


def kept(requested: Asked, flags: Mapping[str, Any]) -> ReplayConfig:
    """Add what a judgement needs: saved outputs, and, unless set otherwise, saved gradients and laws."""
    config, given = requested.config, flags.keys() | requested.sources.keys()
    gradients = config.keep_gradients if "keep_gradients" in given else config.backward is not False
    laws = config.laws if "laws" in given else USUAL_LAWS
    return replace(config, keep_tensors=True, keep_gradients=gradients, laws=laws, truth=None, vary=None)


def asked_and_planned(
    ctx: typer.Context, store: Store, flags: dict[str, Any], inputs: ChosenInputs, *, judged: bool, ask: bool
) -> tuple[Asked, Plan, str | None]:
    """Return this invocation's configuration, its plan, and, unless a model was given, the model that the dumps recorded.

    judged: add what a judgement needs (`kept`). ask: at a terminal, ask which model to replay if the recorded one is available.
    """

    def made(*answers: str) -> tuple[Asked, Plan]:
        requested = asked_for(ctx, flags)
        plan = planned(store, kept(requested, flags) if judged else requested.config, inputs, answers)
        if judged and "laws" not in flags.keys() | requested.sources.keys():
            config = replace(plan.spec.config, laws=affordable_laws(plan.spec.inputs))
            plan = replace(plan, spec=replace(plan.spec, config=config))
        return requested, plan

    requested, plan = made()
    own = unasked_model(store, plan.spec, requested, flags)
    if own is None or not ask or (looks_like_path(own) and not is_local(own)):
        return requested, plan, own
    model = output.answered(f"The dumps were recorded with {own}. Which model to replay? ({TINY}: a toy)", own)
    if model in (None, TINY):
        return requested, plan, own
    flags["model"] = model
    return *made("--model", str(model)), None


def planned(store: Store, config: ReplayConfig, inputs: ChosenInputs, answered: Sequence[str] = ()) -> Plan:
    """Plan the replay of the selected dumps. answered: options to add to the recorded command line, from a question."""
    enough = None if config.align == "rank" else inputs.max_inputs  # the number of rows in whole calls is not known in advance
    rows = rows_of(store, inputs.where, inputs.input_file or [], inputs.ordered, enough)
    plan = make_plan(
        rows,
        config,
        order=inputs.ordered,
        max_inputs=inputs.max_inputs,
        shuffle_seed=inputs.random_seed,
        where=inputs.where,
        command=command_line(answered),
        versions=versions_of(config.model),
    )
    chosen = {item.dump_id for item in plan.spec.inputs}
    require_one_trainer((row for row in rows if row.dump_id in chosen), [config])
    return plan


def say_skipped(skipped: Mapping[str, int]) -> None:
    """Print how many dumps a plan skips, and why."""
    for reason, count in skipped.items():
        note(f"skipped {plural(count, 'dump')}: {reason}")


def unasked_model(store: Store, spec: ReplaySpec, requested: Asked, flags: Mapping[str, Any]) -> str | None:
    """Return the model that all dumps of a plan recorded; None if they differ, recorded none, or a model was given."""
    if "model" in flags.keys() | requested.sources.keys() or not spec.inputs:
        return None
    ids = ", ".join(f"'{item.dump_id}'" for item in spec.inputs[:MOST_NAMED])
    names = {row.model_name for row in select_dumps(open_fresh(store), f"dump_id in ({ids}) and model_name is not null")}
    return names.pop() if len(names) == 1 else None


def require_runnable(store: Store, spec: ReplaySpec, *, announce: bool = True) -> list[RuleHit]:
    """Refuse a configuration that is known to fail, or whose trainer or model is missing. Returns the findings about it.

    announce: print the findings, unless the user wants only the result.
    """
    defaults = defaults_of(store.root, spec.inputs)
    findings = check_config(spec.config, defaults=defaults)
    refuse_hits(findings)
    find_trainer(spec.config, defaults)
    find_model(spec.config.model)
    say_findings(findings if announce and not output.wanted.silent else [])
    return findings


def say_findings(findings: Sequence[RuleHit]) -> None:
    """Print the findings about a configuration."""
    for finding in findings:
        note(f"{finding.severity}[{finding.id}]: {finding.message}")


def what_there_is(store: Store, where: str | None) -> str:
    """Explain why no dump was selected, in terms of what the store holds."""
    count, shortest, longest = dump_extent(store)
    if not count:
        return "the store has no dumps: add some with `actordbg dump enable`, `dump import` or `dump create`"
    if where and (matching := count_dumps(open_fresh(store, where), where)):
        return f"{matching:,} dumps match {where}, but none can be replayed"
    if where:
        return no_match(open_fresh(store), where)
    return f"no dump can be replayed; the store has {plural(count, 'dump')} with seq_len {shortest} to {longest}"


def nothing_to(purpose: str, store: Store, inputs: ChosenInputs) -> Exception:
    """Return the exception to raise if no input was selected: NothingToDo, or, with --allow-empty, an exit with code 0."""
    reason = f"nothing to {purpose}: {what_there_is(store, inputs.where)}"
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


def counting(advance: Callable[..., None]) -> Callable[[Progress], None]:
    """Return a handler of a replay's events that advances the bar by each result and shows the current input."""

    def on_event(event: Progress) -> None:
        if event.kind == "attempt":
            advance(0, note=f"restarting: {event.text[:100]}" if event.text else "starting the workers")
        elif event.kind in ("start", "leaving"):
            advance(0, note=event.text)
        elif event.kind == "result":
            advance(1, note="" if event.text == "passed" else f"last: {event.text}")

    return on_event
