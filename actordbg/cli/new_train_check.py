"""A new training check out of what was typed: configurations, inputs, the optimizer's numbers, the ancestor's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from actordbg.actor.find_trainer import find_trainer
from actordbg.actor.hub_model import find_model
from actordbg.base.errors import UsageError
from actordbg.campaign.ancestor_names import AncestorNames, read_names
from actordbg.campaign.axes import Axes
from actordbg.campaign.run_train_check import folder_of
from actordbg.campaign.sft_cells import keys_of, sft_cells
from actordbg.campaign.train_plan import batch_of, configurations, make_train_cells, require_whole_groups, taken_twice
from actordbg.campaign.train_verdicts import ROUND
from actordbg.catalog.selections import joined
from actordbg.cli import output
from actordbg.cli.chosen_inputs import asked_for, chosen_order, nothing_to, planned
from actordbg.cli.input_options import ChosenInputs
from actordbg.cli.options import command_line
from actordbg.cli.setting_options import TRAINING_AXES
from actordbg.cli.training_options import HowToTrain
from actordbg.config.choices import choose, gather_facts
from actordbg.config.replay_config import AXES, ReplayConfig
from actordbg.config.sources import FSDP_OFF
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.replay_record import ReplayInput
from actordbg.records.train_check_record import OPEN, SFT, TrainCheckRecord
from actordbg.replay.selection import defaults_of
from actordbg.store.layout import Store

MOST_BY_DEFAULT = 32
"""Inputs, where --max-inputs does not say, and no more than the steps take twice: a check should take minutes."""


def new_train_check(
    ctx: typer.Context, store: Store, flags: dict[str, Any], inputs: ChosenInputs, how: HowToTrain, check_id: str
) -> tuple[TrainCheckRecord, tuple[ReplayInput, ...]]:
    """The record before anything ran, and the inputs."""
    names, training, stored = _names(ctx, flags, how), how.training(), how.stored(store.root)
    axes = _axes(flags, names)
    base = _base(ctx, {name: value for name, value in flags.items() if name not in TRAINING_AXES}, names, axes)
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
    plan = planned(store, base, narrowed, chosen_order(inputs.order, False))
    for reason, count in plan.skipped.items():
        output.note(f"left out {output.plural(count, 'dump')}: {reason}")
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
    options: dict[str, Any] = {"inputs": [asdict(item) for item in taken]} | stored
    if how.trainer is not None:
        cells += sft_cells(configs, base, first=len(cells))
        options[SFT] = _rows(how, names) | {"dtype": "fp16" if chosen.dtype == "fp16" else "bf16", "attn": chosen.attn}
    logs = how.log_dir or (Path(names.values["log_dir"]) if "log_dir" in names.values else folder_of(store, check_id) / "logs")
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
        options=options,
    )
    return record, taken


def _names(ctx: typer.Context, flags: Mapping[str, Any], how: HowToTrain) -> AncestorNames:
    """The variables of the ancestor; what each does is said on standard error."""
    typed = {name for name in ("max_inputs", "log_dir", "dataset") if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}
    found = read_names(os.environ, set(flags) | typed, trains_on_rows=how.trainer is not None)
    for name, value in found.took.items():
        output.note(f"taken from the environment: {name}={value}")
    for name, why in found.idle.items():
        output.note(f"{name} has no effect: {why}")
    return found


def _rows(how: HowToTrain, names: AncestorNames) -> dict[str, Any]:
    """What the trainer's own program trains on."""
    if how.trainer != SFT:
        raise UsageError(f"--trainer {how.trainer} is not known", hint=f"--trainer {SFT}")
    data = how.dataset or (Path(names.values["dataset"]) if "dataset" in names.values else None)
    if data is not None:
        keys_of(data)
    rows = {"data": None, ROUND: max(1, how.steps // 2)} if data is None else {"data": str(data.absolute())}
    return rows | {"accumulation": how.gradient_accumulation, "max_len": names.values.get("max_len")}


def _axes(flags: Mapping[str, Any], names: AncestorNames) -> Axes:
    """The lists that were given; a size of the ancestor's beside its absence, where other lists were given."""
    given = {name: AXES[name].list_of(str(flags[name])) for name in TRAINING_AXES if name in flags}
    for name in ("tp", "ring"):
        if given and name in names.values:
            given[name] = sorted({1, names.values[name]})
    return {name: given[name] for name in AXES if name in given}


def _base(ctx: typer.Context, flags: dict[str, Any], names: AncestorNames, axes: Axes) -> ReplayConfig:
    """The configuration that all cells share, with as many processes as the widest needs."""
    widest = max(axes.get("tp", [names.values.get("tp", 2)])) * max(axes.get("ring", [names.values.get("ring", 2)]))
    ours = {name: names.values[name] for name in ("model", "nproc") if name in names.values}
    flags = {"nproc": widest, "zero_stage": 0, "backend": "plain", "tp": 1, "ring": 1} | ours | flags
    distributed = {name: flags.pop(name) for name in ("dist_backend",) if name in flags}
    config = asked_for(ctx, flags).config
    return replace(config, **distributed, backward=True, keep_tensors=False, truth=None, vary=None)
