"""`actordbg locate`: name the module in which a configuration goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from actordbg.cli.options import ConfirmOption, approve, refuse_beside, require_good, stored
from actordbg.cli.output import say_document
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.setting_options import NONE, Given, takes_settings

if TYPE_CHECKING:
    from actordbg.document.blocks import Block
    from actordbg.locate.verdict import LocalVerdict
    from actordbg.records.replay_record import ReplaySpec, ResultRecord
    from actordbg.store.layout import Store


@takes_settings("locate")
def locate(
    ctx: typer.Context,
    replay: str | None = typer.Argument(
        None,
        metavar="REPLAY",
        help="Use the configuration and inputs of this replay: an id, a name, `@1` or `last`.",
        autocompletion=stored("replay"),
    ),
    chosen: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    yes: ConfirmOption = False,
) -> None:
    """Name the module in which a configuration goes wrong.

    Loads transformers' own model of the same checkpoint beside the Actor's. Compares what both are, bit for bit: parameters,
    buffers, ties, attributes. Then runs one input (most rows, most padding) with the truth's values in front of every module, and
    measures what each module adds, in units of what the dtype costs a healthy model there: 1.00 everywhere if all is right.

    Exit code: 1 if anything is wrong or nothing could be checked; 5 if no dump was selected.

    Example: actordbg locate last

    Example: actordbg locate --where "rank=0" --model /models/llama-3.1-8b --dtype bf16 --packing
    """
    from actordbg.cli import replaying
    from actordbg.locate.verdict import verdict_of

    flags = replaying.flags_of(settings)
    if replay is not None:
        refuse_beside(ctx, "a replay has its own configuration and inputs", "replay", "yes")
    store, chosen = replaying.opened(ctx, chosen)
    if replay is not None:
        spec = spec_of(store, replay, yes)
    else:
        spec = replaying.planned(store, replaying.asked_for(ctx, flags).config, chosen).spec
    if not spec.inputs:
        raise replaying.nothing_to("locate a fault with", store, chosen)
    spec, results = run_located(store, spec)
    local = verdict_of(results)
    blocks, answer = _answer(spec, results, local)
    say_document(blocks, data=answer)
    require_good(answer["good"])


def run_located(store: Store, spec: ReplaySpec) -> tuple[ReplaySpec, Sequence[ResultRecord]]:
    """Judge the model of `spec` module by module on one of its inputs, in another replay; return that and its results."""
    from actordbg.api.planning import counting
    from actordbg.cli import replaying
    from actordbg.replay.replay_data import data_of
    from actordbg.replay.supervise import run_replay

    spec = of_one_input(spec)
    replaying.require_runnable(store, spec)
    with replaying.replaying(store, "locating", 1) as advance:
        run_replay(store, spec, on_event=counting(advance))
    return spec, data_of(store, spec).results


def spec_of(store: Store, name: str, yes: bool) -> ReplaySpec:
    """Read a replay's specification. Raises UsageError for a truth; asks before another user's model is loaded."""
    from actordbg.actor.model_code import require_consent
    from actordbg.base.errors import UsageError
    from actordbg.catalog.query import open_fresh
    from actordbg.cli.compare_work import meant
    from actordbg.replay.supervise import spec_and_owner

    spec, owner = spec_and_owner(store, meant(open_fresh(store), name))
    if spec.config.truth is not None:
        raise UsageError(f"replay {spec.replay_id} is itself a truth", hint="name a replay of the configuration to check")
    approve(f"replay {spec.replay_id}, whose model is {spec.config.model!r}", owner, yes)
    require_consent(spec.config.model, store.models)
    return spec


def of_one_input(spec: ReplaySpec) -> ReplaySpec:
    """Make a new replay of the input that shows the most, in which every place is judged and nothing else is kept."""
    from actordbg.base.units import new_replay_id
    from actordbg.cli.options import command_line
    from actordbg.formats.dump_record import now_timestamp
    from actordbg.replay.plan import law_order

    config = replace(
        spec.config, laws=0, vary=None, truth=None, align=None, keep_tensors=False, keep_gradients=False, memory_snapshot=False
    )
    return replace(
        spec,
        replay_id=new_replay_id(),
        created_at=now_timestamp(),
        config=config,
        inputs=(spec.inputs[law_order(spec.inputs)[0]],),
        command=command_line(),
        locate=1,
    )


def _answer(spec: ReplaySpec, results: Sequence[ResultRecord], local: LocalVerdict | None) -> tuple[list[Block], dict[str, Any]]:
    """Build the document, and its JSON: verdict, sentence, what the model is, every wrong place, what was not checked."""
    from actordbg.base.foreign_text import in_shell
    from actordbg.document.blocks import FAILED, Heading, Items, Paragraph
    from actordbg.judge.token_charts import heat_chart
    from actordbg.locate.verdict import NOT_CHECKED, RIGHT, WRONG, lines_of
    from actordbg.records.replay_record import PASSED

    failed = next((result for result in results if result.status != PASSED), None)
    word, said = (local.word, local.said) if local else (NOT_CHECKED, "the input did not run")
    if failed is not None:
        word, said = FAILED, f"the input did not pass: {(failed.error or failed.status).strip().partition(chr(10))[0]}"
    lines = tuple(lines_of(local)) if local else ()
    following = {
        RIGHT: f"actordbg check --model {in_shell(spec.config.model)}",
        WRONG: f"actordbg compare {spec.replay_id} truth",
    }.get(word, f"actordbg report {spec.replay_id}")
    blocks: list[Block] = [Heading(f"{word}: {said}", 1)]
    if lines:
        blocks.append(Items(lines))
    if local and local.located and (chart := heat_chart(local.located)):
        blocks.append(chart)
    blocks.append(Paragraph(f"next: {following}"))
    return blocks, {
        "word": word,
        "good": word == RIGHT,
        "sentence": f"{word}: {said}",
        "replay_id": spec.replay_id,
        "next": following,
        **({"looked_at": local.looked_at, "unchecked": local.unchecked, **asdict(local)} if local else {}),
    }
