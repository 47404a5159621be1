"""The table of laws: what each changes, what must then not change, and where it cannot hold.

A law needs no truth and no tolerance: it compares an Actor with itself, on the same input, in equal shapes. So it sees in bf16
what it sees in fp32. An exact law compares bit for bit with a rerun of the unchanged input. The others compare with what rounding
does to this very input (`actordbg.laws.rounding`).

Pure, standard library only: the reference page and the command line read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Law:
    """One law. changes: what is done to the input. keeps: what must not change. finds: faults that break it.

    exact: bit for bit; otherwise within the rounding measured on the input. seen: what a break says, with places for rows.
    fails_where: where it cannot hold, or not bit for bit.
    """

    name: str
    changes: str
    keeps: str
    finds: str
    exact: bool
    fails_where: str = ""


_EXPERTS = "experts: other tokens change the shapes of their matrix products, so only within rounding"
_SHARED_SCALE = "routing with a capacity, FP8 scales for a whole tensor: one token may change all others"

LAWS = {
    one.name: one
    for one in (
        Law(
            "rerun",
            "nothing; the generators get another seed where nothing is dropped",
            "every log-prob and entropy",
            "kernels that are not deterministic, random noise, uninitialised memory; an action mask that is applied shifted",
            True,
        ),
        Law(
            "normalisation",
            "nothing",
            "log-probs are the log-softmax of logits / T, computed again in fp64; entropies are of the same logits",
            "log-softmax in bf16, a wrong temperature, labels that are off by one",
            False,
        ),
        Law(
            "neighbour",
            "the tokens of every other row, then of the rest",
            "log-probs and entropies of the rows that were left alone",
            "packed rows that see each other, a state or a convolution that runs on, a mask that leaks",
            True,
            f"{_EXPERTS}; {_SHARED_SCALE}",
        ),
        Law(
            "padding",
            "the ids under the padding",
            "every log-prob and entropy of real tokens",
            "padding that is attended to, or that a state has seen",
            True,
            f"{_EXPERTS}; {_SHARED_SCALE}",
        ),
        Law(
            "future",
            "the tokens behind the middle of each row",
            "log-probs and entropies before",
            "attention that is not causal, labels from the wrong side",
            True,
            f"{_EXPERTS}; {_SHARED_SCALE}",
        ),
        Law(
            "jacobian",
            "nothing; one backward of one row's log-probs to the output of the input embeddings",
            "entries of other rows, of later positions and of padding are exactly 0",
            "what `neighbour`, `future` and `padding` find, for all tokens at once",
            True,
            "a compiled graph, whose inside no hook sees",
        ),
        Law(
            "order",
            "the order of the rows",
            "every log-prob, within rounding",
            "offsets of packed rows, rows that are mixed up",
            False,
            "calls that draw random numbers; experts: the mean instead of the largest change",
        ),
        Law(
            "alone",
            "all rows but one are left out",
            "the log-probs of that row, within rounding",
            "positions that run on from the row before, masks made for the whole batch",
            False,
            "calls that draw random numbers; experts: the mean instead of the largest change",
        ),
        Law(
            "additivity",
            "the loss is taken over one half of its terms, then over the other",
            "the two gradients add up to the whole, for each parameter",
            "rows lost between loss and gradient, gradients left over from the input before, counts that depend on the batch",
            False,
            "a backward did not run; a loss term for the whole batch, such as a router's",
        ),
    )
}
"""By name, in the order in which they are asked."""
