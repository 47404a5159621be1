"""Dumps and replays for the catalog's tests: small, real files, made by the same code that a training run uses."""

import contextlib
import json
import os
import sqlite3
import time
import zlib
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import torch

from actordbg.catalog import tables
from actordbg.catalog.tables import DUMP_COLUMNS
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import MAGIC, DumpRecord, format_timestamp, make_dump_id
from actordbg.records.replay_record import ReplayInput, ReplaySpec, ResultRecord
from actordbg.store import payload

START = datetime(2025, 6, 19, 5, 26, 8, 430740, tzinfo=timezone.utc)

DERIVED = ("caller", "replay", "result", "comparison", "comparison_run", "damaged_file")


def record(index, **changes):
    """The record of call `index` of a run with 4 ranks: one call every 37 ms, lengths from 8 to 39."""
    moment = format_timestamp(START + timedelta(milliseconds=37 * index))
    rank, seq_len = index % 4, 8 + (index * 7) % 32
    plain = DumpRecord(
        dump_id=make_dump_id(moment, index, 4711 + rank, f"{index * 7919 % 2**32:08x}"),
        run="ppo-1", rank=rank, timestamp=moment, batch_size=2, seq_len=seq_len, tokens=2 * seq_len - 3,
        world_size=4, local_rank=rank, host=f"node-{rank // 2}", pid=4711 + rank, call_index=index, action_len=4,
        role="policy" if index % 3 else "reference", step=index // 8, training=bool(index % 2), grad_enabled=True,
        temperature=1.0, model_name="tiny", arguments={"return_output": bool(index % 2), "packed_seq_lens": None},
        versions={"openrlhf": "0.11.2", "torch": "2.13.0"},
    )  # fmt: skip
    return replace(plain, **changes)


def publish(store, described):
    """Write the dump of a record, with tensors that fit it."""
    shape = (described.batch_size, described.seq_len)
    tensors = {"sequences": torch.arange(shape[0] * shape[1]).view(shape), "attention_mask": torch.ones(shape).long()}
    return store.publish_dump(*payload.encode(described, tensors))


def fill(store, count, **changes):
    """Publish the first `count` calls and return their records."""
    records = [record(index, **changes) for index in range(count)]
    for described in records:
        publish(store, described)
    return records


def header_frame(line):
    """The frame that begins a dump file, for a record's line of JSON that may be anything."""
    header = b"%b\n%08x" % (line, zlib.crc32(line))
    return MAGIC + len(header).to_bytes(4, "little") + header


def with_record(blob, old, new):
    """A dump file's bytes with a change in its record, and the right checksum for it."""
    end = 8 + int.from_bytes(blob[4:8], "little")
    line = dumpfile.record_line(blob[8:end])
    assert old in line
    return header_frame(line.replace(old, new)) + blob[end:]


def settle(store):
    """Make every folder look as if it had last changed a minute ago, so that its listing is relied on."""
    past = time.time() - 60
    for folder in (*store.dump_folders(), *store.packs.glob("[!.]*")):
        os.utime(folder, (past, past))


def input_of(described, path="-"):
    """This dump as a replay's input."""
    return ReplayInput(described.dump_id, path, described.rank, described.batch_size, described.seq_len, described.tokens)


def spec(replay_id, records, **config):
    """A replay of these dumps."""
    created = f"2025-07-01T00:00:{len(replay_id) % 60:02d}.000000Z"
    return ReplaySpec(
        replay_id, created, ReplayConfig(**config), tuple(map(input_of, records)), where="rank=0", command="actordbg replay"
    )


def write_spec(store, described):
    """Write `spec.json`, and return the replay's folder."""
    folder = store.replays / described.replay_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(described.to_json())
    return folder


def result(replay_id, dump_id, status="passed", **values):
    """A result that finished at 01:00 unless said otherwise."""
    values.setdefault("finished_at", "2025-07-01T01:00:00.000000Z")
    return ResultRecord(replay_id, dump_id, status, **values)


def append(journal, *events):
    """Append events to a journal as a worker does."""
    with journal.open("a") as file:
        for event in events:
            data = {"event": "end", **event.to_dict()} if isinstance(event, ResultRecord) else event
            file.write(json.dumps(data) + "\n")


def dump_rows(store, names):
    """These columns of all dumps, those of their callers among them, times as text, in order of the ids."""
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection:
        tables.add_functions(connection)
        plain = ", ".join("moment(timestamp)" if name == "timestamp" else name for name in names)
        return connection.execute(f"SELECT {plain} FROM dump JOIN caller ON caller.id = dump.caller ORDER BY dump_id").fetchall()


def contents(store):
    """Every derived row, without the numbers of rows, in whatever order an upgrade left the columns."""
    tables = {"dump": dump_rows(store, list(DUMP_COLUMNS))}
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection:
        for table in DERIVED:
            names = sorted(row[1] for row in connection.execute(f"PRAGMA table_info({table})"))
            plain = ", ".join(name for name in names if name != "id")
            tables[table] = sorted(connection.execute(f"SELECT {plain} FROM {table}").fetchall(), key=repr)
        tables["last"] = sorted(
            connection.execute("SELECT d.dump_id, r.replay_id FROM dump d JOIN result r ON r.id = d.last_result")
        )
    return tables
