"""Tell a group of workers what to do in an attempt and what comes next, in two files, each written once.

    store/replays/<id>/work-0-1.json      the work order; with `stay`, workers do not leave when it is done
    store/replays/<id>/next-0-1.json      appears later: {"work": "/.../replays/<next id>/work-0-1.json"}, or null: leave;
                                          with {"fork": "python"}: leave, another process takes it, started like this

The supervisor writes them, every worker of the group reads them. Each order has a separate `next` file, so nothing has to be
cleared and nothing can be missed.

**Lanes** (replicas) are neighboring ranks that run one input together. The first rank of a lane records the result. The others
*follow*: they write their figures to their `filled` events. The supervisor builds the lane's result from both (`LaneBook`):

* If a follower crashed, hung or failed, the lane's input counts as lost, even if the first rank finished it.
* Once every rank has answered, `extra["lane"]` says whether they agree: {"ranks": [0, 1], "differ": {}}. `differ` holds the
  differing figures by rank. Different log-probs for the same input mean a model that differs between ranks, a kernel that is not
  deterministic, or a collective that lost something.

Log-probs agree if they are bit-identical (`output_digest`); losses and gradient norms if they are within GRADIENT_NORM_RTOL,
because the order in which a GPU adds up gradients may vary.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from actordbg.debug.replay_stops import StopOrder
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.record_reading import MOST_VALUES, strict_json
from actordbg.formats.store_files import atomic_write, read_regular
from actordbg.records.replay_record import PASSED, ResultRecord

EXIT_RESTART = 75
"""Exit code of a worker that cannot continue and wrote `restart`: its input is not blamed."""
EXIT_BROKEN = 70
"""Exit code of a worker that could not build the actor and wrote `broken`."""


class Duty(Enum):
    """A rank's job for an input. LEAD: run it and record the result. FOLLOW: run it along with the rank that records it.
    FILL: run a neighbor's input, so that the others' collectives complete.
    """

    LEAD = "lead"
    FOLLOW = "follow"
    FILL = "fill"


@dataclass(frozen=True)
class Task:
    """An input for a rank; `index`: into `spec.inputs`."""

    slot: int
    index: int
    duty: Duty


@dataclass(frozen=True)
class WorkOrder:
    """The work of a group in an attempt.

    ranks: the group, whose ranks start and end together. width: how many neighboring ranks form a lane, that is, run the same
    input. slots: by slot and lane, an index into `spec.inputs`, or None for a filler; lanes beyond a slot's end do nothing in it.
    stay: after the last input, wait for another order.
    stops: breakpoints.
    """

    attempt: int
    ranks: list[int]
    slots: list[list[int | None]]
    width: int = 1
    stay: bool = False
    stops: StopOrder = field(default_factory=StopOrder)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkOrder:
        data = strict_json(text, most=MOST_VALUES)
        return cls(**{**data, "stops": StopOrder(**data["stops"])})

    def inputs_of(self, rank: int) -> list[Task]:
        """Return a rank's tasks, slot by slot. A filler repeats a neighbor's first input in the slot."""
        column = self._lanes().index(rank // self.width)
        own = Duty.FOLLOW if rank % self.width else Duty.LEAD
        work = []
        for slot, row in enumerate(self.slots):
            if column < len(row):
                index = row[column]
                stand_in = next(i for i in row if i is not None)
                work.append(Task(slot, stand_in, Duty.FILL) if index is None else Task(slot, index, own))
        return work

    def mates(self, slot: int) -> list[int]:
        """Return the inputs that run in a slot, over all lanes."""
        return [index for index in self.slots[slot] if index is not None]

    def ranks_in(self, slot: int) -> list[int]:
        """Return the ranks that have work in a slot."""
        busy = self._lanes()[: len(self.slots[slot])]
        return [rank for rank in self.ranks if rank // self.width in busy]

    def lead_of(self, slot: int, index: int) -> int | None:
        """Return the first rank of the lane that runs this input in the slot; None if no lane does."""
        lanes = self._lanes()
        return next((lanes[column] * self.width for column, entry in enumerate(self.slots[slot]) if entry == index), None)

    def _lanes(self) -> list[int]:
        return sorted({rank // self.width for rank in self.ranks})


POLL_S = 0.02


def mailbox_of(work: Path) -> Path:
    """Return the file that will announce the order after `work`."""
    return work.with_name(work.name.replace("work-", "next-", 1))


def announce(work: Path, following: Path | None, fork: str | None = None) -> None:
    """Give the workers that finished `work` their next order. None: they may leave. fork: the launcher that a fork of their
    launcher resembles, which takes the order instead of them.
    """
    letter = {"work": None if following is None else str(following), "fork": fork}
    atomic_write(mailbox_of(work), json.dumps(letter))


def await_next(work: Path) -> Path | None:
    """Wait without a limit for the order after `work`; return None if there is none. Called by workers."""
    while True:
        try:
            fork, following = _announced(work)
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        return None if fork else following


def following_fork(work: Path) -> tuple[str, Path | None]:
    """Return the launcher and the order of the next fork, after its process finished `work`, and orders after it, and left."""
    fork, following = _announced(work)
    return (fork, following) if fork or following is None else following_fork(following)


def _announced(work: Path) -> tuple[str, Path | None]:
    said = strict_json(read_regular(mailbox_of(work)))
    following = said["work"]
    # always in the same store, whatever the file says: the worker writes next to its order
    place = None if following is None else work.parent.parent / Path(following).parent.name / Path(following).name
    return said.get("fork") or "", place


LANE = "lane"
"""The key in a result's `extra`."""
GRADIENT_NORM_RTOL = 1e-6
_FIGURES = ("output_digest", "logprob_mean", "loss", "grad_norm")
_FAULTS = ("error_class", "error", "signature", "log_excerpt")


