"""`noise`: how far results move under what must not matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actordbg.api.desk import Desk, DumpSelection, counting
from actordbg.document.command_result import CommandResult
from actordbg.judge.noise_floor import conclusion, deterministic, measure_noise, moves_most, noise_page, runs_of, tokens_of


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
