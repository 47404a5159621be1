"""The old pickles against the dumps that they became: bytes on disk, loading for a replay, and importing.

- *size*: bytes of the pickles over bytes of the dump files (record, checksum and all), after `dump import`.
- *load*: `pickle.load` of every file over `payload.load` of every dump, which also checks checksums, record and shapes. Both
  read from a warm page cache; files are taken in the same order, repetitions alternate, medians are compared.
- *import*: seconds for a thousand files, decoded in the child, compressed and flushed to disk; and a second import.

The real dumps are taken from `../shared/data/input_dumps` where that is there, else pickles of the same shapes are made.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from actordbg.dumps.create import LLAMA_VOCABULARY, Draws, make_inputs
from actordbg.dumps.importer import import_paths
from actordbg.store import payload
from actordbg.store.layout import Store
from benchmarks.rows import Row, interleaved, one_thread, seconds_of

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "input_dumps"


def run(repeat: int = 7) -> list[Row]:
    """Four rows; `torch` runs single-threaded so that a busy machine disturbs both sides alike."""
    with one_thread():
        with tempfile.TemporaryDirectory() as folder:
            source, note = pickles_in(Path(folder))
            pickles = sorted(source.glob("*.pkl"))
            store = Store(Path(folder) / "store")
            first, second = (seconds_of(lambda: import_paths(store, [source])) for _ in range(2))
            dumps = list(store.iter_dumps())
            return [
                _size(pickles, dumps, note),
                _load(pickles, dumps, note, repeat),
                *_import(first, second, len(pickles), note),
            ]


def pickles_in(folder: Path) -> tuple[Path, str]:
    """The folder of pickles, made below `folder` where the real ones are not there; and what they are, in words."""
    source, what = (REAL, "real") if REAL.is_dir() else (_generate(folder / "generated"), "generated")
    return source, f"{len(list(source.glob('*.pkl')))} {what} dumps"


def _size(pickles: Sequence[Path], dumps: Sequence[Path], note: str) -> Row:
    ours, theirs = (sum(path.stat().st_size for path in paths) for paths in (dumps, pickles))
    ratio = theirs / ours
    return Row(
        "size: pickles / dumps", ours / 1e6, theirs / 1e6, "MB", ratio=ratio, budget=">= 16", note=note, within=ratio >= 16
    )


def _unpickle(paths: Sequence[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            pickle.load(file)


def _load(pickles: Sequence[Path], dumps: Sequence[Path], note: str, repeat: int) -> Row:
    def new() -> None:
        for path in dumps:
            payload.load(path)

    ours, theirs = interleaved(new, lambda: _unpickle(pickles), repeat)
    each = 1e3 / len(dumps)
    ratio = theirs / ours
    return Row(
        "load: pickle.load / payload.load",
        ours * each,
        theirs * each,
        "ms",
        ratio=ratio,
        budget=">= 1.5",
        note=note,
        within=ratio >= 1.5,
    )


def _import(first: float, second: float, count: int, note: str) -> list[Row]:
    scale = 1000 / count
    return [
        Row(
            "import, seconds per 1,000 files",
            first * scale,
            None,
            "s",
            ratio=first * scale,
            budget="< 15",
            note=note,
            within=first * scale < 15,
        ),
        Row(
            "import again, seconds per 1,000 files",
            second * scale,
            None,
            "s",
            ratio=second * scale,
            budget="< 1",
            note=note,
            within=second * scale < 1,
        ),
    ]


def _generate(folder: Path, count: int = 64) -> Path:
    """Pickles as the old recorder wrote them, of shapes that the real ones have (random ids compress less than text)."""
    folder.mkdir()
    generator = Draws(0)
    for number in range(count):
        length = 128 + 30 * number
        made = make_inputs(2 + 2 * (number % 2), length, length // 2, LLAMA_VOCABULARY, generator)
        tensors = {name: torch.from_numpy(values) for name, values in made.items()}
        facts = {"timestamp": f"20250619_0526{number % 60:02d}_{number:06d}", "rank": number % 4}
        path = folder / f"actor_inputs_rank{facts['rank']}_{facts['timestamp']}.pkl"
        path.write_bytes(pickle.dumps({**tensors, "return_output": False, "packed_seq_lens": None, **facts}))
    return folder


if __name__ == "__main__":
    print(f"# {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for row in run():
        print(row)
