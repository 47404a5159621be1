"""What a trainer's `losses.json` declares: its losses, and the methods around them. Loaded only if losses are recorded."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CapturePoint:
    """A loss. where: "module:Class", an nn.Module, or a function. returns: names of its results. names: its arguments' names in
    PolicyLoss. method: of the class; "" for a function. model: the trainer's attribute, and the role, of the model whose values
    it gets; "" if it gets the log-probs of the last forward. scores: the trainer's method that sums log-probs by rows, for a loss
    of these sums. rows: that which returns a micro-batch's sequences and attention mask, for a loss of rewards. facts: what it
    does not have as attributes.
    """

    where: str
    returns: tuple[str, ...]
    names: Mapping[str, str]
    method: str = "forward"
    model: str = ""
    scores: str = ""
    rows: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CapturePoints:
    """The losses of a trainer.

    forward: "module:Class.forward", which returns the log-probs; steps: methods that get an experience, or `strategy.args`, and
    call a loss; optimizer: "module:Class" of that whose `backward(loss, ...)` and `optimizer_step(...)` follow it.
    settings: paths in `strategy.args` by the name that a record has; flags: paths by the name for whether any of them is set.
    """

    losses: tuple[CapturePoint, ...]
    forward: str = ""
    steps: tuple[str, ...] = ()
    optimizer: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    read: list[Any] = field(default_factory=lambda: [object(), {}])

    @classmethod
    def of(cls, package: str) -> CapturePoints:
        """Read what the folder of a trainer's package declares: nothing if actordbg has no such folder."""
        file = Path(__file__).parents[1] / "trainers" / package / "losses.json"
        if not package.isidentifier() or not file.is_file():
            return cls(())
        read = json.loads(file.read_text(encoding="utf-8"))
        losses = (CapturePoint(**{**each, "returns": tuple(each["returns"])}) for each in read.pop("losses"))
        return cls(tuple(losses), **read)

    def settings_in(self, trainer: Any, arguments: Any) -> dict[str, Any]:
        """Return the settings and flags, which a process reads once for each `strategy.args`, and the trainer's end token."""
        if self.read[0] is not arguments:
            named = {name: _at(arguments, path) for name, path in self.settings.items()}
            named |= {name: any(_at(arguments, path) for path in paths.split()) for name, paths in self.flags.items()}
            self.read[:] = arguments, named
        return {**self.read[1], "eos_token_id": _at(trainer, "tokenizer.eos_token_id")}  # a critic's trainer may have none


def _at(holder: Any, path: str) -> Any:
    """Return an attribute by its dotted path; None if there is none."""
    return functools.reduce(lambda holder, name: getattr(holder, name, None), path.split("."), holder)
