"""`actordbg replay`: run captured inputs through a standalone actor, and keep what came of each."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.base.errors import ActordbgError, Unsupported, UsageError
from actordbg.cli import output
from actordbg.cli import replay_options as opt
from actordbg.cli.options import Json, Quiet, Where, settings_of, store_of
from actordbg.cli.replay_answer import ReplayAnswer, answer_of, render, shares_of

if TYPE_CHECKING:
    from actordbg.formats.replay_record import ReplayConfig, ReplaySpec
    from actordbg.replay.plan import Plan
    from actordbg.replay.supervise import Progress
    from actordbg.store.layout import Store

_PANEL = "The inputs"
_BESIDE_RESUME = ("resume", "dry_run", "quiet", "as_json")

MaxInputs = Annotated[
    int | None,
    typer.Option(
        "--max-inputs", min=1, metavar="N", rich_help_panel=_PANEL, help="At most N inputs, in all workers together."
    ),
]
InputFile = Annotated[
    list[Path] | None,
    typer.Option(
        "--input-file",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Replay this dump file, pack, or PACK#ID; may be repeated.",
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        "--order", metavar="time|length|shuffle", rich_help_panel=_PANEL, help="In which order (default: time)."
    ),
]
Shuffle = Annotated[
    bool,
    typer.Option(
        "--shuffle-inputs", rich_help_panel=_PANEL, help="The same as --order shuffle: every worker in its own."
    ),
]
RandomSeed = Annotated[int, typer.Option("--random-seed", rich_help_panel=_PANEL, help="Of the shuffled order.")]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[REPLAY|last]",
        help="Go on with a replay where it stopped, under its own configuration.",
    ),
]
KeepTensors = Annotated[
    bool | None,
    typer.Option(
        "--keep-tensors/--no-keep-tensors",
        help="Keep each input's log-probs and entropies, for `compare` (default: keep).",
    ),
]
KeepGradients = Annotated[
    bool | None, typer.Option("--keep-gradients", help="Keep each parameter's gradient too, whole or a fixed sample.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")]


def replay(
    ctx: typer.Context,
    where: Where = None,
    max_inputs: MaxInputs = None,
    input_file: InputFile = None,
    order: Order = None,
    shuffle_inputs: Shuffle = False,
    random_seed: RandomSeed = 42,
    model: opt.Model = None,
    num_layers: opt.NumLayers = None,
    dtype: opt.Dtype = None,
    attn: opt.Attn = None,
    no_flash_attn: opt.NoFlashAttn = False,
    packing: opt.Packing = None,
    compile: opt.Compile = None,
    compile_backend: opt.CompileBackend = None,
    deepcompile: opt.Deepcompile = None,
    backend: opt.Backend = None,
    zero_stage: opt.ZeroStage = None,
    nproc: opt.Nproc = None,
    backward: opt.Backward = None,
    seed: opt.Seed = None,
    temperature: opt.Temperature = None,
    tp: opt.Tp = None,
    ring: opt.Ring = None,
    dist_backend: opt.DistBackend = None,
    align: opt.Align = None,
    oracle: opt.Oracle = None,
    timeout: opt.Timeout = None,
    keep_tensors: KeepTensors = None,
    keep_gradients: KeepGradients = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Replay recorded inputs, without the training.

    Runs them through OpenRLHF's Actor under a configuration. Starts the workers itself (with deepspeed's own launcher for
    --backend deepspeed). An input that crashes or hangs a worker costs only itself. Results are kept as they come; Ctrl-C keeps
    what is done, and --resume goes on.
    Exit code 1 if an input failed, crashed or hung, or if ranks differ on the same input under --align same.

    Example: actordbg replay --where "seq_len>1800 and rank=0" --max-inputs 3 --backend deepspeed --zero-stage 3
    """
    flags = {
        "model": model, "num_layers": num_layers, "dtype": dtype, "attn": attn, "packing": packing, "compile": compile,
        "compile_backend": compile_backend, "deepcompile": deepcompile, "backend": backend, "zero_stage": zero_stage,
        "nproc": nproc, "backward": backward, "seed": seed, "temperature": temperature, "timeout": timeout,
        "keep_tensors": keep_tensors, "keep_gradients": keep_gradients, "tp": tp, "ring": ring,
        "dist_backend": dist_backend, "align": align, "oracle": oracle,
    }  # fmt: skip
    if is_left_to_rank_0(flags):
        return
    store = store_of(ctx).require()
    chosen = chosen_order(order, shuffle_inputs)
    if resume is not None:
        _only_resume(ctx)
        plan = _resumed(store, resume)
    else:
        config = opt.build_config(settings_of(ctx).replay, flags, no_flash_attn=no_flash_attn)
        plan = planned(store, config, where, input_file or [], chosen, max_inputs, random_seed)
    answer, problem = _run(store, plan, dry_run=dry_run, quiet=quiet or as_json)
    output.emit(answer, render, as_json)
    if problem is not None:
        raise problem
    if answer.status == "interrupted":
        raise typer.Exit(130)
    if not answer.good and not dry_run:
        raise typer.Exit(1)


