"""Compare a replay with another one, with the truth, or with what the training run itself got, dump by dump.

Only dumps that both sides have are compared; every other dump is in the record with the reason. Comparing nothing is a
failure of its own (`not-compared`), because it must never look like an agreement. A dump that A failed on and B did not is a
mismatch without figures.

One dump's tensors are in memory at a time. Only figures are kept, and worst tokens and parameters only of the worst dumps.
So a thousand dumps take no more memory than ten.

Example::

    record = compare(store, "last", "golden")
    record.verdict, record.dumps[0].log_probs.max_abs
    save(store, record)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.units import new_replay_id
from actordbg.catalog import query
from actordbg.formats.dump_record import now_timestamp
from actordbg.judge import sides
from actordbg.judge.dump_figures import measure, unlike
from actordbg.judge.measured_limits import DTYPES, MOST_Z, Rounding
from actordbg.judge.power import Sizes, excluded, noticed
from actordbg.judge.sides import GOLDEN, TRUTH, GoldenSide, Side, Values
from actordbg.judge.thresholds import Applied, Floors, Thresholds, judge, measures, weaker
from actordbg.records.comparison_record import (
    GOOD,
    MATCH,
    MISMATCH,
    NOT_COMPARED,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    NoiseRecord,
)
from actordbg.store.layout import Store

DETAILED = 50
"""How many of the worst dumps keep their worst tokens and parameters."""
NAMED = 10
"""How many of the worst dumps get the ids of their worst tokens. Each of these dumps is read for it."""

Counter = Callable[[int, int], None]
"""Called with (dumps done, dumps in all) after each dump."""
Applying = Callable[[str | None], Applied]
"""The thresholds by the weaker dtype of a dump's two sides; only golden's dumps may differ in it."""


def compare(
    store: Store,
    a: str,
    b: str,
    *,
    thresholds: Thresholds | None = None,
    noise: NoiseRecord | None = None,
    rounding: str | None = None,
    only: Collection[str] | None = None,
    on_progress: Counter | None = None,
) -> ComparisonRecord:
    """Compare the replay `a` with `b`: an id, the beginning of one, or "last"; `b` may also be "golden".

    The truth is a replay too: `compare.find_truth.ensure_truth` gives its id. `rounding`: the replay whose distance from the
    truth sets the limits (`ensure_rounding` gives its id); None: flat limits. `only`: ids of the dumps to compare. `save`
    writes the record. Raises UsageError for an unknown replay, for one compared with itself, and for `truth`; StoreProblem
    for a damaged one.
    """
    catalog = query.open_fresh(store)
    if a in (GOLDEN, TRUTH):
        raise UsageError(f"A is the side that is judged, so it cannot be {a}", hint=f"turn them round: compare REPLAY {a}")
    ours = sides.open_replay(catalog, a)
    if b == TRUTH:
        raise UsageError("the truth must exist before it is compared with", hint="name its replay")
    theirs: Side = GoldenSide(store, ours) if b == GOLDEN else sides.open_replay(catalog, b)
    if theirs.info.replay_id == ours.row.replay_id:
        raise UsageError(f"A and B are the same replay, {ours.row.replay_id}", hint="name two, or `golden`, or `truth`")
    shared = theirs.info.kind == TRUTH  # other replays share it, so its other inputs are not missing in A
    wanted = sorted(set(ours.inputs) | (set() if shared else set(theirs.inputs)))
    if only is not None:
        wanted = [dump_id for dump_id in wanted if dump_id in set(only)]
    blocked = sides.why_not(ours, theirs)
    applied = cache((thresholds or Thresholds()).for_dtype)
    found, floors = _Worst(), Floors(noise)
    rounded = _rounding(catalog, rounding, ours, theirs, [] if blocked else wanted)
    for done, dump_id in enumerate(wanted, 1):
        found.add(*_one(ours, theirs, dump_id, blocked, applied, floors, rounded))
        if on_progress:
            on_progress(done, len(wanted))
    dumps = _with_token_ids(store, ours, found.sorted())
    verdicts = {dump.verdict for dump in dumps}
    shown = applied(weaker(side.info.dtype for side in (ours, theirs)))
    measured = rounded if shown.dtype in DTYPES else None
    bias = measured.bias(dumps) if measured else None
    biased: tuple[str, ...] = ()
    if bias is not None and abs(bias.z) > MOST_Z:
        biased = (
            f"over all dumps A's log-probs are off by {bias.ours:+.3g} nats on average, in one direction: {bias.z:+.1f} standard "
            f"errors from what rounding does (at most {MOST_Z:g}); rounding goes both ways",
        )
    verdicts |= {MISMATCH} if biased else set()
    verdict = next((one for one in (MISMATCH, WITHIN_NOISE, MATCH) if one in verdicts), NOT_COMPARED)
    excludes: Sizes = {}
    if verdict in GOOD and theirs.info.kind == TRUTH:
        excludes = excluded(dumps, shown.limits, bias, floors)
        if rounding and (lone := sides.open_replay(catalog, rounding)).spec.config.planted:
            excludes |= noticed(lone, theirs, dumps, shown.limits, measured, floors)
    return ComparisonRecord(
        comparison_id=new_replay_id(),
        created_at=now_timestamp(),
        a=ours.info,
        b=theirs.info,
        thresholds=shown.limits,
        thresholds_from=_source(shown, measured, dumps),
        rounding_id=measured.replay_id if measured else None,
        verdict=verdict,
        dumps=dumps,
        excludes=excludes,
        noise_id=noise.noise_id if noise else None,
        reasons=(*biased, *_notes(ours, theirs, dumps, blocked, noise, only)),
    )


def _rounding(catalog: query.Catalog, name: str | None, a: sides.ReplaySide, b: Side, wanted: Collection[str]) -> Rounding | None:
    """What rounding does to each of these dumps: the replay `name` against the truth B, gradients over the same dumps as A's."""
    if name is None:
        return None
    lone = sides.open_replay(catalog, name)
    found = Rounding(name, bool((lone.row.resolved or {}).get("experts")))
    for dump_id in wanted:
        ours, loaded = a.read(dump_id), _load(lone, b, dump_id)
        if isinstance(ours, str) or isinstance(loaded, str):
            continue
        pair = tuple(_over_the_same(a, side, ours, values)[1] for side, values in zip((lone, b), loaded, strict=True))
        found.add(measure(dump_id, None, pair[0], pair[1]))
    return found


