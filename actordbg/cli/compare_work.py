"""The work of `actordbg compare`: resolve both sides, compute a missing truth, and save the comparison."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from actordbg.api.planning import counting
from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem, Unsupported, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import LAST
from actordbg.catalog.query import Catalog, get_replay
from actordbg.cli import output
from actordbg.cli.options import approve
from actordbg.cli.output import note
from actordbg.cli.replaying import replaying
from actordbg.config import consent
from actordbg.config.as_ran import as_ran, label
from actordbg.config.replay_config import TINY
from actordbg.formats.weight_hashes import RECORDED_WEIGHTS
from actordbg.judge import noise_floor
from actordbg.judge.comparing import save
from actordbg.judge.explain_outputs import with_explanation
from actordbg.judge.find_truth import Wanted, ensure_lone_rows, find_truth, require_torch, wanted_rounding, wanted_truth
from actordbg.records.comparison_record import ComparisonRecord, NoiseRecord
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.supervise import load_spec, spec_and_owner
from actordbg.store.layout import Store


def meant(catalog: Catalog, name: str) -> str:
    """Resolve a name to a replay id. For `last`, print which replay it is: a store may be shared."""
    row = get_replay(catalog, name)
    if name == LAST and not output.wanted.silent:
        what = label(as_ran(row.config, row.resolved))
        note(f"last is {row.replay_id}: {what}, {row.status}; {row.command or 'no command recorded'}")
    return row.replay_id


def recorded_weights(store: Store, replay_id: str) -> str:
    """Describe whether a replay had the weights that the run recorded; "" if it recorded none."""
    return str((get_replay(store, replay_id).resolved or {}).get(RECORDED_WEIGHTS, ""))


def kept(store: Store, record: ComparisonRecord) -> Path | None:
    """Save the comparison and return its path; None, with a note, if the store cannot be written."""
    try:
        return save(store, record)
    except StoreProblem as problem:
        note(f"this comparison is not saved: {problem.message}")
        return None


def noise_of(store: Store, replay_id: str, name: str) -> NoiseRecord:
    """Return the named noise floor; for "last", the newest that was measured under the configuration of this replay."""
    if name != "last":
        return noise_floor.load(store, name)
    if (newest := noise_floor.newest_for(store, replay_id)) is not None:
        return newest
    words, mark = consent.words_of(load_spec(store, replay_id).command)
    command = "actordbg noise with the same options as that replay"
    if "replay" in words:
        words[words.index("replay")] = "noise"
        command = " ".join(in_shell(word) for word in words if word not in ("--keep-tensors", "--keep-gradients")) + mark
    raise UsageError(f"no noise floor was measured under the configuration of {replay_id}", hint=f"run {command}")


def explained(store: Store, record: ComparisonRecord, yes: bool) -> ComparisonRecord:
    """Name the cause of a mismatch with recorded outputs. Asks for approval before loading the model of another user's replay."""
    replay_id = record.a.replay_id or ""
    spec, owner = spec_and_owner(store, replay_id)
    try:
        store.require_writable()
        approve(f"replay {replay_id}, whose model {spec.config.model!r} would be loaded", owner, yes)
    except ActordbgError as problem:
        return replace(record, reasons=(*record.reasons, f"no cause was searched for: {problem.message}"))
    with replaying(store, "naming the cause", len(record.compared)) as advance, WarmGroups() as warm:
        return with_explanation(store, record, on_event=counting(advance), warm=warm)


def truth_and_rounding(
    store: Store, replay_id: str, dtype: str, *, flat: bool, planted: bool, yes: bool
) -> tuple[str, str | None]:
    """Return the ids of a replay's truth and of the replay that measures its dtype's rounding (None for fixed limits).

    Computes either replay if it does not exist yet. Asks for approval once before it loads the model of another user's replay.
    """
    spec, owner = spec_and_owner(store, replay_id)
    model = spec.config.model
    approve_once = cache(partial(approve, f"replay {spec.replay_id}, whose model {model!r} would be loaded", owner, yes))

    def computed(request: Wanted, label: str, command: str) -> str:
        if (there := find_truth(store, request)) is not None:
            return there
        require_torch(request)
        store.require_writable()
        if model != TINY:
            approve_once()
        with replaying(store, label, len(request.inputs)) as advance:
            reason = f"{command} replay {replay_id}"
            return ensure_lone_rows(store, request, command=reason, on_event=counting(advance), warm=warm)

    with WarmGroups() as warm:
        truth = computed(wanted_truth(store, spec, dtype), "computing the truth", "the truth of")
        rounding = None if flat else wanted_rounding(store, spec, planted=planted)
        try:
            label = "measuring the dtype's rounding"
            return truth, None if rounding is None else computed(rounding, label, "the rounding of")
        except Unsupported:
            return truth, None  # a kernel that this dtype lacks: the comparison says that its limits are fixed
        except (StoreProblem, EnvironmentProblem) as problem:  # a store may hold the truth where nothing can be computed
            note(f"the dtype's rounding was not measured: {problem.message}")
            return truth, None
