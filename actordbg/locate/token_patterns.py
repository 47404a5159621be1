"""Find the smallest rule that covers the wrong tokens: "rows >= 2", "position 0", "rank 1 and S >= 640". Pure; numpy only.

    wrong     bool [N]                    which tokens are wrong
    features  name -> [N]                 what is known of each token: integers, names, or marks (bool)

A rule has at most two clauses. A clause is a mark, an equality, or a bound whose value is the one with the fewest errors. Errors
are the wrong tokens that the rule misses and the right ones that it covers.

Limits, so that a sentence is worth reading:

* It covers `RECALL` of the wrong tokens: otherwise it names a part of the fault as the whole.
* `PRECISION` of the tokens that it covers are wrong. That is low because in bf16 a token of a faulty row is within its limit by
  chance; with less, most of what the rule names is right.
* Rounding could not have drawn it: with a share s of all tokens in the rule, k of w wrong ones are in it by chance with a
  probability below exp(-w KL(k / w || s)) (Chernoff). Times the number of rules, that is at most `CHANCE`. Tokens are not
  independent, so this is a limit and no probability of being right.
* A longer rule has at most half of the errors of a shorter one, and fewer by a tenth of the wrong tokens.

Example:
    pattern_of(array([0, 0, 1, 1] * 20, bool), {"row": array([0, 1, 2, 3] * 20)}).words     # "rows >= 2"
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actordbg.base.units import listed, plural

Array = Any
RECALL, PRECISION, ALL, CHANCE = 0.95, 0.5, 0.9, 1e-3
EVERY_TOKEN = "every token"
MARKS = {
    "first": "the first token of an answer",
    "last": "the last token of an answer",
    "packed": "behind another row of the pack",
    "image": "after an image",
    "padded": "in a row with padding",
}
"""Marks, in words."""
NUMBERS = {
    "row": "row",
    "position": "position",
    "unpadded": "unpadded position",
    "seq_len": "S",
    "rank": "rank",
    "step": "step",
}
"""Numbers, in words. position: in the padded row, prompt included. unpadded: in the row without its padding."""


@dataclass(frozen=True)
class Pattern:
    """The rule `words` covers `hits` of the `wrong` tokens, and `extra` right ones. alike: rules that cover as many of
    both. features: what the rule is about."""

    words: str
    hits: int
    wrong: int
    extra: int
    alike: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """ "rows >= 2: 229 of 233 wrong tokens, and 3 right ones; fits as well: rank 1"; "229 of 233 tokens" if all are wrong."""
        if self.words == EVERY_TOKEN:
            return f"{self.hits:,} of {plural(self.wrong + self.extra, 'token')}" if self.extra else EVERY_TOKEN
        right = f", and {plural(self.extra, 'right one')}" if self.extra else ""
        alike = f"; fits as well: {listed(self.alike[:2])}" if self.alike else ""
        return f"{self.words}: {self.hits:,} of {plural(self.wrong, 'wrong token')}{right}{alike}"

    @property
    def errors(self) -> int:
        return self.wrong - self.hits + self.extra


@dataclass(frozen=True)
class _Clause:
    """The tokens whose feature is `low` at least, or `high` at most, or, if both are the same, that value. Both: a range."""

    feature: str
    low: Any = None
    high: Any = None

    def covers(self, values: Array) -> Array:
        """Mark the tokens of the clause, bool [N]."""
        if self.low == self.high:
            return values == self.low
        return values <= self.high if self.low is None else values >= self.low

    @property
    def words(self) -> str:
        name = NUMBERS.get(self.feature, self.feature)
        if self.low is True:
            return MARKS[self.feature]
        if self.low == self.high:
            return f"{name} = {self.low}" if name == "S" else f"{name} {self.low}"
        plural_name = name if name == "S" else f"{name}s"
        if self.low is not None and self.high is not None:
            return f"{plural_name} {self.low} to {self.high}"
        return f"{plural_name} >= {self.low}" if self.high is None else f"{plural_name} <= {self.high}"


def pattern_of(wrong: Array, features: Mapping[str, Array]) -> Pattern | None:
    """Return the rule that covers the wrong tokens; None if there are none, or no rule is within the limits.

    wrong: bool [N]. features: arrays [N] by name, of NUMBERS (integers), MARKS (bool) or any other name (text); in a tie the
    first is named. A feature that all tokens share names nothing. Deterministic; O(N) for each pair of features.
    """
    wrong = np.asarray(wrong, bool)
    bad = int(wrong.sum())
    if not bad:
        return None
    arrays: dict[str, Array] = {name: np.asarray(values) for name, values in features.items()}
    known = {name: values for name, values in arrays.items() if len(np.unique(values)) > 1}
    tests = sum(2 * len(np.unique(values)) for values in known.values())
    singles: list[tuple[_Clause, ...]] = [(clause,) for clause in _clauses(wrong, known, bad)]
    pairs: list[tuple[_Clause, ...]] = [
        (clause, other)
        for (clause,) in singles
        for inside in [clause.covers(known[clause.feature])]
        for other in _clauses(wrong[inside], {name: values[inside] for name, values in known.items()}, bad)
    ]
    best = Pattern(EVERY_TOKEN, bad, bad, len(wrong) - bad) if bad >= ALL * len(wrong) else None
    for level, rules in enumerate((singles, pairs), 1):
        named = [pattern for rule in rules if (pattern := _judged(rule, wrong, known, tests**level))]
        fewest = min(named, key=lambda pattern: pattern.errors, default=None)
        if fewest and (best is None or _much_better(fewest, best)):
            best = fewest
            if level == 1:  # every longer rule has many such
                alike = (other.words for other in named if (other.hits, other.extra) == (best.hits, best.extra))
                best = replace(best, alike=tuple(words for words in alike if words != best.words))
    return best


def _much_better(pattern: Pattern, shorter: Pattern) -> bool:
    return 2 * pattern.errors <= shorter.errors and shorter.errors - pattern.errors >= max(3, 0.1 * pattern.wrong)


def _judged(rule: Sequence[_Clause], wrong: Array, features: Mapping[str, Array], tests: int) -> Pattern | None:
    """Count what a rule covers; None if it is outside the limits. tests: how many rules could have been named."""
    inside = np.logical_and.reduce([clause.covers(features[clause.feature]) for clause in rule])
    bad, size, hits = int(wrong.sum()), int(inside.sum()), int((inside & wrong).sum())
    if size == len(wrong) or hits < RECALL * bad or hits < PRECISION * size:
        return None
    if bad * _divergence(hits / bad, size / len(wrong)) < math.log(tests / CHANCE):
        return None
    about = tuple(clause.feature for clause in rule)
    return Pattern(" and ".join(_joined(rule)), hits, bad, size - hits, features=about)


def _divergence(share: float, usual: float) -> float:
    """Return KL(share || usual) of two Bernoulli distributions, in nats; 0 if `share` is not above `usual`."""
    if share <= usual:
        return 0.0
    return share * math.log(share / usual) + ((1 - share) * math.log((1 - share) / (1 - usual)) if share < 1 else 0.0)


def _joined(rule: Sequence[_Clause]) -> Iterator[str]:
    """Yield the clauses in words; two bounds of one feature are a range."""
    first, last = rule[0], rule[-1]
    if first is not last and first.feature == last.feature:
        low, high = (first.low, last.high) if last.low is None else (last.low, first.high)
        yield _Clause(first.feature, low, high).words
    else:
        yield from (clause.words for clause in rule)


def _clauses(wrong: Array, features: Mapping[str, Array], bad: int) -> Iterator[_Clause]:
    """Yield, for each feature, the equality and the bounds that cover enough of the `bad` wrong tokens with the fewest errors."""
    for name, values in features.items():
        known, index = np.unique(values, return_inverse=True)
        of_wrong, of_right = (np.bincount(index, where, len(known)) for where in (wrong, ~wrong))
        most = int(of_wrong.argmax())
        if of_wrong[most] >= RECALL * bad and (most or name not in MARKS):
            yield _Clause(name, known[most].item(), known[most].item())
        for end, step in (("low", -1), ("high", 1)) if name in NUMBERS else ():
            hits, extra = of_wrong[::step].cumsum(), of_right[::step].cumsum()  # of a bound at each value
            errors = np.where(hits >= RECALL * bad, bad - hits + extra, np.inf)
            if 0 < (best := int(errors.argmin())) < len(known) - 1:  # neither an equality nor all
                yield _Clause(name, **{end: known[::step][best].item()})
