"""`matrix`: create or resume a matrix, run its cells, and answer with what came of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actordbg.actor.hub_model import find_model
from actordbg.actor.model_code import require_consent
from actordbg.actor.rules import require_torch
from actordbg.api.desk import Desk
from actordbg.api.planning import DumpSelection, to_judge
from actordbg.base.errors import UsageError
from actordbg.base.units import new_replay_id, plural
from actordbg.campaign import run_matrix as matrices
from actordbg.campaign.cell_outcomes import context_of, require_common
from actordbg.campaign.cells import batches, combinations, make_cells, parse_axes
from actordbg.campaign.matrix_document import matrix_document
from actordbg.campaign.run_matrix import Selection, Surroundings, new_matrix
from actordbg.config.choices import gather_facts
from actordbg.config.replay_config import AXES, TINY, ReplayConfig
from actordbg.document.blocks import Items, Paragraph
from actordbg.document.command_result import CommandResult
from actordbg.records.journal import SPEC
from actordbg.records.matrix_record import MatrixRecord
from actordbg.replay.selection import require_one_trainer
from actordbg.replay.supervise import spec_and_owner
from actordbg.store.layout import Store


def new(
    desk: Desk, chosen: DumpSelection, flags: dict[str, Any], *, skip_known: bool, power: bool, truth: str | None,
    baseline: str | None, slower: float | None, dry_run: bool,
) -> CommandResult:  # fmt: skip
    """Run each combination of the axes among `flags`, or plan it. truth: its dtype; None: no truth, so nothing is judged."""
    if power and truth is None:
        raise UsageError("--power needs a truth comparison", hint="drop --no-truth")
    chosen, matrix_id = desk.selected(chosen, writes=not dry_run), new_replay_id()
    axes = {name: str(flags.pop(name)) for name in AXES if name in flags}
    if not dry_run:
        desk.client.begins(f"matrix {matrix_id}")
    base = to_judge(desk.asked(flags), flags)
    files = [path.absolute() for path in chosen.files]
    rows = matrices.select(desk.store, base, chosen.where, files, chosen.order, chosen.max_inputs, chosen.seed)
    desk.skipped(rows.skipped)
    if not rows.rows:
        raise desk.nothing("replay", chosen.where)
    held = _baseline(desk.store, baseline, slower)
    options = {"order": chosen.order, "shuffle_seed": chosen.seed, "skip_known": skip_known, "slower": slower, "power": power}
    options |= {"oracle": truth, matrices.FILES: [os.fspath(path) for path in files]}
    about = {"matrix_id": matrix_id, "selection": chosen.where, "baseline": held and held.matrix_id}
    about["command"] = desk.command("matrix", chosen.where, base, axes)
    return _run(desk, new_record(base, axes, rows, options, **about), rows, held, dry_run=dry_run)


def resumed(desk: Desk, name: str, *, dry_run: bool) -> CommandResult:
    """Continue a stopped matrix. Asks for approval of what another user wrote."""
    desk.store.require_writable()
    store, (record, owner) = desk.store, matrices.load_with_owner(desk.store, name)
    if not dry_run:
        desk.client.begins(f"matrix {record.matrix_id}")
    models = sorted({str(cell.config.get("model", TINY)) for cell in record.cells})
    desk.client.approve(f"matrix {record.matrix_id}, whose model is {', '.join(map(repr, models))}", owner)
    for cell in record.cells:
        if cell.replay_id is not None and (store.replays / cell.replay_id / SPEC).is_file():
            spec, owner = spec_and_owner(store, cell.replay_id)
            whose = f"replay {spec.replay_id} of that matrix, whose model is {spec.config.model!r}"
            desk.client.approve(whose, owner)
            models.append(spec.config.model)
    for model in models:
        require_consent(model, store.models)
    held = _baseline(store, record.baseline, record.options.get("slower"))
    return _run(desk, record, matrices.select_again(store, record), held, dry_run=dry_run)


def shown(store: Store, name: str) -> CommandResult:
    """Return the answer of a matrix that ran, complete or not."""
    record = matrices.load(store.require(), name)
    context = context_of(store, record)
    data = {"matrix": record, "good": record.good, "context": context}
    return CommandResult(record.good, data, matrix_document(record, context))


def new_record(
    base: ReplayConfig, given: Mapping[str, str], chosen: Selection, options: dict[str, Any], **about: Any
) -> MatrixRecord:
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


def _run(desk: Desk, record: MatrixRecord, rows: Selection, held: MatrixRecord | None, *, dry_run: bool) -> CommandResult:
    """Run the unfinished cells, and answer even after Ctrl-C if the client wants that; or say what would run."""
    require_torch()
    surroundings = Surroundings(rows.defaults)
    for model in {str(cell.config.get("model", TINY)) for cell in record.cells if cell.open}:
        find_model(model)
    if dry_run:
        return _plan(record, rows, surroundings)
    if held is not None:
        require_common(desk.store, held, record)
    try:
        with desk.progress("matrix", matrices.steps_left(record)) as advance:
            surroundings.on_progress = lambda words, steps: advance(steps, note=words)
            matrices.run_matrix(desk.store, record, rows.rows, surroundings, held)
    except KeyboardInterrupt:
        left = f"interrupted; results so far are kept, run `actordbg matrix --resume {record.matrix_id}` to continue"
        if not desk.client.stopped(left):
            raise
    return shown(desk.store, record.matrix_id)


def _plan(record: MatrixRecord, rows: Selection, surroundings: Surroundings) -> CommandResult:
    """Answer with the cells, the number of dumps, and the indices of cells that share a loaded Actor."""
    loads = list(batches(record.cells, surroundings.facts, rows.defaults).values())
    states = [f"{cell.status} ({cell.reason})" if cell.reason else "to be run" for cell in record.cells]
    lines = [f"#{cell.index} {cell.name}: {state}" for cell, state in zip(record.cells, states, strict=True)]
    lines += [f"load {number}: {', '.join(f'#{index}' for index in shared)}" for number, shared in enumerate(loads, 1)]
    said = f"{plural(len(record.cells), 'cell')} on {plural(len(rows.rows), 'dump')}:"
    return CommandResult(True, {"dumps": len(rows.rows), "cells": record.cells, "loads": loads}, [Paragraph(said), Items(lines)])
