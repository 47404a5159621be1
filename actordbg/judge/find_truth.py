"""The truth for a replay's inputs: the replay that is its truth, found in the store or run now.

The truth depends on little: the inputs, the model and its number of layers, the dtype that its weights are rounded to, the
temperature, and whether gradients are wanted. Packing, compiling and sharding change nothing. So many configurations (the
cells of a matrix) share one truth.

A truth is found again only for the same weights and under the same versions (`hub_model.DECIDE`): after an upgrade, or
where the model's files changed, another one is computed. A replay whose weights are no longer there has no truth any more.
Where torch is not installed none can be computed, so the versions that decide are those under which the replay itself ran.

Example:
    truth = ensure_truth(store, replay_id)                   # "20250619T052608-9f3a2c"
    compare(store, replay_id, truth)
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from typing import Any

from actordbg.actor.hub_model import DECIDE, WEIGHTS, find_model, versions_of
from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem, Unsupported, UsageError
from actordbg.base.units import new_replay_id
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import LONE_ROWS, SETTINGS, ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.judge.measured_limits import DTYPES
from actordbg.judge.sides import tensors_path
from actordbg.records.journal import SPEC, read_results, read_standing
from actordbg.records.replay_record import FAILED, PASSED, ReplayInput, ReplaySpec
from actordbg.replay.supervise import load_spec, run_replay
from actordbg.store.layout import Store


@dataclass(frozen=True)
class Wanted:
    """What the truth of a replay must have: this configuration, these inputs, and gradients for some of them."""

    config: ReplayConfig
    inputs: tuple[ReplayInput, ...]
    with_gradients: frozenset[str]
    versions: dict[str, str]


def ensure_truth(store: Store, replay_id: str, *, dtype: str = "fp32", **heard: Any) -> str:
    """The id of a finished truth in `dtype` ("fp32", "fp64") for every input of replay `replay_id`, a prefix, or "last".

    An existing truth is used again; otherwise it runs now (`heard`: what `run_replay` takes beside the specification). Raises
    StoreProblem for an unknown replay or one that built no actor, Unsupported if no input has a truth, and what a replay raises.
    """
    wanted = wanted_truth(store, load_spec(store, replay_id), dtype)
    return ensure_lone_rows(store, wanted, command=f"the truth of replay {replay_id}", **heard)


def wanted_rounding(store: Store, spec: ReplaySpec, *, planted: bool = False) -> Wanted | None:
    """What the replay must be that has each row alone in the dtype of this replay: its distance from the truth is what that
    dtype costs. planted: with faults of known sizes, in any dtype. None for a dtype with flat limits; under autocast that is
    the weights'.
    """
    dtype = str(read_standing(store.replays / spec.replay_id)[0].get("dtype"))
    if dtype not in (LONE_ROWS if planted else DTYPES) or spec.config.truth is not None:
        return None
    wanted = wanted_truth(store, spec, dtype)
    return replace(wanted, config=replace(wanted.config, planted=planted))


def ensure_rounding(store: Store, replay_id: str, *, planted: bool = False, **heard: Any) -> str | None:
    """The id of a finished replay that says what this replay's dtype costs; None where there can be none."""
    wanted = wanted_rounding(store, load_spec(store, replay_id), planted=planted)
    with contextlib.suppress(Unsupported):  # a kernel that this dtype lacks: the comparison says that its limits are flat
        if wanted is not None:
            return ensure_lone_rows(store, wanted, command=f"what the dtype costs replay {replay_id}", **heard)
    return None


def ensure_lone_rows(store: Store, wanted: Wanted, *, command: str, **heard: Any) -> str:
    """The id of the newest such replay in the store, else of a new one. `command` says why a new one was run."""
    found = find_truth(store, wanted)
    if found is not None:
        return found
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
    outcome = run_replay(store, spec, **heard)
    if PASSED not in outcome.counts:
        first = next(iter(outcome.results.values()))
        raise Unsupported(
            f"none of the {len(spec.inputs)} inputs has a truth: {first.error or first.status}",
            hint=f"`actordbg report {spec.replay_id}` shows the reason of each",
        )
    return spec.replay_id


