"""The work of `actordbg compare`: which sides are meant, and how the answer is said and kept."""

from __future__ import annotations

from pathlib import Path

from actordbg.base.errors import StoreProblem
from actordbg.base.units import LAST
from actordbg.catalog.query import Catalog, get_configuration, open_fresh, select_dumps
from actordbg.cli import output
from actordbg.cli.options import Format
from actordbg.config.as_ran import as_ran, label
from actordbg.document.blocks import Block
from actordbg.document.renderings import as_markdown, as_text
from actordbg.formats.weight_hashes import RECORDED_WEIGHTS
from actordbg.judge.comparing import save
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.store.layout import Store


def meant(catalog: Catalog, name: str, silent: bool) -> str:
    """The replay that a name means. For `last` it is said which one that was: a store may be shared."""
    row = get_configuration(catalog, name)
    if name == LAST and not silent:
        what = label(as_ran(row.config, row.resolved))
        output.note(f"last is {row.replay_id}: {what}, {row.status}; {row.command or 'no command recorded'}")
    return row.replay_id


def weights(store: Store, replay_id: str) -> str:
    """Whether a replay had the weights that the run recorded; "" where it recorded none."""
    return str((get_configuration(store, replay_id).resolved or {}).get(RECORDED_WEIGHTS, ""))


def selected(store: Store, where: str | None) -> set[str] | None:
    """Ids of the dumps that --where selects, None without it. Asked first: a mistake in it must not cost a truth."""
    return None if where is None else {row.dump_id for row in select_dumps(open_fresh(store, where), where)}


def kept(store: Store, record: ComparisonRecord) -> Path | None:
    """Where the comparison is kept. In a store that cannot be written it is shown all the same, and not kept."""
    try:
        return save(store, record)
    except StoreProblem as problem:
        output.note(f"this comparison is not kept: {problem.message}")
        return None


def render(blocks: list[Block], chosen: Format, path: Path | None) -> None:
    output.say_lines(as_markdown(blocks) if chosen == "md" else as_text(blocks))
    if path is not None:
        output.note(f"kept as {path}")
