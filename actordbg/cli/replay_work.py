"""The work of `actordbg replay`: print its plan, run it, and read its result from the store and print it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from actordbg.base.errors import ActordbgError, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import in_time
from actordbg.catalog.query import Catalog, answers, list_replays, open_fresh
from actordbg.cli import output
from actordbg.cli.output import human_bytes, note, plural, say_wrapped
from actordbg.cli.replay_options import LONG_S, MOST_UNASKED, StopOptions
from actordbg.cli.replaying import counting, replaying, require_runnable, say_skipped, what_there_is
from actordbg.config.as_ran import as_ran, costs, on_machine
from actordbg.config.replay_config import ReplayConfig
from actordbg.debug.meeting import Relay
from actordbg.debug.replay_stops import StopOrder
from actordbg.document.blocks import Block, Heading, Items
from actordbg.judge.replay_document import replay_numbers, replay_results
from actordbg.judge.report_model import ReplaySummary
from actordbg.judge.summary import summary_of
from actordbg.judge.verdicts import replay_verdict
from actordbg.records.journal import TENSORS, read_results
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay import supervise
from actordbg.replay.plan import Plan
from actordbg.replay.replay_data import data_of
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


def run_planned(store: Store, plan: Plan, stopping: StopOptions, *, dry_run: bool) -> tuple[dict[str, Any], Exception | None]:
    """Run a planned replay; return its result, and the error that ended it early, if any."""
    spec = plan.spec
    say_skipped(plan.skipped)
    answer: dict[str, Any] = {
        "replay_id": None,
        "selected": len(spec.inputs),
        "skipped": plan.skipped,
        "findings": [],
        "good": True,
    }
    if not spec.inputs:
        return answer | {"status": "nothing to replay", "note": what_there_is(store, spec.where), "shares": []}, None
    answer["findings"] = require_runnable(store, spec)
    for text in plan.notes:
        note(text)
    if dry_run:
        return answer | _planned(store, spec), None
    ended, problem = _supervised(store, spec, stopping.order(spec))
    return answer | ended, problem


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


def _supervised(store: Store, spec: ReplaySpec, stops: StopOrder) -> tuple[dict[str, Any], Exception | None]:
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
    answer = answer_of(store, spec, restarts)
    if interrupted and answer["status"] != "complete":
        answer["status"] = "interrupted"
    return answer, problem


def is_good(summary: ReplaySummary, config: ReplayConfig) -> bool:
    """Check that every input passed, ranks agree under `--align same`, and no law failed."""
    differ = config.align == "same" and summary.ranks is not None and bool(summary.ranks.differ)
    return summary.counts.passed == summary.counts.inputs and not differ and (summary.laws is None or summary.laws.good)


_COUNTS = ("passed", "failed", "crashed", "hung", "stopped", "not_run")
_RECORDED = ("golden", "golden_entropy", "generators", "not_compared")
"""Distances from the run's own outputs, and what could not be compared with them."""


def answer_of(store: Store, spec: ReplaySpec, restarts: int) -> dict[str, Any]:
    """Read a replay's result from the store: a short form of its summary in `actordbg report`.

    Times in seconds over steady inputs. `folded_ids` counts inputs with token ids outside the model's vocabulary, which were
    wrapped (modulo its size). `folder` has the journals and logs; `kept_bytes` is the size of log-probs, entropies and gradients.
    """
    folder = store.replays / spec.replay_id
    data = data_of(store, spec)
    summary = summary_of(data)
    counts = {name: getattr(summary.counts, name) for name in _COUNTS}
    copied = ("replay_id", "status", "peak_memory_bytes", *_RECORDED, "ranks", "laws", "resolved")
    return {
        **{name: getattr(summary, name) for name in copied},
        **counts,
        "selected": len(spec.inputs),
        "good": is_good(summary, spec.config),
        "note": "",
        "shares": [],
        "restarts": restarts,
        "forward_median_s": summary.forward.median,
        "forward_p95_s": summary.forward.p95,
        "first_forward_s": summary.warm_up.first_forward.median,
        "backward_median_s": summary.backward.median,
        "tokens_per_s": summary.tokens_per_s.median,
        "folded_ids": summary.logprobs.folded_ids if summary.logprobs else 0,
        "asked_for_same": spec.config.align == "same",
        "failures": [
            {"signature": group.name, "error": group.cause}
            | {name: getattr(group, name) for name in ("count", "statuses", "explanation", "ways_out", "examples")}
            for group in summary.failures
        ],
        "configuration": on_machine(spec.config, data.resolved) if data.resolved else "",
        "folder": str(folder),
        "kept_bytes": _size_of(folder / TENSORS),
    }


def _size_of(folder: Path) -> int:
    """Return the total size of the files in a folder; 0 if it is missing or unreadable, which must not lose a replay's result."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def result_blocks(store: Store, spec: ReplaySpec, answer: dict[str, Any]) -> list[Block]:
    """Build the document of a replay that ran: a part of what `actordbg report` says of it."""
    summary = summary_of(data_of(store, spec))
    beside = {
        "restarts": answer["restarts"],
        "your model": answer["recorded_model"] and f"the dumps recorded it: --model {in_shell(answer['recorded_model'])}",
        "saved": answer["kept_bytes"] and f"{human_bytes(answer['kept_bytes'])} of outputs, for `actordbg compare`",
        "journals, logs": answer["folder"],
    }
    facts = Items([f"{name}: {text}" for name, text in beside.items() if text])
    return [
        Heading(f"replay {spec.replay_id}", 1),
        replay_verdict(summary),
        *replay_results(summary),
        *replay_numbers(summary),
        facts,
    ]


def say_plan(answer: dict[str, Any]) -> None:
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
