"""How far a configuration moves by itself: the noise floor, below which no difference means anything.

The unchanged replay is compared with the same inputs run again, re-padded, re-batched and re-ordered (`actordbg.actor.variants`),
all under the same configuration. Each comparison gives the measures of `numerics.thresholds.measures` for each dump; the floor of
a dump is the largest of them over all variants, the floor of the configuration the largest over all dumps. Floors and
thresholds so have the same names, and a comparison looks each measure up in its dump's floor.

"rounding" is beside them: how far the dtype alone is from the truth, measured row by row without any of the configuration. It
counts `ROUNDING_MARGIN` times: another order of the same operations rounds otherwise, and the largest of a few hundred
rounding errors is a matter of luck.

A dump that a variant could not run (out of memory in the doubled batch, say) has the floor of the other variants, and the record
says so. A NaN that comes and goes is no floor: it is said, and leaves the measure out.

Example:
    record = measure(store, "20250619T052608-9f3a2c", {"repeat": "20250619T052701-0b11aa", "repad": "..."})
    record.floor["max_abs"]            # 3.1e-06
    save(store, record)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from actordbg.catalog import query
from actordbg.errors import StoreProblem, UsageError
from actordbg.findings import NOT_COMPARED, DumpComparison, DumpNoise, Figures, NoiseRecord, NoiseVariant
from actordbg.numerics import sides
from actordbg.numerics.compare import compare
from actordbg.numerics.thresholds import Thresholds, measures
from actordbg.record import now_timestamp
from actordbg.replay.plan import new_replay_id
from actordbg.store import Store, atomic_write

NOT_THE_CONFIGURATION = ("timeout_s", "keep_tensors", "keep_gradients", "vary", "seed", "backward")
"""Settings of a replay that do not change the log-probs that a configuration gives."""


ROUNDING = "rounding"
ROUNDING_MARGIN = 2.0


def measure(
    store: Store, unchanged: str, varied: Mapping[str, str], *, rounding: tuple[str, str] | None = None
) -> NoiseRecord:
    """The noise floor from finished replays: the `unchanged` one, and by variation the others. `save` writes it.

    `rounding`: two oracle replays of the same inputs, in the configuration's dtype and in a wider one.

    Raises StoreProblem where nothing could be compared: a floor of nothing would call every difference real.
    """
    side = sides.open_replay(query.open_fresh(store), unchanged)
    floors: dict[str, dict[str, float]] = {}
    variants, reasons = [], []
    pairs = [(name, replay_id, unchanged) for name, replay_id in varied.items()]
    for name, replay_id, against in pairs + ([(ROUNDING, *rounding)] if rounding else []):
        found = compare(store, replay_id, against, thresholds=Thresholds(), only=set(side.inputs))
        compared = [dump for dump in found.dumps if dump.verdict != NOT_COMPARED]
        for dump in compared:
            margin = ROUNDING_MARGIN if name == ROUNDING else 1.0
            _raise_to(floors.setdefault(dump.dump_id, {}), measures(dump), margin)
        variants.append(NoiseVariant(name, replay_id, _together(compared), _largest_norm(compared)))
        reasons += _missing(name, found.dumps)
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
        label=sides.label_of(side.row),
        dtype=side.info.dtype,
        variants=tuple(variants),
        dumps=tuple(DumpNoise(dump_id, floors[dump_id]) for dump_id in sorted(floors)),
        floor=overall,
        reasons=tuple(reasons),
    )


def save(store: Store, record: NoiseRecord) -> Path:
    """Write the record to `store/noise/<noise_id>.json` and return the path."""
    path = store.noise / f"{record.noise_id}.json"
    try:
        atomic_write(path, record.to_json().encode())
    except OSError as error:
        raise StoreProblem(
            f"cannot write {path}: {error.strerror}", hint="check the permissions and the free space of the store"
        ) from None
    return path


def newest_for(store: Store, replay_id: str) -> NoiseRecord | None:
    """The newest floor that was measured under the configuration of this replay, on one of its dumps at least; or None."""
    catalog = query.open_fresh(store)
    side = sides.open_replay(catalog, replay_id)
    for path in sorted(store.noise.glob("*.json"), reverse=True):
        record = NoiseRecord.from_file(path)
        if not any(one.dump_id in side.inputs for one in record.dumps):
            continue
        try:
            measured = sides.open_replay(catalog, record.replay_id)
        except (StoreProblem, UsageError):
            continue  # its replay was removed: nobody knows any more what it resolved to
        if configuration_of(measured) == configuration_of(side):
            return record
    return None


def configuration_of(side: sides.ReplaySide) -> dict[str, object]:
    """What makes two replays the same configuration as far as numbers go: as asked for; what was left open, as built."""
    built = side.row.resolved or {}
    asked = side.spec.config.to_dict()
    settings = {name: value for name, value in asked.items() if name not in NOT_THE_CONFIGURATION}
    for name in ("dtype", "attn", "packing", "temperature"):
        settings[name] = built.get(name) if asked[name] is None else asked[name]
    if asked["backend"] == "plain":
        del settings["nproc"]  # plain ranks are independent of each other
    return settings


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


def _largest_norm(dumps: Sequence[DumpComparison]) -> float | None:
    found = [dump.grad_norm_rel for dump in dumps if dump.grad_norm_rel is not None]
    return max(found, default=None)


def _missing(name: str, dumps: Sequence[DumpComparison]) -> list[str]:
    """What this variant could not measure, in words."""
    said = []
    for dump in dumps:
        reason = dump.not_compared.get("dump") if dump.verdict == NOT_COMPARED else None
        if reason is None and dump.log_probs is not None and dump.log_probs.nonfinite:
            reason = f"{dump.log_probs.nonfinite} log-probs are finite in one run and not in the other"
        if reason is not None:
            said.append(f"{name} of {dump.dump_id}: {reason}")
    return said
