"""Functions that a truth can run on a call's rows, beside its log-probs (`TruthSession.closed`, `TruthSession.arranged`).

No torch: the desk lists such functions, and calls none.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Chosen(NamedTuple):
    """Sampled tokens of a row. labels: their ids [n]. first: bool [n], the first of the row. following: `labels`, but behind the
    row's end the first id of the next row.
    """

    labels: Any
    first: Any
    following: Any


Closed = Callable[[Any, Chosen], Any]
"""(logits [n, V], divided by the temperature; the sampled tokens) -> log-probs [n]."""
Laid = Iterator[tuple[Any, Any, Any]]
"""Arguments of each forward, [B, S]: its tokens (bool, row after row), their positions, those that attention sees (bool)."""
