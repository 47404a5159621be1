"""`matrix` and `train-check`: create or resume a campaign, run what is left of it, and answer with what came of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from actordbg.actor.model_code import require_consent
from actordbg.actor.models import require_model
from actordbg.actor.rules import find_trainer, require_torch
from actordbg.api.desk import Desk, DumpSelection, to_judge
from actordbg.base.errors import UsageError
from actordbg.base.owners import is_own, name_of
from actordbg.base.units import listed, new_replay_id, plural
from actordbg.campaign import run_matrix as matrices
from actordbg.campaign.cell_outcomes import context_of, require_common, shown_path
from actordbg.campaign.cells import Axes, batches, combinations, make_cells, parse_axes
from actordbg.campaign.matrix_document import matrix_document
from actordbg.campaign.run_matrix import Selection, Surroundings, new_matrix
from actordbg.campaign.run_train_check import TrainRun, folder_of, load_train_check, log_of
from actordbg.campaign.train_document import is_good, train_document, verdicts
from actordbg.campaign.train_plan import (
    AncestorNames,
    batch_of,
    configurations,
    make_train_cells,
    read_names,
    require_whole_groups,
    run_of_dataset,
    taken_twice,
)
from actordbg.catalog.selections import joined
from actordbg.config.choices import choose, gather_facts
from actordbg.config.replay_config import AXES, TINY, TRAINING_AXES, ReplayConfig
from actordbg.config.sources import FSDP_OFF
from actordbg.config.training_options import TrainingOptions
from actordbg.document.blocks import Items, Paragraph
from actordbg.document.command_result import CommandResult
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.journal import SPEC
from actordbg.records.matrix_record import OPEN, OUTPUT, STORAGE, MatrixRecord, TrainCell, TrainCheckRecord
from actordbg.records.replay_record import ReplayInput
from actordbg.replay.selection import defaults_of, require_one_trainer
from actordbg.replay.supervise import spec_and_owner
from actordbg.store.layout import Store

Given = dict[str, Any]
"""Options, by name."""


def matrix(
    desk: Desk, chosen: DumpSelection, flags: Given, *, skip_known: bool, power: bool, truth: str | None,
    baseline: str | None, slower: float | None, dry_run: bool,
) -> CommandResult:  # fmt: skip
    """Run each combination of the axes among `flags`, or plan it. truth: its dtype; None: no truth, so nothing is judged."""
    if power and truth is None:
        raise UsageError("--power needs a truth comparison", hint="drop --no-truth")
    chosen, matrix_id = desk.selected(chosen, writes=not dry_run), new_replay_id()
    axes = {name: str(flags.pop(name)) for name in AXES if name in flags}
    if not dry_run:
        desk.client.begins(f"matrix {matrix_id}")
    record = None if "backend" in axes else desk.first_record(chosen)
    base = to_judge(desk.asked(flags, record), flags)
    files = [path.absolute() for path in chosen.files]
    rows = matrices.select(
        desk.store, base, chosen.where, files, chosen.order, max_inputs=chosen.max_inputs, shuffle_seed=chosen.seed
    )
    desk.skipped(rows.skipped)
    if not rows.rows:
        raise desk.nothing("replay", chosen.where)
    held = _baseline(desk.store, baseline, slower)
    options = {"order": chosen.order, "shuffle_seed": chosen.seed, "skip_known": skip_known, "slower": slower, "power": power}
    options |= {"oracle": truth, matrices.FILES: [os.fspath(path) for path in files]}
    about = {"matrix_id": matrix_id, "selection": chosen.where, "baseline": held and held.matrix_id}
    about["command"] = desk.command("matrix", chosen.where, base, axes)
    return _run_matrix(desk, new_record(base, axes, rows, options, **about), rows, held, dry_run=dry_run)


def resumed_matrix(desk: Desk, name: str, *, dry_run: bool) -> CommandResult:
    """Continue a stopped matrix. Asks for approval of what another user wrote."""
    desk.store.require_writable()
    store, (record, owner) = desk.store, matrices.load_with_owner(desk.store, name)
    if not dry_run:
        desk.client.begins(f"matrix {record.matrix_id}")
    models = sorted({str(cell.config.get("model", TINY)) for cell in record.cells})
    desk.client.approve(f"matrix {record.matrix_id}, whose model is {listed(map(repr, models))}", owner)
    for cell in record.cells:
        if cell.replay_id is not None and (store.replays / cell.replay_id / SPEC).is_file():
            spec, owner = spec_and_owner(store, cell.replay_id)
            whose = f"replay {spec.replay_id} of that matrix, whose model is {spec.config.model!r}"
            desk.client.approve(whose, owner)
            models.append(spec.config.model)
    for model in models:
        require_consent(model, store.models)
    held = _baseline(store, record.baseline, record.options.get("slower"))
    return _run_matrix(desk, record, matrices.select_again(store, record), held, dry_run=dry_run)


def shown_matrix(store: Store, name: str) -> CommandResult:
    """Return the answer of a matrix that ran, complete or not."""
    record = matrices.load(store.require(), name)
    context = context_of(store, record)
    data = {"matrix": record, "good": record.good, "context": context}
    return CommandResult(record.good, data, matrix_document(record, context))


def new_record(base: ReplayConfig, given: Mapping[str, str], chosen: Selection, options: Given, **about: Any) -> MatrixRecord:
    """Create the record of a matrix: the product of the axes over `base`. given: comma lists of values, by axis."""
    axes = parse_axes(given)
    configs = combinations(base, axes)
    require_one_trainer(chosen.rows, (combination.config for combination in configs))
    cells = make_cells(configs, gather_facts(), chosen.defaults, skip_known=options["skip_known"])
    return replace(new_matrix(cells, axes, chosen.rows, options), **about)


def _baseline(store: Store, name: str | None, slower: float | None) -> MatrixRecord | None:
    if slower is not None and name is None:
        raise UsageError("--slower needs a baseline", hint="add --baseline MATRIX")
    if slower is not None and not slower >= 1:
        raise UsageError(f"--slower must be at least 1, not {slower:g}", hint="for example --slower 1.5")
    return None if name is None else matrices.load(store, name)


def _run_matrix(desk: Desk, record: MatrixRecord, rows: Selection, held: MatrixRecord | None, *, dry_run: bool) -> CommandResult:
    """Run the unfinished cells, and answer even after Ctrl-C if the client wants that; or say what would run."""
    require_torch()
    surroundings = Surroundings(rows.defaults)
    for model, layers in {(cell.config.get("model", TINY), cell.config.get("num_layers")) for cell in record.cells if cell.open}:
        require_model(model, layers)
    if dry_run:
        return _matrix_plan(record, rows, surroundings)
    if held is not None:
        require_common(desk.store, held, record)
    with desk.progress("matrix", matrices.steps_left(record), f"actordbg matrix --resume {record.matrix_id}") as advance:
        surroundings.on_progress = lambda words, steps: advance(steps, note=words)
        matrices.MatrixRun(desk.store, record, rows.rows, surroundings, held).run()
    return shown_matrix(desk.store, record.matrix_id)


def _matrix_plan(record: MatrixRecord, rows: Selection, surroundings: Surroundings) -> CommandResult:
    """Answer with the cells, the number of dumps, and the indices of cells that share a loaded Actor."""
    loads = list(batches(record.cells, surroundings.facts, rows.defaults).values())
    states = [f"{cell.status} ({cell.reason})" if cell.reason else "to be run" for cell in record.cells]
    lines = [f"#{cell.index} {cell.name}: {state}" for cell, state in zip(record.cells, states, strict=True)]
    lines += [f"load {number}: {', '.join(f'#{index}' for index in shared)}" for number, shared in enumerate(loads, 1)]
    said = f"{plural(len(record.cells), 'cell')} on {plural(len(rows.rows), 'dump')}:"
    return CommandResult(True, {"dumps": len(rows.rows), "cells": record.cells, "loads": loads}, [Paragraph(said), Items(lines)])


MOST_BY_DEFAULT = 32
"""Maximum number of inputs unless it is set (the steps also use each at least twice): a check should take minutes."""


def train_check(desk: Desk, chosen: DumpSelection, flags: Given, how: TrainingOptions, *, dry_run: bool) -> CommandResult:
    """Train each configuration, or say what would run."""
    if how.dataset is not None or os.environ.get("DATASET"):
        desk.store.create()
    chosen, check_id = desk.selected(chosen, writes=not dry_run), new_replay_id()
    if not dry_run:
        desk.client.begins(f"train-check {check_id}")
    record, taken = _new_check(desk, chosen, flags, how, check_id)
    return _check_plan(record) if dry_run else _run_check(desk, record, taken)


def resumed_check(desk: Desk, name: str, *, dry_run: bool) -> CommandResult:
    """Continue a stopped check. Asks for approval of what another user wrote."""
    store, (record, owner) = desk.store, load_train_check(desk.store.require(), name)
    models = ", ".join(sorted({repr(cell.config.get("model")) for cell in record.cells}))
    places = [record.log_dir, record.options.get(OUTPUT), (record.options.get(STORAGE) or {}).get("folder")]
    written = ", ".join(str(place) for place in places if place)
    what = f"training check {record.check_id}, whose model is {models} and whose files go to {written}"
    desk.client.approve(what, owner)
    for cell in record.cells:
        require_consent(str(cell.config.get("model")), store.models)
    taken = tuple(ReplayInput(**item) for item in record.options.get("inputs", []))
    desk.client.begins(f"train-check {record.check_id}")
    require_torch()
    return _check_plan(record) if dry_run else _run_check(desk, record, taken)


def shown_check(store: Store, name: str) -> CommandResult:
    """Return the answer of a check that ran, complete or not."""
    record, owner = load_train_check(store.require(), name)
    paths = {cell.index: log_of(record, cell) for cell in record.cells if cell.steps}
    logs = {index: shown_path(path) for index, path in paths.items() if path.is_file()}
    data = {"check": record, "good": is_good(record), "verdicts": verdicts(record), "logs": logs}
    return CommandResult(is_good(record), data, train_document(record, logs, "" if is_own(owner) else name_of(owner)))


def _check_plan(record: TrainCheckRecord) -> CommandResult:
    inputs, lr = plural(len(record.dump_ids), "input"), record.training["lr"]
    lines = []
    for cell in record.cells:
        config = ReplayConfig.from_dict(cell.config)
        runs = f"{plural(config.nproc, 'process')}, accumulates {record.batch // config.lanes}"
        state = f"{cell.status} ({cell.reason})" if cell.reason else runs
        lines.append(f"{cell.name}: {state}")
    said = f"{record.steps} steps of {record.batch} micro-batches over {inputs}, {record.dtype}, lr {lr:g}:"
    return CommandResult(True, vars(record), [Paragraph(said), Items(lines)])


def _run_check(desk: Desk, record: TrainCheckRecord, taken: tuple[ReplayInput, ...]) -> CommandResult:
    units = record.steps * record.batch * sum(cell.status == OPEN for cell in record.cells)
    with desk.progress("training", units, f"actordbg train-check --resume {record.check_id}") as advance:

        def on_event(cell: TrainCell, what: str) -> None:
            if what in ("micro-batch", "done"):
                advance(what == "micro-batch", note=cell.name)
            elif what == "starts":
                advance(0, note=f"{cell.name}: starting")
            else:
                desk.client.note(f"{cell.name}: {what}")

        TrainRun(desk.store, record, taken, on_event).run()
    return shown_check(desk.store, record.check_id)


def _new_check(
    desk: Desk, chosen: DumpSelection, flags: Given, how: TrainingOptions, check_id: str
) -> tuple[TrainCheckRecord, tuple[ReplayInput, ...]]:
    """Create the record of a check that has not run yet, and select its inputs."""
    given = {"max_inputs": chosen.max_inputs, "log_dir": how.log_dir, "dataset": how.dataset, "output_dir": how.output_dir}
    names, training = _names(desk, {*flags, *(name for name, value in given.items() if value is not None)}), _training(how)
    axes = _axes(flags, names)
    base = _base(desk, flags, names, axes)
    sizes: dict[str, int] = {name: names.values[name] for name in ("tp", "ring") if name in names.values}
    configs = configurations(base, axes, names.skips, sizes)
    if not configs:
        raise UsageError("every configuration is skipped", hint=f"unset a SKIP_ variable, or {FSDP_OFF}")
    require_whole_groups(configs, axes)
    batch = batch_of(configs, how.gradient_accumulation)
    most = chosen.max_inputs or names.values.get("max_inputs") or MOST_BY_DEFAULT
    longest = names.values.get("max_len")
    if dataset := how.dataset or names.values.get("dataset"):
        if chosen.where is not None or chosen.files:
            raise UsageError("--dataset and a selection of recorded inputs cannot be combined", hint="drop --where")
        require_model(base.model, base.num_layers)
        run = run_of_dataset(desk.store, Path(dataset), base.model, longest, most)
        desk.client.note(f"the samples of {dataset} are run {run} of {desk.store.root}")
        chosen = replace(chosen, where=f"run='{run}'")
    where = joined(chosen.where, f"seq_len <= {longest}") if longest else chosen.where
    plan = desk.planned("train-check", base, replace(chosen, max_inputs=most, where=where), "train on")
    taken = plan.spec.inputs
    if chosen.max_inputs is None and "max_inputs" not in names.values:  # the loss over the same inputs says whether it falls
        taken = taken[: taken_twice(len(taken), how.steps, batch)]
    defaults, facts = defaults_of(desk.store.root, taken), gather_facts()
    find_trainer(base, defaults)
    require_model(base.model, base.num_layers)
    logs = Path(names.values.get("log_dir") or how.log_dir or folder_of(desk.store, check_id) / "logs")
    record = TrainCheckRecord(
        check_id=check_id,
        created_at=now_timestamp(),
        status=OPEN,
        cells=tuple(make_train_cells(configs, base, facts, defaults)),
        dump_ids=tuple(item.dump_id for item in taken),
        steps=how.steps,
        batch=batch,
        dtype=choose(base, defaults, facts).dtype,
        threshold=how.threshold,
        training=training,
        log_dir=str(logs.absolute()),
        selection=where,
        command=plan.spec.command,
        names=names.took,
        options={"inputs": [asdict(item) for item in taken]} | _stored(how, names),
    )
    return record, taken


def _stored(how: TrainingOptions, names: AncestorNames) -> Given:
    """Return where checkpoints and trained models go, as in the record's options; UsageError for an interval without a place."""
    stored: Given = {}
    if how.storage is not None:
        folder = how.storage if "://" in how.storage else str(Path(how.storage).absolute())
        stored[STORAGE] = {"folder": folder, "every": how.checkpoint_every or -(-how.steps // 10)}
    elif how.checkpoint_every is not None:
        raise UsageError("--checkpoint-every needs --storage", hint="add --storage DIR, or drop --checkpoint-every")
    if output := how.output_dir or names.values.get("output_dir"):
        stored[OUTPUT] = str(Path(output).absolute())
    return stored


def _training(how: TrainingOptions) -> Given:
    """Return the hyperparameters, as in `training.json`."""
    if not 0 < how.lr < 10:
        raise UsageError(f"--lr {how.lr:g} is out of range", hint="for example 5e-6")
    if not 0 < how.threshold < 1:
        raise UsageError(f"--threshold {how.threshold:g} is invalid", hint="for example 0.05, which allows differences up to 5 %")
    numbers = {name: getattr(how, name) for name in ("lr", "max_norm")}
    more = {"gradient_checkpointing": True} if how.gradient_checkpointing else {}
    return {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0} | numbers | more


def _names(desk: Desk, given: Collection[str]) -> AncestorNames:
    """Read the environment variables of the trainer's backend test suite, and note the effect of each."""
    names = read_names(os.environ, set(given))
    for name, value in names.took.items():
        desk.client.note(f"from the environment: {name}={value}")
    for name, why in names.idle.items():
        desk.client.note(f"{name} has no effect: {why}")
    return names


def _axes(flags: Given, names: AncestorNames) -> Axes:
    """Pop the given lists from `flags`; with a list given, a size from the environment is compared with 1."""
    given = {name: AXES[name].list_of(str(flags.pop(name))) for name in TRAINING_AXES if name in flags}
    for name in ("tp", "ring"):
        if given and name in names.values:
            given[name] = sorted({1, names.values[name]})
    return {name: given[name] for name in AXES if name in given}


def _base(desk: Desk, flags: Mapping[str, Any], names: AncestorNames, axes: Axes) -> ReplayConfig:
    """Build the configuration that all cells share, with as many processes as the largest cell needs."""
    widest = max(axes.get("tp", [names.values.get("tp", 2)])) * max(axes.get("ring", [names.values.get("ring", 2)]))
    ours = {name: names.values[name] for name in ("model", "nproc") if name in names.values}
    flags = {"nproc": widest, "zero_stage": 0, "backend": "plain", "tp": 1, "ring": 1} | ours | dict(flags)
    distributed = {name: flags.pop(name) for name in ("dist_backend",) if name in flags}
    config = desk.asked(flags).config
    return replace(config, **distributed, backward=True, keep_tensors=False, truth=None, vary=None)
