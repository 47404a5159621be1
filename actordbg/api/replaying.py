"""`replay`: plan a replay or continue one, run it, answer with its results; `noise`; the actor built alone, and one forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actordbg.actor.model_code import require_consent
from actordbg.actor.models import require_empty, save_checkpoint
from actordbg.actor.signatures import explain, signature_of
from actordbg.api.desk import Desk, DumpSelection, counting
from actordbg.api.reports import replay_answer
from actordbg.base.errors import ActordbgError, LaunchProblem
from actordbg.base.units import human_bytes, listed, plural, some
from actordbg.compare.noise_floor import conclusion, deterministic, measure_noise, moves_most, noise_page, runs_of, tokens_of
from actordbg.config.as_ran import on_machine
from actordbg.config.replay_config import TINY
from actordbg.config.sources import FSDP_OFF, fsdp_is_off
from actordbg.document.blocks import FAILED, Block, Items, Paragraph, Verdict, verdict_in
from actordbg.document.command_result import CommandResult
from actordbg.dumps.create import create_dumps
from actordbg.records.journal import read_events, read_results
from actordbg.records.replay_record import PASSED, ReplaySpec
from actordbg.replay import supervise
from actordbg.replay.plan import Plan
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import Progress, spec_and_owner
from actordbg.steps.recorded_step import recorded_step
from actordbg.steps.run_step import run_step
from actordbg.steps.step_verdict import step_blocks, step_data
from actordbg.store.layout import Store

VOCABULARY = 512
"""Token ids of the synthetic input are below this, so every model has them."""


def new(desk: Desk, chosen: DumpSelection, flags: dict[str, Any], *, dry_run: bool) -> CommandResult:
    """Replay a selection, or say what would run. A replay of the whole store may need the client's agreement."""
    whole = chosen == replace(DumpSelection(), order=chosen.order, seed=chosen.seed)
    chosen = desk.selected(chosen, writes=not dry_run)
    requested, plan, own = desk.of_recorded_model("replay", flags, chosen, ask=not dry_run)
    if whole:
        desk.client.agrees_to_all(len(plan.spec.inputs), dry_run=dry_run)
    return _run(desk, plan, dry_run=dry_run, settings_from=requested.sources, recorded_model=own)


def resumed(desk: Desk, name: str, *, dry_run: bool) -> CommandResult:
    """Continue a stopped replay under its own configuration. Asks for approval of what another user wrote."""
    (desk.store.require if dry_run else desk.store.require_writable)()
    spec, owner = spec_and_owner(desk.store, name)
    if spec.config.backend == "fsdp2" and fsdp_is_off():
        desk.client.note(f"{FSDP_OFF} has no effect: a replay that continues keeps its own configuration")
    desk.client.approve(f"replay {spec.replay_id}, whose model is {spec.config.model!r}", owner)
    require_consent(spec.config.model, desk.store.models)
    return _run(desk, Plan(spec), dry_run=dry_run, settings_from={}, recorded_model=None)


def _run(desk: Desk, plan: Plan, *, dry_run: bool, **about: Any) -> CommandResult:
    """Run a planned replay. The answer is read from the store, even after Ctrl-C or a failed launch if the client wants that.

    Raises errors from before the start (its folder cannot be written, another process runs it). about: more of its JSON.
    """
    spec, store = plan.spec, desk.store
    if not dry_run:
        desk.client.begins(f"replay {spec.replay_id}", spec.config)
    about |= {"selected": len(spec.inputs), "skipped": plan.skipped, "known_failures": desk.runnable(spec.config, spec.inputs)}
    for text in plan.notes:
        desk.client.note(text)
    if dry_run:
        return _planned(store, spec, about)
    done = len(read_results(store.replays / spec.replay_id))
    begun, restarts = False, 0

    def on_event(event: Progress) -> None:
        nonlocal begun, restarts
        begun = True
        restarts += event.kind == "attempt" and bool(event.text)
        counting(advance)(event)

    watched, options = desk.client.watching(spec, on_event)
    try:
        with desk.progress("replaying", len(spec.inputs), f"actordbg replay --resume {spec.replay_id}") as advance:
            advance(done, note="starting the workers")
            supervise.run_replay(store, spec, watched, **options)
    except (ActordbgError, OSError) as error:
        if not begun or not desk.client.ended(error):
            raise
    return replay_answer(store, spec, restarts=restarts, interrupted=desk.client.was_stopped, **about)


