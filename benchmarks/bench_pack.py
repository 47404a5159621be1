"""Packs against pickles and against dump files: size, what of it is deduplication, loading, and a whole replay.

- *size*: bytes of the pickles over bytes of the pack, after `dump import` and `dump pack`; how much of that is deduplication
  (records and payloads over what is left when everything that repeats is stored once) and how much compression.
- *load*: `payload.load` of every dump out of the pack over the same of files, in order of time and in random order. The cold row
  opens the pack again and decompresses its blocks for each round; the others find them in the cache, as a replay does.
- *replay*: seconds from one input's end to the next one's in a real replay (`run_replay`), over the seconds of the forward in
  between (the machine's speed differs from one replay to the next, and both share it): packed dumps over files. Replays of both
  kinds alternate; medians.

The real dumps are taken from `../shared/data/input_dumps` where that is there, else pickles of the same shapes are made.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from actordbg.catalog.query import select_dumps
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps.importer import import_paths
from actordbg.dumps.packing import PackSummary, pack_dumps
from actordbg.records.replay_record import ReplayInput
from actordbg.replay.plan import make_plan
from actordbg.store import payload, places as reader
from actordbg.store.layout import Store
from benchmarks.bench_load import REAL, _generate
from benchmarks.bench_replay import SMALL, _environment, _replay, _timeline, publish
from benchmarks.rows import Row, interleaved, one_thread

ROUNDS = 3


def run(repeat: int = 7) -> list[Row]:
    """Four rows of size, three of loading, one of a replay; `torch` runs single-threaded."""
    with one_thread():
        with tempfile.TemporaryDirectory() as folder:
            source, what = (REAL, "real") if REAL.is_dir() else (_generate(Path(folder) / "generated"), "generated")
            loose, packed = Store(Path(folder) / "loose"), Store(Path(folder) / "packed")
            import_paths(loose, [source])
            shutil.copytree(loose.root, packed.root)
            summary = pack_dumps(packed)
            pickles = sum(path.stat().st_size for path in source.glob("*.pkl"))
            note = f"{summary.figures.dumps} {what} dumps"
            return [*_size(pickles, summary, note), *_load(loose, packed, note, repeat), _end_to_end()]


def _size(pickles: int, summary: PackSummary, note: str) -> list[Row]:
    made = summary.figures
    ratio, against_files = pickles / made.stored, summary.loose_bytes / made.stored
    dedup, compression = made.content / made.distinct, made.distinct / made.stored
    rows = f"{made.distinct_rows:,} of {made.rows:,} rows distinct"
    return [
        Row(
            "size: pickles / pack",
            made.stored / 1e6,
            pickles / 1e6,
            "MB",
            ratio=ratio,
            budget=">= 27",
            note=note,
            within=ratio >= 27,
        ),
        Row("size: files / pack", made.stored / 1e6, summary.loose_bytes / 1e6, "MB", ratio=against_files, note=note),
        Row("size: deduplication", made.distinct / 1e6, made.content / 1e6, "MB", ratio=dedup, note=f"{note}; {rows}"),
        Row("size: compression of that", made.stored / 1e6, made.distinct / 1e6, "MB", ratio=compression, note=note),
    ]


def _load(loose: Store, packed: Store, note: str, repeat: int) -> list[Row]:
    files, places = ([store.root / row.path for row in select_dumps(store)] for store in (loose, packed))
    order = random.Random(0).sample(range(len(files)), len(files))
    shuffled = [files[place] for place in order], [places[place] for place in order]
    return [
        _load_row("load packed / files, in order of time", files, places, note, repeat),
        _load_row("load packed / files, random order", *shuffled, note, repeat),
        _load_row("load packed / files, in order, pack opened anew", files, places, note, repeat, anew=True),
    ]


def _load_row(name: str, files: Sequence[Path], places: Sequence[Path], note: str, repeat: int, *, anew: bool = False) -> Row:
    def ours() -> None:
        if anew:
            reader._opened.cache_clear()
        for place in places:
            payload.load(place)

    def theirs() -> None:
        for path in files:
            payload.load(path)

    packed, loose = (1e3 * seconds / len(files) for seconds in interleaved(ours, theirs, repeat))
    return Row(name, packed, loose, "ms", ratio=packed / loose, budget="<= 1.1", note=note, within=packed / loose <= 1.1)


def _end_to_end() -> Row:
    """Small inputs, where reading weighs most beside the forward."""
    with tempfile.TemporaryDirectory() as folder, _environment():
        loose = Store(Path(folder) / "loose").create()
        files = publish(loose, SMALL)
        packed = Store(Path(folder) / "packed")
        shutil.copytree(loose.root, packed.root)
        pack_dumps(packed)
        inputs = list(make_plan(select_dumps(packed), ReplayConfig()).spec.inputs)
        times: dict[str, list[float]] = {"packed": [], "loose": []}
        for _ in range(ROUNDS):
            times["loose"] += _around(loose, files)
            times["packed"] += _around(packed, inputs)
    ours, theirs = (statistics.median(times[name]) for name in ("packed", "loose"))
    note = f"{SMALL}, {SMALL.count} inputs, {ROUNDS} replays each, fp32, one thread"
    return Row(
        "replay per input, packed / files",
        ours,
        theirs,
        "x fwd",
        ratio=ours / theirs,
        budget="<= 1.1",
        note=note,
        within=ours / theirs <= 1.1,
    )


def _around(store: Store, inputs: list[ReplayInput]) -> list[float]:
    """For each input but the first: seconds that it took in all, over seconds of its forward."""
    walls, forwards = _timeline(_replay(store, inputs))
    return [wall / forward for wall, forward in zip(walls, forwards, strict=True)]


if __name__ == "__main__":
    print(f"# {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for row in run():
        print(row)
