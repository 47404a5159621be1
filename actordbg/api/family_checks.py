"""`families`: build a small random model of each family, and run a matrix of laws and truth on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actordbg.actor.family_models import FAMILIES, build_families
from actordbg.actor.rules import require_torch
from actordbg.api.client import Client
from actordbg.api.desk import to_judge
from actordbg.campaign.cells import combinations
from actordbg.campaign.family_matrix import (
    SHAPES,
    USUAL_AXES,
    FamilyFolder,
    FamilyResult,
    families_document,
    open_folder,
    run_family,
    subject_of,
)
from actordbg.campaign.run_matrix import Surroundings
from actordbg.config.replay_config import AXES
from actordbg.config.sources import Asked
from actordbg.document.blocks import RIGHT, WRONG, Grid, Verdict
from actordbg.document.command_result import CommandResult
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.supervise import interruptible


def known_families() -> CommandResult:
    """List the known families."""
    rows = [(name, family.model_type, family.known_as) for name, family in FAMILIES.items()]
    columns = ("family", "model type", "models")
    data = {"families": [dict(zip(("name", "model_type", "known_as"), row, strict=True)) for row in rows]}
    known = Verdict("", f"{len(rows)} model families are known", next="actordbg families")
    return CommandResult(True, data, [known, Grid(columns, rows, frozenset(columns))])


def families(
    asked: Asked, flags: Mapping[str, Any], names: Sequence[str], client: Client, *, keep: Path | None, command: str
) -> CommandResult:
    """Check families by name, or folders with a config.json; all known ones by default. keep: a folder to work in."""
    subjects = {subject.typed: subject for subject in map(subject_of, names or FAMILIES)}
    given = {name: AXES[name].list_of(str(flags[name])) for name in AXES if name in flags}
    axes = {name: values for name in AXES if (values := given.get(name) or USUAL_AXES.get(name))}
    base = to_judge(asked, {name: value for name, value in flags.items() if name not in AXES})
    base = replace(base, backward=base.backward is not False)
    workplace = TemporaryDirectory(prefix="actordbg-families-") if keep is None else nullcontext(open_folder(keep))
    with interruptible(), workplace as path, (folder := FamilyFolder(Path(path), base, axes)).locked():
        results = _run(folder, list(subjects.values()), client, command)
    if keep is not None:
        client.note(f"kept: {keep}  (its store: {keep / 'store'})")
    right = sum(result.good for result in results)
    verdict = Verdict(RIGHT if right == len(results) else WRONG, f"{right} of {len(results)} model families are right")
    return CommandResult.of(verdict, {"families": results}, *families_document(results))


def _run(folder: FamilyFolder, subjects: Sequence[FamilyResult], client: Client, command: str) -> list[FamilyResult]:
    """Build the models, then run the families one by one in the same worker processes; reuse the results in `folder`."""
    require_torch()
    folder.make_inputs()
    done = {subject.typed: result for subject in subjects if (result := folder.done(subject)) is not None}
    left = [subject for subject in subjects if subject.typed not in done]
    total = len(left) * (len(SHAPES) + 1) * len(combinations(folder.base, folder.axes))  # with a comparison for each cell
    with client.progress("families", total) as advance, WarmGroups(reopen=True) as warm:
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
            result = run_family(folder.store, subject, model, folder.base, folder.axes, surroundings, command)
            done[subject.typed] = folder.keep(subject, result)
    return [done[subject.typed] for subject in subjects]