def chosen_order(order: str | None, shuffle: bool) -> str:
    """The order that --order and --shuffle-inputs come to; UsageError where they contradict each other."""
    from actordbg.replay.plan import ORDERS

    if shuffle and order not in (None, "shuffle"):
        raise UsageError(f"--shuffle-inputs and --order {order} contradict each other", hint="give one of them")
    chosen = "shuffle" if shuffle else order or "time"
    if chosen not in ORDERS:
        raise UsageError(f"--order {chosen} is not known", hint=f"one of: {', '.join(ORDERS)}")
    return chosen


def is_left_to_rank_0(flags: dict[str, Any]) -> bool:
    """Under `deepspeed -m actordbg replay ...` this command runs once for each rank. Rank 0 supervises; the others leave.

    Rank 0 starts workers of its own, as many as the launcher started processes, with deepspeed where deepspeed did.
    """
    from actordbg.replay.launch import surrounding_launcher

    around = surrounding_launcher(os.environ)
    if around is None:
        return False
    if around.local_size < around.world_size:
        raise Unsupported(
            "a replay runs on one machine, and this launcher started processes on several",
            hint="run `actordbg replay --nproc N` on one of them, without a launcher",
        )
    if around.rank > 0:
        return True
    flags["nproc"] = flags["nproc"] or around.world_size
    if around.deepspeed:
        flags["backend"] = flags["backend"] or "deepspeed"
    return False


def _only_resume(ctx: typer.Context) -> None:
    """Refuse what was typed beside --resume and would have no effect. What a launcher around us implies was not typed."""
    named = [
        (option.secondary_opts if ctx.params[option.name] is False and option.secondary_opts else option.opts)[0]
        for option in ctx.command.params
        if option.name in ctx.params and option.name not in _BESIDE_RESUME and _was_typed(ctx, option.name)
    ]
    if named:
        raise UsageError(
            f"--resume goes on under the replay's own configuration, so {', '.join(named)} cannot be given",
            hint="leave it out, or start a new replay",
        )


def _was_typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def planned(
    store: Store,
    config: ReplayConfig,
    where: str | None,
    files: Sequence[Path],
    order: str,
    max_inputs: int | None,
    shuffle_seed: int,
) -> Plan:
    """The plan of the dumps that --where, --input-file and --max-inputs select."""
    from actordbg.catalog.query import open_fresh
    from actordbg.config.choices import installed_versions
    from actordbg.replay.plan import Row, make_plan
    from actordbg.replay.selection import rows_of_catalog, rows_of_files

    if files and where is not None:
        raise UsageError("--where and --input-file exclude each other", hint="give one of them")
    rows: Sequence[Row]
    enough = None if config.align == "rank" else max_inputs  # of whole calls nobody knows how many rows they take
    rows = rows_of_files(store, files) if files else rows_of_catalog(open_fresh(store, where), where, order, enough)
    return make_plan(
        rows,
        config,
        order=order,
        max_inputs=max_inputs,
        shuffle_seed=shuffle_seed,
        where=where,
        command=shlex.join(["actordbg", *sys.argv[1:]]),
        versions=installed_versions(),
    )


