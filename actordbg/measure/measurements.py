"""Collect what replays measured, by configuration and length: the points of the curves.

* **Configuration**: as resolved by the workers, not as requested. Inputs with a backward and inputs without a backward are
  different configurations. Replays of the truth and of noise variations are skipped: nobody trains that way.
* **Length** (`by`): "seq_len" is S of [B, S], with one curve for each batch size; "tokens" counts real tokens.
* **Several inputs of equal length**: memory is the largest peak (it has to fit), times are medians.
* **Warm-up** is excluded from times (`records/replay_record.py`). Memory excludes inputs during which a graph was compiled.
* **Out of memory** (by the failure's signature, or a worker that the kernel killed) gives a bound instead of a point: the
  shortest such length. With `by="seq_len"` it also bounds larger batches of the same configuration.

Pure: results in, points out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from operator import attrgetter
from statistics import median
from typing import Any

from actordbg.actor.hub_model import find_model
from actordbg.actor.rules import check_config, find_trainer, refuse_hits
from actordbg.base.units import new_replay_id
from actordbg.catalog.query import open_fresh, select_dumps
from actordbg.config.as_ran import as_ran, costs
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord, warm_up_of
from actordbg.replay.plan import make_plan
from actordbg.replay.replay_data import ReplayData
from actordbg.store.layout import Store

SEQ_LEN, TOKENS = "seq_len", "tokens"
BY = {
    SEQ_LEN: "seq_len, padding included; a curve for each batch size",
    TOKENS: "real tokens of an input, without padding",
}
OUT_OF_MEMORY = ("cuda-out-of-memory", "cpu-out-of-memory", "killed")


@dataclass(frozen=True)
class Point:
    """The inputs of a length: their number, the largest peak in bytes, median seconds. None: not measured, or warm-up only."""

    n: int
    inputs: int
    memory: float | None = None
    forward: float | None = None
    backward: float | None = None
    both: float | None = None


@dataclass
class Measurements:
    """The points of a configuration: `settings` by name, whether backward ran, and `batch_size` if curves are per batch size.

    left_out: number of warm-up inputs. out_of_memory: lengths that ran out of memory, ascending.
    """

    settings: dict[str, Any]
    backward: bool
    batch_size: int | None
    replays: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    left_out: int = 0
    out_of_memory: list[int] = field(default_factory=list)


_Key = tuple[tuple[tuple[str, Any], ...], bool, "int | None"]
"""The identity of a configuration: settings by name, whether backward ran, and the batch size if curves are per batch size."""


def gather(replays: Sequence[ReplayData], by: str = SEQ_LEN) -> list[Measurements]:
    """Gather the points of every configuration in `replays`, in order of appearance."""
    groups: dict[_Key, Measurements] = {}
    failed: list[tuple[list[_Key], int, str]] = []
    for data in filter(is_configuration, replays):
        ran = costs(as_ran(data.spec.config, data.resolved)) | {"device_name": data.resolved.get("device_name")}
        del ran["backward"]  # it differs per input
        settings, replay_id = tuple(ran.items()), data.spec.replay_id
        warming_up = set[str]().union(*warm_up_of(data.results))
        inputs = {item.dump_id: item for item in data.spec.inputs}
        for result in data.results:
            item = inputs.get(result.dump_id)
            if item is None:
                continue
            batch = item.batch_size if by == SEQ_LEN else None
            n = item.seq_len if by == SEQ_LEN else result.tokens or item.tokens
            if result.signature in OUT_OF_MEMORY and result.status != PASSED:
                failed.append(([(settings, passes, batch) for passes in _passes(data, result)], n, replay_id))
            elif result.status == PASSED and result.forward_s is not None:
                forward, backward, warm = result.forward_s, result.backward_s, result.dump_id in warming_up
                key = settings, backward is not None, batch
                group = groups.setdefault(key, Measurements(ran, *key[1:]))
                group.replays.append(replay_id)
                group.left_out += warm
                memory = float(result.peak_memory_bytes) if result.peak_memory_bytes and not result.graphs else None
                times = (None, None, None) if warm else (forward, backward, forward + (backward or 0.0))
                group.points.append(Point(n, 1, memory, *times))
    for keys, n, replay_id in failed:
        for key in [key for key in keys if key in groups] or keys[:1]:
            group = groups.setdefault(key, Measurements(dict(key[0]), *key[1:]))
            group.replays.append(replay_id)
            group.out_of_memory.append(n)
    if by == SEQ_LEN:  # a length that does not fit with few rows does not fit with more
        for (key, group), (other, smaller) in product(groups.items(), repeat=2):
            if other[:2] == key[:2] and (other[2] or 0) < (key[2] or 0):
                group.out_of_memory = list({*group.out_of_memory, *smaller.out_of_memory})
    for group in groups.values():
        by_length = groupby(sorted(group.points, key=attrgetter("n")), key=attrgetter("n"))
        group.points = [_together(n, list(samples)) for n, samples in by_length]
        group.replays, group.out_of_memory = list(dict.fromkeys(group.replays)), sorted(set(group.out_of_memory))
    return list(groups.values())


def is_configuration(data: ReplayData) -> bool:
    """Return whether the replay can have a curve: it is neither a truth nor a noise variation."""
    return data.spec.config.truth is None and data.spec.config.vary is None


def _passes(data: ReplayData, result: ResultRecord) -> tuple[bool, ...]:
    """Return the passes (True: with a backward) that ran out of memory on an input, the likelier first."""
    backward = data.spec.config.backward
    if backward is None and data.spec.config.backend != "plain":
        backward = data.resolved.get("backward")
    if result.forward_s is not None or backward:
        return (True,)
    return (False, True)  # a forward alone did not fit, or it is unknown: neither fits


def _together(n: int, samples: Sequence[Point]) -> Point:
    memory, *times = (
        [value for sample in samples if (value := getattr(sample, name)) is not None]
        for name in ("memory", "forward", "backward", "both")
    )
    return Point(n, len(samples), max(memory, default=None), *(median(values) if values else None for values in times))


# Measure on request: create inputs of given lengths, and replay them under the configuration of an earlier replay.


INPUTS = 2
"""Inputs per length for every lane."""


def settled(config: ReplayConfig, resolved: dict[str, Any]) -> ReplayConfig:
    """Replace settings left to the recorded call by their resolved values: synthetic inputs have no recorded call."""
    ran = as_ran(config, resolved)
    open_settings = {name: value for name, value in ran.items() if getattr(config, name) is None and value is not None}
    return replace(config, **open_settings, keep_tensors=False, keep_gradients=False, memory_snapshot=False)


def plan_lengths(store: Store, config: ReplayConfig, lengths: set[int], batch_size: int, *, command: str = "") -> ReplaySpec:
    """Create the inputs, and plan the replay that measures them. Failures and running out of memory are also results.

    Raises UsageError for impossible lengths, Unsupported for a configuration that cannot run here, EnvironmentProblem for an
    unavailable model or a trainer that is not installed.
    """
    from actordbg.dumps.create import create_dumps

    refuse_hits(check_config(config))
    find_trainer(config)
    find_model(config.model)
    run = f"curve-{new_replay_id()}"
    for length in sorted(lengths):
        create_dumps(store, INPUTS * config.lanes, batch_size, length, run=run, padded=False)
    where = f"run='{run}'"
    rows = select_dumps(open_fresh(store, where), where, order="length")
    return make_plan(rows, config, order="length", where=where, command=command, versions=installed_versions()).spec
