"""`actordbg families`: which families of models this trainer and these libraries compute rightly, on small random models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from actordbg.cli import output
from actordbg.cli.options import FormatOption, Json, Quiet, chosen_format
from actordbg.cli.page_file import check_page
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("families")
def families(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|DIR]...", help="Families, or folders with a config.json (default: all that are known)."),
    ] = None,
    settings: Given = NONE,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Work in DIR and keep it; an earlier run there goes on. Else all is removed."),
    ] = None,
    write: Annotated[Path | None, typer.Option("--write", metavar="PAGE", help="Write the answer as Markdown there too.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the families that are known, and run nothing.")] = False,
    format: FormatOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try a small model of each family through laws and the truth.

    Builds a small random model of each family, without a network, and runs a matrix on small made-up inputs: fp32 and bf16, sdpa
    and eager, packed and not. Every cell is asked for its laws and compared with the truth. A folder's config.json gives a small
    model of that configuration, with your own windows, scalings and flags; its weights are not read.

    With --keep a run that was ended goes on where it was, and a list can be run in parts: what was done there under the same
    options and versions is taken from DIR.

    Seconds for a family. Exit code 1 if one of them is wrong or fails.

    Example: actordbg families qwen3_5 mixtral --packing on
    """
    from actordbg.actor.family_models import FAMILIES
    from actordbg.campaign.family_matrix import USUAL_AXES, FamilyFolder, subject_of
    from actordbg.cli.chosen_inputs import asked_for
    from actordbg.cli.families_work import folder_for, print_families, run_families
    from actordbg.cli.matrix_work import kept
    from actordbg.config.replay_config import AXES
    from actordbg.replay.supervise import interruptible

    how = chosen_format(format, as_json)
    check_page(write)
    if list_:
        output.table(["family", "model type", "models"], [(name, one.model_type, one.known_as) for name, one in FAMILIES.items()])
        return
    subjects = {one.typed: one for one in map(subject_of, names or FAMILIES)}
    flags = dict(settings)
    given = {name: AXES[name].list_of(str(flags.pop(name))) for name in AXES if name in flags}
    axes = {name: values for name in AXES if (values := given.get(name) or USUAL_AXES.get(name))}
    base = kept(asked_for(ctx, flags), flags)
    base = replace(base, backward=base.backward is not False)
    with interruptible(), folder_for(keep) as path, (folder := FamilyFolder(path, base, axes)).locked():
        results = run_families(folder, list(subjects.values()), quiet=quiet or how == "json")
    print_families(results, how, write)
