"""Measure the noise floor: how far a configuration's results vary without a fault. A smaller difference means nothing.

`measure_noise` runs the same inputs several times under one configuration: unchanged, again ("repeat"), and with more padding,
every row twice and rows reversed (`actordbg.actor.changes`). Each run is a separate replay that stays in the store. The unchanged
run and the variations share one loaded Actor; "repeat" starts new processes, so it also covers differences between processes.

`measure` compares the runs. The floor of a dump is the largest value of each measure (`thresholds.measures`) over all runs;
the floor of the configuration is the largest over all dumps. Floors and thresholds have the same names.

**Rounding** is also measured. Two runs that round alike are bit-identical, yet both are wrong in the third digit. So each row is
also computed alone in the configuration's dtype and in the next wider dtype (bf16 and fp16 against fp32, fp32 against fp64). That
difference counts `ROUNDING_MARGIN` times, because another order of the same operations rounds differently.

**Faults stay out of the noise floor.** If rows leak into each other, reversing them moves the results by as much as they
are wrong. Counted as noise, that would make a wrong configuration look right. Other shapes and orders only round differently. So
a movement beyond the dtype's thresholds *and* beyond `FAULT` times what rounding and rerunning explain is left out and reported.
A rerun that moves by more than `FAULT` times what rounding explains is likewise a fault.

If one run failed on a dump (say out of memory with every row twice), the dump's floor comes from the other runs, and the record
says so. A NaN in only one of two runs is reported, and its measure is left out.

`noise_page` reports whether the same call repeats, what moves it, and by how much.

Example:
    record = measure_noise(store, plan.spec, on_run=print)
    record.floor["max_abs"]            # 3.1e-06
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.owners import whose
from actordbg.base.units import listed, new_replay_id, plural
from actordbg.catalog import query
from actordbg.compare.comparing import compare
from actordbg.compare.find_truth import ensure_lone_rows, find_truth, wanted_truth
from actordbg.compare.sides import ReplaySide, open_replay
from actordbg.compare.thresholds import MEASURES, applied_to, measures
from actordbg.config.as_ran import as_ran, deciding
from actordbg.config.replay_config import TINY, VARIATIONS, WIDER
from actordbg.document.blocks import Block, Grid, Heading, Items, Paragraph, Verdict, number
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.comparison_record import NOT_COMPARED, DumpComparison, DumpNoise, Figures, NoiseRecord, NoiseVariant
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store

UNCHANGED, REPEAT, ROUNDING = "unchanged", "repeat", "rounding"
ROUNDING_MARGIN = 2.0
FAULT = 10.0
"""A movement of this many times its explanation is a fault. Measured with the tiny model: 1.1 times in bf16 without a
fault, 700,000 times in fp32 where packed rows leak into each other."""
LEAST_NORM = 1e-5
"""The floor of a gradient norm is never lower: engines sum its squares in fp32, which rounds by more than the gradients did."""
_TELLING = ("max_abs", "mean_abs", "grad_norm_rel", "gradient_distance")
"""Measures that reveal a fault. Shares and percentiles say little about short inputs."""

Moved = dict[str, dict[str, dict[str, float]]]
"""How far each variation moved each dump: by name, dump and measure."""


def measure(store: Store, unchanged: str, varied: Mapping[str, str], *, rounding: tuple[str, str] | None = None) -> NoiseRecord:
    """Measure the noise floor from finished replays: `unchanged`, and one for each variation. `save` writes the record.

    rounding: two replays of the same inputs, each row alone, in the configuration's dtype and in a wider dtype.

    Raises StoreProblem if nothing could be compared, because an empty floor would call every difference real.
    """
    side = open_replay(store, unchanged)
    pairs = {name: (replay_id, unchanged) for name, replay_id in varied.items()} | ({ROUNDING: rounding} if rounding else {})
    moved: Moved = {}
    variants, reasons = [], []
    for name, pair in pairs.items():
        dumps = compare(store, *pair, only=side.inputs).dumps
        compared = [dump for dump in dumps if dump.verdict != NOT_COMPARED and dump.log_probs is not None]
        moved[name] = {dump.dump_id: measures(dump) for dump in compared}
        norms = (dump.grad_norm_rel for dump in compared if dump.grad_norm_rel is not None)
        variants.append(NoiseVariant(name, pair[0], _together(compared), max(norms, default=None)))
        reasons += [f"{name} of {dump.dump_id}: {why}" for dump in dumps if (why := _missing(dump))]
    reasons += _take_out_faults(moved, applied_to(side.info.dtype, {}).limits)
    floors: dict[str, dict[str, float]] = {}
    for dump_id in sorted({dump_id for by_dump in moved.values() for dump_id in by_dump}):
        margins = {name: ROUNDING_MARGIN if name == ROUNDING else 1.0 for name in moved if dump_id in moved[name]}
        floor = _largest({key: margin * value for key, value in moved[name][dump_id].items()} for name, margin in margins.items())
        if "grad_norm_rel" in floor:
            floor["grad_norm_rel"] = max(LEAST_NORM, floor["grad_norm_rel"])
        floors[dump_id] = floor
    if not floors:
        raise StoreProblem(
            "no dump passed both unchanged and varied, so the noise floor cannot be measured: "
            + "; ".join(reasons[:2] or ["nothing was replayed"]),
            hint=f"run `actordbg report {side.row.replay_id}` to see what failed",
        )
    return NoiseRecord(
        noise_id=new_replay_id(),
        created_at=now_timestamp(),
        replay_id=side.row.replay_id,
        config=side.spec.config.to_dict(),
        label=side.info.label,
        dtype=side.info.dtype,
        variants=tuple(variants),
        dumps=tuple(DumpNoise(dump_id, floor) for dump_id, floor in floors.items()),
        floor=_largest(floors.values()),
        reasons=tuple(reasons),
    )


def save(store: Store, record: NoiseRecord) -> Path:
    """Write the record to `store/noise/<noise_id>.json` and return the path."""
    return store.publish_text(store.noise / f"{record.noise_id}.json", record.to_json())


def newest_for(store: Store, replay_id: str) -> NoiseRecord | None:
    """Return this user's newest noise floor of this replay's configuration that covers any of its dumps; None if none does."""
    catalog = query.open_fresh(store)
    side = open_replay(catalog, replay_id)
    for path in sorted(store.noise.glob("*.json"), reverse=True):
        try:
            record = NoiseRecord.from_file(path)
            measured = open_replay(catalog, record.replay_id)
        except (StoreProblem, UsageError):
            continue  # damaged (`fsck` reports it), or its replay and thus its resolved configuration was removed
        if whose(path, store.replays / record.replay_id / SPEC):
            continue  # somebody else's floor could hide any difference
        about_these = any(dump.dump_id in side.inputs for dump in record.dumps)
        if about_these and configuration_of(measured) == configuration_of(side):
            return record
    return None


def configuration_of(side: ReplaySide) -> dict[str, object]:
    """Return the settings that change results, as they ran."""
    return deciding(as_ran(side.row.config, side.row.resolved))


def _take_out_faults(moved: Moved, limits: Mapping[str, float]) -> list[str]:
    """Remove faults from `moved` and return a text for each.

    Removes nothing if rounding was not measured, because then nothing explains a movement.
    """
    explained = moved.get(ROUNDING)
    if not explained:
        return []
    anywhere, by, removed = _largest(explained.values()), "rounding explains", []
    for name in sorted((name for name in moved if name != ROUNDING), key=lambda name: name != REPEAT):
        for dump_id, values in list(moved[name].items()):
            known = explained.get(dump_id, anywhere)
            for key in _TELLING:
                if key in values and key in limits and key in known and values[key] > max(limits[key], FAULT * known[key]):
                    del moved[name][dump_id]
                    why = f"{name} of {dump_id}: {key} {values[key]:.3g}, where {by} {known[key]:.2g}"
                    removed.append(f"{why}: counted as a fault, left out of the noise floor")
                    break
        if name == REPEAT:
            again, by = moved[name], "rounding and rerunning explain"
            explained = {dump_id: _largest([values, again.get(dump_id, {})]) for dump_id, values in explained.items()}
            anywhere = _largest([anywhere, *again.values()])
    return removed


def _largest(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each measure."""
    largest: dict[str, float] = {}
    for values in each:
        largest |= {name: max(largest.get(name, 0.0), value) for name, value in values.items()}
    return largest


