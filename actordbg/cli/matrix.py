"""`actordbg matrix`: replay the same inputs under every combination of some settings, and show which run and are right."""

from __future__ import annotations

from typing import Any

import typer

from actordbg.base.errors import UsageError
from actordbg.cli.options import (
    ConfirmOption,
    Power,
    command_line,
    option,
    refuse_beside,
)
from actordbg.cli.output import say_answer
from actordbg.cli.replay_options import ChosenInputs, EngineOptions
from actordbg.cli.setting_options import NONE, Given, TruthDtype, takes_settings, truth_dtype


@takes_settings("matrix")
def matrix(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    machines: EngineOptions = EngineOptions(),
    skip_known: bool = option(False, "Skip cells known to fail (default: run them).", rank=30),
    no_truth: bool = option(False, 'Skip the truth; "passed" then only means finished.', rank=30),
    power: Power = False,
    truth: TruthDtype = None,
    baseline: str | None = option(
        None,
        ("Exit 1 only for cells worse than the same cell of this matrix; failures it shares do not count."),
        metavar="MATRIX|last",
    ),
    slower: float | None = option(None, "Count a cell this many times slower as a regression.", metavar="FACTOR", rank=30),
    resume: str | None = option(None, "Continue a stopped matrix.", metavar="MATRIX|last"),
    show: str | None = option(None, "Print an existing matrix; run nothing.", metavar="MATRIX|last"),
    yes: ConfirmOption = False,
    dry_run: bool = option(False, "Print the cells; run nothing.", rank=13),
) -> None:
    """Find which setting combinations run and are right.

    Replays the same inputs under every combination of the listed settings, checks the laws (invariance checks) on some inputs,
    and compares every cell that passes with the truth. Default axes: flash_attention_2 and sdpa, compiled or not, packed or not.
    Each cell is a replay; cells that can share a loaded Actor do. Cells that cannot run here are listed as unavailable, with a
    workaround.

    Exit code: 1 if a cell failed, is wrong, is unfinished or is worse than in --baseline, or if no cell could run.

    Example: actordbg matrix --where "seq_len>1800" --max-inputs 3 --attn sdpa,eager --packing both --compile off
    """
    from actordbg.api.matrices import matrix_answer, new_record
    from actordbg.api.planning import to_judge
    from actordbg.base.units import new_replay_id
    from actordbg.campaign import run_matrix as matrices
    from actordbg.cli import matrix_work as work
    from actordbg.cli import replaying
    from actordbg.config.replay_config import AXES

    flags = replaying.flags_of(settings)
    store, inputs = replaying.opened(ctx, inputs, writes=not dry_run and show is None)
    if show is not None:
        refuse_beside(ctx, "--show keeps the matrix's settings", "show")
        return say_answer(matrix_answer(store, matrices.load(store, show)))
    if power and no_truth:
        raise UsageError("--power needs a truth comparison", hint="drop --no-truth")
    axes = {name: str(flags.pop(name)) for name in AXES if name in flags}
    if resume is not None:
        refuse_beside(ctx, "--resume keeps the matrix's settings", "resume", "yes", groups=[EngineOptions])
    matrix_id = new_replay_id() if resume is None else matrices.load(store, resume).matrix_id
    if not dry_run:
        machines.run(ctx, f"matrix {matrix_id}")
    if resume is not None:
        record, chosen, held = work.resumed(store, resume, yes)
    else:
        base = to_judge(replaying.asked_for(ctx, flags), flags)
        chosen = work.selected(store, base, inputs)
        held = work.baseline_of(store, baseline, slower)
        options: dict[str, Any] = {
            "order": inputs.ordered,
            "shuffle_seed": inputs.random_seed,
            "skip_known": skip_known,
            "slower": slower,
            "power": power,
            "oracle": None if no_truth else truth_dtype(truth),
            "input_files": [str(path.absolute()) for path in inputs.input_file or []],
        }
        about = {
            "matrix_id": matrix_id,
            "command": command_line(),
            "selection": inputs.where,
            "baseline": held and held.matrix_id,
        }
        record = new_record(base, axes, chosen, options, **about)
    return work.run_cells(store, record, chosen, held, dry_run=dry_run)
