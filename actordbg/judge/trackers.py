"""Figures of replays for the trackers that people already look at: TensorBoard, Weights & Biases, MLflow.

    send("tensorboard:runs", replays)      # a run for each replay, below the folder `runs`
    send("wandb:my-project", replays)
    send("mlflow:http://tracker:5000", replays)

Each replay is a run, named as the replay is. Its figures are those of the report; the results of its inputs are series over the
order in which they ran. TensorBoard needs the package `tensorboard` only; the others come with extras of their own names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, EnvironmentProblem, UsageError
from actordbg.config.as_ran import as_ran
from actordbg.judge.report_model import ReplaySummary
from actordbg.judge.summary import summary_of
from actordbg.replay.replay_data import ReplayData

Figures = dict[str, float]
_OF_INPUT = ("forward_s", "backward_s", "tokens_per_s", "peak_memory_bytes", "logprob_mean", "loss", "grad_norm")


def send(target: str, replays: Sequence[ReplayData]) -> list[str]:
    """Send every replay to `KIND:WHERE`; where each of them is now, in words. UsageError for another form."""
    kind, colon, where = target.partition(":")
    if kind not in _KINDS or not colon or not where:
        raise UsageError(f"--to {target!r:.60} is no tracker", hint="tensorboard:DIR, wandb:PROJECT or mlflow:ADDRESS")
    deliver = _KINDS[kind]
    try:
        return [deliver(where, data, summary_of(data)) for data in replays]
    except ActordbgError:
        raise
    except Exception as error:  # noqa: BLE001 - each tracker raises errors of its own; all mean that it did not take the figures
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        hint = "check the address, that it answers, and that you are logged in; what was sent before stays there"
        raise EnvironmentProblem(f"{kind} at {where} did not take the figures: {reason}", hint=hint) from None


def figures_of(one: ReplaySummary) -> Figures:
    """The figures of a replay by name; what nobody measured is left out."""
    truth = next((row for row in one.comparisons if row.against_kind == "truth"), None)
    found: dict[str, float | None] = {
        **{f"inputs/{name}": float(count) for name, count in vars(one.counts).items()},
        "time/forward_median_s": one.forward.median,
        "time/forward_p95_s": one.forward.p95,
        "time/backward_median_s": one.backward.median,
        "time/tokens_per_s": one.tokens_per_s.median,
        "memory/peak_bytes": one.peak_memory_bytes,
        "truth/max_abs_nats": truth.max_abs if truth else None,
        "laws/violations": float(len(one.laws.violations)) if one.laws else None,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def series_of(data: ReplayData) -> Iterator[tuple[int, Figures]]:
    """The figures of each input, in the order in which they ended."""
    for step, one in enumerate(sorted(data.results, key=lambda result: result.finished_at)):
        values = ((name, getattr(one, name)) for name in _OF_INPUT)
        yield step, {f"input/{name}": float(value) for name, value in values if value is not None}


def _settings(data: ReplayData) -> dict[str, str]:
    return {name: str(value) for name, value in as_ran(data.spec.config, data.resolved).items() if value is not None}


def _name(data: ReplayData) -> str:
    return f"{data.spec.config.name}-{data.spec.replay_id}" if data.spec.config.name else data.spec.replay_id


def _to_tensorboard(where: str, data: ReplayData, one: ReplaySummary) -> str:
    writer_of = _imported("tensorboard.summary.writer.event_file_writer", "tensorboard").EventFileWriter
    summary_pb2 = import_module("tensorboard.compat.proto.summary_pb2")
    event_pb2 = import_module("tensorboard.compat.proto.event_pb2")
    folder = Path(where) / _name(data)
    writer = writer_of(str(folder))
    for step, found in ((0, figures_of(one)), *series_of(data)):
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in found.items()]
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)))
    writer.close()
    return f"wrote {folder}: tensorboard --logdir {where}"


def _to_wandb(where: str, data: ReplayData, one: ReplaySummary) -> str:
    run = _imported("wandb", "wandb").init(project=where, name=_name(data), config=_settings(data))
    for step, found in series_of(data):
        run.log(found, step=step)
    run.summary.update(figures_of(one))
    run.finish()
    return f"sent {_name(data)} to the project {where} of Weights & Biases"


def _to_mlflow(where: str, data: ReplayData, one: ReplaySummary) -> str:
    mlflow = _imported("mlflow", "mlflow")
    mlflow.set_tracking_uri(where)
    with mlflow.start_run(run_name=_name(data)):
        mlflow.log_params(_settings(data))
        mlflow.log_metrics(figures_of(one))
        for step, found in series_of(data):
            mlflow.log_metrics(found, step=step)
    return f"sent {_name(data)} to MLflow at {where}"


_KINDS: dict[str, Callable[[str, ReplayData, ReplaySummary], str]] = {
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
}


def _imported(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise EnvironmentProblem(f"{extra} is not installed here", hint=f"pip install 'actordbg[{extra}]'") from None