def _together(dumps: Sequence[DumpComparison]) -> Figures | None:
    """Combine the log-prob figures of several dumps: maxima of max and percentiles, mean over all tokens."""
    parts = [dump.log_probs for dump in dumps if dump.log_probs is not None and dump.log_probs.max_abs is not None]
    if not parts:
        return None
    count = sum(part.count for part in parts)
    largest: dict[str, Any] = {
        name: max(getattr(part, name) or 0.0 for part in parts) for name in ("max_abs", "p95_abs", "p99_abs")
    }
    return Figures(count, mean_abs=sum((part.mean_abs or 0.0) * part.count for part in parts) / count, **largest)


def _missing(dump: DumpComparison) -> str:
    """Describe what could not be measured for this dump; "" if everything was."""
    if dump.log_probs is not None and dump.log_probs.nonfinite:
        return f"{dump.log_probs.nonfinite} log-probs are finite in one run and not in the other"
    return dump.not_compared.get("dump") or ("" if dump.log_probs else "; ".join(dump.reasons))


def measure_noise(
    store: Store,
    spec: ReplaySpec,
    *,
    on_run: Callable[[str], None],
    on_passed_over: Callable[[int], None],
    **callbacks: Any,
) -> NoiseRecord:
    """Run `spec` unchanged and with every variation, measure the noise floor, and write it to the store.

    on_run: called with "unchanged", "repeat", ..., "rounding" before each kind of replay. on_passed_over: called with the number
    of inputs that need no replay because the store has one. callbacks: passed to `run_replay`. Raises whatever `run_replay`
    raises, and StoreProblem if no input passed twice.
    """
    ids: dict[str, str] = {}

    def run(name: str, warm: WarmGroups | None) -> None:
        on_run(name)
        config = replace(spec.config, vary=None if name == UNCHANGED else name)
        varied = replace(spec, replay_id=new_replay_id(), created_at=now_timestamp(), config=config)
        run_replay(store, varied, warm=warm, **callbacks)
        ids[name] = varied.replay_id

    alone, rounding = spec.config.truth is not None, None  # a truth's model is never shared and has no rounding to measure
    with WarmGroups() as warm:
        for name in (UNCHANGED, *(name for name in VARIATIONS if name != REPEAT)):
            run(name, None if alone else warm)
    run(REPEAT, None)
    if not alone:
        on_run(ROUNDING)
        rounding = _rounding(store, ids[UNCHANGED], on_passed_over, callbacks)
    record = measure(store, ids[UNCHANGED], {name: ids[name] for name in VARIATIONS}, rounding=rounding)
    save(store, record)
    return record


