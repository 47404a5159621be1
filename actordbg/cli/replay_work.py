"""The work of `actordbg replay`: print its plan, run it, and read its result from the store and print it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from statistics import median
from typing import Any

from actordbg.api.planning import counting, why_nothing
from actordbg.api.replays import replay_answer
from actordbg.base.errors import ActordbgError, UsageError
from actordbg.base.units import in_time
from actordbg.catalog.query import Catalog, answers, list_replays, open_fresh
from actordbg.cli import output
from actordbg.cli.output import note, plural, say_wrapped
from actordbg.cli.replay_options import LONG_S, MOST_UNASKED, StopOptions
from actordbg.cli.replaying import replaying, require_runnable, say_skipped
from actordbg.config.as_ran import as_ran, costs
from actordbg.debug.meeting import Relay
from actordbg.debug.replay_stops import StopOrder
from actordbg.document.command_result import CommandResult
from actordbg.records.journal import read_results
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay import supervise
from actordbg.replay.plan import Plan
from actordbg.replay.supervise import Progress
from actordbg.store.layout import Store


def ask_for_all(store: Store, spec: ReplaySpec, *, dry_run: bool) -> None:
    """Ask before replaying a whole store if that takes over a minute by what replays took here, or, without such a replay, if
    there are many dumps. Raises UsageError if the user declines, or there is no terminal.

    At a terminal, a dry run only prints that the replay will ask; without one it is refused, as the replay would be.
    """
    count, seconds = len(spec.inputs), expected_seconds(open_fresh(store), spec)
    if count <= MOST_UNASKED if seconds is None else seconds <= LONG_S:
        return
    if dry_run and output.can_ask():
        return note(f"without --dry-run, this asks before it replays {count:,} dumps; --all skips the question")
    lasting = "" if seconds is None else f", in about {in_time(seconds)} by an earlier replay"
    if output.agreed(f"This replays all {count:,} dumps of the store{lasting}"):
        return
    raise UsageError(
        f"refusing to replay {count:,} dumps{lasting}",
        hint="narrow it with --diverse 8, --where or --max-inputs, or pass --all",
    )


def expected_seconds(catalog: Catalog, spec: ReplaySpec) -> float | None:
    """Estimate a replay's duration by the newest finished one with the same settings; None without one."""
    settings, tokens = costs(as_ran(spec.config)), sum(item.tokens for item in spec.inputs)
    sql = (
        "SELECT (forward_s + coalesce(backward_s, 0)) / tokens, started_at FROM result "
        "WHERE replay_id = ? AND status = 'passed' AND forward_s IS NOT NULL AND tokens > 0 ORDER BY started_at"
    )
    for row in list_replays(catalog, limit=100):
        results = answers(catalog, sql, (row.replay_id,))
        if row.finished_at and results and costs(as_ran(row.config)) == settings:
            began, first = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (row.created_at, results[0][1]))
            pace = median(pace for pace, _ in results)  # the first of a compiled model includes its compilation
            return float(max((first - began).total_seconds(), 0.0) + pace * tokens / spec.config.lanes)
    return None


def run_planned(
    store: Store, plan: Plan, stopping: StopOptions, *, dry_run: bool, **about: Any
) -> tuple[CommandResult, Exception | None]:
    """Run a planned replay; return its result, and the error that ended it early, if any. about: more of its JSON."""
    spec = plan.spec
    say_skipped(plan.skipped)
    about |= {"selected": len(spec.inputs), "skipped": plan.skipped, "findings": []}
    if not spec.inputs:
        unplanned = {"status": "nothing to replay", "note": why_nothing(store, spec.where), "shares": []}
        return CommandResult(True, about | {"replay_id": None, "good": True} | unplanned, ()), None
    about["findings"] = require_runnable(store, spec)
    for text in plan.notes:
        note(text)
    if dry_run:
        return CommandResult(True, about | {"replay_id": None, "good": True} | _planned(store, spec), ()), None
    return _supervised(store, spec, stopping.order(spec), about)


_ALIGNED = {
    None: "",
    "same": ", each on all ranks (--align same)",
    "rank": ", call by call (--align rank)",
    "shuffle": ", each rank its share in a different order (--align shuffle)",
}


