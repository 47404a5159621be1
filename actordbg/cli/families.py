"""`actordbg families`: check which model families are right with this trainer and these libraries, on small random models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actordbg.cli.options import command_line, option, require_good
from actordbg.cli.output import note, progress, say_document, table
from actordbg.cli.setting_options import NONE, Given, takes_settings

if TYPE_CHECKING:
    from actordbg.campaign.family_matrix import FamilyFolder, FamilyResult


@takes_settings("families")
def families(
    ctx: typer.Context,
    names: list[str] | None = typer.Argument(
        None, metavar="NAME|DIR", help="Families, or folders with a config.json (default: all known families)."
    ),
    settings: Given = NONE,
    keep: Path | None = option(
        None, "Work in DIR and keep it, continuing an earlier run there (default: a temporary folder).", metavar="DIR"
    ),
    list_: bool = option(False, "List the known families and run nothing."),
) -> None:
    """Test a small model of each family against laws and truth.

    Builds a small random model of each family, without network access, and runs a matrix on small synthetic inputs: fp32 and
    bf16, sdpa and eager, packed and not. Checks the laws in every cell and compares it with the truth. A folder's config.json
    gives a small model of that configuration, with your own windows, scalings and flags; its weights are not read.

    With --keep, an interrupted run continues, and a list can be run in parts: results in DIR with the same options and versions
    are reused.

    Takes seconds per family.

    Exit code: 1 if a family is wrong or fails.

    Example: actordbg families qwen3_5 mixtral --packing on
    """
    from tempfile import TemporaryDirectory

    from actordbg.actor.family_models import FAMILIES
    from actordbg.api.planning import to_judge
    from actordbg.campaign.family_matrix import USUAL_AXES, FamilyFolder, families_document, open_folder, subject_of
    from actordbg.cli.replaying import asked_for
    from actordbg.config.replay_config import AXES
    from actordbg.document.blocks import RIGHT, WRONG, Verdict
    from actordbg.replay.supervise import interruptible

    if list_:
        rows = [(name, family.model_type, family.known_as) for name, family in FAMILIES.items()]
        return table(["family", "model type", "models"], rows)
    subjects = {subject.typed: subject for subject in map(subject_of, names or FAMILIES)}
    flags = dict(settings)
    given = {name: AXES[name].list_of(str(flags.pop(name))) for name in AXES if name in flags}
    axes = {name: values for name in AXES if (values := given.get(name) or USUAL_AXES.get(name))}
    base = to_judge(asked_for(ctx, flags), flags)
    base = replace(base, backward=base.backward is not False)
    place = TemporaryDirectory(prefix="actordbg-families-") if keep is None else nullcontext(open_folder(keep))
    with interruptible(), place as path, (folder := FamilyFolder(Path(path), base, axes)).locked():
        results = _run(folder, list(subjects.values()))
    if keep is not None:
        note(f"kept: {keep}  (its store: {keep / 'store'})")
    blocks, good = families_document(results), all(result.good for result in results)
    said = f"{sum(result.good for result in results)} of {len(results)} model families are right"
    verdict = Verdict(RIGHT if good else WRONG, said)
    say_document([verdict, *blocks], data={"good": good, "families": results})
    return require_good(good)


def _run(folder: FamilyFolder, subjects: Sequence[FamilyResult]) -> list[FamilyResult]:
    """Build the models, then run the families one by one in the same worker processes; reuse the results in `folder`."""
    from actordbg.actor.family_models import build_families
    from actordbg.actor.rules import require_torch
    from actordbg.campaign.cells import combinations
    from actordbg.campaign.family_matrix import SHAPES, run_family
    from actordbg.campaign.run_matrix import Surroundings
    from actordbg.replay.group_engine import WarmGroups

    require_torch()
    folder.make_inputs()
    done = {subject.typed: result for subject in subjects if (result := folder.done(subject)) is not None}
    left = [subject for subject in subjects if subject.typed not in done]
    total = len(left) * (len(SHAPES) + 1) * len(combinations(folder.base, folder.axes))  # with a comparison for each cell
    with progress("families", total) as advance, WarmGroups(reopen=True) as warm:
        advance(0, note=f"building small models ({len(done)} families are done)" if done else "building small models")
        problems = build_families({folder.model(subject): subject.config for subject in left})
        for subject in left:
            model = folder.model(subject)
            if why := problems.get(model):
                done[subject.typed] = replace(subject, problem=why, config={})
                continue

            def on_progress(words: str, steps: int, name: str = subject.name) -> None:
                advance(steps, note=f"{name}: {words}")

            surroundings = Surroundings(None, on_progress=on_progress, warm=warm)
            result = run_family(folder.store, subject, model, folder.base, folder.axes, surroundings, command_line())
            done[subject.typed] = folder.keep(subject, result)
    return [done[subject.typed] for subject in subjects]