def wanted_truth(store: Store, spec: ReplaySpec, dtype: str) -> Wanted:
    """What the truth of this replay must be. Its weights have the dtype in which the replay ran."""
    if spec.config.truth is not None:
        raise UsageError(
            f"replay {spec.replay_id} is a truth itself",
            hint="name a replay of the configuration that you want to judge",
        )
    folder = store.replays / spec.replay_id
    resolved, _ = read_standing(folder)
    if not resolved:
        raise StoreProblem(
            f"replay {spec.replay_id} has built no actor yet, so the dtype of its weights is unknown",
            hint=f"`actordbg report {spec.replay_id}` says why; `actordbg replay --resume {spec.replay_id}` continues",
        )
    asked, results = spec.config, read_results(folder)
    with_gradients = frozenset(dump_id for dump_id, one in results.items() if one.grad_norm is not None)
    config = ReplayConfig(
        model=asked.model,
        dtype=resolved["dtype"],
        num_layers=asked.num_layers,
        temperature=asked.temperature,
        backward=asked.backward if asked.backward is not None or asked.backend == "plain" else bool(with_gradients),
        timeout_s=asked.timeout_s,
        keep_gradients=asked.keep_gradients,
        truth=dtype,
    )
    versions = versions_of(asked.model)
    if "torch" not in versions:
        versions |= {name: spec.versions[name] for name in DECIDE if name in spec.versions}
    ran, now = spec.versions.get(WEIGHTS), versions.get(WEIGHTS)
    if ran and now and ran != now:
        raise StoreProblem(
            f"the files of {asked.model} have changed since replay {spec.replay_id} ran, so its truth cannot be computed",
            hint="replay again with the model as it is now, or put its files back",
        )
    return Wanted(config, spec.inputs, with_gradients, versions)


def require_torch(wanted: Wanted) -> None:
    """EnvironmentProblem where nothing can be computed, with the versions that a replay would have to be found under."""
    if "torch" in installed_versions():
        return
    ran = ", ".join(f"{name} {wanted.versions[name]}" for name in DECIDE if name in wanted.versions)
    ran = ran or "versions that it did not record"
    raise EnvironmentProblem(
        f"the store has no finished truth in {wanted.config.truth} of all its inputs under {ran}, and torch, which computes one, "
        f"is not installed in {sys.executable}'s environment",
        hint="compare where the replay ran, and copy the store again: the truth is kept in it; or compare with another replay",
    )


def find_truth(store: Store, wanted: Wanted) -> str | None:
    """The newest replay in the store that is this truth and has every wanted input; None if there is none."""
    decide = [name for name, setting in SETTINGS.items() if setting.decides_truth]
    for path in sorted(store.replays.glob(f"*/{SPEC}"), reverse=True):
        with contextlib.suppress(ActordbgError):  # damaged, or of a newer version: other commands report it
            spec = load_spec(store, path.parent.name)
            there = spec.config
            if (
                all(spec.versions.get(name) == wanted.versions.get(name) for name in DECIDE)
                and all(getattr(there, name) == getattr(wanted.config, name) for name in decide)
                and there.keep_tensors
                and (there.keep_gradients or not wanted.config.keep_gradients)
                and _covers(store, spec, wanted)
            ):
                return spec.replay_id
    return None


def _covers(store: Store, spec: ReplaySpec, wanted: Wanted) -> bool:
    """Whether every wanted input has a result. A refused input counts: running it again would refuse it again."""
    results = read_results(store.replays / spec.replay_id)
    for dump_id in (item.dump_id for item in wanted.inputs):
        result = results.get(dump_id)
        if result is None or result.status not in (PASSED, FAILED):
            return False
        whole = result.grad_norm is not None or dump_id not in wanted.with_gradients
        if result.status == PASSED and not (whole and tensors_path(store, spec.replay_id, dump_id).is_file()):
            return False
    return True
