"""Turn catalog rows into a work list, and that into the inputs of each group. Pure: rows and a configuration in, a
ReplaySpec out.

The plan decides which lane runs which input, and neither a restart nor `--resume` changes it: lane `i % lanes` runs input `i` of
`spec.inputs`. A lane is a replica: one worker, or workers that share an input (`LaneBook`). In each *slot* (round) all lanes run
one input at the same time. ZeRO-3 needs that, since every rank takes part in each forward. So a lane without an input for a slot
repeats a neighbor's as a dummy batch, and nothing is recorded for it (a *filler*).

Orders:

- `time`: as captured. Calls that ran at the same time on different ranks stay neighbours.
- `length`: shortest sequences first, so the inputs of one slot have similar sizes.
- `shuffle`: each lane's inputs in a separate random order (`seed + lane`), so lengths in a slot differ.

Alignments (`config.align`):

- none: each lane has its share of the inputs.
- `same`: all ranks are one lane.
- `rank`: the inputs of one call run in one slot, rank r's in lane `r % lanes`, in order of the calls. `max_inputs` takes whole
  calls only. A call with more ranks than lanes takes several slots.
- `shuffle`: the first `max_inputs` by `order`; each lane shuffles its share separately, without fillers. If one lane has one
  input less, its ranks are missing in the others' collectives.

With `rank` and `shuffle`, a resumed or restarted replay keeps the slots of the plan (`slots_for`).

If any group may run any input, the inputs are dealt portion by portion (`Dealer`), the longest first, so that all groups
finish at about the same time. A portion is half of a group's fair share of the remaining tokens: large at the beginning, one
slot at the end. Inputs that a lost group did not finish are dealt again. No two groups ever hold the same input.
"""

import random
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import TypeVar

from actordbg.base.errors import UsageError
from actordbg.base.units import new_replay_id
from actordbg.config.replay_config import USUAL_LAWS, ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.selection import Calls, Row, find_calls

T = TypeVar("T")

ORDERS = ("time", "length", "shuffle")
DEFAULT_SHUFFLE_SEED = 42
FIXED = ("rank", "shuffle")
"""Alignments that say which inputs run at the same time."""

Slot = tuple[int | None, ...]
"""An index into `spec.inputs` for each lane of a group, or None for a filler. Lanes beyond its end do nothing."""


