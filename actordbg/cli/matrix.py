"""`actordbg matrix`: replay the same inputs under every combination of some settings, and show which run and are right."""

from __future__ import annotations

from typing import Annotated

import typer

from actordbg.base.errors import UsageError
from actordbg.base.option import Option
from actordbg.cli.options import (
    ConfirmOption,
    Given,
    Power,
    refuse_beside,
)
from actordbg.cli.output import say_answer
from actordbg.cli.replay_options import ChosenInputs, EngineOptions
from actordbg.cli.setting_options import TruthDtype, truth_dtype


def matrix(
    ctx: typer.Context,
    *,
    inputs: ChosenInputs,
    settings: Given,
    machines: EngineOptions,
    skip_known: Annotated[bool, Option(rank=30)] = False,
    no_truth: Annotated[bool, Option(rank=30)] = False,
    power: Power = False,
    truth: TruthDtype = None,
    baseline: str | None = None,
    slower: Annotated[float | None, Option(rank=30)] = None,
    resume: str | None = None,
    show: str | None = None,
    yes: ConfirmOption = False,
    dry_run: Annotated[bool, Option(rank=13)] = False,
) -> object:
    """Find which setting combinations run and are right.

    Replays the same inputs under every combination of the listed settings, checks the laws (invariance checks) on some inputs,
    and compares every cell that passes with the truth. Default axes: flash_attention_2 and sdpa, compiled or not, packed or not.
    Each cell is a replay; cells that can share a loaded Actor do. Cells that cannot run here are listed as unavailable, with a
    workaround.

    Exit code: 1 if a cell failed, is wrong, is unfinished or is worse than in --baseline, or if no cell could run.

    Example: actordbg matrix --where "seq_len>1800" --max-inputs 3 --attn sdpa,eager --packing both --compile off

    Args:
        skip_known: Skip cells known to fail (default: run them).
        no_truth: Skip the truth; "passed" then only means finished.
        baseline (MATRIX|last): Exit 1 only for cells worse than the same cell of this matrix; failures it shares do not
            count.
        slower (FACTOR): Count a cell this many times slower as a regression.
        resume (MATRIX|last): Continue a stopped matrix.
        show (MATRIX|last): Print an existing matrix; run nothing.
        dry_run: Print the cells; run nothing.
    """
    from actordbg.cli.terminal import opened

    store = opened(ctx, yes=yes, machines=machines)
    if show is not None:
        refuse_beside(ctx, "--show keeps the matrix's settings", "show")
        say_answer(store.matrix_again(show, run=False))
        return None
    if resume is not None:
        refuse_beside(ctx, "--resume keeps the matrix's settings", "resume", "yes", groups=[EngineOptions])
        return store.matrix_again(resume)
    if power and no_truth:
        raise UsageError("--power needs a truth comparison", hint="drop --no-truth")
    return store.matrix(
        inputs.selection,
        truth=None if no_truth else truth_dtype(truth),
        power=power,
        skip_known=skip_known,
        baseline=baseline,
        slower=slower,
        dry_run=dry_run,
        **settings,
    )
