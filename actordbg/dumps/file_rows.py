"""A row of a file that a run left behind: the type of its layout, and how its fields become a `FileRow`.

`row_of` makes a `FileRow` of any layout's fields: its real tokens, and values beside them. Every list of values ends with the
row: the last value is that of the last token, whether a list covers all tokens, all but the first, or the response only. So one
rule places all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from actordbg.dumps.pickle_notes import corrupt

IDS, MASK, RESPONSE, LENGTH, ATTENTION, SAMPLE = (
    "ids",
    "action_mask",
    "response_length",
    "length",
    "attention_mask",
    "sample_mask",
)
OF_LOG_PROBS = ("log_probs", "old_log_probs", "rollout_log_probs", "base_action_log_probs")
OF_ROW_OR_TOKENS = ("advantages", "returns")
"""Parts of which a row may have one value for all of its tokens, as GRPO makes them."""
OF_TOKENS = (MASK, *OF_LOG_PROBS, *OF_ROW_OR_TOKENS, "values", "entropy")
"""Parts of a row that have a value for each token, or for each token of its response."""
LABELS, IGNORED = "labels", -100
"""The tokens that a supervised training learns, and what stands for those that it does not."""
OF_ROWS = ("rewards", "truncated", "step", "rank", "ranks")
PARTS = (IDS, ATTENTION, *OF_TOKENS, *OF_ROWS, RESPONSE, LENGTH, SAMPLE, LABELS)
ALIGN, NEXT, OWN = "align", "next", "own"
MOST_TOKENS = 2**23
"""Most tokens of a row: a few bytes may be unpacked to any number of zeros."""
Values: TypeAlias = Any
"""A numpy array."""
Fields: TypeAlias = Mapping[str, Any]
Parts: TypeAlias = Mapping[str, Values]
"""Values by part."""


@dataclass
class FileRow:
    """A row of a file. ids: its real tokens [T]. values: by part, [L] with L <= T, of its last L tokens. odd: parts whose values
    do not fit it. number: its place in the file. ranks: how many ranks have rows of their own, if that is known. of_row: its
    reward, and whether it was cut off, where they are known.
    """

    ids: Values
    values: dict[str, Values]
    number: int = 0
    step: int | None = None
    rank: int = 0
    ranks: int | None = None
    of_row: dict[str, float] = field(default_factory=dict)
    odd: dict[str, Values] = field(default_factory=dict)


@dataclass(frozen=True)
class FileLayout:
    """How a writer lays out rows. marks: fields by which a file is known: of the whole value, or of a row, if that is its unit.

    source: where the fields were read, and in which version. container: None for any. fields: the writer's name of each part.
    rows: yields the rows of a content, each with the writer's names. step: the number of a step by its content or path.
    incomplete: why a file may lack rows, "" if it does not. folder: how many folders above a file its run's is. notes: what a
    reader would not expect.
    """

    name: str
    writer: str
    source: str
    marks: frozenset[str]
    fields: Mapping[str, str]
    container: str | None = None
    rows: Callable[[Fields], Iterator[Fields]] = lambda content: iter((content,))
    step: Callable[[Fields, Path], int | None] = lambda content, path: None
    incomplete: Callable[[Path], str] = lambda path: ""
    folder: int = 1
    notes: str = ""
    aligned: str = OWN

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that rows of this layout have."""
        return tuple(part for part in PARTS if part in self.fields)


def row_of(layout: FileLayout, record: Fields, number: int) -> FileRow | None:
    """Return a row of a file; None if it has fewer than two tokens. Raises CorruptDump if it cannot be one."""
    given = {part: record[name] for part, name in layout.fields.items() if record.get(name) is not None}
    try:
        return _row(layout, given, number)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise corrupt(f"row {number}: {error!s:.200}") from None


def _row(layout: FileLayout, given: Mapping[str, Any], number: int) -> FileRow | None:
    if IDS not in given:
        raise ValueError("it has no token ids")
    ids = numbers_in(IDS, given[IDS])
    if ids.size > MOST_TOKENS:
        raise ValueError(f"it has more than {MOST_TOKENS} tokens")
    whole = ids.dtype.kind != "f" or (ids == np.floor(ids)).all()
    if ids.ndim != 1 or not whole or (ids.size and not 0 <= ids.min() <= ids.max() < 2**31):
        raise ValueError(f"its {layout.fields[IDS]} are not token ids")
    kept = np.ones(len(ids), bool)
    if ATTENTION in given:
        mask = numbers_in(ATTENTION, given[ATTENTION])
        if mask.shape != ids.shape:
            raise ValueError(f"its {layout.fields[ATTENTION]} has {mask.size} values, it has {len(ids)} tokens")
        kept = mask != 0
    if LENGTH in given and ATTENTION not in given:
        kept[int(given[LENGTH]) :] = False
    response = int(given[RESPONSE]) if RESPONSE in given else None
    if response is not None and not 0 <= response <= len(ids):
        raise ValueError(f"its {layout.fields[RESPONSE]} is {response}, it has {len(ids)} tokens")
    values: Parts = {part: numbers_in(part, given[part]) for part in OF_TOKENS if part in given}
    values = _at_tokens(values, len(ids) if response is None else response)
    if layout.aligned == NEXT:
        values = {part: each[: len(ids) - 1] if len(each) == len(ids) else each for part, each in values.items()}
    if MASK not in values and LABELS in given and (labels := numbers_in(LABELS, given[LABELS])).shape == ids.shape:
        values = {**values, MASK: _labelled(ids, labels)}
    if MASK not in values and response is None and (said := _said(given, values)) is not None:
        values = {**values, MASK: said}
    values = _of_actions(values)
    fits = _lengths(layout, values, len(ids), response)
    odd = {part: each for part, each in values.items() if each.ndim != 1 or len(each) not in fits}
    if MASK in odd:
        raise ValueError(f"its {layout.fields[MASK]} has {odd[MASK].size} values, expected {' or '.join(map(str, sorted(fits)))}")
    fitting = ((part, each) for part, each in values.items() if part not in odd)
    cut = {part: each if kept.all() else each[kept[len(ids) - len(each) :]] for part, each in fitting}
    tokens = ids[kept].astype("<i8")
    if len(tokens) < 2:
        return None
    cut[MASK] = _mask(cut, tokens, response) * (float(np.ravel(given[SAMPLE])[0]) if SAMPLE in given else 1.0)
    of_row = {name: value for name in ("rewards", "truncated") if (value := _one(given.get(name))) is not None}
    step, rank, ranks = (_whole(given.get(name)) for name in ("step", "rank", "ranks"))
    if step is None and given.get("step") is not None:  # taken as none, all steps of the file would be judged as one
        raise ValueError(f"its step is {given['step']!r:.40}, expected a whole number from 0 on")
    return FileRow(tokens, cut, number, step=step, rank=rank or 0, ranks=ranks, of_row=of_row, odd=odd)


