"""A report for other programs: JSON of the whole Summary, CSV with one row for each result, and figures for trackers.

The CSV's columns are a contract: new ones go to the end, none is renamed or moved. An input that was not run has no row. Times
are in seconds, memory in bytes, log-probs in nats; a figure that was not measured is an empty cell. `warm_up` says why a row is
no part of steady timing: "first", "compiled", or empty.

Trackers are those that people already look at:

    send("tensorboard:runs", replays)      # a run for each replay, below the folder `runs`
    send("wandb:my-project", replays)
    send("mlflow:http://tracker:5000", replays)

Each replay is a run, named as the replay is. Its figures are those of the report; the results of its inputs are series over the
order in which they ran. TensorBoard needs the package `tensorboard` only; the others come with extras of their own names.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actordbg.base.errors import ActordbgError, EnvironmentProblem, UsageError
from actordbg.base.foreign_text import in_csv, in_json
from actordbg.config.as_ran import as_ran
from actordbg.config.replay_config import SETTINGS
from actordbg.document.blocks import Block, as_data
from actordbg.judge.report_model import ReplaySummary, Summary
from actordbg.judge.summary import summary_of
from actordbg.records.replay_record import NOT_CHECKED, ResultRecord, answers_of, violations, warm_up_of
from actordbg.replay.replay_data import ReplayData

CONFIGURATION = (
    "model", "backend", "dtype", "attn", "packing", "compile", "deepcompile", "zero_stage", "nproc", "backward",
    "num_layers", "temperature", "seed",
)  # fmt: skip
"""The settings that had a column first. Every row repeats them as they ran, so that rows of several replays can be pivoted."""
INPUT = ("rank", "batch_size", "seq_len")
_RESULT = tuple(field.name for field in fields(ResultRecord) if field.name not in ("log_excerpt", "extra"))
_LATER = _RESULT.index("golden_entropy_count")
"""From here on, fields of a result came when the columns behind the others had their places."""
SETTINGS_LATER = tuple(name for name, one in SETTINGS.items() if name not in CONFIGURATION and (one.numbers or one.cost))
"""The other settings that tell one configuration from another; a new one comes last."""
COLUMNS = (
    *_RESULT[:_LATER], *INPUT, "warm_up", *CONFIGURATION, *_RESULT[_LATER:], *(SETTINGS[name].stored for name in SETTINGS_LATER),
    "laws_violated", "laws_not_checked",
)  # fmt: skip
"""Every column of the CSV, in order. The last two have the names of the laws that forbid a green verdict, and of those that could
not be asked; empty where none was asked."""


def render_json(summary: Summary, blocks: Iterable[Block] = ()) -> str:
    """The Summary field by field, with the verdict and the charts of its document: indented JSON that ends with a line break."""
    told = asdict(summary) | as_data(blocks)
    return in_json(json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)) + "\n"


def _plain(value: Any) -> Any:
    """A row of the catalog as a dict, anything else in words."""
    return vars(value) if isinstance(value, SimpleNamespace) else str(value)


def render_csv(replays: Sequence[ReplayData]) -> str:
    """One row for each result of `replays`, below a row with the names of the columns."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for data in replays:
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in _rows(data))
    return out.getvalue()


def _rows(data: ReplayData) -> Iterator[dict[str, Any]]:
    """A result, its input and the settings as they ran; of these the model's own number of layers and the seed that counted stand
    where none was asked for."""
    by_id = {given.dump_id: given for given in data.spec.inputs}
    first, compiling = warm_up_of(data.results)
    values = as_ran(data.spec.config, data.resolved)
    settings = {SETTINGS[name].stored: values[name] for name in (*CONFIGURATION, *SETTINGS_LATER)}
    settings |= {name: data.resolved[name] for name in ("num_layers", "seed") if name in data.resolved}
    for result in data.results:
        answers = answers_of(result.extra)
        yield result.to_dict() | settings | {
            **{name: getattr(by_id.get(result.dump_id), name, None) for name in INPUT},
            "warm_up": "first" if result.dump_id in first else "compiled" if result.dump_id in compiling else "",
            "laws_violated": " ".join(answer.law for answer in violations(answers)),
            "laws_not_checked": " ".join(answer.law for answer in answers if answer.verdict == NOT_CHECKED),
        }  # fmt: skip


