"""The work of `actordbg matrix`: create or resume a matrix, run its cells with a progress bar, and print it in each format."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from actordbg.actor.hub_model import find_model
from actordbg.actor.model_code import require_consent
from actordbg.actor.rules import require_torch
from actordbg.api.matrices import matrix_answer
from actordbg.base.errors import UsageError
from actordbg.campaign import run_matrix as matrices
from actordbg.campaign.cell_outcomes import require_common
from actordbg.campaign.cells import batches
from actordbg.campaign.run_matrix import (
    Selection,
    Surroundings,
    run_matrix,
    select,
    select_again,
    steps_left,
)
from actordbg.cli import output
from actordbg.cli.options import approve
from actordbg.cli.output import emit_json, note, plural, say, say_answer, say_wrapped
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.replaying import nothing_to, replaying, say_skipped
from actordbg.config.replay_config import TINY, ReplayConfig
from actordbg.records.journal import SPEC
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.replay.supervise import spec_and_owner
from actordbg.store.layout import Store


def selected(store: Store, base: ReplayConfig, inputs: ChosenInputs) -> Selection:
    files = inputs.input_file or []
    chosen = select(store, base, inputs.where, files, inputs.ordered, inputs.max_inputs, inputs.random_seed)
    say_skipped(chosen.skipped)
    if not chosen.rows:
        raise nothing_to("replay", store, inputs)
    return chosen


def baseline_of(store: Store, name: str | None, slower: float | None) -> MatrixRecord | None:
    if slower is not None and name is None:
        raise UsageError("--slower needs a baseline", hint="add --baseline MATRIX")
    if slower is not None and not slower >= 1:
        raise UsageError(f"--slower must be at least 1, not {slower:g}", hint="for example --slower 1.5")
    return None if name is None else matrices.load(store, name)


def resumed(store: Store, name: str, yes: bool) -> tuple[MatrixRecord, Selection, MatrixRecord | None]:
    record, owner = matrices.load_with_owner(store, name)
    models = sorted({str(cell.config.get("model", TINY)) for cell in record.cells})
    approve(f"matrix {record.matrix_id}, whose model is {', '.join(map(repr, models))}", owner, yes)
    for cell in record.cells:
        if cell.replay_id is not None and (store.replays / cell.replay_id / SPEC).is_file():
            spec, owner = spec_and_owner(store, cell.replay_id)
            approve(f"replay {spec.replay_id} of that matrix, whose model is {spec.config.model!r}", owner, yes)
            models.append(spec.config.model)
    for model in models:
        require_consent(model, store.models)
    held = baseline_of(store, record.baseline, record.options.get("slower"))
    return record, select_again(store, record), held


def run_cells(
    store: Store,
    record: MatrixRecord,
    chosen: Selection,
    held: MatrixRecord | None,
    *,
    dry_run: bool,
) -> None:
    """Run the unfinished cells and print the matrix, even after Ctrl-C. Exits with 1 if the matrix is bad, 130 if interrupted."""
    require_torch()
    surroundings = Surroundings(chosen.defaults)
    for model in {str(cell.config.get("model", TINY)) for cell in record.cells if cell.open}:
        find_model(model)
    if dry_run:
        loads = list(batches(record.cells, surroundings.facts, chosen.defaults).values())
        return print_plan(record.cells, len(chosen.rows), loads)
    if held is not None:
        require_common(store, held, record)
    interrupted = False
    try:
        with replaying(store, "matrix", steps_left(record)) as advance:
            surroundings.on_progress = lambda words, steps: advance(steps, note=words)
            run_matrix(store, record, chosen.rows, surroundings, held)
    except KeyboardInterrupt:
        interrupted = True
        note(f"interrupted; results so far are kept, run `actordbg matrix --resume {record.matrix_id}` to continue")
    record = matrices.load(store, record.matrix_id)
    say_answer(matrix_answer(store, record))
    if interrupted or not record.good:
        raise typer.Exit(130 if interrupted else 1)
    return None


def print_plan(cells: Sequence[MatrixCell], dumps: int, loads: Sequence[Sequence[int]]) -> None:
    """Print the plan of `--dry-run`: the cells, the number of dumps, and the indices of cells that share a loaded Actor."""
    if output.wanted.json:
        return emit_json({"dumps": dumps, "cells": cells, "loads": loads})
    say(f"{plural(len(cells), 'cell')} on {plural(dumps, 'dump')}:")
    for cell in cells:
        state = f"{cell.status} ({cell.reason})" if cell.reason else "to be run"
        say_wrapped(f"  #{cell.index} {cell.name}: {state}", "      ")
    for number, shared in enumerate(loads, 1):
        say(f"  load {number}: {', '.join(f'#{index}' for index in shared)}")
    return None
