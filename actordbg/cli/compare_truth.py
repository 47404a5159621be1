"""The truth and the noise floor that `actordbg compare` needs: found where they are, a truth else computed now."""

from __future__ import annotations

from functools import cache, partial

from actordbg.base.errors import EnvironmentProblem, StoreProblem, Unsupported, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.catalog.query import read_noise
from actordbg.cli import output
from actordbg.cli.live_progress import counting, replaying
from actordbg.cli.options import approve
from actordbg.config import consent
from actordbg.config.replay_config import TINY
from actordbg.judge.find_truth import Wanted, ensure_lone_rows, find_truth, require_torch, wanted_rounding, wanted_truth
from actordbg.judge.noise_floor import newest_for
from actordbg.records.comparison_record import NoiseRecord
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.supervise import load_spec, spec_and_owner
from actordbg.store.layout import Store


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


def truth_and_rounding(
    store: Store, replay_id: str, dtype: str, *, flat: bool, planted: bool, quiet: bool, yes: bool
) -> tuple[str, str | None]:
    """The ids of a replay's truth, and of the replay that says what the dtype costs: None for flat limits.

    Each is computed now if it is not there; for either a foreign replay's model is confirmed, once.
    """
    spec, owner = spec_and_owner(store, replay_id)
    model = spec.config.model
    approve_once = cache(partial(approve, f"replay {spec.replay_id}, whose model {model!r} would be loaded", owner, yes))

    def computed(wanted: Wanted, label: str, command: str) -> str:
        if (there := find_truth(store, wanted)) is not None:
            return there
        require_torch(wanted)
        store.require_writable()
        if model != TINY:
            approve_once()
        with replaying(store, label, len(wanted.inputs), quiet=quiet) as (catalog, advance):
            heard = {"on_event": counting(catalog, advance), "on_tick": catalog.tick, "warm": warm}
            return ensure_lone_rows(store, wanted, command=f"{command} replay {replay_id}", **heard)

    with WarmGroups() as warm:
        truth = computed(wanted_truth(store, spec, dtype), "computing the truth", "the truth of")
        rounding = None if flat else wanted_rounding(store, spec, planted=planted)
        try:
            label = "measuring what the dtype costs"
            return truth, None if rounding is None else computed(rounding, label, "what the dtype costs")
        except Unsupported:
            return truth, None  # a kernel that this dtype lacks: the comparison says that its limits are flat
        except (StoreProblem, EnvironmentProblem) as problem:  # one may have a truth where nothing can be computed
            output.note(f"what the dtype costs is not measured: {problem.message}")
            return truth, None
