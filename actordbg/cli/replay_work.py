"""The work of `actordbg replay`: a new one, one that goes on, and its run."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

from actordbg.actor.find_trainer import find_trainer
from actordbg.actor.hub_model import find_model
from actordbg.actor.known_failures import check_config, refuse_hits
from actordbg.base.errors import ActordbgError, UsageError
from actordbg.base.units import in_time
from actordbg.catalog.query import open_fresh
from actordbg.cli import output
from actordbg.cli.chosen_inputs import what_there_is
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.input_options import MOST_UNASKED, ChosenInputs
from actordbg.cli.live_progress import replaying, show
from actordbg.cli.replay_answer import ReplayAnswer, answer_of, shares_of
from actordbg.cli.stop_options import StopOptions
from actordbg.debug.meeting import Relay
from actordbg.debug.replay_stops import StopOrder
from actordbg.records.journal import read_results
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay import supervise
from actordbg.replay.plan import Plan
from actordbg.replay.replay_data import estimated
from actordbg.replay.selection import defaults_of
from actordbg.replay.supervise import Progress
from actordbg.store.layout import Store

BESIDE_RESUME = (
    "resume", "trust_remote_code", "dist_plugin", "yes", "dry_run", "quiet", "as_json",
    *(one.name for one in (*fields(StopOptions), *fields(EngineOptions))),
)  # fmt: skip


def narrowed(inputs: ChosenInputs) -> bool:
    """Whether an option says which dumps, or how many."""
    return inputs.where is not None or bool(inputs.max_inputs or inputs.input_file)


def ask_for_all(store: Store, spec: ReplaySpec, *, dry_run: bool) -> None:
    """Replay a whole store only if somebody wants that: UsageError where nobody can be asked.

    A dry run says at a terminal that the replay will ask, and is refused elsewhere, as the replay would be.
    """
    count = len(spec.inputs)
    if count <= MOST_UNASKED:
        return
    if dry_run and output.can_ask():
        return output.note(f"nothing selects among {count:,} dumps: without --dry-run this asks first, unless --all is given")
    if output.agreed(f"This replays all {count:,} dumps of the store{_lasts(store, spec)}"):
        return
    raise UsageError(
        f"nothing selects among {count:,} dumps",
        hint="`--diverse 8` takes those that differ most, --where and --max-inputs some, --all every one",
    )


def _lasts(store: Store, spec: ReplaySpec) -> str:
    """How long it may take, in words."""
    found = estimated(open_fresh(store), spec)
    if found is None:
        return "; nothing was replayed under these settings yet, so how long it takes is unknown"
    return f"; about {in_time(found.seconds)}, by {output.plural(found.results, 'result')} under these settings"


def run_planned(
    store: Store, plan: Plan, stopping: StopOptions, *, dry_run: bool, quiet: bool
) -> tuple[ReplayAnswer, Exception | None]:
    """The answer, and the error that ended the replay before every input had its result, if one did."""
    spec = plan.spec
    for reason, count in plan.skipped.items():
        output.note(f"left out {output.plural(count, 'dump')}: {reason}")
    if not spec.inputs:
        note = what_there_is(store, spec.where)
        return ReplayAnswer(None, "nothing to replay", 0, skipped=plan.skipped, note=note), None
    defaults = defaults_of(store.root, spec.inputs)
    findings = check_config(spec.config, defaults=defaults)
    refuse_hits(findings)
    find_trainer(spec.config, defaults)
    find_model(spec.config.model)
    for finding in findings if not quiet else ():
        output.note(f"{finding.severity}[{finding.id}]: {finding.message}")
    for note in plan.notes:
        output.note(note)
    known = tuple(asdict(finding) for finding in findings)
    if dry_run:
        done = read_results(store.replays / spec.replay_id)
        left = replace(spec, inputs=tuple(one for one in spec.inputs if one.dump_id not in done))
        lasts = _lasts(store, left) if left.inputs else "; nothing is left to do"
        note = f"{_plan_text(spec)}{f'; {len(spec.inputs) - len(left.inputs):,} are done' * bool(done)}{lasts}"
        shares = shares_of(left)
        return ReplayAnswer(
            None, "planned", len(spec.inputs), skipped=plan.skipped, findings=known, note=note, shares=shares
        ), None
    answer, problem = _supervised(store, spec, stopping.order(spec), quiet)
    return replace(answer, skipped=plan.skipped, findings=known), problem


def _supervised(store: Store, spec: ReplaySpec, stops: StopOrder, quiet: bool) -> tuple[ReplayAnswer, Exception | None]:
    """Run it with a progress bar, and read the answer from the store, also after a Ctrl-C or a launch that went wrong.

    What goes wrong before anything was started (its folder cannot be written, another process runs it) is raised.
    """
    done = len(read_results(store.replays / spec.replay_id))
    problem: Exception | None = None
    begun = interrupted = False
    restarts = 0
    lines: list[str] = []
    prompts = Relay() if stops.terminal and stops.debugpy is None else None
    bare = quiet or bool(stops.at) or stops.level != StopOrder().level  # a bar would draw over prompts and lines

    def on_event(event: Progress) -> None:
        nonlocal begun, restarts
        begun = True
        restarts += event.kind == "attempt" and bool(event.text)
        if event.kind == "line":
            lines.append(event.text)
        elif event.kind == "stop" and (prompts is None or event.at):
            output.note(f"{event.text}; it waits for {_somebody(spec, stops, event.at)}")
        elif event.kind == "stop":
            advance(0, drawn=False)  # the terminal is the prompt's
        show(catalog, advance, event)

    def on_tick() -> None:
        """Lines and the bar wait until no prompt is on the screen."""
        if prompts is None or prompts.at is None:
            while lines:
                output.note(lines.pop(0))
            advance(0, drawn=True)
        catalog.tick()

    try:
        with replaying(store, "replaying", len(spec.inputs), quiet=bare) as (catalog, advance):
            advance(done, note="starting the workers")
            supervise.run_replay(store, spec, on_event, on_tick=on_tick, stops=stops, prompts=prompts)
    except KeyboardInterrupt:
        interrupted = True
        output.note(f"interrupted; what is done is kept, `actordbg replay --resume {spec.replay_id}` goes on")
    except (ActordbgError, OSError) as error:
        if not begun:
            raise
        problem = error
    answer = answer_of(store, spec, restarts)
    return replace(answer, status="interrupted") if interrupted and answer.status != "complete" else answer, problem


def _somebody(spec: ReplaySpec, stops: StopOrder, at: str) -> str:
    """Who can come to a rank that stopped, in words."""
    if stops.debugpy is not None:
        return f"an editor, at {at}"
    return f"`actordbg attach {spec.replay_id}`" + f" on the node {at}" * bool(at)


_ALIGNED = {
    None: "",
    "same": ", each on all ranks (--align same)",
    "rank": ", call by call (--align rank)",
    "shuffle": ", each rank its share in an order of its own (--align shuffle)",
}


def _plan_text(spec: ReplaySpec) -> str:
    config = spec.config
    lengths = [one.seq_len for one in spec.inputs]
    return (
        f"{output.plural(len(spec.inputs), 'input')} by {spec.order}{_ALIGNED[config.align]}, "
        f"seq_len {min(lengths)} to {max(lengths)}, "
        f"{sum(one.tokens for one in spec.inputs):,} tokens, on {output.plural(config.nproc, 'worker')} ({config.backend})"
    )
