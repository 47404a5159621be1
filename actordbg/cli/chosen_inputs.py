"""What the commands that replay inputs share once they are asked: the inputs, their configuration, the bar while they run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer

from actordbg.actor.hub_model import looks_like_path
from actordbg.actor.model_code import require_consent
from actordbg.actor.weights_version import versions_of
from actordbg.base.errors import NothingToDo, Unsupported, UsageError
from actordbg.base.ids import MOST_NAMED
from actordbg.catalog import selections
from actordbg.catalog.query import count_dumps, dump_extent, open_fresh, select_dumps
from actordbg.catalog.selections import no_match
from actordbg.cli import output
from actordbg.cli.input_options import ChosenInputs
from actordbg.cli.options import command_line, settings_of, store_of
from actordbg.config import dist_plugin
from actordbg.config.choices import is_local
from actordbg.config.replay_config import TINY, ReplayConfig
from actordbg.config.sources import Asked, build_config
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.launch import surrounding_launcher
from actordbg.replay.plan import ORDERS, Plan, make_plan
from actordbg.replay.selection import PICKLES, require_one_trainer, rows_of
from actordbg.store.layout import Store
from actordbg.store.places import dump_id_of


def chosen_order(order: str | None, shuffle: bool) -> str:
    """The order that --order and --shuffle-inputs come to; UsageError where they contradict each other."""
    if shuffle and order not in (None, "shuffle"):
        raise UsageError(f"--shuffle-inputs and --order {order} contradict each other", hint="give one of them")
    chosen = "shuffle" if shuffle else order or "time"
    if chosen not in ORDERS:
        raise UsageError(f"--order {chosen} is not known", hint=f"one of: {', '.join(ORDERS)}")
    return chosen


def is_left_to_rank_0(flags: dict[str, Any]) -> bool:
    """Under `deepspeed -m actordbg replay ...` this command runs once for each rank. Rank 0 supervises; the others leave.

    Rank 0 starts workers of its own, as many as the launcher started processes, with deepspeed where deepspeed did.
    """
    around = surrounding_launcher(os.environ)
    if around is None:
        return False
    if around.local_size < around.world_size:
        raise Unsupported(
            "a replay starts its ranks itself, and this launcher started processes on more than one machine",
            hint="without a launcher: `actordbg replay --nproc N`, with --engine ray for several machines",
        )
    if around.rank > 0:
        return True
    flags["nproc"] = flags.get("nproc") or around.world_size
    if around.deepspeed:
        flags["backend"] = flags.get("backend") or "deepspeed"
    return False


def opened(ctx: typer.Context, inputs: ChosenInputs, *, writes: bool = True) -> tuple[Store, ChosenInputs]:
    """The store, and the inputs with each named pickle replaced by its dump: imported by the inert reader, never unpickled.

    A store is made for a pickle where there is none. writes: results will be written, so a store that cannot be is refused now.
    """
    files, store = inputs.input_file or [], store_of(ctx)
    inputs = _with_preset(store, inputs)
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
        output.note(f"{path} is dump {dump_id_of(str(dump))} of {store.root}")
    return store, replace(inputs, input_file=[dumps.get(path, path) for path in files])


def _with_preset(store: Store, inputs: ChosenInputs) -> ChosenInputs:
    """The inputs with --failed, --longest, --slowest or --diverse as part of --where: what a record keeps can be asked again."""
    asked = {name: count for name in ("longest", "slowest", "diverse") if (count := getattr(inputs, name)) is not None}
    if not asked and not inputs.failed:
        return inputs
    if len(asked) > 1 or inputs.input_file:
        given = [f"--{name}" for name in ("input-file",) if inputs.input_file] + [f"--{name}" for name in asked]
        raise UsageError(f"{' and '.join(given or ['--failed'])} exclude each other", hint="give one of them")
    where = selections.joined(inputs.where, selections.FAILED) if inputs.failed else inputs.where
    for name, count in asked.items():
        where = getattr(selections, name)(open_fresh(store.require(), where), where, count)
    return replace(inputs, where=where)


def asked_for(ctx: typer.Context, flags: Mapping[str, Any]) -> Asked:
    """The configuration of this invocation. What came from outside of the command line is said on standard error.

    UnsafeInput for a model that brings code along, without consent."""
    asked = build_config(settings_of(ctx), flags)
    require_consent(asked.config.model)
    dist_plugin.require(asked.config.dist_backend)
    if asked.sources:
        output.note(f"not from the command line: {asked.in_words}")
    return asked


def planned(store: Store, config: ReplayConfig, inputs: ChosenInputs, order: str, answered: Sequence[str] = ()) -> Plan:
    """The plan of the dumps that --where, --input-file and --max-inputs select. answered: options that a question stands for."""
    where, files = inputs.where, inputs.input_file or []
    enough = None if config.align == "rank" else inputs.max_inputs  # of whole calls nobody knows how many rows they take
    rows = rows_of(store, where, files, order, enough)
    plan = make_plan(
        rows,
        config,
        order=order,
        max_inputs=inputs.max_inputs,
        shuffle_seed=inputs.random_seed,
        where=where,
        command=command_line(answered),
        versions=versions_of(config.model),
    )
    chosen = {item.dump_id for item in plan.spec.inputs}
    require_one_trainer((row for row in rows if row.dump_id in chosen), [config])
    return plan


def recorded_model(store: Store, spec: ReplaySpec) -> str | None:
    """The model that the dumps of a plan name, where they name one."""
    ids = ", ".join(f"'{item.dump_id}'" for item in spec.inputs[:MOST_NAMED])
    rows = select_dumps(open_fresh(store), f"dump_id in ({ids}) and model_name is not null") if ids else []
    names = {row.model_name for row in rows}
    return names.pop() if len(names) == 1 else None


def ask_for_model(store: Store, spec: ReplaySpec, asked: Asked, flags: dict[str, Any]) -> list[str]:
    """Ask at a terminal which model to replay, where the dumps name one that can be had and nobody else names any.

    What was answered, as options, also in `flags`; [] where nothing was asked, or `tiny` was meant.
    """
    own = recorded_model(store, spec) if "model" not in flags.keys() | asked.sources.keys() else None
    if own is None or (looks_like_path(own) and not is_local(own)):
        return []
    model = output.answered(f"The dumps are of {own}. Replay which model? ({TINY}: a toy)", own)
    if model is None or model == TINY:
        return []
    flags["model"] = model
    return ["--model", model]


def what_there_is(store: Store, where: str | None) -> str:
    """Why nothing matched, in terms of what the store holds."""
    count, shortest, longest = dump_extent(store)
    if not count:
        return "the store holds no dumps: `actordbg dump enable`, `dump import` or `dump create` bring some"
    if where and (matching := count_dumps(open_fresh(store, where), where)):
        return f"of the dumps that match {where} ({matching:,}) none can be replayed"
    if where:
        return no_match(open_fresh(store), where)
    return f"no dump can be replayed; the store holds {output.plural(count, 'dump')} with seq_len {shortest} to {longest}"


def nothing_to(purpose: str, store: Store, inputs: ChosenInputs) -> Exception:
    """What to raise where no input was selected and there is no answer to give: an error, or with --allow-empty a good end."""
    reason = f"nothing to {purpose}: {what_there_is(store, inputs.where)}"
    if not inputs.allow_empty:
        return NothingToDo(reason, hint="choose dumps with --where or --input-file; --allow-empty calls this good")
    output.note(reason)
    return typer.Exit(0)
