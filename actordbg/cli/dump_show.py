"""`actordbg dump show`: everything about one dump."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.cli import output
from actordbg.cli.completion import complete_dumps
from actordbg.cli.options import Json, option, store_of

if TYPE_CHECKING:
    from actordbg.formats.dump_record import DumpRecord
    from actordbg.records.replay_record import ResultRecord


INPUT, OUTPUT, GENERATOR = _KINDS = ("input", "output", "generator")


@dataclass
class TensorSummary:
    """One tensor. `kind`: "input"; "output", what the call returned; "generator", a random generator's state before it.

    min, max and nonzero only with --values, and not of a generator's state, whose bytes are no figures.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stored: str
    min: float | None = None
    max: float | None = None
    nonzero: int | None = None


@dataclass
class DumpAnswer:
    """One dump: its record, its tensors, and what became of it in replays, the newest first. A packed dump's bytes: its share.

    trainer, adapter, function: whose call it is, as the catalog says it. weights: the hashes of the weights that it met, if the
    run recorded them.
    """

    path: str
    bytes: int
    trainer: str | None
    adapter: str | None
    function: str | None
    record: DumpRecord
    tensors: list[TensorSummary]
    results: list[ResultRecord]
    weights: str | None = None


def show(
    ctx: typer.Context,
    dump_id: Annotated[
        str, typer.Argument(metavar="ID", help="The dump's id, or the beginning of it.", autocompletion=complete_dumps)
    ],
    values: bool = option(False, "Read the tensors too: min, max, non-zero (needs torch).", "--values"),
    as_json: Json = False,
) -> None:
    """Show one dump: its record, its tensors, its results.

    Example: actordbg dump show 20250619T052608 --values
    """
    from actordbg.catalog.query import get_dump, open_fresh, results_of_dump
    from actordbg.formats.weight_hashes import weights_of
    from actordbg.store.places import read_record

    catalog = open_fresh(store_of(ctx))
    row = get_dump(catalog, dump_id)
    path = catalog.store.root / row.path
    record = read_record(path)
    tensors = _with_values(path) if values else _specs(record)
    whose = (row.trainer, row.adapter, row.function)
    results = results_of_dump(catalog, row.dump_id)
    hashes = weights_of(catalog.store.root, record)
    weights = None if hashes is None else catalog.store.relative(hashes)
    output.emit(DumpAnswer(row.path, row.bytes, *whose, record, tensors, results, weights), _render, as_json)


def _specs(record: DumpRecord) -> list[TensorSummary]:
    return [
        TensorSummary(name, _kind(name), spec.dtype, spec.shape, spec.stored)
        for name, spec in sorted(record.tensors.items(), key=lambda item: _KINDS.index(_kind(item[0])))
    ]


def _with_values(path: Path) -> list[TensorSummary]:
    from actordbg.store.payload import load

    dump = load(path)
    summaries = _specs(dump.record)
    for summary in summaries:
        if summary.kind == GENERATOR:
            continue
        tensor, summary.nonzero = dump.tensors[summary.name], 0
        if tensor.numel() and not tensor.is_complex():
            wide = tensor.double() if tensor.is_floating_point() else tensor.long()
            summary.min, summary.max = _finite(wide.min().item()), _finite(wide.max().item())
            summary.nonzero = int(tensor.count_nonzero())
    return summaries


def _kind(name: str) -> str:
    from actordbg.formats.dump_record import OUTPUT_PREFIX, RNG_PREFIX

    return OUTPUT if name.startswith(OUTPUT_PREFIX) else GENERATOR if name.startswith(RNG_PREFIX) else INPUT


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and value - value != 0 else value


