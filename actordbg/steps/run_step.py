"""Replay a recorded step on its two sides, and hold the figures against each other: `StepFigures`.

    figures = run_step(store, recorded_step(store, None, 3), ReplayConfig(model="/models/policy"))
    figures.replayed.grad_norm, figures.reference.grad_norm, figures.step.grad_norm

The workers' files are below `store/cache/steps`, and are removed when both sides ended.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import safetensors.numpy

from actordbg.base.errors import Unsupported, require_package
from actordbg.base.units import first_line, new_replay_id, plural
from actordbg.compare.same_weights import WeightsMet, weights_met
from actordbg.config.replay_config import ENDPOINT, ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.recorded.recorded_calls import Numbers
from actordbg.records.journal import TENSORS
from actordbg.records.replay_record import PASSED, ReplayInput, ReplaySpec
from actordbg.replay.group_engine import WarmGroups, launch_group
from actordbg.replay.supervise import Progress, ReplayOutcome, run_replay
from actordbg.steps.recorded_step import RecordedStep
from actordbg.steps.step_engine import MODULE
from actordbg.steps.step_plan import PLAN, STEP, StepPlan
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER


@dataclass(frozen=True)
class Side:
    """A side of a step: for each micro-batch, in their order, its figures and its log-probs [B, A], float32.

    resolved: the configuration that its workers reported. failed: why an input did not pass; "" if all did.
    """

    figures: tuple[dict[str, Any], ...] = ()
    log_probs: tuple[Numbers, ...] = ()
    resolved: dict[str, Any] | None = None
    failed: str = ""

    @property
    def grad_norm(self) -> float:
        """The norm of the whole step's gradient, before clipping; NaN if the side failed."""
        return self._last("grad_norm", math.nan)  # type: ignore[no-any-return]

    @property
    def alone(self) -> list[float]:
        """The norm of the gradient of each place alone, on the reference's side."""
        return [each["alone"] for each in self.figures if "alone" in each]

    @property
    def squares(self) -> dict[str, float]:
        """The square of each parameter's gradient of the whole step, on the reference's side."""
        return self._last("squares", {})  # type: ignore[no-any-return]

    def norm_of(self, times: Numbers) -> float:
        """Return the norm of a step whose micro-batches' gradients are multiplied by `times` [M], on the reference's side."""
        products = np.reshape(self._last("products", []), (len(times),) * 2)
        return math.sqrt(max(0.0, float(times @ products @ times)))

    def _last(self, name: str, default: Any) -> Any:
        return next((each[name] for each in reversed(self.figures) if each.get(name) is not None), default)

    def total(self, divided_by: float = 1.0) -> float:
        """Return the sum of its losses, divided."""
        return float(sum(each["loss"] for each in self.figures) / divided_by)


@dataclass(frozen=True)
class StepFigures:
    """A step as recorded, replayed under a configuration, and as one batch in fp32."""

    step: RecordedStep
    config: ReplayConfig
    replayed: Side
    reference: Side

    def apart(self, side: Side, other: Side | None = None) -> Numbers:
        """Return the distances, in nats, of a side's log-probs from those of another, by default the recorded ones: [actions]."""
        distances = [np.zeros(0)]
        for at, each in enumerate(self.step.micro_batches):
            theirs, active = other.log_probs[at] if other else each.loss.array("log_probs"), each.loss.active
            assert theirs is not None and active is not None
            distances.append(np.abs(theirs.astype("f8") - side.log_probs[at])[active])
        return np.concatenate(distances)

    def moved(self, side: Side) -> float:
        """Return the mean distance of a side's log-probs from the recorded ones over all actions, in nats."""
        distances = self.apart(side)
        return float(distances.mean()) if len(distances) else 0.0

    @cached_property
    def weights(self) -> WeightsMet:
        """Say whether the model has the weights of the step."""
        dtype = (self.replayed.resolved or {}).get("dtype")
        as_recorded = dtype is None or (dtype == "fp32") == self.step.fp32
        rounding, apart = self.apart(self.replayed, self.reference), self.apart(self.replayed)
        return weights_met(
            self.replayed.resolved,
            fp32=self.step.fp32,
            as_recorded=as_recorded,
            apart=float(apart.mean()) if len(apart) else math.nan,
            rounding=float(rounding.mean()) if len(rounding) else 0.0,
        )


def run_step(store: Store, step: RecordedStep, config: ReplayConfig, on_event: Callable[[Progress], None]) -> StepFigures:
    """Replay a step under `config`, and as one batch in fp32. Raises Unsupported if the configuration cannot divide it."""
    require_package("the loss of a step", TRAINER.package)
    inputs = tuple(each.forward for each in step.micro_batches)
    if config.backend == ENDPOINT:
        raise Unsupported("a server computes no gradients", hint="use --backend plain, deepspeed or fsdp2")
    if len(inputs) % config.lanes:
        raise Unsupported(
            f"{plural(len(inputs), 'micro-batch')} cannot be divided among {plural(config.lanes, 'data-parallel process')}",
            hint=f"use --nproc {step.ranks * config.lane_width}, as recorded, or 1",
        )
    config = replace(config, backward=True, keep_tensors=True, keep_gradients=False, laws=0, truth=None, vary=None, align=None)
    same = {name: getattr(config, name) for name in ("model", "num_layers", "dtype", "temperature", "timeout_s")}
    sides = {"replay": config, "reference": ReplayConfig(**same, backward=True, keep_tensors=True, truth="fp32")}
    folder, results = store.root / "cache" / "steps" / new_replay_id(), dict[str, Side]()
    try:
        with WarmGroups(partial(launch_group, module=MODULE)) as warm:
            for name, own in sides.items():
                warm.share((own.backend, own.nproc))
                make_folder(folder / name)
                atomic_write(folder / name / PLAN, json.dumps(asdict(_plan(step, own))))
                spec = ReplaySpec(f"{folder.name}-{name}", now_timestamp(), own, inputs, command="step")
                outcome = run_replay(store, spec, on_event, folder=folder / name, deal=False, warm=warm)
                results[name] = _side(outcome, inputs)
                if results[name].failed:
                    break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return StepFigures(step, config, results["replay"], results.get("reference", Side()))


def _plan(step: RecordedStep, config: ReplayConfig) -> StepPlan:
    count = len(step.micro_batches)
    return StepPlan(
        losses={each.forward.dump_id: each.loss_path for each in step.micro_batches},
        accumulation=count // config.lanes,
        scale=count / (step.accumulation * step.ranks),
        ranks=step.ranks,
        tokens=step.tokens,
        rows=step.rows,
        frozen=step.frozen,
        max_norm=float(step.fact("engine_max_norm") or 0.0),
    )


def _side(outcome: ReplayOutcome, inputs: Sequence[ReplayInput]) -> Side:
    results = [outcome.results.get(item.dump_id) for item in inputs]
    failed = [result for result in results if result is None or result.status != PASSED]
    if failed:
        text = "the replay ended early" if failed[0] is None else failed[0].error or failed[0].status
        return Side(failed=first_line(text), resolved=outcome.resolved)
    kept = (outcome.folder / TENSORS / f"{item.dump_id}.safetensors" for item in inputs)
    log_probs = tuple(safetensors.numpy.load_file(path)["log_probs"] for path in kept)
    return Side(tuple(result.extra[STEP] for result in results if result is not None), log_probs, outcome.resolved)
