"""The work of `actordbg train-check`: create or resume a check, run it, and print its result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from actordbg.actor.hub_model import find_model
from actordbg.actor.model_code import require_consent
from actordbg.actor.rules import find_trainer
from actordbg.base.errors import UsageError
from actordbg.campaign.cell_outcomes import shown_path
from actordbg.campaign.cells import Axes
from actordbg.campaign.run_train_check import TrainRun, folder_of, load_train_check, log_of
from actordbg.campaign.train_document import is_good, train_document, verdicts
from actordbg.campaign.train_plan import (
    AncestorNames,
    batch_of,
    configurations,
    make_train_cells,
    read_names,
    require_whole_groups,
    taken_twice,
)
from actordbg.catalog.selections import joined
from actordbg.cli.options import command_line, is_typed, require_good
from actordbg.cli.output import note, plural, progress, say, say_document, say_wrapped
from actordbg.cli.replay_options import ChosenInputs, HowToTrain
from actordbg.cli.replaying import asked_for, nothing_to, planned, say_skipped
from actordbg.cli.setting_options import TRAINING_AXES
from actordbg.config.choices import choose, gather_facts
from actordbg.config.replay_config import AXES, ReplayConfig
from actordbg.config.sources import FSDP_OFF
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.matrix_record import OPEN, TrainCell, TrainCheckRecord
from actordbg.records.replay_record import ReplayInput
from actordbg.replay.selection import defaults_of
from actordbg.store.layout import Store


def inputs_again(store: Store, record: TrainCheckRecord) -> tuple[ReplayInput, ...]:
    for cell in record.cells:
        require_consent(str(cell.config.get("model")), store.models)
    return tuple(ReplayInput(**item) for item in record.options.get("inputs", []))


def run_cells_of(store: Store, record: TrainCheckRecord, chosen: tuple[ReplayInput, ...]) -> None:
    units = record.steps * record.batch * sum(cell.status == OPEN for cell in record.cells)
    try:
        with progress("training", units) as advance:

            def on_event(cell: TrainCell, what: str) -> None:
                advance(what == "micro-batch", note=cell.name if what != "starts" else f"{cell.name}: starting")

            record = TrainRun(store, record, chosen, on_event).run()
    except KeyboardInterrupt:
        note(f"interrupted; finished runs are kept, run `actordbg train-check --resume {record.check_id}` for the others")
        print_train_check(load_train_check(store, record.check_id)[0], judge=False)
        raise typer.Exit(130) from None
    print_train_check(record)


def print_train_check(record: TrainCheckRecord, *, judge: bool = True) -> None:
    """Print the result; with `judge`, exit with code 1 if it is bad."""
    paths = {cell.index: log_of(record, cell) for cell in record.cells if cell.steps}
    logs = {index: shown_path(path) for index, path in paths.items() if path.is_file()}
    good = is_good(record)
    data = {"check": record, "good": good, "verdicts": verdicts(record), "logs": logs}
    say_document(train_document(record, logs), data=data)
    if judge:
        require_good(good)


def say_plan(record: TrainCheckRecord) -> None:
    inputs = plural(len(record.dump_ids), "input")
    say(f"{record.steps} steps of {record.batch} micro-batches over {inputs}, {record.dtype}, lr {record.training['lr']:g}:")
    for cell in record.cells:
        config = ReplayConfig.from_dict(cell.config)
        runs = f"{plural(config.nproc, 'process')}, accumulates {record.batch // config.lanes}"
        plan = f"{cell.status} ({cell.reason})" if cell.reason else runs
        say_wrapped(f"  {cell.name}: {plan}", "      ")


MOST_BY_DEFAULT = 32
"""Maximum number of inputs without --max-inputs (the steps also use each at least twice): a check should take minutes."""


def new_train_check(
    ctx: typer.Context, store: Store, flags: dict[str, Any], inputs: ChosenInputs, how: HowToTrain, check_id: str
) -> tuple[TrainCheckRecord, tuple[ReplayInput, ...]]:
    """Create the record of a check that has not run yet, and select its inputs."""
    names, training = _names(ctx, flags), _training(how)
    axes = _axes(flags, names)
    base = _base(ctx, flags, names, axes)
    sizes: dict[str, int] = {name: names.values[name] for name in ("tp", "ring") if name in names.values}
    configs = configurations(base, axes, names.skips, sizes)
    if not configs:
        raise UsageError("every configuration is skipped", hint=f"unset a SKIP_ variable, or {FSDP_OFF}")
    require_whole_groups(configs, axes)
    batch = batch_of(configs, how.gradient_accumulation)
    most = inputs.max_inputs or names.values.get("max_inputs") or MOST_BY_DEFAULT
    longest = names.values.get("max_len")
    where = joined(inputs.where, f"seq_len <= {longest}") if longest else inputs.where
    narrowed = replace(inputs, max_inputs=most, where=where)
    plan = planned(store, base, narrowed)
    say_skipped(plan.skipped)
    if not plan.spec.inputs:
        raise nothing_to("train on", store, narrowed)
    taken = plan.spec.inputs
    if inputs.max_inputs is None:  # the loss over the same inputs says whether it falls
        taken = taken[: taken_twice(len(taken), how.steps, batch)]
    defaults, facts = defaults_of(store.root, taken), gather_facts()
    find_trainer(base, defaults)
    find_model(base.model)
    chosen = choose(base, defaults, facts)
    cells = make_train_cells(configs, base, facts, defaults)
    logs = Path(names.values.get("log_dir") or how.log_dir or folder_of(store, check_id) / "logs")
    record = TrainCheckRecord(
        check_id=check_id,
        created_at=now_timestamp(),
        status=OPEN,
        cells=tuple(cells),
        dump_ids=tuple(item.dump_id for item in taken),
        steps=how.steps,
        batch=batch,
        dtype=chosen.dtype,
        threshold=how.threshold,
        training=training,
        log_dir=str(logs.absolute()),
        selection=narrowed.where,
        command=command_line(),
        names=names.took,
        options={"inputs": [asdict(item) for item in taken]},
    )
    return record, taken


def _training(how: HowToTrain) -> dict[str, Any]:
    """Return the hyperparameters, as in `training.json`."""
    if not 0 < how.lr < 10:
        raise UsageError(f"--lr {how.lr:g} is out of range", hint="for example 5e-6")
    if not 0 < how.threshold < 1:
        raise UsageError(f"--threshold {how.threshold:g} is invalid", hint="for example 0.05, which allows differences up to 5 %")
    numbers = {name: getattr(how, name) for name in ("lr", "max_norm")}
    more = {"gradient_checkpointing": True} if how.gradient_checkpointing else {}
    return {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0} | numbers | more


def _names(ctx: typer.Context, flags: Mapping[str, Any]) -> AncestorNames:
    """Read the environment variables of OpenRLHF's backend test suite, and note the effect of each on standard error."""
    typed = {name for name in ("max_inputs", "log_dir") if is_typed(ctx, name)}
    names = read_names(os.environ, set(flags) | typed)
    for name, value in names.took.items():
        note(f"from the environment: {name}={value}")
    for name, why in names.idle.items():
        note(f"{name} has no effect: {why}")
    return names


def _axes(flags: dict[str, Any], names: AncestorNames) -> Axes:
    """Pop the given lists from `flags`; with a list given, a size from the environment is compared with 1."""
    given = {name: AXES[name].list_of(str(flags.pop(name))) for name in TRAINING_AXES if name in flags}
    for name in ("tp", "ring"):
        if given and name in names.values:
            given[name] = sorted({1, names.values[name]})
    return {name: given[name] for name in AXES if name in given}


def _base(ctx: typer.Context, flags: dict[str, Any], names: AncestorNames, axes: Axes) -> ReplayConfig:
    """Build the configuration that all cells share, with as many processes as the largest cell needs."""
    widest = max(axes.get("tp", [names.values.get("tp", 2)])) * max(axes.get("ring", [names.values.get("ring", 2)]))
    ours = {name: names.values[name] for name in ("model", "nproc") if name in names.values}
    flags = {"nproc": widest, "zero_stage": 0, "backend": "plain", "tp": 1, "ring": 1} | ours | flags
    distributed = {name: flags.pop(name) for name in ("dist_backend",) if name in flags}
    config = asked_for(ctx, flags).config
    return replace(config, **distributed, backward=True, keep_tensors=False, truth=None, vary=None)