_ALIGNED = {
    None: "",
    "same": ", each on all ranks (--align same)",
    "rank": ", call by call (--align rank)",
    "shuffle": ", each rank its share in a different order (--align shuffle)",
}


def _planned(store: Store, spec: ReplaySpec, about: Mapping[str, Any]) -> CommandResult:
    """Answer a dry run: the inputs and each replica's share."""
    config, count = spec.config, len(spec.inputs)
    done = read_results(store.replays / spec.replay_id)
    left = replace(spec, inputs=tuple(item for item in spec.inputs if item.dump_id not in done))
    lengths = [item.seq_len for item in spec.inputs]
    progress = f"; {count - len(left.inputs):,} are done" if done else ""
    progress += "" if left.inputs else "; nothing is left to do"
    text = (
        f"{plural(count, 'input')} by {spec.order}{_ALIGNED[config.align]}, seq_len {min(lengths)} to {max(lengths)}, "
        f"{sum(item.tokens for item in spec.inputs):,} tokens, on {plural(config.nproc, 'worker')} ({config.backend})"
        f"{progress}"
    )
    shares = []
    for lane in range(config.lanes):
        mine = left.inputs[lane :: config.lanes]
        ranks = range(lane * config.lane_width, (lane + 1) * config.lane_width)
        dumps, seq_lens = [item.dump_id for item in mine], [item.seq_len for item in mine]
        shares.append({"ranks": list(ranks), "dumps": dumps, "seq_lens": seq_lens})
    data = {**about, "replay_id": None, "good": True, "status": "planned", "shares": shares}
    return CommandResult(True, data, [Paragraph(text), Items([_share(share) for share in shares])])


def _share(share: dict[str, Any]) -> str:
    who = ("rank " if len(share["ranks"]) == 1 else "ranks ") + listed(share["ranks"])
    if not share["dumps"]:
        return f"{who}: nothing"
    runs = [(length, len(list(same))) for length, same in groupby(share["seq_lens"])]
    lengths = [f"{length} x {count}" if count > 1 else str(length) for length, count in runs]
    return f"{who}: {plural(len(share['dumps']), 'input')}, seq_len {some(lengths, 8)}"


def noise(desk: Desk, chosen: DumpSelection, flags: Mapping[str, Any]) -> CommandResult:
    """Replay the same inputs unchanged and in ways that must not matter, and measure how far the results move."""
    chosen = desk.selected(chosen)
    config = desk.asked(flags, desk.first_record(chosen)).config
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


def built_alone(desk: Desk, flags: Mapping[str, Any], batch_size: int, seq_len: int, save: Path | None) -> CommandResult:
    """Build the actor, and run one forward of a synthetic input: the settings that the built actor has, and what it cost.

    save: a new folder for the checkpoint of an actor that ran.

    Times in seconds (the slowest rank's), memory in bytes (the largest rank's). Raises the worker's error if it is one of
    actordbg's, and LaunchProblem if a worker died without reporting an error.
    """
    config = desk.asked(flags).config
    if save is not None:
        require_empty(save)
    with TemporaryDirectory(prefix="actordbg-init-") as folder:
        store = Store(Path(folder) / "store")
        create_dumps(store, config.lanes, batch_size, seq_len, vocab_size=VOCABULARY, seed=config.seed or 0, run="init")
        apart = replace(desk, store=store)
        spec = apart.planned("actor init", config, DumpSelection()).spec
        findings = apart.runnable(config, spec.inputs, minor=False)
        data = _tried(store, spec) | {"batch_size": batch_size, "seq_len": seq_len, "known_failures": findings}
        if save is not None and data["ok"]:
            save_checkpoint(config.model, store.models, config.num_layers, save)
            data["saved"] = str(save)
    word, said = ("", "the actor was built and ran") if data["ok"] else (FAILED, "the actor did not run")
    first = "actordbg status" if desk.store.exists() else "actordbg demo"
    following = first if data["ok"] else "actordbg doctor"
    blocks: list[Block] = [Verdict(word, said, next=following), Items([f"{label}: {text}" for label, text in _facts(data)])]
    return CommandResult(data["ok"], data, blocks)


