"""What examines inputs beside the model, in a worker: one line for each instrument, and what it gets and gives.

The worker knows no instrument: it loads those that a specification asks for, by their names here. An instrument's other parts
(its rules, and the words for what it found) are read where verdicts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from actordbg.actor.forward_outcome import ForwardOutcome
    from actordbg.actor.session import Session
    from actordbg.records.replay_record import ReplaySpec
    from actordbg.store.payload import Dump

AT_END = "at the end"
"""Stands beside the names of instruments after the last input."""


@dataclass(frozen=True)
class Examined:
    """An input that has run. backward: its backward too. tell: called before each step of an examination, whose time does not
    count as a hang of the input.

    asked: this instrument examines the input. at_end: it is the last one, for what is compared once more then.
    """

    dump: Dump
    outcome: ForwardOutcome
    backward: bool
    tell: Callable[[str], None]
    asked: bool
    at_end: bool = False


class Examiner:
    """An instrument in a worker, made when the model is loaded. together: ranks compute each input together.

    out_of_step: why this process must be replaced after the input, "" if it can continue.
    """

    out_of_step = ""

    def __init__(self, session: Any, *, together: bool) -> None:
        self.session, self.together = session, together

    def examine(self, run: Examined) -> dict[str, Any]:
        """Return fields of the result's `extra`, plain data. No error of an examination fails the input."""
        raise NotImplementedError


class Instrument(NamedTuple):
    """examiner: "MODULE:CLASS". inputs: how many inputs a specification asks it about, the most telling first."""

    examiner: str
    inputs: Callable[[ReplaySpec], int]


INSTRUMENTS: Mapping[str, Instrument] = {
    "laws": Instrument("actordbg.laws.law_run:LawsInWorker", lambda spec: spec.config.laws),
    "causes": Instrument("actordbg.causes.in_worker:CausesInWorker", lambda spec: len(spec.inputs) if spec.config.causes else 0),
    "locate": Instrument("actordbg.locate.locate_run:LocateInWorker", lambda spec: spec.locate),
}
"""By name, in the order in which they examine an input."""


def examiners(spec: ReplaySpec, session: Session, *, together: bool) -> dict[str, Examiner]:
    """Make the instruments that a specification asks for, by name."""
    made = {}
    for name, instrument in INSTRUMENTS.items():
        if instrument.inputs(spec):
            module, _, examiner = instrument.examiner.partition(":")
            made[name] = getattr(import_module(module), examiner)(session, together=together)
    return made
