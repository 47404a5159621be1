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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from actordbg.actor.models import truncate
from actordbg.base.errors import CorruptDump, UsageError
from actordbg.reduce.case import ALONE, GRADIENT, LIMITS, MODEL, PACKED, PADDED, FaultCase, drawn, without_paths
from actordbg.reduce.fingerprint import Fingerprint
from actordbg.reduce.trials import RETURNED, Ending, Trials

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
    while low < high:
        middle = (low + high) // 2
        if shows(middle):
            high = middle
        else:
            low = middle + 1
    return high


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
            case = replace(self.best, **changes)
        except (CorruptDump, ValueError):
            return False
        ending = self.trials.ending(case)
        if self.fingerprint.shown_by(case, ending) and (
            notable or _size(ending) >= min(_size(self.trials.ending(self.best)), _CLEAR) / 2
        ):
            self.best = case
            self.accepted.append(case)
            return True
        if notable and (words := _other(case, ending)):
            self.aside.setdefault(words, case.words)
        return False

    def _settings(self) -> None:
        engine = {"processes": 1, "engine": "", "zero": 0}
        fp32 = {"dtype": "fp32", "limit": LIMITS["fp32"]}
        alone = {"layout": ALONE, "left": (), "cache": False}
        packed = {"layout": PACKED, "left": ()}
        forward = {"backward": self.best.kind == GRADIENT}
        others = ({"attn": "sdpa"}, {"temperature": 1.0}, forward, {"memory": None})
        for changes in (engine, {"through": MODEL}, {"compile": ""}, alone, packed, {"cache": False}, fp32, *others):
            differs = any(getattr(self.best, name) != value for name, value in changes.items())
            if differs and (changes is not packed or self.best.layout == PADDED):
                self._take(**changes)

    def _drawn(self) -> None:
        if not self.best.synthetic:
            lengths = [len(row) for row in self.best.rows]
            self._take(synthetic=True, rows=drawn(lengths, self.best.vocabulary), left=self.best.left)

    def _rows(self) -> None:
        rows, left = self.best.rows, self.best.left
        ddmin(range(len(rows)), lambda kept: self._with_rows([rows[at] for at in kept], tuple(left[at] for at in kept if left)))
        if len(self.best.rows) == 1 and self.best.layout != ALONE:
            self._take(layout=ALONE, left=())

    def _with_rows(self, rows: Sequence[Sequence[int]], left: tuple[int, ...]) -> bool:
        if len(rows) < self.best.processes:
            return False
        if self.best.synthetic:
            rows = drawn([len(row) for row in rows], self.best.vocabulary)
        return self._take(rows=tuple(map(tuple, rows)), left=left)

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
        if len(row) >= len(self.best.rows[number]):
            return True  # the best case itself
        return self._with_rows([row if at == number else other for at, other in enumerate(self.best.rows)], self.best.left)

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
            any(self._with_size(name, half) for half in halves)  # the smallest first

    def _with_size(self, name: str, value: int) -> bool:
        smaller: dict[str, Any] = {"config": (self.best.config or {}) | {name: value}}
        if name == "vocab_size":
            lengths = [len(row) for row in self.best.rows]
            folded = tuple(tuple(token % value for token in row) for row in self.best.rows)
            smaller["rows"] = drawn(lengths, value) if self.best.synthetic else folded
        return self._take(notable=False, **smaller)

    def _keys(self) -> None:
        self._without(
            [
                name
                for name, value in (self.best.config or {}).items()
                if name != "model_type" and not (isinstance(value, int) and _SIZE.fullmatch(name)) and "layer" not in name
            ]
        )

    def _without(self, names: Sequence[str]) -> None:
        """Drop keys of the configuration: all at once, else those of each half."""
        kept = {key: value for key, value in (self.best.config or {}).items() if key not in names}
        if names and not self._take(notable=False, config=kept) and (half := len(names) // 2):
            self._without(names[:half])
            self._without(names[half:])


def _size(ending: Ending) -> float:
    """Return the largest difference; infinity if it is not finite, or if something else than a difference is watched."""
    return max((math.inf if value is None else value for value in ending.values), default=math.inf)


def _other(case: FaultCase, ending: Ending) -> str:
    """Say what other fault a trial shows; "" for none."""
    if ending.status != RETURNED:
        return f"{ending.error_class or ending.status}: {without_paths(ending.error)}"[:120].removesuffix(": ")
    return ""


def neighbours(case: FaultCase) -> Iterator[tuple[str, FaultCase]]:
    """Yield cases that differ from this case in a single setting, and the setting in words, for what was tried beside it."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("attention eager", {"attn": "eager"}),
        ("attention sdpa", {"attn": "sdpa"}),
        ("each row alone", {"layout": ALONE, "left": ()}),
        ("rows packed", {"layout": PACKED, "left": ()}),
        ("use_cache=False", {"cache": False}),
        ("with cu_seq_lens_q and seq_idx passed", {"borders": True} if case.layout == PACKED else {}),
        ("without torch.compile", {"compile": ""}),
        ("torch.compile with backend eager", {"compile": "eager"} if case.compile else {}),
        ("in fp32", {"dtype": "fp32", "limit": LIMITS["fp32"]}),
        ("in bf16", {"dtype": "bf16", "limit": LIMITS["bf16"]}),
        ("one process", {"processes": 1, "engine": "", "zero": 0}),
    ]
    for words, change in changes:
        if any(getattr(case, name) != value for name, value in change.items()):
            yield words, replace(case, **change)
