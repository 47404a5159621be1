"""Create the record of a matrix, and build the answer of a matrix that ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actordbg.campaign.cell_outcomes import context_of
from actordbg.campaign.cells import combinations, make_cells, parse_axes
from actordbg.campaign.matrix_document import matrix_document
from actordbg.campaign.run_matrix import Selection, new_matrix
from actordbg.config.choices import gather_facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.command_result import CommandResult
from actordbg.records.matrix_record import MatrixRecord
from actordbg.replay.selection import require_one_trainer
from actordbg.store.layout import Store


def new_record(
    base: ReplayConfig, given: Mapping[str, str], chosen: Selection, options: dict[str, Any], **about: Any
) -> MatrixRecord:
    """Create the record of a matrix: the product of the axes over `base`. given: comma lists of values, by axis."""
    axes = parse_axes(given)
    configs = combinations(base, axes)
    require_one_trainer(chosen.rows, (combination.config for combination in configs))
    cells = make_cells(configs, gather_facts(), chosen.defaults, skip_known=options["skip_known"])
    return replace(new_matrix(cells, axes, chosen.rows, options), **about)


def matrix_answer(store: Store, record: MatrixRecord) -> CommandResult:
    """Build the answer of a complete or unfinished matrix."""
    context = context_of(store, record)
    return CommandResult(
        record.good, {"matrix": record, "good": record.good, "context": context}, matrix_document(record, context)
    )
