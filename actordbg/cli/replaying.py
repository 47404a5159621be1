"""What the commands that replay inputs share once they are asked: the inputs, their configuration, the bar while they run."""

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
from actordbg.base.errors import NothingToDo, Unsupported, UsageError
from actordbg.base.units import MOST_NAMED
from actordbg.catalog import selections
from actordbg.catalog.query import count_dumps, dump_extent, open_fresh, select_dumps
from actordbg.catalog.selections import no_match
from actordbg.cli import output
from actordbg.cli.options import command_line, settings_of, store_of
from actordbg.cli.output import note, plural, progress
from actordbg.cli.replay_options import ChosenInputs
from actordbg.config import dist_plugin
from actordbg.config.choices import is_local
from actordbg.config.replay_config import TINY, USUAL_LAWS, ReplayConfig
from actordbg.config.sources import Asked, build_config
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.launch import surrounding_launcher
from actordbg.replay.plan import Plan, affordable_laws, make_plan
from actordbg.replay.replay_data import LiveCatalog
from actordbg.replay.selection import PICKLES, defaults_of, require_one_trainer, rows_of
from actordbg.replay.supervise import Progress
from actordbg.store.layout import Store
from actordbg.store.places import dump_id_of


def flags_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, and those that a launcher around this command implies.

    Under `deepspeed -m actordbg replay ...` this command runs once for each rank. Rank 0 supervises; the others leave. Rank 0
    starts workers of its own, as many as the launcher started processes, with deepspeed where deepspeed did.
    """
    flags = dict(settings)
    launcher = surrounding_launcher(os.environ)
    if launcher is None:
        return flags
    if launcher.local_size < launcher.world_size:
        raise Unsupported(
            "a replay starts its ranks itself, and this launcher started processes on more than one machine",
            hint="without a launcher: `actordbg replay --nproc N`, with --engine ray for several machines",
        )
    if launcher.rank > 0:
        raise typer.Exit
    flags["nproc"] = flags.get("nproc") or launcher.world_size
    if launcher.deepspeed:
        flags["backend"] = flags.get("backend") or "deepspeed"
    return flags


def opened(ctx: typer.Context, inputs: ChosenInputs, *, writes: bool = True) -> tuple[Store, ChosenInputs]:
    """The store, and the inputs with each named pickle replaced by its dump: imported by the inert reader, never unpickled.

    A store is made for a pickle if there is none. writes: results will be written, so a store that cannot be is refused now.
    """
    files, store = inputs.input_file or [], store_of(ctx)
    presets = {name: count for name in ("longest", "slowest", "diverse") if (count := getattr(inputs, name)) is not None}
    if (presets or inputs.failed) and (len(presets) > 1 or files):
        given = [f"--{name}" for name in (*["input-file"] * bool(files), *presets)]
        raise UsageError(f"{' and '.join(given or ['--failed'])} cannot be combined", hint="use only one")
    where = selections.joined(inputs.where, selections.FAILED) if inputs.failed else inputs.where
    for name, count in presets.items():  # part of --where: what a record keeps can be asked again
        where = getattr(selections, name)(open_fresh(store.require(), where), where, count)
    inputs = replace(inputs, where=where)
    pickles = [path for path in files if path.suffix in PICKLES]
    if not pickles:
        return store.require_writable() if writes else store.require(), inputs
    from actordbg.dumps.importer import dumps_of

    for path in pickles:
        if not path.is_file():
            raise UsageError(f"--input-file {path} is not a file", hint="name a pickle that is there")
    if store.exists():
        store.require_writable()
    dumps = dict(zip(pickles, dumps_of(store, pickles), strict=True))
    for path, dump in dumps.items():
        note(f"{path} is dump {dump_id_of(str(dump))} of {store.root}")
    return store, replace(inputs, input_file=[dumps.get(path, path) for path in files])


def asked_for(ctx: typer.Context, flags: Mapping[str, Any]) -> Asked:
    """The configuration of this invocation. What came from outside of the command line is said on standard error.

    UnsafeInput for a model that brings code along, without consent."""
    requested = build_config(settings_of(ctx), flags)
    require_consent(requested.config.model)
    dist_plugin.require(requested.config.dist_backend)
    if requested.sources:
        note(f"not from the command line: {requested.in_words}")
    return requested


def kept(requested: Asked, flags: Mapping[str, Any]) -> ReplayConfig:
    """Add what a replay is judged by: outputs; gradients and laws unless that was said otherwise."""
    config, given = requested.config, flags.keys() | requested.sources.keys()
    gradients = config.keep_gradients if "keep_gradients" in given else config.backward is not False
    laws = config.laws if "laws" in given else USUAL_LAWS
    return replace(config, keep_tensors=True, keep_gradients=gradients, laws=laws, truth=None, vary=None)


def asked_and_planned(
    ctx: typer.Context, store: Store, flags: dict[str, Any], inputs: ChosenInputs, *, judged: bool, ask: bool
) -> tuple[Asked, Plan, str | None]:
    """The configuration of this invocation, its plan over the inputs, and the model that these recorded, if nobody named one.

    judged: with what a replay is judged by. ask: at a terminal ask which model to replay if the recorded one is available.
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
    model = output.answered(f"The dumps are of {own}. Replay which model? ({TINY}: a toy)", own)
    if model in (None, TINY):
        return requested, plan, own
    flags["model"] = model
    return *made("--model", str(model)), None