def answer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Select the result fields that a follower writes to its journal, without non-finite numbers."""
    figures = {name: fields[name] for name in ("status", *_FIGURES, *_FAULTS) if fields.get(name) is not None}
    return {name: value for name, value in figures.items() if not isinstance(value, float) or math.isfinite(value)}


def differing(record: ResultRecord, answers: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of ranks that differ from the lane's first rank, by rank (as text, for JSON)."""
    return {
        str(rank): {name: answer.get(name) for name in _FIGURES}
        for rank, answer in sorted(answers.items())
        if not _same(record, answer)
    }


def _same(record: ResultRecord, answer: Mapping[str, Any]) -> bool:
    if answer.get("output_digest") != record.output_digest:
        return False
    pairs = ((record.loss, answer.get("loss")), (record.grad_norm, answer.get("grad_norm")))
    return all(
        ours == theirs or (ours is not None and theirs is not None and math.isclose(ours, theirs, rel_tol=GRADIENT_NORM_RTOL))
        for ours, theirs in pairs
    )


def result_from(replay_id: str, event: Mapping[str, Any], **fields: Any) -> ResultRecord:
    """Build the result of the input that a journal event names, with these fields."""
    return ResultRecord(
        replay_id=replay_id,
        dump_id=event["dump_id"],
        attempt=event["attempt"],
        worker=event["rank"],
        slot=event["slot"],
        started_at=event.get("started_at", ""),
        finished_at=now_timestamp(),
        **fields,
    )


class LaneBook:
    """Collects the answers of each lane's ranks about each input, over all attempts, and builds the lanes' results."""

    def __init__(self, replay_id: str, width: int, results: Iterable[ResultRecord] = ()) -> None:
        self._replay_id, self._width = replay_id, width
        self._answers: dict[str, dict[int, Mapping[str, Any]]] = {}
        self._spoiled: dict[str, ResultRecord] = {}
        self._led: dict[str, ResultRecord] = {}
        for record in results:
            self.take_result(record)

    def answered(self, dump_id: str, rank: int) -> bool:
        """Check whether this rank has answered for the input or lost it."""
        spoiled = self._spoiled.get(dump_id)
        return rank in self._answers.get(dump_id, {}) or (spoiled is not None and spoiled.worker == rank)

    def take_result(self, record: ResultRecord) -> ResultRecord | None:
        """Take in a result of a lane's first rank, or a verdict on any rank; return the result that replaces it, if any."""
        if record.worker % self._width and record.status != PASSED:
            self._spoiled.setdefault(record.dump_id, record)
            return None
        self._led[record.dump_id] = record
        return self._settled(record.dump_id)

    def take_answer(self, event: Mapping[str, Any]) -> ResultRecord | None:
        """Take in a follower's `filled` event; return the input's result if it changes."""
        dump_id, rank = event["dump_id"], event["rank"]
        self._answers.setdefault(dump_id, {})[rank] = event
        if event["status"] != PASSED and dump_id not in self._spoiled:
            faults = {name: event.get(name) for name in ("status", *_FAULTS)}
            faults["error"] = f"on rank {event['rank']}, which ran it with others: {event.get('error')}"
            self._spoiled[dump_id] = result_from(self._replay_id, event, **faults)
            led = self._led.get(dump_id)
            return self._spoiled[dump_id] if led is None or led.status == PASSED else None
        return self._settled(dump_id)

    def _settled(self, dump_id: str) -> ResultRecord | None:
        led, spoiled, answers = self._led.get(dump_id), self._spoiled.get(dump_id), self._answers.get(dump_id, {})
        if led is None or led.status != PASSED or LANE in led.extra:
            return None
        if spoiled is not None:
            return replace(spoiled, finished_at=now_timestamp())
        if len(answers) < self._width - 1 or self._width == 1:
            return None
        ranks = sorted({led.worker, *answers})
        lane = {"ranks": ranks, "differ": differing(led, answers)}
        return replace(led, finished_at=now_timestamp(), extra=led.extra | {LANE: lane})
