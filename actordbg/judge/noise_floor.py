"""How far a configuration moves by itself: the noise floor. A difference below it means nothing.

`measure_noise` runs the same inputs several times under one configuration: unchanged, again ("repeat"), and with more padding,
every row twice and rows reversed (`actordbg.actor.variants`). Each run is a replay of its own and stays in the store. The
unchanged one and the variations share one loaded Actor; "repeat" has new processes, so it also sees what differs from
process to process.

`measure` compares the runs. The floor of a dump is the largest value of each measure (`compare.thresholds.measures`) over
all runs; the floor of the configuration is the largest over all dumps. Floors and thresholds have the same names.

**Rounding** is measured too. Two runs that round alike agree to the bit, and both are wrong in the third digit. So each row is
also computed alone in the configuration's dtype and in the next wider one (bf16 and fp16 against fp32, fp32 against fp64). That
difference counts `ROUNDING_MARGIN` times, because another order of the same operations rounds differently.

**Faults stay out of the floor.** If rows leak into each other, reversing them moves the numbers by as much as they are wrong.
Taken for noise, that would make a wrong configuration look right. Other shapes and orders only round differently. So a
movement beyond the dtype's thresholds *and* beyond `FAULT` times what rounding and running again explain is left out and named.
What moves when it is run again, by more than that times what rounding explains, does not explain itself: it is a fault too.

A dump that one run failed on (out of memory with every row twice, say) has the floor of the other runs, and the record says so.
A NaN that comes and goes is named, and leaves its measure out.

Example:
    record = measure_noise(store, plan.spec, on_run=print)
    record.floor["max_abs"]            # 3.1e-06
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.ids import new_replay_id
from actordbg.catalog import query
from actordbg.config.as_ran import as_ran, telling
from actordbg.config.replay_config import SETTINGS, VARIATIONS
from actordbg.formats.dump_record import now_timestamp
from actordbg.judge.comparing import compare
from actordbg.judge.find_truth import ensure_lone_rows, find_truth, wanted_truth
from actordbg.judge.sides import ReplaySide, open_replay
from actordbg.judge.thresholds import Thresholds, measures
from actordbg.records.comparison_record import NOT_COMPARED, DumpComparison, DumpNoise, Figures, NoiseRecord, NoiseVariant
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store

NOT_THE_CONFIGURATION = ("vary", "seed")
"""Settings of a replay that do not change the log-probs that a configuration gives."""


UNCHANGED, REPEAT, ROUNDING = "unchanged", "repeat", "rounding"
WIDER = {"bf16": "fp32", "fp16": "fp32", "fp32": "fp64"}
"""The dtype that a dtype's rounding is measured against."""
ROUNDING_MARGIN = 2.0
FAULT = 10.0
"""A movement of this many times its explanation is a fault. Measured with the tiny model: 1.1 times in bf16 without a
fault, 700,000 times in fp32 where packed rows leak into each other."""
LEAST = {"grad_norm_rel": 1e-5}
"""Floors that are never lower: engines sum a norm's squares in fp32, which rounds by more than the gradients did."""
_TELLING = ("max_abs", "mean_abs", "grad_norm_rel", "gradient_distance")
"""Measures that reveal a fault. Shares and percentiles say little about short inputs."""


