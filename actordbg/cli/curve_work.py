"""The work of `actordbg curve`: measuring what is missing, and how the answer is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import typer

from actordbg.base.errors import UsageError
from actordbg.campaign import run_matrix as matrices
from actordbg.catalog.query import newest_configuration, open_fresh
from actordbg.cli import output
from actordbg.cli.curve_options import Question
from actordbg.cli.live_progress import counting, replaying
from actordbg.cli.options import approve, chosen_format, command_line, store_of
from actordbg.cli.page_file import check_page, write_page
from actordbg.cli.setting_options import Given
from actordbg.config.as_ran import as_ran, costs
from actordbg.config.replay_config import SETTINGS, TINY, validate
from actordbg.document import chart_file
from actordbg.document.blocks import Paragraph, as_data
from actordbg.document.renderings import as_markdown, as_text
from actordbg.judge.load_replays import load
from actordbg.measure.curve_document import as_csv, curve_banner, curve_chart, document, explanations
from actordbg.measure.curves import answer
from actordbg.measure.measurements import gather, is_configuration, plan_lengths, settled
from actordbg.replay.supervise import run_replay, spec_and_owner
from actordbg.store.layout import Store


def answer_question(
    ctx: typer.Context, asked: Question, settings: Given, quantity: str, budget: float | None, passes: str = "both"
) -> None:
    """Answer for memory (`budget` in bytes) or time (in seconds, of the `passes`)."""
    if asked.explained:
        return output.say_lines(as_text(explanations(quantity)))
    chosen = chosen_format(asked.format, asked.as_json)
    check_page(asked.html)
    chart_file.check("--plot", asked.plot)
    store = store_of(ctx)
    flags = [*(["--batch-size"] if asked.batch_size else []), *(SETTINGS[name].flag for name in settings)]
    if flags and asked.measure is None:
        given = ", ".join(flags)
        raise UsageError(f"{given} changes nothing without --measure", hint="add --measure LEN,LEN,..., or leave it out")
    names = _names(store, asked)
    if asked.measure is not None:
        names += _measured(store.require_writable(), names, asked, settings)
    material = load(store, names, asked.where)
    notes = list(material.notes)
    others = sum(not is_configuration(data) for data in material.replays)
    if others:
        notes.append(f"{output.plural(others, 'replay')} left out: truths and noise variants")
    measured, lengths, count = gather(material.replays, asked.by), sorted(set(asked.at or [])), len(material.replays) - others
    found = answer(measured, quantity, asked.by, passes=passes, budget=budget, at=lengths, replays=count, notes=notes)
    blocks = document(found, asked.limit)
    charts = [chart] if (chart := curve_chart(found)) else []
    blocks[2:2] = [curve_banner(found), *charts]
    whole = [*blocks, *explanations(quantity)]
    write_page(asked.html, whole)
    if chosen == "json":
        output.emit(vars(found) | as_data(whole), lambda _: None, True)
    elif chosen == "text":
        told = f"How to read the figures: `actordbg curve {quantity} --explain`."
        output.say_lines(as_text([*blocks, Paragraph(told)]))
    else:
        output.say_lines(as_csv(found) if chosen == "csv" else as_markdown(whole))
    if asked.plot is not None and chart_file.save(charts, asked.plot):
        output.note(f"wrote {asked.plot}")
    if not found.good:
        raise typer.Exit(1)


def _names(store: Store, asked: Question) -> list[str]:
    if asked.matrix is None:
        names = asked.replays or ["all"]
        # the newest that can have a curve: truths and noise variants cannot
        newest = newest_configuration(open_fresh(store)) if "last" in names else None
        return [newest.replay_id if newest is not None and name == "last" else name for name in names]
    if asked.replays:
        raise UsageError("REPLAY and --matrix exclude each other", hint="give one of them")
    names = [cell.replay_id for cell in matrices.load(store, asked.matrix).cells if cell.replay_id is not None]
    if not names:
        raise UsageError(f"no cell of the matrix {asked.matrix} was replayed", hint="`actordbg matrix --resume` goes on")
    gone = [name for name in names if not (store.replays / name).is_dir()]
    if len(gone) == len(names):
        raise UsageError(f"all replays of the matrix {asked.matrix} are gone", hint="`actordbg matrix` runs a new one")
    if gone:
        output.note(f"left out, since they are gone from the store: {', '.join(gone)}")
    return [name for name in names if name not in gone]


def _measured(store: Store, names: Sequence[str], asked: Question, settings: Given) -> list[str]:
    """Replays of made-up inputs of the lengths that --measure names, one for each different configuration of `names`."""
    if not asked.replays and asked.matrix is None:
        raise UsageError("--measure needs the replays whose configurations it is to use", hint="name one, or `last`")
    parts = [part.strip() for part in (asked.measure or "").split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 9 and int(part) >= 2 for part in parts):
        raise UsageError(f"--measure {asked.measure!r:.60} is not a list of lengths", hint="write it like 512,1024,2048")
    done: dict[tuple[str, int], str] = {}
    for data in load(store, names).replays:
        spec, owner = spec_and_owner(store, data.spec.replay_id)
        config = replace(settled(spec.config, data.resolved), **settings)
        validate(config)
        batch = asked.batch_size or max((item.batch_size for item in data.spec.inputs), default=1)
        if config.model != TINY:
            approve(f"replay {data.spec.replay_id}, whose model {config.model!r} would be loaded", owner, asked.yes)
        key = (str(costs(as_ran(config))), batch)
        if key in done or config.truth is not None or config.vary is not None:
            continue
        spec = plan_lengths(store, config, {int(part) for part in parts}, batch, command=command_line())
        label = f"measuring as {data.spec.replay_id}"
        with replaying(store, label, len(spec.inputs), quiet=asked.quiet or asked.as_json) as (catalog, advance):
            advance(0, note="starting the workers")
            run_replay(store, spec, counting(catalog, advance), on_tick=catalog.tick)
        done[key] = spec.replay_id
    return list(done.values())
