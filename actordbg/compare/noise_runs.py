"""Run what a noise floor is measured from: the unchanged replay, each variation of it, and what its dtype costs by itself.

Each is a replay of its own, and stays in the store like any. The unchanged one and the variations share one loaded Actor;
"repeat" has processes of its own, so that it also sees what differs from process to process.

A variation may move nothing although every number is rounded: two runs that round alike agree to the bit and are both wrong in
the third digit. So the floor also has "rounding": the inputs row by row, in the dtype that the configuration computes in, against
the same in the next wider one (bf16 and fp16 against fp32, fp32 against fp64). Both are oracle replays, and shared.

Example:

    record = measure_noise(store, plan.spec, on_run=print)
    record.floor["max_abs"]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actordbg.base.errors import UsageError
from actordbg.catalog import query
from actordbg.compare import noise_floor as noise
from actordbg.compare import sides
from actordbg.compare.find_truth import ensure_oracle, wanted_truth
from actordbg.compare.noise_floor import ROUNDING
from actordbg.config.replay_config import VARIATIONS
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.noise_record import NoiseRecord
from actordbg.formats.replay_record import ReplaySpec
from actordbg.replay.plan import new_replay_id
from actordbg.replay.supervise import Progress, run_replay
from actordbg.replay.warm_groups import WarmGroups
from actordbg.store.layout import Store

UNCHANGED, REPEAT = "unchanged", "repeat"
WIDER = {"bf16": "fp32", "fp16": "fp32", "fp32": "fp64"}


def measure_noise(
    store: Store,
    spec: ReplaySpec,
    *,
    on_run: Callable[[str], None] = lambda name: None,
    on_event: Callable[[Progress], None] = lambda event: None,
    on_tick: Callable[[], None] = lambda: None,
) -> NoiseRecord:
    """Run `spec` unchanged and varied in every way, measure the floor, and write it to the store.

    `on_run` is called with "unchanged", "repeat", ..., "rounding" before each kind of replay. Raises whatever `run_replay`
    raises, and StoreProblem where no input passed twice.
    """
    if spec.config.vary is not None:
        raise UsageError("a noise floor is measured over every variation", hint="leave `vary` out of the configuration")
    if not spec.config.keep_tensors:
        raise UsageError("without tensors there is nothing to measure", hint="leave --no-keep-tensors out")
    ids: dict[str, str] = {}

    def run(name: str, warm: WarmGroups | None) -> None:
        on_run(name)
        varied = varied_spec(spec, None if name == UNCHANGED else name)
        run_replay(store, varied, on_event, on_tick=on_tick, warm=warm)
        ids[name] = varied.replay_id

    with WarmGroups() as warm:
        for name in (UNCHANGED, *(one for one in VARIATIONS if one != REPEAT)):
            run(name, warm if spec.config.oracle is None else None)  # the truth's model is never shared
    run(REPEAT, None)
    unchanged = ids[UNCHANGED]
    rounding = None
    if spec.config.oracle is None:
        on_run(ROUNDING)
        rounding = _rounding(store, unchanged, on_event, on_tick)
    record = noise.measure(store, unchanged, {name: ids[name] for name in VARIATIONS}, rounding=rounding)
    noise.save(store, record)
    return record


def _rounding(
    store: Store, unchanged: str, on_event: Callable[[Progress], None], on_tick: Callable[[], None]
) -> tuple[str, str] | None:
    """The oracle replay in the dtype that the configuration computes in, and in the next wider one."""
    side = sides.open_replay(query.open_fresh(store), unchanged)
    narrow = side.info.dtype
    if narrow not in WIDER:
        return None
    found = []
    for dtype in (narrow, WIDER[narrow]):
        wanted = wanted_truth(store, side.spec, dtype)
        command = f"the rounding of replay {unchanged}, in {dtype}"
        found.append(ensure_oracle(store, wanted, command=command, on_event=on_event, on_tick=on_tick))
    return found[0], found[1]


def varied_spec(spec: ReplaySpec, how: str | None) -> ReplaySpec:
    """The same replay under an id of its own, each input varied in this way; None: not at all."""
    return replace(spec, replay_id=new_replay_id(), created_at=now_timestamp(), config=replace(spec.config, vary=how))