def measure(store: Store, unchanged: str, varied: Mapping[str, str], *, rounding: tuple[str, str] | None = None) -> NoiseRecord:
    """The noise floor from finished replays: the `unchanged` one, and one for each variation. `save` writes it.

    `rounding`: two replays of the same inputs, each row alone, in the configuration's dtype and in a wider one.

    Raises StoreProblem if nothing could be compared, because a floor of nothing would call every difference real.
    """
    side = open_replay(query.open_fresh(store), unchanged)
    moved: dict[str, dict[str, dict[str, float]]] = {}
    variants, reasons = [], []
    pairs = [(name, replay_id, unchanged) for name, replay_id in varied.items()]
    for name, replay_id, against in pairs + ([(ROUNDING, *rounding)] if rounding else []):
        found = compare(store, replay_id, against, thresholds=Thresholds(), only=set(side.inputs))
        compared = [dump for dump in found.dumps if dump.verdict != NOT_COMPARED and dump.log_probs is not None]
        moved[name] = {dump.dump_id: measures(dump) for dump in compared}
        norms = (dump.grad_norm_rel for dump in compared if dump.grad_norm_rel is not None)
        variants.append(NoiseVariant(name, replay_id, _together(compared), max(norms, default=None)))
        reasons += _missing(name, found.dumps)
    reasons += _take_out_faults(moved, Thresholds().for_dtype(side.info.dtype).limits)
    floors: dict[str, dict[str, float]] = {}
    for name, by_dump in moved.items():
        for dump_id, values in by_dump.items():
            least = {one: value for one, value in LEAST.items() if one in values}
            _raise_to(floors.setdefault(dump_id, least), values, ROUNDING_MARGIN if name == ROUNDING else 1.0)
    if not floors:
        raise StoreProblem(
            "no dump passed both unchanged and varied, so there is no floor to measure: "
            + "; ".join(reasons[:2] or ["nothing was replayed"]),
            hint=f"`actordbg report {side.row.replay_id}` shows what failed",
        )
    overall: dict[str, float] = {}
    for floor in floors.values():
        _raise_to(overall, floor)
    return NoiseRecord(
        noise_id=new_replay_id(),
        created_at=now_timestamp(),
        replay_id=side.row.replay_id,
        config=side.spec.config.to_dict(),
        label=side.info.label,
        dtype=side.info.dtype,
        variants=tuple(variants),
        dumps=tuple(DumpNoise(dump_id, floors[dump_id]) for dump_id in sorted(floors)),
        floor=overall,
        reasons=tuple(reasons),
    )


def save(store: Store, record: NoiseRecord) -> Path:
    """Write the record to `store/noise/<noise_id>.json` and return the path."""
    return store.publish_text(store.noise / f"{record.noise_id}.json", record.to_json())


def newest_for(store: Store, replay_id: str) -> NoiseRecord | None:
    """The newest floor of this replay's configuration that has at least one of its dumps; None if there is none."""
    catalog = query.open_fresh(store)
    side = open_replay(catalog, replay_id)
    for path in sorted(store.noise.glob("*.json"), reverse=True):
        try:
            record = NoiseRecord.from_file(path)
            measured = open_replay(catalog, record.replay_id)
        except (StoreProblem, UsageError):
            continue  # damaged, which `index` reports; or its replay was removed, and nobody knows what it resolved to
        about_these = any(one.dump_id in side.inputs for one in record.dumps)
        if about_these and configuration_of(measured) == configuration_of(side):
            return record
    return None


def configuration_of(side: ReplaySide) -> dict[str, object]:
    """What makes two replays the same configuration as far as numbers go, as it ran. Plain ranks are independent."""
    settings = {
        name: value for name, value in telling(as_ran(side.row.config, side.row.resolved)).items() if SETTINGS[name].numbers
    }
    apart = NOT_THE_CONFIGURATION if settings["backend"] != "plain" else (*NOT_THE_CONFIGURATION, "nproc")
    return {name: value for name, value in settings.items() if name not in apart}


def _take_out_faults(moved: dict[str, dict[str, dict[str, float]]], limits: Mapping[str, float]) -> list[str]:
    """Remove faults from `moved` (measures by variation and dump), and return them in words.

    Removes nothing where rounding was not measured, because then nothing explains a movement.
    """
    said: list[str] = []
    explained: dict[str, dict[str, float]] = {}
    anywhere: dict[str, float] = {}
    order = (ROUNDING, REPEAT, *(name for name in moved if name not in (ROUNDING, REPEAT))) if moved.get(ROUNDING) else ()
    for name in order:
        by = "rounding explains" if name == REPEAT else "rounding and running again explain"
        for dump_id, values in list(moved.get(name, {}).items()) if name != ROUNDING else ():
            known = explained[dump_id] if dump_id in moved[ROUNDING] else anywhere
            for measure in (one for one in _TELLING if one in values and one in limits and one in known):
                if values[measure] > max(limits[measure], FAULT * known[measure]):
                    del moved[name][dump_id]
                    why = f"{name} of {dump_id}: {measure} {values[measure]:.3g}, where {by} {known[measure]:.2g}"
                    said.append(f"{why}: taken for a fault, and left out of the floor")
                    break
        if name in (ROUNDING, REPEAT):
            for dump_id, values in moved.get(name, {}).items():
                _raise_to(explained.setdefault(dump_id, {}), values)
                _raise_to(anywhere, values)
    return said


def _raise_to(floor: dict[str, float], values: Mapping[str, float], margin: float = 1.0) -> None:
    for name, value in values.items():
        floor[name] = max(floor.get(name, 0.0), margin * value)


