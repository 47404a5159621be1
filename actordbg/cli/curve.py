"""`actordbg curve memory|time`: memory or time by length under each configuration, and the longest length that fits a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from actordbg.base.errors import UsageError
from actordbg.base.units import parse_seconds, parse_size
from actordbg.cli.options import (
    ConfirmOption,
    Where,
    approve,
    command_line,
    option,
    option_field,
    require_good,
    store_of,
    stored,
)
from actordbg.cli.output import plural, say_document
from actordbg.cli.setting_options import NONE, Given, takes_settings
from actordbg.config.replay_config import SETTINGS, TINY, validate

if TYPE_CHECKING:
    from actordbg.store.layout import Store


@dataclass(frozen=True)
class Question:
    """The options of both commands."""

    rank: ClassVar[int] = 2

    replays: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REPLAY",
            help="Replays by id, name, @1, last or all (default: all).",
            autocompletion=stored("replay"),
        ),
    ] = None
    where: Where = None
    at: list[int] | None = option_field(
        None, "Estimate this length, and whether it fits; repeatable.", metavar="LEN", min=1, max=2**53
    )
    by: Literal["seq_len", "tokens"] = option_field("seq_len", "Length unit: seq_len (one curve per batch size) or real tokens.")
    measure: str | None = option_field(
        None,
        "First replay synthetic inputs of these lengths under each REPLAY's configuration, changed by the given options.",
        metavar="LEN,LEN,...",
    )
    batch_size: int | None = option_field(None, "Rows of the --measure inputs (default: as in REPLAY).", min=1)
    yes: ConfirmOption = False


@takes_settings("curve")
def memory(
    ctx: typer.Context,
    budget: str | None = option(None, "Find the longest length that fits this memory, e.g. 80GB, 75GiB.", metavar="SIZE", rank=1),
    question: Question = Question(),
    settings: Given = NONE,
) -> None:
    """Show peak memory by length, and the longest that fits.

    Prints one curve per replayed configuration; --budget finds the longest length that fits. Marks lengths as measured or
    extrapolated. A length that ran out of memory never counts as fitting.

    Exit code: 1 if nothing was measured, if an --at length is not sure to fit --budget under every configuration shown, or if
    the result would be more than four times the longest measured length.

    Example: actordbg curve memory --budget 80GB --at 16384 --at 32768
    """
    if budget is not None and budget.strip().replace(".", "", 1).isdecimal():
        raise UsageError(f"--budget {budget} has no unit", hint=f"write --budget {budget}GB, or {budget}B if bytes are meant")
    most = None if budget is None else float(parse_size("--budget", budget))
    if most == 0:
        raise UsageError(f"--budget {budget} is zero", hint="for example 500MB, 10GB or 5GiB")
    _answer(ctx, question, settings, "memory", most)


@takes_settings("curve")
def time(
    ctx: typer.Context,
    budget: str | None = option(None, "Find the longest length that fits this time, e.g. 2s, 500ms.", metavar="TIME", rank=1),
    of: Literal["both", "forward", "backward"] = option("both", "Which time to model and to compare with --budget.", rank=2),
    question: Question = Question(),
    settings: Given = NONE,
) -> None:
    """Show time by length, and the longest that fits.

    Prints one curve of forward and backward per replayed configuration; --budget finds the longest length that fits. Leaves out
    warm-up and compiling inputs. Marks lengths as measured or extrapolated.

    Exit code: 1 if nothing was measured, if an --at length is not sure to fit --budget under every configuration shown, or if
    the result would be more than four times the longest measured length.

    Example: actordbg curve time last --budget 2s --by tokens
    """
    most = None if budget is None else parse_seconds("--budget", budget)
    _answer(ctx, question, settings, "time", most, of)


def _answer(
    ctx: typer.Context, question: Question, settings: Given, quantity: str, budget: float | None, passes: str = "both"
) -> None:
    """Print the curves of memory (`budget` in bytes) or of time (`budget` in seconds, over the `passes`)."""
    from actordbg.judge.load_replays import load
    from actordbg.measure.curve_document import curve_charts, document
    from actordbg.measure.curves import answer
    from actordbg.measure.measurements import gather, is_configuration

    store = store_of(ctx)
    flags = [*(["--batch-size"] if question.batch_size else []), *(SETTINGS[name].flag for name in settings)]
    if flags and question.measure is None:
        given = ", ".join(flags)
        raise UsageError(f"{given} changes nothing without --measure", hint=f"add --measure LEN,LEN,..., or drop {given}")
    names = _names(store, question)
    if question.measure is not None:
        names += _measured(store.require_writable(), names, question, settings)
    material = load(store, names, question.where)
    notes = list(material.notes)
    others = sum(not is_configuration(data) for data in material.replays)
    if others:
        notes.append(f"{plural(others, 'replay')} left out: truths and noise variants")
    measured, lengths = gather(material.replays, question.by), sorted(set(question.at or []))
    count = len(material.replays) - others
    curves = answer(measured, quantity, question.by, passes=passes, budget=budget, at=lengths, replays=count, notes=notes)
    say_document(document(curves, curve_charts(curves)), data=vars(curves))
    require_good(curves.good)


def _names(store: Store, question: Question) -> list[str]:
    from actordbg.catalog.query import newest_configuration, open_fresh

    names = question.replays or ["all"]
    # "last" here: the newest replay that can have a curve, so neither a truth nor a noise variant
    newest = newest_configuration(open_fresh(store)) if "last" in names else None
    return [newest.replay_id if newest is not None and name == "last" else name for name in names]


def _measured(store: Store, names: Sequence[str], question: Question, settings: Given) -> list[str]:
    """Replay synthetic inputs of the --measure lengths, once per distinct configuration of `names`; return the replay ids."""
    from actordbg.api.planning import counting
    from actordbg.cli.replaying import replaying
    from actordbg.config.as_ran import as_ran, costs
    from actordbg.judge.load_replays import load
    from actordbg.measure.measurements import plan_lengths, settled
    from actordbg.replay.supervise import run_replay, spec_and_owner

    if not question.replays:
        raise UsageError("--measure needs the replays whose configurations to use", hint="name a replay, or `last`")
    parts = [part.strip() for part in (question.measure or "").split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 9 and int(part) >= 2 for part in parts):
        raise UsageError(f"--measure {question.measure!r:.60} is not a list of lengths", hint="write it like 512,1024,2048")
    done: dict[tuple[str, int], str] = {}
    for data in load(store, names).replays:
        spec, owner = spec_and_owner(store, data.spec.replay_id)
        config = replace(settled(spec.config, data.resolved), **settings)
        validate(config)
        batch = question.batch_size or max((item.batch_size for item in data.spec.inputs), default=1)
        if config.model != TINY:
            approve(f"replay {data.spec.replay_id}, whose model {config.model!r} would be loaded", owner, question.yes)
        key = (str(costs(as_ran(config))), batch)
        if key in done or config.truth is not None or config.vary is not None:
            continue
        spec = plan_lengths(store, config, {int(part) for part in parts}, batch, command=command_line())
        label = f"measuring as {data.spec.replay_id}"
        with replaying(store, label, len(spec.inputs)) as advance:
            advance(0, note="starting the workers")
            run_replay(store, spec, counting(advance))
        done[key] = spec.replay_id
    return list(done.values())