def runs_of(spec: ReplaySpec) -> int:
    """Return how many replays `measure_noise` runs: unchanged, each variation, and two for rounding unless `spec` is a truth."""
    return 1 + len(VARIATIONS) + (2 if spec.config.truth is None else 0)


def _rounding(
    store: Store, unchanged: str, on_passed_over: Callable[[int], None], callbacks: dict[str, Any]
) -> tuple[str, str] | None:
    """Return two replays with each row alone: in the configuration's dtype and in the next wider one; None if none is wider."""
    side = open_replay(store, unchanged)
    narrow, inputs = side.info.dtype, len(side.inputs)
    if narrow not in WIDER:
        on_passed_over(2 * inputs)
        return None

    def lone_rows(dtype: str) -> str:
        wanted = wanted_truth(store, side.spec, dtype)
        on_passed_over(0 if find_truth(store, wanted) is None else inputs)
        return ensure_lone_rows(store, wanted, command=f"the rounding of replay {unchanged}, in {dtype}", warm=warm, **callbacks)

    with WarmGroups() as warm:
        return lone_rows(narrow), lone_rows(WIDER[narrow])


_HOW = {
    "repeat": "the same call again",
    "repad": "more padding",
    "rebatch": "every row twice",
    "reorder": "rows reversed",
    "rounding": "the dtype alone",
}
_FIGURES = {"max_abs": "largest", "p99_abs": "99th percentile", "mean_abs": "mean"}


