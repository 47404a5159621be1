"""Run what a noise floor is measured from: the unchanged replay and each variation of it, one after another.

Each is a replay of its own, in processes of its own, so that "repeat" also sees what differs from process to process. They
stay in the store like any replay.

Example:

    record = measure_noise(store, plan.spec, on_run=print)
    record.floor["max_abs"]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actordbg.actor.choices import VARIATIONS
from actordbg.errors import UsageError
from actordbg.findings import NoiseRecord
from actordbg.numerics import noise
from actordbg.outcome import ReplaySpec
from actordbg.record import now_timestamp
from actordbg.replay.plan import new_replay_id
from actordbg.replay.supervise import Progress, run_replay
from actordbg.store import Store

UNCHANGED = "unchanged"


def measure_noise(
    store: Store,
    spec: ReplaySpec,
    *,
    on_run: Callable[[str], None] = lambda name: None,
    on_event: Callable[[Progress], None] = lambda event: None,
    on_tick: Callable[[], None] = lambda: None,
) -> NoiseRecord:
    """Run `spec` unchanged and varied in every way, measure the floor, and write it to the store.

    `on_run` is called with "unchanged", "repeat", ... before each replay. Raises whatever `run_replay` raises, and StoreProblem
    where no input passed twice.
    """
    if spec.config.vary is not None:
        raise UsageError("a noise floor is measured over every variation", hint="leave `vary` out of the configuration")
    if not spec.config.keep_tensors:
        raise UsageError("without tensors there is nothing to measure", hint="leave --no-keep-tensors out")
    ids: dict[str, str] = {}
    for name in (UNCHANGED, *VARIATIONS):
        on_run(name)
        varied = varied_spec(spec, None if name == UNCHANGED else name)
        run_replay(store, varied, on_event, on_tick=on_tick)
        ids[name] = varied.replay_id
    record = noise.measure(store, ids.pop(UNCHANGED), ids)
    noise.save(store, record)
    return record


def varied_spec(spec: ReplaySpec, how: str | None) -> ReplaySpec:
    """The same replay under an id of its own, each input varied in this way; None: not at all."""
    return replace(spec, replay_id=new_replay_id(), created_at=now_timestamp(), config=replace(spec.config, vary=how))
