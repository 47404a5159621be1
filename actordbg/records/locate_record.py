"""What a result says about where its configuration goes wrong: in its `extra`, as plain data (`actordbg.locate` computes it).

    identity    a list, a ModelIdentity for each rank that computes with this worker: what its model is, against transformers' own
                model of the same checkpoint; in a worker's first result, and again in its last
    located     a Located: the forced forward of one input, place by place
    formulas    a FormulaCheck: in a truth's first result, its modules against the formulas of their papers

A *place* is a module's output, or what comes into it: the result of the operations between modules, such as attention, a gated
product or a residual. Its `ratio` is the error that the configuration adds there to the truth's values, in units of what its
dtype costs a healthy model there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actordbg.records.finding import BROKEN, KEPT, NOT_CHECKED
from actordbg.records.replay_record import LawAnswer, ResultRecord

IDENTITY, LOCATED, FORMULAS = "identity", "located", "formulas"
"""Keys in a result's `extra`."""
LOCAL = "local"
"""The law of `located`: every module's output is the truth's."""
OUT, INTO = "out", "into"
"""Kinds of places: a module's output, and what came into it."""
BACK = {OUT: "back out", INTO: "back into"}
"""The kind of a place in the backward: the gradient that comes back to a module's output, or that it gives back to its input."""
GRADIENT = "gradient"
"""The kind of a parameter's gradient; the place has the parameter's name."""


def is_backward(kind: str) -> bool:
    """Check whether a place of this kind is in the backward."""
    return kind not in (OUT, INTO)


MOST = 20
"""Most differences and most wrong places that a record keeps; it has the count of all."""
ROUTING = "the routing of"
"""How the `what` of a place begins that is a router's choice of experts; its gain is the overlap with the truth's."""
EVERYTHING = "everything"
"""What `unchecked` names if nothing could be judged."""


SHAPE, ROUNDED, ZERO, FACTOR, VALUES, TIE, ATTRIBUTE, MODE = (
    "shape", "rounded", "zero", "factor", "values", "tie", "attribute", "mode",
)  # fmt: skip
"""Kinds of differences of what a model is."""


@dataclass(frozen=True)
class ModelDifference:
    """A difference of what a model is. name: of the tensor, the module or the attribute. said: for people, a whole sentence.

    kind: SHAPE to MODE, "" in a record of before 2026-12. factor: of a FACTOR. ranks: those that have it, () for all.
    """

    name: str
    kind: str
    said: str
    factor: float | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelIdentity:
    """What a rank's model is. looked_at: how many parameters, buffers, attributes and ties were compared, bit for bit.

    differences: MOST at most (earlier records have sentences); count: of all. unchecked: what could not be compared, and why.
    ran: compared after the replay's last input; else when it was loaded.
    """

    looked_at: int = 0
    count: int = 0
    differences: tuple[ModelDifference | str, ...] = ()
    unchecked: tuple[str, ...] = ()
    rank: int = 0
    ran: bool = False


@dataclass(frozen=True)
class PlaceResult:
    """A place that exceeds its limit. module: its name; kind: OUT, INTO, a kind of BACK, or GRADIENT; what: in words.

    ratio: the root mean square error over all tokens, in units of the healthy model's; None if infinite. gain: the values,
    regressed on the truth's: 1.01 for a matrix times 1.01. rows: those that exceed the limit by themselves; of_rows: of how many.
    tokens: how many tokens exceed it; of_tokens: of how many. position: where in its padded row the first of them is.
    pattern: the rule that covers these tokens (`actordbg.locate.token_patterns`), "" for none.
    """

    module: str
    kind: str
    what: str
    ratio: float | None
    limit: float
    gain: float | None = None
    rows: tuple[int, ...] = ()
    of_rows: int = 0
    tokens: int = 0
    of_tokens: int = 0
    position: int | None = None
    pattern: str = ""


@dataclass(frozen=True)
class Operation:
    """The first operation of a module that is not transformers' own. module: its name. word: what it is called, such as "rotary
    embedding"; "" if the module could not be looked into. said: how it differs, or why it could not be looked into.
    other_rows: queries see keys of other rows.
    """

    module: str
    word: str
    said: str
    other_rows: bool = False

    @property
    def sentence(self) -> str:
        """Return all three in words."""
        return (
            f"the {self.word} of {self.module}: {self.said}" if self.word else f"{self.module} was not looked into: {self.said}"
        )


@dataclass(frozen=True)
class FormulaCheck:
    """The modules of a truth's model against the formulas of their papers, on `tokens` tokens of a row.

    modules: how many were compared. differs: the worst of those that differ, in words, "" if none does; count: of all.
    """

    modules: int
    tokens: int
    differs: str = ""
    count: int = 0


@dataclass(frozen=True)
class Located:
    """The forced forward of one input, and its backward.

    places, gradients: how many were judged forward and backward. wrong: those above their limits, forward first, then the
    largest, MOST at most; count: of all. largest: the largest ratio. unchecked: places, or "everything", without a judgement,
    with the reason. dtype: of the weights. tokens: how many were judged. notes: such as "run eagerly: ...".
    heat: if a place is wrong, the largest ratio of a token, by layer and field; fields: the row of each field, and its first and
    last position in the padded row.
    formulas: the truth's own modules against the formulas of their papers; None for a model without formulas.
    kernel: what the attention kernel of transformers does that is wrong, in words; "" if it is right.
    operation: where an operation between modules differs, the first of them. seconds: how long the judgement took.
    resident_bytes: weights of the truth that were in memory at once. spilled_bytes: its values that were in temporary files.
    """

    places: int = 0
    wrong: tuple[PlaceResult, ...] = ()
    count: int = 0
    largest: float | None = None
    unchecked: tuple[str, ...] = ()
    dtype: str = ""
    tokens: int = 0
    notes: tuple[str, ...] = ()
    gradients: int = 0
    heat: dict[str, tuple[float, ...]] = field(default_factory=dict)
    fields: tuple[tuple[int, int, int], ...] = ()
    formulas: FormulaCheck | None = None
    kernel: str = ""
    operation: Operation | None = None
    resident_bytes: int = 0
    spilled_bytes: int = 0
    seconds: float = 0.0


def formula_checks(results: Iterable[ResultRecord]) -> list[FormulaCheck]:
    """Read how a truth's modules agree with their formulas; [] if its model has none."""
    each = (result.extra.get(FORMULAS) for result in results)
    return [FormulaCheck(**values) for values in each if isinstance(values, dict)]


def local_answers(extra: Mapping[str, Any]) -> list[LawAnswer]:
    """Return what a result's `extra` says of the model and its modules as answers of the laws `identity` and `local`."""
    ranks, located = extra.get(IDENTITY), extra.get(LOCATED)
    looks = [look for look in ranks if isinstance(look, Mapping)] if isinstance(ranks, list) else []
    answers = [LawAnswer(IDENTITY, BROKEN if any(look.get("count") for look in looks) else KEPT)] if looks else []
    if isinstance(located, Mapping):
        beside = [(located.get(name), key) for name, key in _WRONG_BESIDE]
        beside_it = any(isinstance(part, Mapping) and part.get(key) for part, key in beside)
        wrong = located.get("count") or located.get("kernel") or beside_it
        judged = KEPT if located.get("places") else NOT_CHECKED
        answers.append(LawAnswer(LOCAL, BROKEN if wrong else judged))
    return answers


_WRONG_BESIDE = ((FORMULAS, "count"), ("operation", "word"))
"""What else of a `Located` says that it is wrong."""