def tokens_of(record: NoiseRecord) -> int:
    """Return how many log-probs were compared."""
    return max((variant.log_probs.count for variant in record.variants if variant.log_probs is not None), default=0)


def deterministic(record: NoiseRecord) -> bool | None:
    """Return whether a rerun gave the same log-probs and gradient norms; None if unknown."""
    repeat = _variant(record, REPEAT)
    if repeat is None or repeat.log_probs is None:
        return None
    return not repeat.log_probs.max_abs and not repeat.grad_norm_rel


def moves_most(record: NoiseRecord) -> NoiseVariant | None:
    """Return the variation that moves a log-prob most; None if no variation moves any. Rounding is not a variation."""
    moved = [variant for variant in record.variants if _size(variant) and variant.name != ROUNDING]
    return max(moved, key=_size, default=None)


def conclusion(record: NoiseRecord) -> list[str]:
    """Explain the noise floor, a sentence or two per finding."""
    lines, most, same = [], moves_most(record), deterministic(record)
    if same is True:
        lines.append("A rerun is bit-identical: this configuration is deterministic here.")
    elif same is False:
        lines.append(
            "A rerun gives different numbers: this configuration is not deterministic here (atomic additions, kernels chosen by "
            "timing), so no two runs of it can agree more closely."
        )
    unknown = [variant.name for variant in record.variants if variant.name != ROUNDING and variant.log_probs is None]
    if unknown:
        lines.append(f"Not measured: {listed(unknown)}; no input passed both unchanged and varied.")
    if most is not None:
        how = _HOW.get(most.name, most.name)
        lines.append(f"Largest movement: {how} ({most.name}), a log-prob by up to {_size(most):.3g} nats.")
    elif not unknown:
        lines.append("Padding, batch size and row order move no log-prob.")
    rounding = _variant(record, ROUNDING)
    if rounding is not None and rounding.log_probs is not None:
        lines.append(
            f"{record.dtype} rounding (each row alone, against a wider dtype) is up to {_size(rounding):.3g} nats: "
            f"no configuration can be expected to be nearer to the truth. It counts {ROUNDING_MARGIN:g} times in the noise floor."
        )
    return lines


def noise_page(record: NoiseRecord) -> list[Block]:
    """Build the page of `actordbg noise`: the noise floor by variation, then by measure, and what it means."""
    lines = conclusion(record)
    use = f"actordbg compare {record.replay_id} truth --noise {record.noise_id}" if record.config.get("oracle") is None else ""
    floor = (("log-prob noise floor", f"{number(record.floor.get('max_abs'), 3)} nats"), ("inputs", str(len(record.dumps))))
    rows = tuple(
        (variant.name, _HOW.get(variant.name, ""), *(number(getattr(variant.log_probs or Figures(0), name)) for name in _FIGURES),
         number(variant.grad_norm_rel))
        for variant in record.variants
    )  # fmt: skip
    floors = tuple((MEASURES.get(name, name), number(value)) for name, value in record.floor.items())
    compared = f"{plural(len(record.dumps), 'input')} with {tokens_of(record):,} log-probs"
    left = [f"left out: {reason}" for reason in record.reasons[:5]]
    more = len(record.reasons) - len(left)
    return [
        Heading(f"noise {record.noise_id}", 1),
        Verdict("", lines[0], floor, next=use, toy=record.config.get("model", TINY) == TINY),
        Items((f"ran as: {record.label}", f"compared: {compared}; unchanged run: {record.replay_id}")),
        Grid(("variation", "what", "max", "p99", "mean", "|g| rel"), rows, {"variation", "what"}),
        Paragraph("max, p99, mean: how far it moves log-probs, nats. |g| rel: the gradient norm, relative."),
        Grid(("noise floor", "largest"), floors, {"noise floor"}),
        Items((*lines[1:], *left, *([f"left out: {more} more, in --json"] if more else []))),
    ]  # fmt: skip


def _variant(record: NoiseRecord, name: str) -> NoiseVariant | None:
    return next((variant for variant in record.variants if variant.name == name), None)


def _size(variant: NoiseVariant) -> float:
    return (variant.log_probs.max_abs or 0.0) if variant.log_probs else 0.0
