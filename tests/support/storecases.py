"""One small store that has something of every kind: dumps, a pack, replays with tensors, a comparison, a noise floor, a matrix."""

import contextlib
import hashlib

import catalogcases
from comparecases import write_replay

from actordbg.base.errors import StoreProblem
from actordbg.capture.control import Control
from actordbg.capture.ledger import Identity, Ledger
from actordbg.capture.switch_file import write_control
from actordbg.catalog.indexer import refresh
from actordbg.compare.comparing import compare, save
from actordbg.dumps.packing import pack_dumps
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import atomic_write
from actordbg.records.comparison_record import DumpNoise, NoiseRecord
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.store.layout import Store
from actordbg.store.places import places_of, read_payload

LOOSE, PACKED = "ppo-1", "ppo-2"
"""The run whose dumps have files of their own, and the one whose dumps lie in a pack."""


def build(root):
    """The store, indexed."""
    store = Store(root).create()
    records = catalogcases.fill(store, 8)
    for index in range(8, 14):
        catalogcases.publish(store, catalogcases.record(index, run=PACKED))
    pack_dumps(store, f"run = '{PACKED}'")
    inputs = [catalogcases.input_of(record, store.relative(store.dump_path(record))) for record in records[:3]]
    for replay_id in ("r-01", "r-02"):
        write_replay(store, replay_id, inputs)
    write_control(store, Control(enabled=False, run=LOOSE, since=now_timestamp()))
    made = compare(store, "r-02", "r-01")
    save(store, made)
    _publish_records(store, records)
    for path in (*store.replays.glob("*/spec.json"), *store.replays.glob("*/tensors/*")):
        path.chmod(0o600)
    refresh(store)
    catalogcases.settle(store)
    refresh(store)
    return store


def counters(run, **said):
    """What a process of a run counted that has ended and captured nothing."""
    counts = ("rank", "calls", "captured", "bytes", "pending", "queue_bytes", "generation", "rotated", "rotated_bytes",
              "outputs_dropped")  # fmt: skip
    moment = now_timestamp()
    told = {"format": 1, "pid": 1, "run": run, "host": "h", "instance": "a", "state": "ended", "since": moment}
    told |= {"heartbeat": moment, "dropped": {}, "sampled_out": {}, "triggered": {}}
    return dict.fromkeys(counts, 0) | told | said


def _publish_records(store, records):
    """A noise floor and a matrix of the first replay, and counters of a process that ended."""
    moment, floor = now_timestamp(), {"max_abs": 0.5, "clip_share": 0.1}
    dump_id = records[0].dump_id
    noise = NoiseRecord("n-01", moment, "r-01", {"dtype": "fp32"}, "tiny", "fp32", (), (DumpNoise(dump_id, floor),), floor)
    cell = MatrixCell(0, "sdpa", {"attn": "sdpa"}, "passed", {}, replay_id="r-01")
    matrix = MatrixRecord("m-01", moment, "complete", {"attn": ["sdpa"]}, (cell,), (dump_id,), loads=1)
    atomic_write(store.noise / "n-01.json", noise.to_json().encode())
    atomic_write(store.matrices / "m-01.json", matrix.to_json().encode())
    Ledger(Identity(LOOSE, 0, 1, "node-0", 1, "a"), since=moment).publish(store, "ended", {"queue_bytes": 0})


def contents(store):
    """The SHA-256 of the payload of every dump that can be read whole, by dump id, wherever it lies."""
    found = {}
    for place in places_of(store):
        with contextlib.suppress(StoreProblem):
            dump, data = read_payload(place)
            found[dump.dump_id] = hashlib.sha256(data).hexdigest()
    return found
