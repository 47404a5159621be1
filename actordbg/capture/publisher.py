"""From a call in the ring to a dump file: whether and how it is published, by this thread or by the writer process.

With `--writer process` a separate process encodes and publishes most calls, those that need only their inputs (`_send_ahead`).
If it cannot be started or dies, the thread does everything, and `dump status` says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from actordbg.base.fault import describe
from actordbg.capture.control import BEFORE
from actordbg.capture.facts import versions
from actordbg.capture.ledger import Ledger, Rotation
from actordbg.capture.recorded_call import LEFT, Item, TriggerResult, trigger_of
from actordbg.capture.snapshot import LOGITS_SUM
from actordbg.capture.watch import Notices
from actordbg.formats.dump_record import OUTPUT_PREFIX, SUFFIX, DumpRecord
from actordbg.formats.ringfile import CAPTURED, OPEN
from actordbg.formats.store_files import StoreFiles

BATCH = 64
"""Most calls that the writer process gets at once."""
_FLOOR_SECONDS = 1.0


class Publisher:
    """Publishes calls, and closes their books. `Writer` adds the queue and the thread.

    `kind`: what publishes: "thread", "process", or "thread: " and why.
    """

    def __init__(self, store: StoreFiles, notices: Notices) -> None:
        self._store, self._notices = store, notices
        self._deadline: float | None = None
        self._floor_checked = float("-inf")
        self._free = 0
        self._versions: dict[str, str] | None = None
        self._scribe: Any = None  # the writer process, a `Scribe`
        self.kind = self._asked = "thread"

    def _send_ahead(self, queue: Sequence[Item]) -> None:
        """Let the writer process publish queued calls that need only their inputs. `_write` writes any others as usual."""
        if self._asked == "thread" == queue[0].control.writer:
            return
        batch, failed = [queue[place] for place in range(min(len(queue), BATCH))], None
        for item in batch:
            item.offered = True
        control, ring = batch[0].control, batch[0].ring
        if control.writer != self._asked:
            self._asked, self.kind = control.writer, control.writer
            self._end_scribe()
        if self.kind != "process" or self._is_over() or not self._above_floor(control.free_floor_bytes):
            return
        self._versions = self._versions or versions()
        try:
            like = control.generation, ring  # losses have a switch of their own
            chosen = [item for item in batch if (item.control.generation, item.ring) == like and item.needs_only_inputs()]
            if chosen:
                for item in chosen:
                    self._land(item)
                if self._scribe is None:
                    from actordbg.capture.writer_process import Scribe

                    self._scribe = Scribe()
                slots = [(item.entry.slot, item.entry.sequence) for item in chosen]
                request = {"ring": str(ring.path), "store": str(self._store.root)}
                answers = self._scribe.ask(request | {"versions": self._versions, "slots": slots}, self._is_over)
                for item, answer in zip(chosen, answers, strict=True):
                    if answer is not None:
                        item.path, item.ahead = Path(answer[0]), answer[1]
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread can write instead
            error.__traceback__ = None
            failed = error
        if failed is not None:
            self.kind = "thread"  # first: a process that was not understood is never asked again, whatever fails here
            self._end_scribe()
            self.kind += ": " + describe(failed)
            for item in batch:  # the lost answer was for all of them: some may be published
                path = self._store.dump_folder(item.ledger.identity.run, item.ledger.identity.rank) / f"{item.dump_id}{SUFFIX}"
                if path.exists():
                    item.path, item.ahead = path, path.stat().st_size
            self._notices.warn("scribe", f"no writer process: {describe(failed)}; a thread writes")

    def _end_scribe(self) -> None:
        if self._scribe is not None:
            self._scribe.stop()  # if this fails, it is retried at the end
            self._scribe = None

    def _land(self, item: Item) -> None:
        """Copy an item's device copies into the ring."""
        if item.snapshot is not None:
            item.snapshot.land(item.ring.arena)
            item.ring.arrived(item.entry)
            item.snapshot = None

    def _fired(self, item: Item) -> TriggerResult | None:
        """Return the trigger that keeps an item, unless it has reached its limit."""
        tensors = item.outputs.tensors() if item.outputs is not None else {}
        mask = None
        if item.control.on.logprobs is not None:
            from actordbg.formats.encoding import tensors_in

            action_mask = tensors_in(item.ring.arena.memory, item.entry.data, item.own, item.kind.tensors).get("action_mask")
            mask = torch.from_numpy(action_mask.values != 0) if action_mask is not None else None
        fired = trigger_of(item, tensors, mask)
        return fired if fired and item.ledger.admits_trigger(item.control, fired.trigger) else None

    def _keep_too(self, item: Item, dump_id: str) -> None:
        """Keep a call that came before a triggered one: publish it, or pin what was published."""
        from actordbg.formats import encoding

        facts = {"before": dump_id}
        if item.written is None or self._is_over():
            item.reopen()
            if item.standing == OPEN:
                self._write(item, TriggerResult(BEFORE, facts))
            elif self._is_over() and item.standing in (CAPTURED, LEFT):
                item.leave_in_ring(TriggerResult(BEFORE, facts))
            return
        record, data = item.written
        if not record.pinned and item.path is not None:
            record = replace(record, pinned=True, triggered=BEFORE, trigger_facts=facts)
            self._store.publish_dump(record, encoding.pack(record, data))
            item.written = (record, data)
            self._rotation(item.ledger).spare(item.path)

    def _write(self, item: Item, fired: TriggerResult | None) -> None:
        """Encode and publish an item. Closes its call last, or raises with the call still open."""
        if item.path is not None and item.ahead:
            return self._count(item, item.path, item.ahead, False, None)
        if self._is_over():
            return item.leave_in_ring(fired)
        control = item.control
        if not self._above_floor(control.free_floor_bytes):
            self._notices.warn("disk_floor", f"free space is under {control.free_floor_bytes} bytes: dropping dumps")
            return item.dropped("disk_floor", f"only {self._free} bytes free")
        from actordbg.formats import encoding  # with numpy: most processes never need it

        record, payload_bytes = self._describe(item, fired)
        blob = encoding.pack(record, payload_bytes)
        if fired is None and item.over_max_bytes(len(blob)):
            return None
        path = item.path = self._store.publish_dump(record, blob)
        if control.before:
            item.written = (record, payload_bytes)
        return self._count(item, path, len(blob), record.pinned, fired)

    def _count(self, item: Item, path: Path, nbytes: int, pinned: bool, fired: TriggerResult | None) -> None:
        """Close the books of an item whose file is published, and rotate."""
        item.captured(nbytes, fired.trigger if fired else None)
        self._notices.over("disk_full", "write_error", "error", "disk_floor")
        if item.control.keep_bytes is not None and not pinned:
            rotation = self._rotation(item.ledger)
            rotation.add(path, nbytes)
            rotation.apply(item.control.keep_bytes)

    def _describe(self, item: Item, fired: TriggerResult | None) -> tuple[DumpRecord, bytes]:
        """Return the record and the payload to store."""
        from actordbg.formats import encoding

        self._versions = self._versions or versions()
        tensors = encoding.tensors_in(item.ring.arena.memory, item.entry.data, item.own, item.kind.tensors)
        record = encoding.record_of(item.kind.fields, item.own, tensors, self._versions, **item.known(fired))
        if item.control.with_outputs and item.outputs is not None:
            strides = item.outputs.strides
            tensors |= {name: encoding.of_torch(t, strides.get(name)) for name, t in item.outputs.tensors().items()}
            tensors.pop(OUTPUT_PREFIX + LOGITS_SUM, None)
        return encoding.serialize(record, tensors)

    def _is_over(self) -> bool:
        """Check whether the time to write is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def _rotation(self, ledger: Ledger) -> Rotation:
        ledger.rotation = ledger.rotation or Rotation(self._store, ledger)
        return ledger.rotation

    def _above_floor(self, floor: int) -> bool:
        now = time.monotonic()
        if now - self._floor_checked >= _FLOOR_SECONDS:
            space = os.statvfs(self._store.root)
            self._free, self._floor_checked = space.f_bavail * space.f_frsize, now
        return self._free >= floor