def _labelled(ids: Values, labels: Values) -> Values:
    """Return which tokens are trained on, [L], by labels of a row's own tokens or of those that follow. Raises ValueError."""
    own, following = labels != IGNORED, labels[:-1] != IGNORED
    if not own.any():
        raise ValueError(f"all its labels are {IGNORED}: nothing is learned from it")
    if (labels == ids)[own].all():
        return own
    if (labels[:-1] == ids[1:])[following].all():
        return following
    raise ValueError(f"its labels are neither its tokens nor those that follow (or {IGNORED})")


def _said(given: Fields, values: Parts) -> Values | None:
    """Return which tokens have a value, [L]: not those of a null, nor of a prompt where all log-probs are 0; None if all have."""
    known = [np.array([value is not None for value in given[part]]) for part in values if isinstance(given[part], list)]
    figures = [each != 0 for part, each in values.items() if part in OF_LOG_PROBS and each.ndim == 1]
    longest = max(map(len, (*known, *figures)), default=0)
    nulls, figures = ([each for each in marks if len(each) == longest] for marks in (known, figures))
    said = np.any(nulls, 0) if nulls else np.ones(longest, bool)
    begun = np.logical_or.accumulate(np.any(figures, 0)) if figures else said
    said = said & begun if begun.any() else said
    return None if said.all() else said


def _at_tokens(values: Parts, count: int) -> Parts:
    """Return values with a row's single advantage or return at each of its tokens. count: of those, where no other part says."""
    others = [len(each) for part, each in values.items() if each.ndim and part in (MASK, *OF_LOG_PROBS)]
    return {
        part: np.full(others[0] if others else count, each)
        if each.ndim == 0 and part in OF_ROW_OR_TOKENS
        else np.atleast_1d(each)
        for part, each in values.items()
    }


def _of_actions(values: Parts) -> Parts:
    """Return values with those of a response alone at its place in a longer mask, whose actions they are; 0 elsewhere."""
    mask = np.atleast_1d(values.get(MASK, np.zeros(0)))
    at = np.flatnonzero(mask)
    if not at.size or at[-1] - at[0] + 1 != at.size:
        return values  # where the values of several turns belong is not known
    placed = {part: each for part, each in values.items() if each.shape == at.shape != mask.shape and part != MASK}
    for part, each in placed.items():
        whole = np.zeros(mask.shape, each.dtype)
        whole[at] = each
        placed[part] = whole
    return {**values, **placed}


def _lengths(layout: FileLayout, values: Parts, total: int, response: int | None) -> set[int]:
    """Return how many values a part may have: those of the response, of the mask, of all tokens, or of all but the first."""
    if response is not None and layout.container:
        return {response}
    others = (
        [response] if response is not None else [len(values[MASK])] if MASK in values else list(map(len, values.values()))[:1]
    )
    return {total, total - 1, *(count for count in others if count <= total)}


def _mask(values: Parts, tokens: Values, response: int | None) -> Values:
    """Return which tokens are actions, [L]: by the mask, else all of the response, else those that have values."""
    if MASK in values:
        return values[MASK]
    covered = [len(each) for each in values.values()]
    return np.ones(response if response is not None else max(covered, default=len(tokens)))


def numbers_in(part: str, values: Any) -> Values:
    """Return values as an array of numbers; None in a list is NaN. Raises ValueError."""
    try:
        array = np.asarray(values)
        array = array if array.dtype.kind in "biuf" else np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"its {part} are not numbers") from None
    if part in OF_LOG_PROBS and array.dtype.kind == "u" and array.any():
        raise ValueError(f"its {part} are whole numbers, perhaps the bits of bf16: save them as float32")
    return array


def _one(value: Any) -> float | None:
    """Return a value that is one number; None for anything else, such as rewards by name."""
    if isinstance(value, (int, float)):
        return float(value)
    array = np.ravel(value) if isinstance(value, (list, np.ndarray, np.generic)) else np.empty(0)
    return float(array[0]) if array.size == 1 and array.dtype.kind in "biuf" else None


def _whole(value: Any) -> int | None:
    number = _one(value)
    return int(number) if number is not None and 0 <= number < 2**40 and number == int(number) else None
