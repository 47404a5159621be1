"""Log-probs of the truth's model under each cause of the bank, and under rounding: computed where the truth is, in its worker.

`tensors` names what it computes: `cause/NAME=SIZE`, and `cause/noise=SEED`, a draw of what rounding does. In a draw every
module's output is moved by at most half a rounding step of the run's dtype, at random: y (1 + u eps / 2), u uniform in [-1, 1].
Rounding to nearest moves a value by as much (Higham, Accuracy and Stability of Numerical Algorithms, 2.1), but by an amount that
repeats in every call, and in products and sums within a module too. So draws have the shape of rounding's effect, not exactly its
size: `fit` scales them to a real one. Each costs one forward of the truth, as does each size of a planted cause; closed causes
cost none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.other_log_probs import Closed, Laid
from actordbg.actor.truth_session import TruthSession
from actordbg.causes.bank import BANK, cause_and_part
from actordbg.causes.gather import NOISE, PREFIX
from actordbg.config.replay_config import DTYPES
from actordbg.replay.instruments import Examined, Examiner

DRAWS = 8

Rows = Callable[[Mapping[str, Closed]], Mapping[str, Tensor]]
"""Runs the truth's rows: given closed causes by name, returns log-probs [B, A] or [B, S-1] of each, and of the forward ("")."""


def owns(model: Any, dtype: torch.dtype) -> dict[str, float]:
    """Return, by name, the size at which nothing is wrong, of every cause that this model can have in a run in `dtype`."""
    signatures = {
        f"{cause.name}: {part}" if part else cause.name: cause.own(model) if callable(cause.own) else cause.own
        for cause in BANK
        if not (cause.rounds and dtype is torch.bfloat16)
        for part in (cause.parts(model) if cause.parts else [""])
    }
    return {name: own for name, own in signatures.items() if own is not None}


Arranged = Callable[[Callable[[Tensor, Tensor, float], Laid], float], Tensor]
"""Runs the rows as a cause of a size arranges them; returns log-probs [B, A] or [B, S-1], NaN for tokens that no forward has."""


def tensors(model: Any, wanted: str, dtype: torch.dtype, rows: Rows, arranged: Arranged) -> dict[str, Tensor]:
    """Return the log-probs under each wanted cause, by PREFIX + "NAME=SIZE". wanted: "NAME=SIZE,NAME=SIZE", or all, with draws.

    dtype: the run's, in which draws round.
    """
    own, every = owns(model, dtype), "=" not in wanted
    if every:
        asked = [(name, size) for name in own for size in cause_and_part(name)[0].tried(own[name])]
    else:
        asked = [(name, float(size)) for name, _, size in (text.partition("=") for text in wanted.split(","))]
    closed = {f"{name}={size!r}": make(model, size) for name, size in asked if (make := cause_and_part(name)[0].closed)}
    log_probs = dict(rows(closed))
    log_probs.pop("")
    for name, size in asked:
        cause, part = cause_and_part(name)
        if (lay := cause.laid) is not None:
            log_probs[f"{name}={size!r}"] = arranged(lay, size)
        if (plant := cause.planted) is not None:
            with plant(model, part or size):
                log_probs[f"{name}={size!r}"] = rows({})[""]
    for seed in range(DRAWS if every else 0):
        with rounded(model, torch.finfo(dtype).eps / 2, seed):
            log_probs[f"{NOISE}={seed}"] = rows({})[""]
    return {PREFIX + name: values for name, values in log_probs.items()}


@contextmanager
def rounded(model: Any, step: float, seed: int) -> Iterator[None]:
    """Move each module's output by up to `step` of itself, at random, within the block."""
    generators = {parameter.device: torch.Generator(parameter.device).manual_seed(seed) for parameter in model.parameters()}

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value * (1 + step * (2 * torch.rand(value.shape, generator=generators[value.device], device=value.device) - 1))

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(map(moved, output))
        return moved(output)

    hooks = [module.register_forward_hook(hook) for module in model.modules() if module is not model]
    yield
    for handle in hooks:
        handle.remove()


class CausesInWorker(Examiner):
    """What it computes is kept beside the outcome's tensors."""

    session: TruthSession

    def __init__(self, session: TruthSession, *, together: bool) -> None:
        super().__init__(session, together=together)
        self._run_dtype: torch.dtype = getattr(torch, DTYPES[session.choices.dtype])
        session.resolved["causes"] = owns(session.model, self._run_dtype)

    def examine(self, run: Examined) -> dict[str, Any]:
        wanted = self.session.config.causes
        if not run.asked or wanted is None:
            return {}
        run.tell("causes")
        rows, arranged = partial(self.session.closed, run.dump), partial(self.session.arranged, run.dump)
        run.outcome.tensors |= tensors(self.session.model, wanted, self._run_dtype, rows, arranged)
        return {}
