"""`actordbg dump ls` lists the dumps that a condition selects, `dump columns` the columns to query, `dump show` one dump."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.base.option import Option
from actordbg.base.units import ago, listed, with_handles
from actordbg.cli import output
from actordbg.cli.options import Where, require_some, store_of
from actordbg.cli.output import (
    cell,
    emit,
    emit_each,
    human_bytes,
    note,
    rows_as_json,
    say,
    say_facts,
    say_next,
    say_wrapped,
    table,
)

if TYPE_CHECKING:
    from actordbg.catalog.columns import DumpRow
    from actordbg.catalog.query import Catalog
    from actordbg.formats.dump_record import DumpRecord


_ROWS = 50
_WIDE = 100
"""Terminal width from which the recording time and the run are shown."""
INPUT, OUTPUT, GENERATOR = _KINDS = ("input", "output", "generator")


def ls(
    ctx: typer.Context, *, where: Where = None, order: str = "newest", limit: Annotated[int | None, Option(min=0)] = None
) -> None:
    """List dumps, newest first.

    Columns for --where: rank, seq_len, timestamp, batch_size, tokens, padding, action_len, run, step, role, training,
    source, bytes, ... the last verdict: verdict, broken, theirs; and from the last result: status, error, signature,
    forward_s, backward_s, peak_memory, replay. `actordbg dump columns` lists all.

    Exit code: 5 if no dump matches.

    Example: actordbg dump ls --where "seq_len>4096 and timestamp > now() - '2h'"

    Args:
        order: Sort order: newest (first), time (oldest first), length, longest (first), a column, or -COLUMN (largest first).
        limit: At most N rows; 0 for all (default: 50; with --json all).
    """
    from actordbg.catalog.query import count_dumps, each_dump, open_fresh, select_dumps
    from actordbg.cli.index import warn_damaged

    catalog = open_fresh(store_of(ctx), where)
    limit = (0 if output.wanted.whole else _ROWS) if limit is None else limit
    warn_damaged(catalog.summary)
    rows: list[DumpRow] = []
    if output.wanted.whole:
        shown = emit_each(map(vars, each_dump(catalog, where, order=order, limit=limit or None)))
    else:
        rows = select_dumps(catalog, where, order=order, limit=limit or None)
        _say_dumps(rows, catalog, where)
        shown = len(rows)
    total = count_dumps(catalog, where) if limit and shown == limit else shown
    if total > shown:
        note(f"{total - shown:,} more; pass --limit 0 to list all")
    if rows:
        say_next(f"actordbg dump show {with_handles(rows[0].dump_id)}")
    require_some(shown)


def _say_dumps(rows: list[DumpRow], catalog: Catalog, where: str | None) -> None:
    from actordbg.catalog.selections import reasons, verdict_of, without_dumps

    if not rows and where:
        say(f"no dump matches {where}")
        for reason in reasons(catalog, where):
            note(reason)
        return
    if not rows:
        only, reader = without_dumps(catalog)
        say(f"there are no dumps in this store, only {only}" if only else "there are no dumps in this store yet")
        return say_next(reader or "actordbg dump status")
    cells = [
        {"dump": row.dump_id, "trainer": row.trainer, "rank": row.rank, "role": row.role, "B": row.batch_size, "S": row.seq_len,
         "tokens": row.tokens, "trigger": row.triggered or row.recovered or ("protected" if row.pinned else None),
         "verdict": verdict_of(row), "when": ago(row.timestamp), "run": row.run}
        for row in rows
    ]  # fmt: skip
    left_out = {"trainer"} if len({row.trainer for row in rows}) == 1 else set()
    if output.table_width() < _WIDE:
        left_out |= {"when", "run"}
    named = [name for name in cells[0] if name not in left_out]
    table(named, [[row[name] for name in named] for row in cells], tight=True)


def columns() -> None:
    """List the columns, functions and operators of --where.

    Compares only values of the same kind.

    Example: actordbg dump columns
    """
    from actordbg.catalog.tables import FUNCTIONS, HEADINGS, OPERATORS, WHERE_COLUMNS

    headings = {name: heading for heading, name in HEADINGS.items()}
    answer = [
        {"name": column.name, "kind": column.kind, "heading": headings.get(column.name), "meaning": column.doc}
        for column in WHERE_COLUMNS.values()
    ]
    if not rows_as_json(answer):
        table(("column", "kind", "meaning"), [(row["name"], row["kind"], row["meaning"]) for row in answer], tight=True)
        say()
        for line in (f"operators: {OPERATORS}", *FUNCTIONS.values()):
            say(line)


def show(ctx: typer.Context, dump_id: str) -> None:
    """Show one dump: its record, its tensors, its results.

    Example: actordbg dump show 20250619T052608

    Args:
        dump_id (ID): Dump id, handle, or a unique prefix of the id.
    """
    from actordbg.catalog.query import get_dump, open_fresh, results_of_dump
    from actordbg.records.run_files import weights_of
    from actordbg.store.places import read_record

    catalog = open_fresh(store_of(ctx))
    row = get_dump(catalog, dump_id)
    path = catalog.store.root / row.path
    record = read_record(path)
    hashes = weights_of(catalog.store.root, record)
    names = ("path", "bytes", "trainer", "adapter", "function", "broken", "theirs", "model")
    answer = {name: getattr(row, name) for name in names} | {
        "verdict": row.verdict or "",  # every answer's is a text
        "record": record,
        "tensors": _tensors(record),
        "results": results_of_dump(catalog, row.dump_id),
        "weights": None if hashes is None else catalog.store.relative(hashes),
    }
    emit(answer, _say_dump)


def _tensors(record: DumpRecord) -> list[dict[str, Any]]:
    """Describe each tensor. `kind`: "input"; "output" (returned by the call); "generator" (RNG state before the call)."""
    from actordbg.formats.dump_record import OUTPUT_PREFIX, RNG_PREFIX

    tensors: list[dict[str, Any]] = []
    for name, spec in record.tensors.items():
        kind = OUTPUT if name.startswith(OUTPUT_PREFIX) else GENERATOR if name.startswith(RNG_PREFIX) else INPUT
        tensors.append({"name": name, "kind": kind, "dtype": spec.dtype, "shape": spec.shape, "stored": spec.stored})
    return sorted(tensors, key=lambda tensor: _KINDS.index(tensor["kind"]))


def _say_dump(answer: dict[str, Any]) -> None:
    record, tensors, results = answer["record"], answer["tensors"], answer["results"]
    say(f"dump `{record.dump_id}`")
    say_facts(_facts(answer), 14)
    say()
    cells = [(tensor["name"], tensor["dtype"], str(list(tensor["shape"])), tensor["stored"]) for tensor in tensors]
    table(("tensor", "dtype", "shape", "stored as"), cells)
    say()
    if not results:
        if record.point == "loss":  # which only `lint` and `step` read, and both name dumps
            return None
        return say_next(f"actordbg replay --where \"dump='{with_handles(record.dump_id)}'\"")
    kinds = {tensor["kind"] for tensor in tensors}
    own = {"max diff": "golden_max_abs"} if OUTPUT in kinds else {}
    own |= {"entropy diff": "golden_entropy_max_abs"} if "output.entropy" in record.tensors else {}
    own |= {"same RNG": "rng_match"} if GENERATOR in kinds else {}
    columns = {"replay": "replay_id", "status": "status", "forward s": "forward_s", "backward s": "backward_s"}
    columns |= {"mean log-prob": "logprob_mean", **own, "error": "error_class"}
    table(tuple(columns), [[getattr(result, name) for name in columns.values()] for result in results])
    if own:
        say_wrapped("max diff, entropy diff: largest difference from the run's own outputs, nats; -: not compared")
    newest = results[0]
    for reason in dict.fromkeys((newest.extra.get("not_compared") or {}).values()):
        say_wrapped(f"not compared in {newest.replay_id}: {reason}", "  ")
    return None


def _facts(answer: dict[str, Any]) -> dict[str, Any]:
    record, trainer, adapter = answer["record"], answer["trainer"], answer["adapter"]
    from actordbg.catalog.selections import verdict_of
    from actordbg.formats.dump_record import FORWARD, UNKNOWN_TYPE

    yes = {name: cell(getattr(record, name)) for name in ("training", "grad_enabled", "packing_samples")}
    extra = ", ".join(f"{name} ({why})" for name, why in record.extra.items())
    unknown = bool(extra) and all(why.startswith(UNKNOWN_TYPE) for why in record.extra.values())
    if unknown and record.point == FORWARD and not record.replayable:
        extra += "; record --with-outputs to replay without it"
    return {
        "verdict": verdict_of(SimpleNamespace(**answer)),
        "file": f"{answer['path']} ({human_bytes(answer['bytes'])})",
        "run": record.run,
        "time": record.timestamp,
        "rank": f"{record.rank}" + (f" of {record.world_size}" if record.world_size else ""),
        "process": f"{cell(record.host)}, pid {record.pid}, call {record.call_index}",
        "trainer": " ".join(filter(None, (trainer, record.versions.get(trainer or "")))),
        "function": (answer["function"] or "") + (f" (adapter {adapter})" if adapter else ""),
        "role": record.role,
        "step": record.step,
        "batch": f"{record.batch_size} x {record.seq_len}: {record.tokens} tokens, {record.padding} padding",
        "actions": record.action_len,
        "model": " ".join(filter(None, (record.model_name, record.model_dtype))),
        "weights": f"hashed in {answer['weights']}" if answer["weights"] else None,
        "mode": f"training {yes['training']}, grad {yes['grad_enabled']}, packing {yes['packing_samples']}, "
        f"autocast {cell(record.autocast_dtype)}",
        "temperature": record.temperature,
        "trigger": "; ".join(filter(None, _marks(record))),
        "also recorded": "; ".join(_recorded_too(answer["tensors"])),
        "arguments": ", ".join(f"{name}={value}" for name, value in sorted(record.arguments.items())),
        "source": record.source + (f" ({record.origin['name']})" if "name" in record.origin else ""),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items())),
        "replayable": ": ".join(filter(None, ("yes" if record.replayable else "no", extra))),
    }


def _marks(record: DumpRecord) -> Iterator[str | None]:
    """Yield why a dump was kept: its trigger and the trigger's figures, its recovery, its protection."""
    yield record.triggered
    if record.recovered:
        flying = "in flight" if record.recovered == "in_flight" else "among the last calls"
        yield f"{flying} when its process died"
    yield ", ".join(f"{name} {cell(value)}" for name, value in record.trigger_facts.items())
    yield "protected" if record.pinned else None


def _recorded_too(tensors: list[dict[str, Any]]) -> Iterator[str]:
    for kind, what in ((OUTPUT, "returned outputs"), (GENERATOR, "RNG state before the call")):
        if names := [tensor["name"].partition(".")[2] for tensor in tensors if tensor["kind"] == kind]:
            yield f"{what} ({listed(names)})"