def _planned(store: Store, spec: ReplaySpec) -> dict[str, Any]:
    """Return the result of a dry run: the inputs and each replica's share."""
    config, count = spec.config, len(spec.inputs)
    done = read_results(store.replays / spec.replay_id)
    left = replace(spec, inputs=tuple(item for item in spec.inputs if item.dump_id not in done))
    lengths = [item.seq_len for item in spec.inputs]
    text = (
        f"{plural(count, 'input')} by {spec.order}{_ALIGNED[config.align]}, seq_len {min(lengths)} to {max(lengths)}, "
        f"{sum(item.tokens for item in spec.inputs):,} tokens, on {plural(config.nproc, 'worker')} ({config.backend})"
        f"{f'; {count - len(left.inputs):,} are done' * bool(done)}"
        f"{'' if left.inputs else '; nothing is left to do'}"
    )
    shares = []
    for lane in range(config.lanes):
        mine = left.inputs[lane :: config.lanes]
        ranks = range(lane * config.lane_width, (lane + 1) * config.lane_width)
        dumps, seq_lens = [item.dump_id for item in mine], [item.seq_len for item in mine]
        shares.append({"ranks": list(ranks), "dumps": dumps, "seq_lens": seq_lens})
    return {"status": "planned", "note": text, "shares": shares}


def _supervised(
    store: Store, spec: ReplaySpec, stops: StopOrder, about: dict[str, Any]
) -> tuple[CommandResult, Exception | None]:
    """Run it with a progress bar, and read the result from the store, even after Ctrl-C or a failed launch.

    Raises errors from before the start (its folder cannot be written, another process runs it).
    """
    done = len(read_results(store.replays / spec.replay_id))
    problem: Exception | None = None
    begun = interrupted = False
    restarts = 0
    lines: list[str] = []
    prompts = Relay() if stops.terminal and stops.debugpy is None else None
    bare = bool(stops.at) or stops.level != StopOrder().level  # a bar would draw over prompts and lines

    def on_event(event: Progress) -> None:
        nonlocal begun, restarts
        begun = True
        restarts += event.kind == "attempt" and bool(event.text)
        if event.kind == "line":
            lines.append(event.text)
        elif event.kind == "stop" and (prompts is None or event.at):
            attach = f"`actordbg attach {spec.replay_id}`" + f" on the node {event.at}" * bool(event.at)
            note(f"{event.text}; it waits for {attach if stops.debugpy is None else f'an editor, at {event.at}'}")
        elif event.kind == "stop":
            advance(0, drawn=False)  # the terminal is the prompt's
        counted(event)

    def on_tick() -> None:
        """Print the waiting lines and show the bar, unless a prompt is on the screen."""
        if prompts is None or prompts.at is None:
            while lines:
                note(lines.pop(0))
            advance(0, drawn=True)

    try:
        with replaying(store, "replaying", len(spec.inputs), quiet=bare) as advance:
            counted = counting(advance)
            advance(done, note="starting the workers")
            supervise.run_replay(store, spec, on_event, on_tick=on_tick, stops=stops, prompts=prompts)
    except KeyboardInterrupt:
        interrupted = True
        note(f"interrupted; results so far are kept, run `actordbg replay --resume {spec.replay_id}` to continue")
    except (ActordbgError, OSError) as error:
        if not begun:
            raise
        problem = error
    return replay_answer(store, spec, restarts=restarts, interrupted=interrupted, **about), problem


def say_plan(answer: Mapping[str, Any]) -> None:
    """Print the plan of a dry run as text, or why nothing is replayed."""
    say_wrapped(answer["note"], "  ")
    for share in answer["shares"]:
        say_wrapped(_share(share), "    ")


def _share(share: dict[str, Any]) -> str:
    who = ("rank " if len(share["ranks"]) == 1 else "ranks ") + ", ".join(map(str, share["ranks"]))
    if not share["dumps"]:
        return f"  {who}: nothing"
    runs = [(length, len(list(same))) for length, same in groupby(share["seq_lens"])]
    lengths = ", ".join(f"{length} x {count}" if count > 1 else str(length) for length, count in runs[:8])
    return f"  {who}: {plural(len(share['dumps']), 'input')}, seq_len {lengths}{', ...' * (len(runs) > 8)}"
