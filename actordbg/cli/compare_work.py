"""The work of `actordbg compare`: its sides, the truth and the noise that it needs, and how the answer is said."""

from __future__ import annotations

from pathlib import Path

from actordbg.base.errors import EnvironmentProblem, StoreProblem, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.ids import LAST
from actordbg.catalog.query import get_configuration, open_fresh, read_noise, select_dumps
from actordbg.cli import output
from actordbg.cli.chosen_inputs import counting, replaying
from actordbg.cli.options import Format, approve
from actordbg.compare.comparing import save
from actordbg.compare.find_truth import ensure_rounding, ensure_truth, find_truth, require_torch, wanted_truth
from actordbg.compare.noise_floor import newest_for
from actordbg.config import consent
from actordbg.config.as_ran import as_ran, label
from actordbg.config.replay_config import TINY
from actordbg.formats.comparison_record import ComparisonRecord
from actordbg.formats.noise_record import NoiseRecord
from actordbg.formats.weight_hashes import RECORDED_WEIGHTS
from actordbg.replay.supervise import load_spec, spec_and_owner
from actordbg.replay.warm_groups import WarmGroups
from actordbg.report.blocks import Block
from actordbg.report.renderings import as_markdown, as_text
from actordbg.store.layout import Store


def meant(store: Store, name: str, silent: bool) -> str:
    """The replay that a name means. For `last` it is said which one that was: a store may be shared."""
    row = get_configuration(store, name)
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


def noise_of(store: Store, replay_id: str, name: str) -> NoiseRecord:
    """The noise floor that was named; for "last" the newest that was measured under the configuration of this replay."""
    if name != "last":
        return read_noise(store, name)
    found = newest_for(store, replay_id)
    if found is None:
        raise UsageError(
            f"no noise floor was measured under the configuration of {replay_id}",
            hint=f"measure one: {_noise_command(store, replay_id)}",
        )
    return found


def _noise_command(store: Store, replay_id: str) -> str:
    """The replay's own command line, for `noise`."""
    words, mark = consent.words_of(load_spec(store, replay_id).command)
    taken = [word for word in words if word not in ("--keep-tensors", "--keep-gradients")]
    if "replay" not in taken:
        return "actordbg noise with the same options as that replay"
    taken[taken.index("replay")] = "noise"
    return " ".join(map(in_shell, taken)) + mark


def kept(store: Store, record: ComparisonRecord) -> Path | None:
    """Where the comparison is kept. In a store that cannot be written it is shown all the same, and not kept."""
    try:
        return save(store, record)
    except StoreProblem as problem:
        output.note(f"this comparison is not kept: {problem.message}")
        return None


def truth_of(store: Store, replay_id: str, dtype: str, quiet: bool, yes: bool, warm: WarmGroups) -> str:
    """The id of the truth of a replay's inputs, computed now if it is not there; a foreign replay's model is confirmed."""
    spec, owner = spec_and_owner(store, replay_id)
    wanted = wanted_truth(store, spec, dtype)
    if (found := find_truth(store, wanted)) is not None:
        return found
    require_torch(wanted)
    if spec.config.model != TINY:
        approve(f"replay {spec.replay_id}, whose model {spec.config.model!r} would be loaded", owner, yes)
    store.require_writable()
    with replaying(store, "computing the truth", len(wanted.inputs), quiet=quiet) as (catalog, advance):
        return ensure_truth(store, replay_id, dtype=dtype, on_event=counting(catalog, advance), on_tick=catalog.tick, warm=warm)


def rounding_of(store: Store, replay_id: str, quiet: bool, warm: WarmGroups, planted: bool) -> str | None:
    """The replay that says what the dtype costs each dump, computed now if it is not there; None for flat limits."""
    total = len(load_spec(store, replay_id).inputs)
    try:
        with replaying(store, "measuring what the dtype costs", total, quiet=quiet) as (catalog, advance):
            on_event = counting(catalog, advance)
            return ensure_rounding(store, replay_id, planted=planted, on_event=on_event, on_tick=catalog.tick, warm=warm)
    except (
        StoreProblem,
        EnvironmentProblem,
    ) as problem:  # a store that cannot be written, or read without torch, may have its truth
        output.note(f"what the dtype costs is not measured: {problem.message}")
        return None


def render(blocks: list[Block], chosen: Format, path: Path | None) -> None:
    output.say_lines(as_markdown(blocks) if chosen == "md" else as_text(blocks))
    if path is not None:
        output.note(f"kept as {path}")