def _cell(value: Any) -> Any:
    """True as `true`; numbers stay numbers, and text is cleaned."""
    if isinstance(value, bool):
        return str(value).lower()
    return in_csv(value) if isinstance(value, str) else value


Figures = dict[str, float]
Series = Iterator[tuple[int, Figures]]
_OF_INPUT = ("forward_s", "backward_s", "tokens_per_s", "peak_memory_bytes", "logprob_mean", "loss", "grad_norm")


def send(target: str, replays: Sequence[ReplayData]) -> list[str]:
    """Send every replay to `KIND:WHERE`; where each of them is now, in words. UsageError for another form."""
    kind, colon, where = target.partition(":")
    if kind not in _KINDS or not colon or not where:
        raise UsageError(f"--to {target!r:.60} is no tracker", hint="tensorboard:DIR, wandb:PROJECT or mlflow:ADDRESS")
    try:
        return [deliver_to(kind, where, data) for data in replays]
    except ActordbgError:
        raise
    except Exception as error:  # noqa: BLE001 - each tracker raises errors of its own; all mean that it did not take the figures
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        hint = "check the address, that it answers, and that you are logged in; what was sent before stays there"
        raise EnvironmentProblem(f"{kind} at {where} did not take the figures: {reason}", hint=hint) from None


def deliver_to(kind: str, where: str, data: ReplayData) -> str:
    """Send one replay to a tracker of this kind; where it is now, in words."""
    name = "-".join(filter(None, (data.spec.config.name, data.spec.replay_id)))
    values = as_ran(data.spec.config, data.resolved)
    settings = {name: str(value) for name, value in values.items() if value is not None}
    return _KINDS[kind](where, name, settings, figures_of(summary_of(data)), series_of(data))


def figures_of(one: ReplaySummary) -> Figures:
    """The figures of a replay by name; what nobody measured is left out."""
    found: dict[str, float | None] = {
        **{f"inputs/{name}": float(count) for name, count in vars(one.counts).items()},
        "time/forward_median_s": one.forward.median,
        "time/forward_p95_s": one.forward.p95,
        "time/backward_median_s": one.backward.median,
        "time/tokens_per_s": one.tokens_per_s.median,
        "memory/peak_bytes": one.peak_memory_bytes,
        "truth/max_abs_nats": one.truth.max_abs if one.truth else None,
        "laws/violations": float(len(one.laws.violations)) if one.laws else None,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def series_of(data: ReplayData) -> Series:
    """The figures of each input, in the order in which they ended."""
    for step, result in enumerate(sorted(data.results, key=lambda each: each.finished_at)):
        values = ((name, getattr(result, name)) for name in _OF_INPUT)
        yield step, {f"input/{name}": float(value) for name, value in values if value is not None}


def _to_tensorboard(where: str, name: str, settings: dict[str, str], figures: Figures, series: Series) -> str:
    writer_of = _imported("tensorboard.summary.writer.event_file_writer", "tensorboard").EventFileWriter
    summary_pb2 = import_module("tensorboard.compat.proto.summary_pb2")
    event_pb2 = import_module("tensorboard.compat.proto.event_pb2")
    folder = Path(where) / name
    writer = writer_of(str(folder))
    for step, some in ((0, figures), *series):
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in some.items()]
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)))
    writer.close()
    return f"wrote {folder}: tensorboard --logdir {where}"


def _to_wandb(where: str, name: str, settings: dict[str, str], figures: Figures, series: Series) -> str:
    run = _imported("wandb", "wandb").init(project=where, name=name, config=settings)
    for step, values in series:
        run.log(values, step=step)
    run.summary.update(figures)
    run.finish()
    return f"sent {name} to the project {where} of Weights & Biases"


def _to_mlflow(where: str, name: str, settings: dict[str, str], figures: Figures, series: Series) -> str:
    mlflow = _imported("mlflow", "mlflow")
    mlflow.set_tracking_uri(where)
    with mlflow.start_run(run_name=name):
        mlflow.log_params(settings)
        mlflow.log_metrics(figures)
        for step, values in series:
            mlflow.log_metrics(values, step=step)
    return f"sent {name} to MLflow at {where}"


_KINDS: dict[str, Callable[[str, str, dict[str, str], Figures, Series], str]] = {
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
}


def _imported(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise EnvironmentProblem(f"{extra} is not installed here", hint=f"pip install 'actordbg[{extra}]'") from None