def planned(store: Store, config: ReplayConfig, inputs: ChosenInputs, answered: Sequence[str] = ()) -> Plan:
    """The plan of the dumps that --where, --input-file and --max-inputs select. answered: options that a question stands for."""
    enough = None if config.align == "rank" else inputs.max_inputs  # of whole calls nobody knows how many rows they take
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
    """Say which dumps a plan leaves out, and why."""
    for reason, count in skipped.items():
        note(f"left out {plural(count, 'dump')}: {reason}")


def unasked_model(store: Store, spec: ReplaySpec, requested: Asked, flags: Mapping[str, Any]) -> str | None:
    """The model that the dumps of a plan name, where they name one and nobody asked for any."""
    if "model" in flags.keys() | requested.sources.keys() or not spec.inputs:
        return None
    ids = ", ".join(f"'{item.dump_id}'" for item in spec.inputs[:MOST_NAMED])
    names = {row.model_name for row in select_dumps(open_fresh(store), f"dump_id in ({ids}) and model_name is not null")}
    return names.pop() if len(names) == 1 else None


def require_runnable(store: Store, spec: ReplaySpec, *, announce: bool = True) -> list[RuleHit]:
    """Refuse a configuration that is known to fail, and a trainer or a model that are not there. Returns what is known of it.

    told: say that, unless the user wants the answer alone.
    """
    defaults = defaults_of(store.root, spec.inputs)
    findings = check_config(spec.config, defaults=defaults)
    refuse_hits(findings)
    find_trainer(spec.config, defaults)
    find_model(spec.config.model)
    say_findings(findings if announce and not output.wanted.silent else [])
    return findings


def say_findings(findings: Sequence[RuleHit]) -> None:
    """Say what is known of a configuration."""
    for finding in findings:
        note(f"{finding.severity}[{finding.id}]: {finding.message}")


def what_there_is(store: Store, where: str | None) -> str:
    """Why nothing matched, in terms of what the store holds."""
    count, shortest, longest = dump_extent(store)
    if not count:
        return "the store holds no dumps: `actordbg dump enable`, `dump import` or `dump create` bring some"
    if where and (matching := count_dumps(open_fresh(store, where), where)):
        return f"of the dumps that match {where} ({matching:,}) none can be replayed"
    if where:
        return no_match(open_fresh(store), where)
    return f"no dump can be replayed; the store holds {plural(count, 'dump')} with seq_len {shortest} to {longest}"


def nothing_to(purpose: str, store: Store, inputs: ChosenInputs) -> Exception:
    """What to raise where no input was selected and there is no answer to give: an error, or with --allow-empty a good end."""
    reason = f"nothing to {purpose}: {what_there_is(store, inputs.where)}"
    if not output.wanted.allow_empty:
        return NothingToDo(reason, hint="choose dumps with --where or --input-file; --allow-empty calls this good")
    note(reason)
    return typer.Exit(0)


@contextmanager
def replaying(store: Store, label: str, total: int, *, quiet: bool = False) -> Iterator[tuple[LiveCatalog, Callable[..., None]]]:
    """A catalog that follows running replays, and a progress bar (`output.progress`). The catalog is up to date afterwards,
    also after a Ctrl-C; why it is not goes to standard error."""
    catalog = LiveCatalog(store)
    try:
        with progress(label, total, quiet=quiet) as advance:
            yield catalog, advance
    finally:
        settle(store, catalog)


def settle(store: Store, catalog: LiveCatalog) -> None:
    """Index what is new. What cannot be indexed now will be by the next command."""
    catalog.flush()
    if catalog.problem is not None:
        note(f"the catalog could not be updated ({catalog.problem}); the results are in {store.root}")


def counting(catalog: LiveCatalog, advance: Callable[..., None]) -> Callable[[Progress], None]:
    """What to do with a replay's news: each result is a step of the bar, and beside it stands what continues."""

    def on_event(event: Progress) -> None:
        if event.kind == "attempt":
            advance(0, note=f"starting again: {event.text[:100]}" if event.text else "starting the workers")
        elif event.kind in ("start", "leaving"):
            advance(0, note=event.text)
        elif event.kind == "result":
            catalog.touch()
            advance(1, note="" if event.text == "passed" else f"last: {event.text}")

    return on_event