def _source(shown: Applied, rounded: Rounding | None, dumps: Collection[DumpComparison]) -> str:
    if rounded is None:
        return shown.source
    flat = sum(one.verdict != NOT_COMPARED and not rounded.knows(one.dump_id) for one in dumps)
    left = f"; {flat} of {len(dumps)} dumps without it: flat" if flat else ""
    left += "; wider for experts, which rounding may exchange" if rounded.experts else ""
    said = f"measured on each dump: what {shown.dtype} costs, replay {rounded.replay_id}{left}"
    return f"{said}; {shown.source.partition('; ')[2]}" if "; " in shown.source else said


def save(store: Store, record: ComparisonRecord) -> Path:
    """Write the record to `store/comparisons/<comparison_id>.json` and return the path."""
    return store.publish_text(store.comparisons / f"{record.comparison_id}.json", record.to_json())


def _one(
    a: sides.ReplaySide,
    b: Side,
    dump_id: str,
    blocked: str | None,
    applied: Applying,
    floors: Floors,
    rounded: Rounding | None,
) -> tuple[DumpComparison, float]:
    """One dump's comparison, and its severity."""
    given = a.inputs.get(dump_id) or b.inputs.get(dump_id)
    length = given.seq_len if given else None
    loaded = blocked or _load(a, b, dump_id)
    if isinstance(loaded, str):
        if not blocked and a.failed(dump_id) and dump_id in b.inputs and not isinstance(b.read(dump_id), str):
            return DumpComparison(dump_id, MISMATCH, (f"{loaded}, and B has its results",), seq_len=length), math.inf
        return DumpComparison(dump_id, NOT_COMPARED, seq_len=length, not_compared={"dump": loaded}), -1.0
    ours, theirs = _over_the_same(a, b, *loaded)
    measured = measure(dump_id, length, ours, theirs)
    dump, broken = measured.dump, measured.broken
    if dump.log_probs is None or not dump.log_probs.count:
        return replace(dump, verdict=NOT_COMPARED, not_compared={"dump": "its mask selects no token"}), -1.0
    asked = applied(weaker([ours.dtype, theirs.dtype]))
    limits = asked.limits
    if rounded is not None and rounded.knows(dump_id) and asked.dtype in DTYPES:
        dump = rounded.limited(asked, measured)
        limits = dump.limits
    elif dump.parameter_distance is not None and "parameter_distance" in limits:
        dump = replace(dump, parameter_seen=limits["parameter_distance"] + dump.parameter_distance)
    if not broken and not limits.keys() & measures(dump).keys():
        reason = "nothing that was measured has a threshold"
        return replace(dump, verdict=NOT_COMPARED, not_compared=dump.not_compared | {"dump": reason}), -1.0
    judged, severity = judge(dump, limits, floors.of(dump_id), broken)
    if theirs.fault and judged.verdict == MISMATCH:
        judged = replace(judged, reasons=(*judged.reasons, theirs.fault))
    return judged, severity


