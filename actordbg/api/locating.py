"""The replay that judges a model module by module, and its answer: the cause and the place of a wrong configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from actordbg.api.desk import Desk
from actordbg.api.planning import counting
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import new_replay_id
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Block, Heading, Items, Verdict
from actordbg.document.command_result import CommandResult
from actordbg.formats.dump_record import now_timestamp
from actordbg.judge.token_charts import heat_chart
from actordbg.locate.verdict import lines_of, verdict_of
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord
from actordbg.replay.plan import law_order
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import run_replay


def of_one_input(spec: ReplaySpec, command: str = "") -> ReplaySpec:
    """Make a new replay of the input that shows the most, in which every place is judged and nothing else is kept."""
    config = replace(
        spec.config, laws=0, vary=None, truth=None, align=None, keep_tensors=False, keep_gradients=False, memory_snapshot=False
    )
    return replace(
        spec,
        replay_id=new_replay_id(),
        created_at=now_timestamp(),
        config=config,
        inputs=(spec.inputs[law_order(spec.inputs)[0]],),
        command=command,
        locate=1,
    )


def run_located(desk: Desk, spec: ReplaySpec, command: str) -> tuple[ReplaySpec, Sequence[ResultRecord]]:
    """Judge the model of `spec` module by module on one of its inputs, in another replay; return that and its results.

    command: what that replay records as its command.
    """
    spec = of_one_input(spec, command)
    desk.runnable(spec)
    with desk.progress("locating", 1) as advance:
        run_replay(desk.store, spec, on_event=counting(advance))
    return spec, data_of(desk.store, spec).results


def locate_answer(spec: ReplaySpec, results: Sequence[ResultRecord]) -> CommandResult:
    """Build the answer: what the model is, every wrong place, what was not checked."""
    local = verdict_of(results)
    failed = next((result for result in results if result.status != PASSED), None)
    word, said = (local.word, local.said) if local else (UNCHECKED, "the input did not run")
    if failed is not None:
        word, said = FAILED, f"the input did not pass: {(failed.error or failed.status).strip().partition(chr(10))[0]}"
    following = {
        RIGHT: f"actordbg check --model {in_shell(spec.config.model)}",
        WRONG: f"actordbg explain {spec.replay_id}",
    }.get(word, f"actordbg report {spec.replay_id}")
    unchecked = local.unchecked if local and word in (RIGHT, WRONG) else ()
    blocks: list[Block] = [Heading(f"locate {spec.replay_id}", 1), Verdict(word, said, not_checked=unchecked[:1], next=following)]
    if local and (lines := tuple(lines_of(local))):
        blocks.append(Items(lines))
    if local and local.located and (chart := heat_chart(local.located)):
        blocks.append(chart)
    about = {"looked_at": local.looked_at, "unchecked": local.unchecked, **asdict(local)} if local else {}
    return CommandResult(word == RIGHT, {"word": word, "good": word == RIGHT, "replay_id": spec.replay_id, **about}, blocks)