def _resumed(store: Store, name: str) -> Plan:
    from actordbg.replay.plan import Plan
    from actordbg.replay.supervise import load_spec

    return Plan(load_spec(store, name))


def _run(store: Store, plan: Plan, *, dry_run: bool, quiet: bool) -> tuple[ReplayAnswer, Exception | None]:
    """The answer, and the error that ended the replay before every input had its result, if one did."""
    from actordbg.actor.known_failures import check_config, refuse_findings
    from actordbg.replay.selection import defaults_of

    spec = plan.spec
    if not spec.inputs:
        note = what_there_is(store, spec.where)
        return ReplayAnswer(None, "nothing to replay", 0, skipped=plan.skipped, note=note), None
    findings = check_config(spec.config, defaults=defaults_of(store.root, spec.inputs))
    refuse_findings(findings)
    for finding in findings if not quiet else ():
        output.note(f"{finding.severity}[{finding.id}]: {finding.message}")
    for note in plan.notes:
        output.note(note)
    for reason, count in plan.skipped.items():
        output.note(f"left out {output.plural(count, 'dump')}: {reason}")
    known = tuple(asdict(finding) for finding in findings)
    if dry_run:
        note, shares = _plan_text(spec), shares_of(spec)
        return ReplayAnswer(
            None, "planned", len(spec.inputs), skipped=plan.skipped, findings=known, note=note, shares=shares
        ), None
    answer, problem = _supervised(store, spec, quiet)
    return replace(answer, skipped=plan.skipped, findings=known), problem


def _supervised(store: Store, spec: ReplaySpec, quiet: bool) -> tuple[ReplayAnswer, Exception | None]:
    """Run it with a progress bar, and read the answer from the store, also after a Ctrl-C or a launch that went wrong.

    What goes wrong before anything was started (its folder cannot be written, another process runs it) is raised.
    """
    from actordbg.formats.journal import read_results
    from actordbg.replay.live_catalog import LiveCatalog
    from actordbg.replay.supervise import run_replay

    folder = store.replays / spec.replay_id
    done = len(read_results(folder))
    catalog = LiveCatalog(store)
    problem: Exception | None = None
    begun = False
    restarts = 0

    def on_event(event: Progress) -> None:
        nonlocal begun, restarts
        begun = True
        restarts += event.kind == "attempt" and bool(event.text)
        if event.kind == "result":
            catalog.touch()
        _show(event, advance)

    try:
        with output.progress("replaying", len(spec.inputs), quiet=quiet) as advance:
            advance(done, note="starting the workers")
            run_replay(store, spec, on_event, on_tick=catalog.tick)
    except KeyboardInterrupt:
        output.note(f"interrupted; what is done is kept, `actordbg replay --resume {spec.replay_id}` goes on")
    except (ActordbgError, OSError) as error:
        if not begun:
            raise
        problem = error
    catalog.flush()
    if catalog.problem is not None:
        output.note(f"the catalog could not be updated ({catalog.problem}); the results are in {folder}")
    return answer_of(store, spec, restarts), problem


def _show(event: Progress, advance: Any) -> None:
    if event.kind == "attempt" and event.text:
        advance(0, note=f"starting again: {event.text[:100]}")
    elif event.kind == "ready":
        advance(0, note="running")
    elif event.kind == "result":
        advance(1, note="running" if event.text == "passed" else f"last: {event.text}")


def what_there_is(store: Store, where: str | None) -> str:
    """Why nothing matched, in terms of what the store holds."""
    from actordbg.catalog.query import dump_extent

    count, shortest, longest = dump_extent(store)
    if not count:
        return "the store holds no dumps: `actordbg dump enable`, `dump import` or `dump create` bring some"
    what = f"no dump matches {where}" if where else "no dump can be replayed"
    return f"{what}; the store holds {output.plural(count, 'dump')} with seq_len {shortest} to {longest}"


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