def _over_the_same(a: sides.ReplaySide, b: Side, ours: Values, theirs: Values) -> tuple[Values, Values]:
    """Both values with gradients over the same dumps, where one side averaged over lanes and the other can follow it."""
    if ours.gradient_over != theirs.gradient_over and isinstance(b, sides.ReplaySide):
        if len(ours.gradient_over) > 1:
            theirs = b.averaged(theirs, ours.gradient_over)
        elif len(theirs.gradient_over) > 1:
            ours = a.averaged(ours, theirs.gradient_over)
    return ours, theirs


def _load(a: Side, b: Side, dump_id: str) -> tuple[Values, Values] | str:
    """The values of both sides, or why they cannot be compared."""
    for letter, side, other in (("A", a, "B"), ("B", b, "A")):
        if dump_id not in side.inputs:
            return f"only {other} replayed it, {letter} did not"
    ours = a.read(dump_id)
    if isinstance(ours, str):
        return f"A: {ours}"
    theirs = b.read(dump_id)
    if isinstance(theirs, str):
        return theirs if isinstance(b, GoldenSide) else f"B: {theirs}"
    return unlike(ours, theirs) or (ours, theirs)


class _Worst:
    """Collects dumps. Only the `DETAILED` worst ones keep their tokens and parameters."""

    def __init__(self) -> None:
        self._dumps: list[tuple[DumpComparison, float]] = []
        self._detailed: list[tuple[float, int]] = []

    def add(self, dump: DumpComparison, severity: float) -> None:
        self._dumps.append((dump, severity))
        heapq.heappush(self._detailed, (severity, len(self._dumps) - 1))
        if len(self._detailed) > DETAILED:
            _, index = heapq.heappop(self._detailed)
            plain, least = self._dumps[index]
            self._dumps[index] = (replace(plain, worst_tokens=(), parameters=(), distances={}), least)

    def sorted(self) -> tuple[DumpComparison, ...]:
        """Mismatches first, then the more severe one; what was not compared last."""
        order = (MISMATCH, WITHIN_NOISE, MATCH, NOT_COMPARED)
        ranked = sorted(self._dumps, key=lambda one: (order.index(one[0].verdict), -one[1], one[0].dump_id))
        return tuple(dump for dump, _ in ranked)


def _with_token_ids(store: Store, side: sides.ReplaySide, dumps: tuple[DumpComparison, ...]) -> tuple[DumpComparison, ...]:
    """Add token ids to the worst tokens of the worst dumps, where the dump still exists.

    Log-probs [B, A] belong to the last A of the ids [B, S].
    """
    from actordbg.store.plain_tensors import load_plain

    found = list(dumps)
    for index, one in enumerate(found[:NAMED]):
        if not one.worst_tokens or one.dump_id not in side.inputs:
            continue
        try:
            _, tensors = load_plain(store.root / side.inputs[one.dump_id].path)
        except StoreProblem:
            continue
        if "sequences" in tensors:
            ids, mask = tensors["sequences"].values, tensors.get("action_mask")
            actions = ids.shape[1] - 1 if mask is None else mask.values.shape[1]
            named = [
                replace(token, token_id=int(ids[token.row, place]))
                if token.row < ids.shape[0] and 0 <= (place := ids.shape[1] - actions + token.position) < ids.shape[1]
                else token
                for token in one.worst_tokens
            ]
            found[index] = replace(one, worst_tokens=tuple(named))
    return tuple(found)


def _notes(
    a: sides.ReplaySide,
    b: Side,
    dumps: tuple[DumpComparison, ...],
    blocked: str | None,
    noise: NoiseRecord | None,
    only: Collection[str] | None,
) -> Iterator[str]:
    """Remarks about the whole comparison."""
    if blocked:
        yield blocked
    if not dumps:
        yield "there is no dump to compare" if only is None else "the selection has none of their dumps"
    if isinstance(b, sides.ReplaySide) and b.spec.config.truth and any(one.verdict in (*GOOD, MISMATCH) for one in dumps):
        ours, theirs = sides.weights_dtype(a), sides.weights_dtype(b)
        if ours and theirs and ours != theirs:
            yield f"the truth's weights are {theirs}, A's {ours}: their rounding is part of the difference"
    if noise is not None and noise.replay_id not in (a.row.replay_id, b.info.replay_id):
        yield f"the noise floor was measured with another replay, {noise.replay_id} ({noise.label})"
