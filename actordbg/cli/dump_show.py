"""`actordbg dump show`: everything about one dump."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.cli import output
from actordbg.cli.options import Json, store_of

if TYPE_CHECKING:
    from pathlib import Path

    from actordbg.outcome import ResultRecord
    from actordbg.record import DumpRecord


@dataclass
class TensorSummary:
    """One tensor; min, max and nonzero only with --values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: str
    min: float | None = None
    max: float | None = None
    nonzero: int | None = None


@dataclass
class DumpAnswer:
    """One dump: its record, its tensors, and what became of it in replays, the newest first. A packed dump's bytes: its share."""

    path: str
    bytes: int
    record: DumpRecord
    tensors: list[TensorSummary]
    results: list[ResultRecord]


def show(
    ctx: typer.Context,
    dump_id: Annotated[str, typer.Argument(metavar="ID", help="The dump's id, or the beginning of it.")],
    values: Annotated[
        bool, typer.Option("--values", help="Read the tensors too: min, max, non-zero (needs torch).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show one dump: its record, its tensors, its results so far.

    Example: actordbg dump show 20250619T052608 --values
    """
    from actordbg.catalog.query import get_dump, open_fresh, results_of_dump
    from actordbg.places import read_record

    catalog = open_fresh(store_of(ctx))
    row = get_dump(catalog, dump_id)
    path = catalog.store.root / row.path
    record = read_record(path)
    tensors = _with_values(path) if values else _specs(record)
    output.emit(
        DumpAnswer(row.path, row.bytes, record, tensors, results_of_dump(catalog, row.dump_id)), _render, as_json
    )


def _specs(record: DumpRecord) -> list[TensorSummary]:
    return [TensorSummary(name, spec.dtype, spec.shape, spec.stored) for name, spec in record.tensors.items()]


def _with_values(path: Path) -> list[TensorSummary]:
    from actordbg.payload import load

    dump = load(path)
    summaries = []
    for name, tensor in dump.tensors.items():
        spec = dump.record.tensors[name]
        figures: tuple[Any, ...] = (None, None, 0)
        if tensor.numel() and not tensor.is_complex():
            wide = tensor.double() if tensor.is_floating_point() else tensor.long()
            figures = (wide.min().item(), wide.max().item(), int(tensor.count_nonzero()))
        summaries.append(TensorSummary(name, spec.dtype, spec.shape, spec.stored, *map(_finite, figures)))
    return summaries


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and value - value != 0 else value


def _render(answer: DumpAnswer) -> None:
    record = answer.record
    output.say(record.dump_id)
    for name, value in _facts(answer):
        output.say(f"  {name:<14} {value}")
    output.say()
    with_values = any(tensor.nonzero is not None for tensor in answer.tensors)
    columns = ("tensor", "dtype", "shape", "stored as") + (("min", "max", "non-zero") if with_values else ())
    output.table(
        columns,
        [
            (t.name, t.dtype, str(list(t.shape)), t.stored) + ((t.min, t.max, t.nonzero) if with_values else ())
            for t in answer.tensors
        ],
    )
    output.say()
    if not answer.results:
        output.say("no result yet: `actordbg replay --where \"dump_id='...'\"`")
        return
    output.table(
        ("replay", "status", "forward s", "backward s", "mean log-prob", "error"),
        [(r.replay_id, r.status, r.forward_s, r.backward_s, r.logprob_mean, r.error_class) for r in answer.results],
    )


def _facts(answer: DumpAnswer) -> list[tuple[str, str]]:
    record = answer.record
    facts = {
        "file": f"{answer.path} ({output.human_bytes(answer.bytes)})",
        "run": record.run,
        "time": record.timestamp,
        "rank": f"{record.rank}" + (f" of {record.world_size}" if record.world_size else ""),
        "process": f"{record.host or '?'}, pid {record.pid}, call {record.call_index}",
        "role": record.role,
        "step": record.step,
        "batch": f"{record.batch_size} x {record.seq_len}: {record.tokens} tokens, {record.padding} padding",
        "actions": record.action_len,
        "model": " ".join(filter(None, (record.model_name, record.model_dtype))),
        "mode": f"training {output.cell(record.training)}, grad {output.cell(record.grad_enabled)}, "
        f"packing {output.cell(record.packing_samples)}, autocast {record.autocast_dtype or '-'}",
        "temperature": record.temperature,
        "arguments": ", ".join(f"{name}={value}" for name, value in sorted(record.arguments.items())),
        "source": record.source + (f" ({record.origin['name']})" if "name" in record.origin else ""),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items())),
        "replayable": "yes" if record.replayable else f"no: {', '.join(f'{k} ({v})' for k, v in record.extra.items())}",
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]