def _tried(store: Store, spec: ReplaySpec) -> dict[str, Any]:
    failed: dict[str, Any] | None = None
    try:
        supervise.run_replay(store, spec)
    except LaunchProblem:
        journals = sorted((store.replays / spec.replay_id).glob("rank*.jsonl"))
        failed = next((event for path in journals for event in read_events(path) if event["event"] == "broken"), None)
        if failed is None or failed["error_class"].endswith("ModuleNotFoundError"):
            raise
        failed["signature"] = signature_of(failed["error_class"], failed["error"], failed["trace"])
    data = data_of(store, spec)
    results = data.results
    failed = failed or next((vars(result) for result in results if result.status != PASSED), None)
    signature = failed and failed["signature"]
    explanation, ways_out = explain(signature or "") or (None, ())
    figures = {
        name: max((value for result in results if (value := getattr(result, name)) is not None), default=None)
        for name in ("forward_s", "backward_s", "peak_memory_bytes")
    }
    figures |= {name: getattr(results[0], name) if results else None for name in ("logprob_mean", "loss", "grad_norm", "graphs")}
    return {
        "ok": failed is None,
        "asked": spec.config.to_dict(),
        "resolved": data.resolved,
        **figures,
        "error": f"{failed['error_class']}: {failed['error']}" if failed else None,
        "signature": signature,
        "explanation": explanation,
        "ways_out": list(ways_out),
    }


def _facts(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if built := answer["resolved"]:
        vocabulary = f"{plural(built['num_layers'], 'layer')}, vocabulary {built['vocab_size']:,}"
        yield "model", f"{built['model']} ({built['model_class']}, {vocabulary})"
        yield "parameters", f"{built['parameters']:,} in {built['dtype']}"
        yield "built", on_machine(answer["asked"], built)
        yield "load", f"{built['load_s']:.2f} s"
        if answer["forward_s"] is not None:
            compiled = f", {plural(answer['graphs'], 'graph')} compiled" if answer["graphs"] else ""
            yield "forward", f"{answer['forward_s']:.3f} s on {answer['batch_size']} x {answer['seq_len']}{compiled}"
        if answer["backward_s"] is not None:
            figures = f"loss {answer['loss']:.4f}, gradient norm {answer['grad_norm']:.4f}"
            yield "backward", f"{answer['backward_s']:.3f} s, {figures}"
        yield "peak memory", human_bytes(answer["peak_memory_bytes"])
    if "saved" in answer:
        yield "saved", f"{answer['saved']}, for --model"
    if not answer["ok"]:
        yield "failed", str(answer["error"])
        yield "signature", str(answer["signature"])
        if answer["explanation"]:
            yield "why", answer["explanation"]
        yield from (("try", way) for way in answer["ways_out"])


def replayed_step(desk: Desk, number: int, run: str | None, flags: Mapping[str, Any]) -> CommandResult:
    """Replay a step of a run under these settings.

    Raises what `recorded_step` and `run_step` raise, and Unsupported or EnvironmentProblem for what cannot run here.
    """
    store = desk.store.require_writable()
    step = recorded_step(store, run, number)
    config = desk.asked(flags, step.micro_batches[0].loss.record).config
    inputs = tuple(each.forward for each in step.micro_batches)
    desk.runnable(config, inputs, announce=False)
    with desk.progress("replaying the step", 2 * len(inputs)) as advance:
        figures = run_step(store, step, config, counting(advance))
    blocks = step_blocks(figures)
    if config.model == TINY:
        blocks = [replace(each, toy=True) if isinstance(each, Verdict) else each for each in blocks]
    verdict = verdict_in(blocks)
    good = verdict is not None and verdict.good
    return CommandResult(good, step_data(figures) | {"good": good}, blocks)
