"""`noise`, `curve` and `compare-logs`: numerical noise, memory or time by length, the losses of trainings step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actordbg.api.desk import Desk, DumpSelection, counting
from actordbg.base.errors import UsageError
from actordbg.base.units import plural
from actordbg.catalog.query import newest_configuration, open_fresh
from actordbg.config.as_ran import as_ran, costs
from actordbg.config.replay_config import SETTINGS, TINY, validate
from actordbg.document.command_result import CommandResult
from actordbg.judge.load_replays import load
from actordbg.judge.noise_floor import conclusion, deterministic, measure_noise, moves_most, noise_page, runs_of, tokens_of
from actordbg.measure.align_logs import compare_many, together
from actordbg.measure.curve_document import curve_charts, document
from actordbg.measure.curves import answer
from actordbg.measure.log_document import log_charts, logs_page
from actordbg.measure.log_lines import read_log
from actordbg.measure.measurements import gather, is_configuration, plan_lengths, settled
from actordbg.replay.supervise import run_replay, spec_and_owner


def noise(desk: Desk, chosen: DumpSelection, flags: Mapping[str, Any]) -> CommandResult:
    """Replay the same inputs unchanged and in ways that must not matter, and measure how far the results move."""
    chosen = desk.selected(chosen)
    config = desk.asked(flags).config
    config = replace(config, keep_tensors=True, keep_gradients=config.backward is not False)
    plan = desk.planned("noise", config, chosen, "measure noise on")
    spec = plan.spec
    desk.client.begins(f"noise of {spec.replay_id}")
    desk.runnable(config, spec.inputs, announce=False)
    with desk.progress("measuring noise", len(spec.inputs) * runs_of(spec)) as advance:
        record = measure_noise(
            desk.store,
            spec,
            on_run=lambda name: advance(0, note=name),
            on_event=counting(advance),
            on_passed_over=advance,
        )
    most = moves_most(record)
    data = {name: getattr(record, name) for name in ("noise_id", "replay_id", "label", "dtype")} | {
        "dumps": len(record.dumps),
        "tokens": tokens_of(record),
        "floor": record.floor,
        "variants": record.variants,
        "moves_most": most.name if most else None,
        "deterministic": deterministic(record),
        "conclusion": conclusion(record),
        "reasons": record.reasons,
        "skipped": plan.skipped,
    }
    return CommandResult(True, data, noise_page(record))


def curve(
    desk: Desk, quantity: str, replays: Sequence[str], where: str | None, settings: Mapping[str, Any], *, by: str, of: str,
    budget: float | None, at: Sequence[int], measure: str | None, batch_size: int | None,
) -> CommandResult:  # fmt: skip
    """Model memory (`budget` in bytes) or time (`budget` in seconds, `of` both passes or one) over length."""
    flags = [*(["--batch-size"] if batch_size else []), *(SETTINGS[name].flag for name in settings)]
    if flags and measure is None:
        given = ", ".join(flags)
        raise UsageError(f"{given} changes nothing without --measure", hint=f"add --measure LEN,LEN,..., or drop {given}")
    # "last" here: the newest replay that can have a curve, so neither a truth nor a noise variant
    newest = newest_configuration(open_fresh(desk.store)) if "last" in replays else None
    names = [newest.replay_id if newest is not None and name == "last" else name for name in replays or ["all"]]
    if measure is not None:
        if not replays:
            raise UsageError("--measure needs the replays whose configurations to use", hint="name a replay, or `last`")
        desk.store.require_writable()
        names += _measured(desk, names, measure, batch_size, settings)
    material = load(desk.store, names, where)
    notes = list(material.notes)
    others = sum(not is_configuration(data) for data in material.replays)
    if others:
        notes.append(f"{plural(others, 'replay')} left out: truths and noise variants")
    measured, lengths = gather(material.replays, by), sorted(set(at))
    count = len(material.replays) - others
    curves = answer(measured, quantity, by, passes=of, budget=budget, at=lengths, replays=count, notes=notes)
    return CommandResult(curves.good, vars(curves), document(curves, curve_charts(curves)))


def _measured(desk: Desk, names: Sequence[str], measure: str, batch_size: int | None, settings: Mapping[str, Any]) -> list[str]:
    """Replay synthetic inputs of these lengths, once per distinct configuration of `names`; return the replay ids."""
    parts = [part.strip() for part in measure.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 9 and int(part) >= 2 for part in parts):
        raise UsageError(f"--measure {measure!r:.60} is not a list of lengths", hint="write it like 512,1024,2048")
    done: dict[tuple[str, int], str] = {}
    for data in load(desk.store, names).replays:
        spec, owner = spec_and_owner(desk.store, data.spec.replay_id)
        config = replace(settled(spec.config, data.resolved), **settings)
        validate(config)
        batch = batch_size or max((item.batch_size for item in data.spec.inputs), default=1)
        if config.model != TINY:
            desk.client.approve(f"replay {data.spec.replay_id}, whose model {config.model!r} would be loaded", owner)
        key = (str(costs(as_ran(config))), batch)
        if key in done or config.truth is not None or config.vary is not None:
            continue
        command = desk.command("curve", None, config)
        spec = plan_lengths(desk.store, config, {int(part) for part in parts}, batch, command=command)
        with desk.progress(f"measuring as {data.spec.replay_id}", len(spec.inputs)) as advance:
            advance(0, note="starting the workers")
            run_replay(desk.store, spec, counting(advance))
        done[key] = spec.replay_id
    return list(done.values())


def compare_logs(
    logs: Sequence[str], *, each: bool = False, metric: str | None = None, threshold: float = 0.05,
    rule: str = "first-mean-last", worst: int = 10, charts: bool = True,
) -> CommandResult:  # fmt: skip
    """Compare the losses of logs with those of the first, or, with `each`, every pair. "-" is standard input.

    threshold: the relative difference at which values are too far apart. worst: how many steps the text lists.
    """
    if len(logs) < 2:
        raise UsageError("compare-logs needs at least two logs", hint="name two or more")
    if list(logs).count("-") > 1:
        raise UsageError("standard input can be only one of the logs", hint="pass - once, and files for the others")
    read = [read_log(path, metric) for path in logs]
    pairs = compare_many(read, each=each, metric=metric, threshold=threshold, rule=rule, limit=worst)
    whole = together(pairs)
    blocks = logs_page(pairs, log_charts(pairs, read) if charts else [])
    return CommandResult(whole.good, vars(pairs[0] if len(logs) == 2 else whole), blocks)