def _render(answer: DumpAnswer) -> None:
    record = answer.record
    output.say(record.dump_id)
    for name, value in _facts(answer):
        output.say_fact(f"  {name}", str(value), 16)
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
        output.say(f"no result yet: `actordbg replay --where \"dump_id='{record.dump_id}'\"`")
        return
    own = _own_columns(answer)
    output.table(
        ("replay", "status", "forward s", "backward s", "mean log-prob", *own, "error"),
        [
            (r.replay_id, r.status, r.forward_s, r.backward_s, r.logprob_mean)
            + (*(getattr(r, name) for name in own.values()), r.error_class)
            for r in answer.results
        ],
    )
    if own:
        output.say_wrapped("off: largest difference from what the run itself recorded, in nats; - was not compared")
    newest = answer.results[0]
    for reason in dict.fromkeys((newest.extra.get("not_compared") or {}).values()):
        output.say_wrapped(f"not compared in {newest.replay_id}: {reason}", "  ")


def _own_columns(answer: DumpAnswer) -> dict[str, str]:
    """Heading -> field of a result, for what the run recorded of its own results."""
    kinds = {tensor.kind for tensor in answer.tensors}
    own = {"log-probs off": "golden_max_abs"} if OUTPUT in kinds else {}
    if "output.entropy" in answer.record.tensors:
        own["entropy off"] = "golden_entropy_max_abs"
    return own | ({"same draws": "rng_match"} if GENERATOR in kinds else {})


def _facts(answer: DumpAnswer) -> list[tuple[str, str]]:
    record = answer.record
    facts = {
        "file": f"{answer.path} ({output.human_bytes(answer.bytes)})",
        "run": record.run,
        "time": record.timestamp,
        "rank": f"{record.rank}" + (f" of {record.world_size}" if record.world_size else ""),
        "process": f"{record.host or '?'}, pid {record.pid}, call {record.call_index}",
        "trainer": " ".join(filter(None, (answer.trainer, record.versions.get(answer.trainer or "")))),
        "function": (answer.function or "") + (f" (adapter {answer.adapter})" if answer.adapter else ""),
        "role": record.role,
        "step": record.step,
        "batch": f"{record.batch_size} x {record.seq_len}: {record.tokens} tokens, {record.padding} padding",
        "actions": record.action_len,
        "model": " ".join(filter(None, (record.model_name, record.model_dtype))),
        "weights": f"hashed in {answer.weights}" if answer.weights else None,
        "mode": f"training {output.cell(record.training)}, grad {output.cell(record.grad_enabled)}, "
        f"packing {output.cell(record.packing_samples)}, autocast {record.autocast_dtype or '-'}",
        "temperature": record.temperature,
        "kept because": _kept_because(record),
        "recorded too": _recorded_too(answer.tensors),
        "arguments": ", ".join(f"{name}={value}" for name, value in sorted(record.arguments.items())),
        "source": record.source + (f" ({record.origin['name']})" if "name" in record.origin else ""),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items())),
        "replayable": ": ".join(filter(None, ("yes" if record.replayable else "no", _extra(record)))),
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _extra(record: DumpRecord) -> str:
    return ", ".join(f"{name} ({why})" for name, why in record.extra.items())


def _kept_because(record: DumpRecord) -> str:
    """What marks a dump: the trigger that kept it and what that saw, the ring that it came out of, the pin."""
    marks = [f"{record.triggered}" if record.triggered else ""]
    if record.recovered:
        marks.append("it was in flight" if record.recovered == "in_flight" else "it was one of the last calls")
        marks[-1] += " when its process died"
    if record.trigger_facts:
        marks.append(", ".join(f"{name} {output.cell(value)}" for name, value in record.trigger_facts.items()))
    return "; ".join(filter(None, [*marks, "pinned" if record.pinned else ""]))


def _recorded_too(tensors: list[TensorSummary]) -> str:
    names = {kind: ", ".join(t.name.partition(".")[2] for t in tensors if t.kind == kind) for kind in (OUTPUT, GENERATOR)}
    parts = [f"what the call returned ({names[OUTPUT]})"] * bool(names[OUTPUT])
    parts += [f"random generators before it ({names[GENERATOR]})"] * bool(names[GENERATOR])
    return "; ".join(parts)
