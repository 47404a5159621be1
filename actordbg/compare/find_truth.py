"""Find the truth for a replay's inputs in the store, or compute it now. A truth is itself a replay.

The truth depends on little: the inputs, the model and its number of layers, the dtype that its weights are rounded to, the
temperature, and whether gradients are needed. It does not depend on packing, compiling or sharding, so many configurations (the
cells of a matrix) share one truth.

A stored truth is reused only with the same weights and under the same versions (`hub_model.DECIDE`): after an upgrade, or if the
model's files changed, a new truth is computed, as it is if the stored one was imported, or another user wrote it. A replay
whose weights no longer exist has no truth. Without torch no truth can be computed, so the versions to match are those under
which the replay ran.

Example:
    truth = ensure_truth(store, replay_id)                   # "20250619T052608-9f3a2c"
    compare(store, replay_id, truth)
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from actordbg.actor.hub_model import DECIDE, WEIGHTS, find_model, versions_of
from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem, Unsupported, UsageError
from actordbg.base.owners import is_own
from actordbg.base.units import new_replay_id
from actordbg.compare.sides import NON_FINITE, open_replay, tensors_path
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import ANY_WIDER, ENDPOINT, SETTINGS, WIDER, ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.journal import SPEC, read_results
from actordbg.records.locate_record import formula_checks
from actordbg.records.replay_record import FAILED, PASSED, ReplayInput, ReplaySpec
from actordbg.replay.supervise import ReplayOutcome, load_spec, run_replay, spec_and_owner
from actordbg.store.layout import Store

_REFUSED = f"{Unsupported.__module__}.{Unsupported.__qualname__}"
"""The error class of an input that has no truth."""
Runner = Callable[..., ReplayOutcome]
"""Runs a replay: `run_replay`, or another function with its arguments."""


@dataclass(frozen=True)
class Wanted:
    """The truth that a replay needs: its configuration and inputs, the inputs that need gradients, and the versions to match."""

    config: ReplayConfig
    inputs: tuple[ReplayInput, ...]
    with_gradients: frozenset[str]
    versions: dict[str, str]


def ensure_truth(store: Store, replay_id: str, *, dtype: str = ANY_WIDER, **callbacks: Any) -> str:
    """Return the id of a finished truth for every input of a replay: an id, a prefix, or "last".

    dtype: "fp32", "fp64", or ANY_WIDER: the next wider dtype than the replay's.
    Reuses an existing truth, else runs it now; `callbacks` are passed to `run_replay`, or to the `run` among them. Raises
    StoreProblem for an unknown replay or a replay that built no actor, Unsupported if no input has a truth, and whatever
    `run_replay` raises.
    """
    wanted = wanted_truth(store, load_spec(store, replay_id), dtype)
    return ensure_lone_rows(store, wanted, command=f"the truth of replay {replay_id}", **callbacks)


def wanted_rounding(store: Store, spec: ReplaySpec, *, planted: bool = False) -> Wanted | None:
    """Specify the replay that runs each row alone in this replay's dtype: its distance from the truth is what that dtype costs.

    planted: add faults of known sizes. None for a truth, under autocast (its operations have several dtypes), and for a dtype
    without a wider dtype.
    """
    side = open_replay(store, spec.replay_id)
    dtype = side.resolved.get("dtype")
    if dtype not in WIDER or dtype != side.info.dtype or spec.config.truth is not None:
        return None
    wanted = wanted_truth(store, spec, dtype)
    return replace(wanted, config=replace(wanted.config, planted=planted))


def ensure_rounding(store: Store, replay_id: str, *, planted: bool = False, **callbacks: Any) -> str | None:
    """Return the id of a finished replay that measures what this replay's dtype costs; None if that cannot be measured."""
    wanted = wanted_rounding(store, load_spec(store, replay_id), planted=planted)
    with contextlib.suppress(Unsupported):  # a kernel that this dtype lacks: the comparison says that its limits are flat
        if wanted is not None:
            return ensure_lone_rows(store, wanted, command=f"what the dtype costs replay {replay_id}", **callbacks)
    return None


def ensure_lone_rows(store: Store, wanted: Wanted, *, command: str, run: Runner = run_replay, **callbacks: Any) -> str:
    """Return the id of the newest matching replay in the store; if none matches, run it. command: recorded as its reason."""
    replay_id = find_truth(store, wanted)
    if replay_id is not None:
        return replay_id
    require_torch(wanted)
    find_model(wanted.config.model)
    spec = ReplaySpec(
        replay_id=new_replay_id(),
        created_at=now_timestamp(),
        config=wanted.config,
        inputs=wanted.inputs,
        command=command,
        versions=wanted.versions,
    )
    outcome = run(store, spec, **callbacks)
    if PASSED not in outcome.counts:
        first = next(iter(outcome.results.values()))
        why = first.error or first.status
        raise Unsupported(
            f"none of the {len(spec.inputs)} inputs has a truth: {why}",
            hint=f"run `actordbg report {spec.replay_id}` to see why"
            + ("; `compare REPLAY truth --truth fp32` needs half the memory" if wanted.config.truth == "fp64" else ""),
        )
    return spec.replay_id