def _together(dumps: Sequence[DumpComparison]) -> Figures | None:
    """The log-probs' figures over several dumps: largest of the largest and of the percentiles, mean over all tokens."""
    parts = [dump.log_probs for dump in dumps if dump.log_probs is not None and dump.log_probs.max_abs is not None]
    if not parts:
        return None
    count = sum(part.count for part in parts)
    return Figures(
        count=count,
        max_abs=max(part.max_abs or 0.0 for part in parts),
        mean_abs=sum((part.mean_abs or 0.0) * part.count for part in parts) / count,
        p95_abs=max(part.p95_abs or 0.0 for part in parts),
        p99_abs=max(part.p99_abs or 0.0 for part in parts),
    )


def _missing(name: str, dumps: Sequence[DumpComparison]) -> list[str]:
    """What this variation could not measure, in words."""
    said = []
    for dump in dumps:
        reason = dump.not_compared.get("dump") if dump.verdict == NOT_COMPARED else None
        if dump.log_probs is None and reason is None:
            reason = "; ".join(dump.reasons)
        if reason is None and dump.log_probs is not None and dump.log_probs.nonfinite:
            reason = f"{dump.log_probs.nonfinite} log-probs are finite in one run and not in the other"
        if reason is not None:
            said.append(f"{name} of {dump.dump_id}: {reason}")
    return said


def measure_noise(
    store: Store,
    spec: ReplaySpec,
    *,
    on_run: Callable[[str], None] = lambda name: None,
    on_passed_over: Callable[[int], None] = lambda inputs: None,
    **heard: Any,
) -> NoiseRecord:
    """Run `spec` unchanged and varied in every way, measure the floor, and write it to the store.

    `on_run` is called with "unchanged", "repeat", ..., "rounding" before each kind of replay; `on_passed_over` with the number of
    inputs of which no replay is run, since the store has one already. `heard`: what `run_replay` takes beside. Raises whatever
    `run_replay` raises, and StoreProblem where no input passed twice.
    """
    if spec.config.vary is not None:
        raise UsageError("a noise floor covers every variation", hint="leave `vary` out of the configuration")
    if not spec.config.keep_tensors:
        raise UsageError("without tensors there is nothing to measure", hint="leave --no-keep-tensors out")
    ids: dict[str, str] = {}

    def run(name: str, warm: WarmGroups | None) -> None:
        on_run(name)
        config = replace(spec.config, vary=None if name == UNCHANGED else name)
        varied = replace(spec, replay_id=new_replay_id(), created_at=now_timestamp(), config=config)
        run_replay(store, varied, warm=warm, **heard)
        ids[name] = varied.replay_id

    with WarmGroups() as warm:
        for name in (UNCHANGED, *(one for one in VARIATIONS if one != REPEAT)):
            run(name, warm if spec.config.truth is None else None)  # the truth's model is never shared
    run(REPEAT, None)
    unchanged = ids[UNCHANGED]
    rounding = None
    if spec.config.truth is None:
        on_run(ROUNDING)
        rounding = _rounding(store, unchanged, on_passed_over, heard)
    record = measure(store, unchanged, {name: ids[name] for name in VARIATIONS}, rounding=rounding)
    save(store, record)
    return record


def runs_of(spec: ReplaySpec) -> int:
    """How many replays `measure_noise` makes of it: unchanged, varied, and two for rounding, which the truth has none of."""
    return 1 + len(VARIATIONS) + (2 if spec.config.truth is None else 0)


def _rounding(
    store: Store, unchanged: str, on_passed_over: Callable[[int], None], heard: dict[str, Any]
) -> tuple[str, str] | None:
    """Replays with each row alone: in the dtype that the configuration computes in, and in the next wider one."""
    side = open_replay(query.open_fresh(store), unchanged)
    narrow = side.info.dtype
    inputs = len(side.spec.inputs)
    if narrow not in WIDER:
        on_passed_over(2 * inputs)
        return None
    found = []
    with WarmGroups() as warm:
        for dtype in (narrow, WIDER[narrow]):
            wanted = wanted_truth(store, side.spec, dtype)
            on_passed_over(inputs - (len(wanted.inputs) if find_truth(store, wanted) is None else 0))
            command = f"the rounding of replay {unchanged}, in {dtype}"
            found.append(ensure_lone_rows(store, wanted, command=command, warm=warm, **heard))
    return found[0], found[1]
