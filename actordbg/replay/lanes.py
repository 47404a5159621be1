"""Lanes: neighbouring ranks that run one input together, and whether their results agree.

The first rank of a lane records the result. The others *follow*: they write what came out into their `filled` events. The
supervisor makes the lane's result from both (`LaneBook`):

* If a follower crashed, hung or failed, the lane's input counts as lost, even if the first rank finished it.
* When every rank has answered, `extra["lane"]` says whether they agree: {"ranks": [0, 1], "differ": {}}. `differ` holds, by rank,
  what came out there. Different log-probs for the same input mean a model that differs between ranks, a kernel that is not
  deterministic, or a collective that lost something.

Log-probs agree when they are equal to the bit (`output_digest`); losses and gradient norms within GRADIENT_NORM_RTOL, because
the order in which a GPU adds up gradients may vary. Pure, standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from actordbg.formats.dump_record import now_timestamp
from actordbg.records.replay_record import PASSED, ResultRecord

LANE = "lane"
"""The key in a result's `extra`."""
GRADIENT_NORM_RTOL = 1e-6
_FIGURES = ("output_digest", "logprob_mean", "loss", "grad_norm")
_FAULTS = ("error_class", "error", "signature", "log_excerpt")


def answer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result that a follower writes down. Numbers that are not finite are left out."""
    told = {name: fields[name] for name in ("status", *_FIGURES, *_FAULTS) if fields.get(name) is not None}
    return {name: value for name, value in told.items() if not isinstance(value, float) or math.isfinite(value)}


def differing(record: ResultRecord, answers: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of ranks that differ from the lane's first rank, by rank (as text, for JSON)."""
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
        one == other or (one is not None and other is not None and math.isclose(one, other, rel_tol=GRADIENT_NORM_RTOL))
        for one, other in pairs
    )


class LaneBook:
    """Collects what the ranks of each lane wrote about each input, over all attempts, and makes the lanes' results."""

    def __init__(self, replay_id: str, width: int, results: Iterable[ResultRecord] = ()) -> None:
        self._replay_id, self._width = replay_id, width
        self._answers: dict[str, dict[int, Mapping[str, Any]]] = {}
        self._spoiled: dict[str, ResultRecord] = {}
        self._led: dict[str, ResultRecord] = {}
        for record in results:
            self.take_result(record)

    def answered(self, dump_id: str, rank: int) -> bool:
        """Whether this rank has answered for the input, or lost it."""
        spoiled = self._spoiled.get(dump_id)
        return rank in self._answers.get(dump_id, {}) or (spoiled is not None and spoiled.worker == rank)

    def take_result(self, record: ResultRecord) -> ResultRecord | None:
        """Take in a result of a lane's first rank, or a verdict on any rank. Returns the result that replaces it, if any."""
        if record.worker % self._width and record.status != PASSED:
            self._spoiled.setdefault(record.dump_id, record)
            return None
        self._led[record.dump_id] = record
        return self._settled(record.dump_id)

    def take_answer(self, event: Mapping[str, Any]) -> ResultRecord | None:
        """Take in a follower's `filled` event. Returns the input's result if that changes."""
        dump_id, rank = event["dump_id"], event["rank"]
        self._answers.setdefault(dump_id, {})[rank] = event
        if event["status"] != PASSED and dump_id not in self._spoiled:
            self._spoiled[dump_id] = self._failure(event)
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

    def _failure(self, event: Mapping[str, Any]) -> ResultRecord:
        faults: dict[str, Any] = {name: event.get(name) for name in _FAULTS}
        faults["error"] = f"on rank {event['rank']}, which ran it with others: {event.get('error')}"
        return ResultRecord(
            replay_id=self._replay_id,
            dump_id=event["dump_id"],
            status=event["status"],
            attempt=event["attempt"],
            worker=event["rank"],
            slot=event["slot"],
            started_at=event.get("started_at", ""),
            finished_at=now_timestamp(),
            **faults,
        )