def wanted_truth(store: Store, spec: ReplaySpec, dtype: str = ANY_WIDER) -> Wanted:
    """Specify the truth of this replay. Its weights are rounded to the dtype in which the replay ran."""
    if spec.config.truth is not None:
        raise UsageError(
            f"replay {spec.replay_id} is itself a truth",
            hint="name a replay of the configuration to check",
        )
    side = open_replay(store, spec.replay_id)
    requested, resolved = spec.config, side.resolved
    if not resolved:
        raise StoreProblem(
            f"replay {spec.replay_id} has built no actor yet, so the dtype of its weights is unknown",
            hint=f"run `actordbg report {spec.replay_id}` to see why, `actordbg replay --resume {spec.replay_id}` to continue",
        )
    with_gradients = frozenset(dump_id for dump_id, result in side.results.items() if result.grad_norm is not None)
    backward = requested.backward
    if backward is None and requested.backend != "plain":  # engines run the backward that the recorded calls ran
        backward = bool(with_gradients)
    config = ReplayConfig(
        model=requested.model,
        dtype=resolved["dtype"],
        num_layers=requested.num_layers,
        temperature=resolved["temperature"] if requested.backend == ENDPOINT else requested.temperature,
        backward=backward,
        timeout_s=requested.timeout_s,
        keep_gradients=requested.keep_gradients and backward is not False,
        truth=WIDER.get(str(side.info.dtype), "fp32") if dtype == ANY_WIDER else dtype,
    )
    versions = versions_of(requested.model)
    if "torch" not in versions:
        versions |= {name: spec.versions[name] for name in DECIDE if name in spec.versions}
    ran, now = spec.versions.get(WEIGHTS), versions.get(WEIGHTS)
    if ran and now and ran != now:
        raise StoreProblem(
            f"the files of {requested.model} have changed since replay {spec.replay_id} ran, so its truth cannot be computed",
            hint="replay again with the current model, or restore its files",
        )
    return Wanted(config, spec.inputs, with_gradients, versions)


def require_torch(wanted: Wanted) -> None:
    """Raise EnvironmentProblem if torch is not installed, with the versions that a stored truth would have to match."""
    if "torch" in installed_versions():
        return
    ran = ", ".join(f"{name} {wanted.versions[name]}" for name in DECIDE if name in wanted.versions)
    ran = ran or "versions that it did not record"
    raise EnvironmentProblem(
        f"the store has no finished truth in {wanted.config.truth} of all its inputs under {ran}, and torch, which computes one, "
        f"is not installed in {sys.executable}'s environment",
        hint="compare where the replay ran and copy the store, which keeps the truth; or compare with another replay",
    )


def find_truth(store: Store, wanted: Wanted) -> str | None:
    """Return the id of this user's newest replay that is this truth and has every input; None if there is none."""
    decide = [name for name, setting in SETTINGS.items() if setting.decides_truth]
    for path in sorted(store.replays.glob(f"*/{SPEC}"), reverse=True):
        with contextlib.suppress(ActordbgError):  # damaged, or of a newer version: other commands report it
            spec, owner = spec_and_owner(store, path.parent.name)
            there = spec.config
            if (
                is_own(owner)  # another's truth may be anything
                and all(spec.versions.get(name) == wanted.versions.get(name) for name in DECIDE)
                and all(getattr(there, name) == getattr(wanted.config, name) for name in decide)
                and there.keep_tensors
                and (there.keep_gradients or not wanted.config.keep_gradients)
                and _covers(store, spec, wanted)
            ):
                return spec.replay_id
    return None


def _covers(store: Store, spec: ReplaySpec, wanted: Wanted) -> bool:
    """Return whether every input has a result. Failures count beside a result that passed; alone, only those that would be the
    same again: of refused inputs, and of log-probs that are not finite.

    A truth whose modules differed from their formulas covers nothing: its installation may be another one now.
    """
    results = read_results(store.replays / spec.replay_id)
    if any(check.differs for check in formula_checks(results.values())):
        return False
    lasting = (result.error_class == _REFUSED or result.signature == NON_FINITE for result in results.values())
    if all(result.status == FAILED for result in results.values()) and not all(lasting):
        return False
    for dump_id in (item.dump_id for item in wanted.inputs):
        result = results.get(dump_id)
        if result is None or result.status not in (PASSED, FAILED):
            return False
        whole = result.grad_norm is not None or dump_id not in wanted.with_gradients
        if result.status == PASSED and not (whole and tensors_path(store, spec.replay_id, dump_id).is_file()):
            return False
    return True
