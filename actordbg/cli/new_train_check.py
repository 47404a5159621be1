"""A new training check out of what was typed: configurations, inputs, the optimizer's numbers, the ancestor's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from actordbg.actor.hub_model import find_model
from actordbg.base.errors import StoreProblem, UsageError
from actordbg.cli import output
from actordbg.cli.input_options import ChosenInputs, asked_for, chosen_order, planned, what_there_is
from actordbg.cli.options import command_line
from actordbg.cli.setting_options import TRAINING_AXES
from actordbg.config.choices import choose, gather_facts
from actordbg.config.replay_config import AXES, ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.replay_record import ReplayInput
from actordbg.formats.train_check_record import OPEN, SFT, TrainCheckRecord
from actordbg.matrix.axes import Axes
from actordbg.replay.selection import defaults_of
from actordbg.store.layout import Store
from actordbg.traincheck.ancestor_names import AncestorNames, read_names
from actordbg.traincheck.checkpoints import checked_storage, every_by_default
from actordbg.traincheck.run_train_check import STORAGE, folder_of
from actordbg.traincheck.sft_cells import keys_of, sft_cells
from actordbg.traincheck.train_plan import batch_of, configurations, make_train_cells

_PANEL = "The training"
MOST_BY_DEFAULT = 32
"""Inputs, where --max-inputs does not say: a check should take minutes."""


@dataclass(frozen=True)
class HowToTrain:
    """The optimizer's numbers, and what else is trained, as typed."""

    steps: Annotated[int, typer.Option("--steps", min=1, rich_help_panel=_PANEL, help="Optimizer steps (default 10).")] = 10
    lr: Annotated[
        float, typer.Option("--lr", rich_help_panel=_PANEL, help="Learning rate, constant (default 5e-6, the test suite's).")
    ] = 5e-6
    gradient_accumulation: Annotated[
        int,
        typer.Option(
            "--gradient-accumulation",
            min=1,
            rich_help_panel=_PANEL,
            help="Micro-batches in each step of the configuration with most lanes; others take as many in all (default 1).",
        ),
    ] = 1
    max_norm: Annotated[
        float,
        typer.Option("--max-norm", min=0, rich_help_panel=_PANEL, help="Clip gradients to this norm; 0: never (default 1)."),
    ] = 1.0
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0, rich_help_panel=_PANEL, help="AdamW's (default 0).")] = (
        0.0
    )
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold", metavar="X", rich_help_panel=_PANEL, help="First, mean and last loss must be nearer (default 0.05)."
        ),
    ] = 0.05
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", metavar="DIR", help="Where each configuration's log goes (default: in the store).")
    ] = None
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer", metavar="sft", rich_help_panel=_PANEL, help="Run the trainer's own train_sft as well, over rows of text."
        ),
    ] = None
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset", metavar="FILE", rich_help_panel=_PANEL, help="Rows for --trainer sft, JSONL (default: made-up ones)."
        ),
    ] = None

    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", metavar="DIR", rich_help_panel=_PANEL, help="Where ranks write checkpoints, to go on from after a death."
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            "--checkpoint-every", min=1, metavar="N", rich_help_panel=_PANEL,
            help="Steps from one checkpoint to the next (default: a tenth of --steps).",
        ),
    ] = None  # fmt: skip

    def stored(self, store: Path) -> dict[str, Any]:
        """Where checkpoints go and how often, as the record's options have it."""
        if self.storage is None:
            if self.checkpoint_every is not None:
                raise UsageError("--checkpoint-every says nothing without --storage", hint="--storage DIR, or leave it out")
            return {}
        every = self.checkpoint_every or every_by_default(self.steps)
        return {STORAGE: {"folder": str(checked_storage(self.storage, store)), "every": every}}

    def training(self) -> dict[str, Any]:
        """The optimizer's numbers, as `training.json` has them."""
        if not 0 < self.lr < 10:
            raise UsageError(f"--lr {self.lr:g} is no learning rate", hint="for example 5e-6")
        if not 0 < self.threshold < 1:
            raise UsageError(f"--threshold {self.threshold:g} is no share", hint="0.05 allows 5 % of difference")
        numbers = {"lr": self.lr, "max_norm": self.max_norm, "weight_decay": self.weight_decay}
        return {"betas": [0.9, 0.95], "eps": 1e-8} | numbers


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
        raise UsageError("every configuration is skipped", hint="unset a SKIP_ variable")
    most = inputs.max_inputs or names.values.get("max_inputs") or MOST_BY_DEFAULT
    narrowed = replace(inputs, max_inputs=most, where=_where(inputs.where, names.values.get("max_len")))
    plan = planned(store, base, narrowed, chosen_order(inputs.order, False))
    for reason, count in plan.skipped.items():
        output.note(f"left out {output.plural(count, 'dump')}: {reason}")
    if not plan.spec.inputs:
        raise StoreProblem(f"nothing to train on: {what_there_is(store, narrowed.where)}", hint="choose dumps with --where")
    defaults, facts = defaults_of(store.root, plan.spec.inputs), gather_facts()
    find_model(base.model)
    chosen = choose(base, defaults, facts)
    cells = make_train_cells(configs, base, facts, defaults)
    options: dict[str, Any] = {"inputs": [asdict(item) for item in plan.spec.inputs]} | stored
    if how.trainer is not None:
        cells += sft_cells(configs, base, first=len(cells))
        options[SFT] = _rows(how, names) | {"dtype": "fp16" if chosen.dtype == "fp16" else "bf16", "attn": chosen.attn}
    logs = how.log_dir or (Path(names.values["log_dir"]) if "log_dir" in names.values else folder_of(store, check_id) / "logs")
    record = TrainCheckRecord(
        check_id=check_id,
        created_at=now_timestamp(),
        status=OPEN,
        cells=tuple(cells),
        dump_ids=tuple(item.dump_id for item in plan.spec.inputs),
        steps=how.steps,
        batch=batch_of(configs, how.gradient_accumulation),
        dtype=chosen.dtype,
        threshold=how.threshold,
        training=training,
        log_dir=str(logs.absolute()),
        selection=narrowed.where,
        command=command_line(),
        names=names.took,
        options=options,
    )
    return record, plan.spec.inputs


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
    told = None if data is None else str(data.absolute())
    return {"data": told, "accumulation": how.gradient_accumulation, "max_len": names.values.get("max_len")}


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


def _where(where: str | None, longest: int | None) -> str | None:
    if longest is None:
        return where
    return f"seq_len <= {longest}" if where is None else f"({where}) and seq_len <= {longest}"