@dataclass(frozen=True)
class Plan:
    """The specification, the number of rows skipped by reason, and notes for the user."""

    spec: ReplaySpec
    skipped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def make_plan(
    rows: Iterable[Row],
    config: ReplayConfig,
    *,
    order: str = "time",
    max_inputs: int | None = None,
    shuffle_seed: int = DEFAULT_SHUFFLE_SEED,
    where: str | None = None,
    command: str = "",
    versions: dict[str, str] | None = None,
) -> Plan:
    """Order the rows, skip those that cannot be replayed, and cut to `max_inputs` (in total, not per worker).

    UsageError if `config.align` is "rank" and no call is whole.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is not one of {ORDERS}")
    rows = list(rows)
    usable = [row for row in rows if row.replayable]
    lost = len(rows) - len(usable)
    skipped = {"they cannot be replayed; `dump show` says why": lost} if lost else {}
    notes = []
    if config.align is not None and config.nproc == 1:
        notes.append(f"--align {config.align} with one process aligns nothing: its inputs run one after another")
    elif config.align in FIXED and config.lanes == 1:
        notes.append(f"--align {config.align} aligns nothing: all {config.nproc} processes run one input together")
    if config.align == "rank" and config.lanes > 1:
        calls = find_calls(usable, config.lanes)
        skipped |= calls.left_out
        notes += [calls.how_matched()]
        chosen = _whole_calls(calls, order, config.lanes, shuffle_seed, max_inputs)
    else:
        chosen = _ordered(usable, order, config.lanes, shuffle_seed)[:max_inputs]
    if config.align == "shuffle":
        chosen = _shuffled_per_lane(chosen, config.lanes, shuffle_seed)
        if len(chosen) % config.lanes and config.backend != "plain":
            shares = [len(range(lane, len(chosen), config.lanes)) for lane in range(config.lanes)]
            notes.append(
                f"--align shuffle gives the processes {' and '.join(map(str, shares))} inputs: if they compute together, the "
                f"last round hangs until --timeout ({config.timeout_s:g} s)"
            )
    spec = ReplaySpec(
        replay_id=new_replay_id(),
        created_at=now_timestamp(),
        config=config,
        inputs=tuple(ReplayInput(row.dump_id, row.path, row.rank, row.batch_size, row.seq_len, row.tokens) for row in chosen),
        where=where,
        order=order,
        command=command,
        versions=versions or {},
    )
    return Plan(spec, skipped, tuple(filter(None, notes)))


def slots_for(config: ReplayConfig, lanes: Sequence[int], pending: Sequence[int], total: int) -> list[Slot]:
    """Return the slots in which `lanes` run their `pending` inputs: indices, in order, into the `total` inputs of the plan.

    If the alignment decides which inputs meet (`FIXED`), the slots of the whole plan stay: a filler replaces an input that
    already has its result. Otherwise each lane continues with its next input.
    """
    if config.align not in FIXED:
        queues = ([index for index in pending if index % config.lanes == lane] for lane in lanes)
        return list(zip_longest(*queues))
    left = set(pending)
    rows = (range(first, min(first + config.lanes, total)) for first in range(0, total, config.lanes))
    mine = ([index for index in row if index % config.lanes in lanes] for row in rows)
    return [tuple(index if index in left else None for index in row) for row in mine if left.intersection(row)]


def _ordered(rows: list[Row], order: str, lanes: int, seed: int) -> list[Row]:
    by_time = sorted(rows, key=lambda row: (row.timestamp, row.dump_id))
    if order == "time":
        return by_time
    if order == "length":
        return sorted(by_time, key=lambda row: row.seq_len)
    return _shuffled_per_lane(by_time, lanes, seed)


def _shuffled_per_lane(rows: list[T], lanes: int, seed: int) -> list[T]:
    queues = [rows[lane::lanes] for lane in range(lanes)]
    for lane, queue in enumerate(queues):
        random.Random(seed + lane).shuffle(queue)
    return [queues[index % lanes][index // lanes] for index in range(len(rows))]


def _whole_calls(calls: Calls, order: str, lanes: int, seed: int, max_inputs: int | None) -> list[Row]:
    """Return the dumps of as many whole calls as `max_inputs` allows, call by call, each in the order of its slots."""
    whole = calls.whole
    if not whole and calls.left_out:
        reasons = "; ".join(f"{count:,} left out: {reason}" for reason, count in calls.left_out.items())
        raise UsageError(
            f"--align rank: no call is complete for {lanes} processes ({reasons})",
            hint="select all ranks of a call, with as many processes (--nproc), or drop --align",
        )
    if order == "length":
        whole = sorted(whole, key=lambda call: max(row.seq_len for row in call))
    elif order == "shuffle":
        whole = random.Random(seed).sample(whole, len(whole))
    chosen: list[Row] = []
    for call in whole:
        if max_inputs is not None and len(chosen) + len(call) > max_inputs:
            break
        queues = [[row for row in call if row.rank % lanes == lane] for lane in range(lanes)]  # rank r runs in lane r % lanes
        chosen += [row for slot in zip(*queues, strict=True) for row in slot]
    if whole and not chosen:
        raise UsageError(
            f"--max-inputs {max_inputs} is less than one call, which has an input on each of {len(whole[0])} ranks",
            hint=f"use --max-inputs {len(whole[0])} or more",
        )
    return chosen


class Dealer:
    """The inputs that no group holds. `lanes`: how many a group runs at a time; `groups`: how many groups share them."""

    def __init__(self, inputs: Sequence[ReplayInput], pending: Iterable[int], lanes: int, groups: int) -> None:
        self._inputs, self._lanes, self._groups = inputs, lanes, groups
        self._left: list[int] = []
        self.give_back(pending)

    def __bool__(self) -> bool:
        return bool(self._left)

    def deal(self) -> list[int]:
        """Return the next portion, in whole slots; [] if nothing is left."""
        fair, tokens = (self._tokens / (2 * self._groups) if self._groups > 1 else self._tokens), 0
        portion: list[int] = []
        while self._left and (not portion or len(portion) % self._lanes or tokens + self._next <= fair):
            tokens += self._next
            portion.append(self._left.pop())
        self._tokens -= tokens
        return portion

    def give_back(self, indices: Iterable[int]) -> None:
        """Take back inputs that no group runs any more."""
        self._left = sorted({*self._left, *indices}, key=lambda index: (self._inputs[index].tokens, -index))
        self._tokens = sum(self._inputs[index].tokens for index in self._left)

    @property
    def _next(self) -> int:
        return self._inputs[self._left[-1]].tokens


def dealt_slots(portion: Sequence[int], lanes: int) -> list[tuple[int | None, ...]]:
    """Return the slots of a portion: neighbors together, and fillers at the end of the last slot."""
    rows = (tuple(portion[first : first + lanes]) for first in range(0, len(portion), lanes))
    return [row + (None,) * (lanes - len(row)) for row in rows]


def law_order(inputs: Sequence[ReplayInput]) -> list[int]:
    """Order inputs by what their laws can show: the most rows first, then the most padding, then short before long.

    A leak that begins at row 3 shows only in an input that has a row 3. Inputs with several rows and padding come before others,
    and shorter ones before longer ones. Every process of a replay gets the same order: only the specification decides.
    """

    def size(index: int) -> int:
        return inputs[index].batch_size * inputs[index].seq_len

    def worth(index: int) -> tuple[bool, bool, int, int]:
        return inputs[index].batch_size < 2, inputs[index].tokens >= size(index), size(index), index

    short = sorted(range(len(inputs)), key=worth)
    if not short:
        return []
    most_rows = max(short, key=lambda index: inputs[index].batch_size)
    most_padding = max(short, key=lambda index: 1 - inputs[index].tokens / max(1, size(index)))
    return list(dict.fromkeys([most_rows, most_padding, *short]))


def other_lengths(inputs: Sequence[ReplayInput], judged: Container[str]) -> list[ReplayInput]:
    """Return one input of each length that no input of `judged` (ids) has, the longest first: a fault may need length.

    Lengths are alike up to a power of two, of a row and of all tokens, which packing puts into one row.
    """

    def lengths(item: ReplayInput) -> set[tuple[str, int]]:
        return {("row", item.seq_len.bit_length()), ("all", item.tokens.bit_length())}

    known = {length for item in inputs if item.dump_id in judged for length in lengths(item)}
    others = []
    for item in sorted(inputs, key=lambda item: (-item.tokens, -item.seq_len)):
        if not lengths(item) <= known:
            others.append(item)
            known |= lengths(item)
    return others


def affordable_laws(inputs: Sequence[ReplayInput]) -> int:
    """Count the inputs, in `law_order`, whose laws take about as long as one more replay of all: at least two.

    An input is run some ten times for its laws, so they may hold an eighth of all positions.
    """
    sizes = [inputs[index].batch_size * inputs[index].seq_len for index in law_order(inputs)]
    return max(USUAL_LAWS, sum(8 * positions <= sum(sizes) for positions in accumulate(sizes)))
