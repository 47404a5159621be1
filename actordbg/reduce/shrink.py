"""Make a case smaller as long as trials show the same fingerprint: bisection where size is a number, then delta debugging.

    shrinker = Shrinker(trials, fingerprint, start)
    shrinker.run()
    shrinker.best, shrinker.accepted, shrinker.aside

In this order: settings back to their defaults, one after another; drawn token ids instead of the captured ones; rows; tokens,
from the end, the beginning and the middle; layers; the sizes and then the keys of a random model's configuration. Delta
debugging is Zeller and Hildebrandt's ddmin (doi:10.1109/32.988498).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from actordbg.actor.models import truncate
from actordbg.base.errors import CorruptDump, UsageError
from actordbg.reduce.case import ALONE, MODEL, PACKED, PADDED, FaultCase
from actordbg.reduce.trials import RETURNED, Ending, Fingerprint, Trials

T = TypeVar("T")
LEAST_ROW = 2
"""Fewest tokens of a row: the first has no log-prob."""
_SIZE = re.compile(r".*(_size|_dim|_heads|_rank|_experts|_per_tok|_groups|_state)")
_LEAST_SIZE = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 32}
_CLEAR = 0.1
"""A smaller model may show less of a fault, but at least half of it, or of this: nats."""


def ddmin(items: Sequence[T], shows: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a smallest part of `items`, in order, that still shows it: no single item can be left out. `shows(items)` holds."""
    items, parts = list(items), 2
    while len(items) >= 2:
        size = max(1, len(items) // parts)
        chunks = [items[at : at + size] for at in range(0, len(items), size)]
        rests = [[item for other in chunks if other is not chunk for item in other] for chunk in chunks]
        for smaller in [*chunks, *rests] if parts == 2 else rests:
            if smaller and len(smaller) < len(items) and shows(smaller):
                items, parts = list(smaller), max(2, min(parts - 1, len(smaller)))
                break
        else:
            if size == 1:
                return items
            parts = min(2 * parts, len(items))
    return items


def least(low: int, high: int, shows: Callable[[int], bool]) -> int:
    """Return the smallest number of `low` to `high` that shows it, by bisection: all larger ones are taken to show it too."""
    return low + bisect_left(range(low, high), True, key=shows)


class Shrinker:
    """The state of a reduction. best: the smallest case so far. accepted: all that showed the fingerprint, in order.

    aside: smaller cases that showed something else, and what. on_step: called with what is tried.
    """

    def __init__(
        self, trials: Trials, fingerprint: Fingerprint, start: FaultCase, on_step: Callable[[str], None] = lambda words: None
    ) -> None:
        self.trials, self.fingerprint, self.best, self.on_step = trials, fingerprint, start, on_step
        self.accepted, self.aside = [start], dict[str, str]()

    def run(self) -> None:
        """Shrink until nothing smaller shows it. Raises `trials.OutOfBudget`; `best` is then what was reached."""
        for phase in (self._settings, self._drawn, self._rows, self._tokens, self._layers, self._sizes, self._keys, self._drawn):
            self.on_step(f"{phase.__name__.strip('_')}: {self.best.words}")
            phase()

    def _take(self, *, notable: bool = True, **changes: Any) -> bool:
        """Try the best case with these changes, and keep it if it shows the fault. notable: another fault is worth a word."""
        try:
            case = replace(self.best, **changes).fitted
        except (CorruptDump, ValueError):
            return False
        ending = self.trials.ending(case)
        if self.fingerprint.shown_by(case, ending) and (
            notable or _size(ending) >= min(_size(self.trials.ending(self.best)), _CLEAR) / 2
        ):
            self.best = case
            self.accepted.append(case)
            return True
        if notable and ending.status != RETURNED:
            self.aside.setdefault(ending.words, case.words)
        return False

    def _settings(self) -> None:
        for words, changes in _DEFAULTS.items():
            if _differs(self.best, changes) and (words != "rows packed" or self.best.layout == PADDED):
                self._take(**changes)

    def _drawn(self) -> None:
        if not self.best.synthetic:
            self._take(synthetic=True)

    def _rows(self) -> None:
        rows, left = self.best.rows, self.best.left
        ddmin(
            range(len(rows)),
            lambda kept: (
                len(kept) >= self.best.processes
                and self._take(rows=tuple(rows[at] for at in kept), left=tuple(left[at] for at in kept if left))
            ),
        )
        if len(self.best.rows) == 1 and self.best.layout != ALONE:
            self._take(layout=ALONE, left=())

    def _tokens(self) -> None:
        for number in range(len(self.best.rows)):
            self._shorten(number)

    def _shorten(self, number: int) -> None:
        """Shorten one row: from its end; captured ids also from the beginning and the middle."""
        row = self.best.rows[number]
        least(min(LEAST_ROW, len(row)), len(row), lambda size: self._with_row(number, row[:size]))
        if not self.best.synthetic:
            rest = self.best.rows[number]
            least(min(LEAST_ROW, len(rest)), len(rest), lambda size: self._with_row(number, rest[-size:]))
            ddmin(self.best.rows[number], lambda kept: len(kept) >= LEAST_ROW and self._with_row(number, kept))

    def _with_row(self, number: int, row: Sequence[int]) -> bool:
        rows = tuple(tuple(row) if at == number else other for at, other in enumerate(self.best.rows))
        return len(row) >= len(self.best.rows[number]) or self._take(rows=rows)  # the best case itself

    def _layers(self) -> None:
        if (config := self.best.config) is None:
            if self.best.layers is not None:
                least(1, self.best.layers, lambda count: self._take(layers=count))
            return
        depth = self.best.depth
        if not isinstance(depth, int) or depth < 2:
            return
        kinds = list(dict.fromkeys(config.get("layer_types") or ()))
        for kind in kinds if len(kinds) > 1 else ():
            if self._take(config=truncate(config, 1) | {"layer_types": [kind]}):
                return

        def shows(count: int) -> bool:
            try:
                return count == depth or self._take(config=truncate(config, count))
            except UsageError:
                return False

        least(1, depth, shows)

    def _sizes(self) -> None:
        if self.best.config is None:
            return
        heads = {name: 1 for name in self.best.config if name in ("num_attention_heads", "num_key_value_heads")}
        self._take(notable=False, config=self.best.config | heads)
        names = [name for name, value in self.best.config.items() if isinstance(value, int) and _SIZE.fullmatch(name)]
        for name in sorted(names, key=lambda name: name == "vocab_size"):
            value, lowest = self.best.config[name], _LEAST_SIZE.get(name, 1)
            halves = [value >> times for times in range(value.bit_length() - 1, 0, -1) if value >> times >= lowest]
            any(self._take(notable=False, config=self.best.config | {name: half}) for half in halves)  # the smallest first

    def _keys(self) -> None:
        config = self.best.config or {}
        sizes = {name for name, value in config.items() if isinstance(value, int) and _SIZE.fullmatch(name)}
        stays = {"model_type", *sizes, *(name for name in config if "layer" in name)}

        def shows(kept: Sequence[str]) -> bool:
            return self._take(notable=False, config={name: config[name] for name in config if name in stays or name in kept})

        if not shows(()):
            ddmin([name for name in config if name not in stays], shows)


def _size(ending: Ending) -> float:
    """Return the largest difference; infinity if it is not finite, or if something else than a difference is watched."""
    return max((math.inf if value is None else value for value in ending.values), default=math.inf)


_DEFAULTS: dict[str, dict[str, Any]] = {
    "one process, no engine": {"processes": 1, "engine": "", "zero": 0},
    "without the trainer": {"through": MODEL},
    "without torch.compile": {"compile": ""},
    "each row alone": {"layout": ALONE, "left": (), "cache": False},
    "rows packed": {"layout": PACKED, "left": ()},
    "use_cache=False": {"cache": False},
    "in fp32": {"dtype": "fp32"},
    "attention sdpa": {"attn": "sdpa"},
    "temperature 1": {"temperature": 1.0},
    "without a backward": {"backward": False},
    "without a limit of memory": {"memory": None},
}
"""Settings that a case is better without, in the order in which they are tried."""
_BESIDE: dict[str, dict[str, Any]] = {
    "attention eager": {"attn": "eager"},
    "with cu_seq_lens_q and seq_idx passed": {"borders": True},
    "torch.compile with backend eager": {"compile": "eager"},
    "in bf16": {"dtype": "bf16"},
}


def _differs(case: FaultCase, changes: Mapping[str, Any]) -> bool:
    return any(getattr(case, name) != value for name, value in changes.items())


def neighbours(case: FaultCase) -> Iterator[tuple[str, FaultCase]]:
    """Yield cases that differ from this case in a single setting, and the setting in words, for what was tried beside it."""
    for words, changes in (_DEFAULTS | _BESIDE).items():
        pointless = ("borders" in changes and case.layout != PACKED) or ("compile" in changes and not case.compile)
        if _differs(case, changes) and not pointless:
            yield words, replace(case, **changes)
