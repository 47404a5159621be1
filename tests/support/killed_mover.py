"""Runs pack, unpack or prune on copies of a store, and kills it with SIGKILL at one step after the other.

    python killed_mover.py STORE WORK pack|unpack|prune

A step is a call that changes the disk: making a file, flushing it, writing into it, renaming, removing. It dies before
the call (after one is before the next), and of a write after half of it. Children are forked, so nothing is imported twice. Prints a JSON
list: for each death the step, what the store's files held then, what the catalog said, and the same after the command ran again.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actordbg.catalog import query
from actordbg.dumps import packing, prune
from actordbg.store.layout import Store
from actordbg.store.places import places_of, read_payload

STEPS = ("open", "fsync", "replace", "unlink", "rmdir")


class Deaths:
    """Counts steps inside a store, and dies at one of them."""

    def __init__(self, root: Path, at: int) -> None:
        self.root, self.at, self.count = str(root), at, 0
        self.log: list[str] = []
        for name in STEPS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        self._fdopen, os.fdopen = os.fdopen, self._opened  # type: ignore[assignment]

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            harmless = name == "open" and not words[1] & os.O_CREAT
            where = "" if isinstance(words[0], int) else os.fspath(words[0])
            if harmless or "catalog" in where:
                return real(*words, **options)
            self.step(f"before {name} {where.removeprefix(self.root)}")
            return real(*words, **options)

        return call

    def _opened(self, descriptor: int, *words: Any, **options: Any) -> Any:
        file = self._fdopen(descriptor, *words, **options)
        return Torn(file, self) if "b" in "".join(map(str, words)) else file

    def step(self, what: str) -> None:
        self.log.append(what)
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class Torn:
    """A file whose writes can be cut in the middle."""

    def __init__(self, file: Any, deaths: Deaths) -> None:
        self._file, self._deaths = file, deaths

    def write(self, data: bytes) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._deaths.step(f"half of a write of {len(data)} bytes")
        return half + int(self._file.write(data[half:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def operate(store: Store, operation: str) -> None:
    """One command."""
    if operation == "pack":
        packing.pack_dumps(store, level=1)
    elif operation == "unpack":
        packing.unpack_dumps(store, "rank < 2")
    else:
        prune.apply(store, prune.plan_prune(query.open_fresh(store), where="rank < 2"))


def forked(work: Callable[[], None]) -> int:
    """Run in a child; its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def state(store: Store) -> dict[str, Any]:
    """What the files hold, what the catalog says, and what lies about."""
    files, problems = {}, []
    for place in places_of(store):
        try:
            record, _ = read_payload(place)
        except Exception as error:  # noqa: BLE001  the test wants to see whatever it was
            problems.append(f"{place}: {error}")
        else:
            files[record.dump_id] = record.payload_sha256
    rows = query.select_dumps(query.open_fresh(store))
    wrong = [row.path for row in rows if not _agrees(store, row, files)]
    loose = [path.name for path in store.iter_dumps()]
    packs = [str(path.relative_to(store.root)) for path in store.iter_packs()]
    left = [path.name for path in store.packs.rglob(".tmp-*")]
    return {"files": files, "rows": sorted(row.dump_id for row in rows), "wrong": wrong, "problems": problems,
            "loose": loose, "packs": packs, "left": left, "bytes": sum(row.bytes for row in rows)}  # fmt: skip


def _agrees(store: Store, row: query.DumpRow, files: dict[str, str]) -> bool:
    record, _ = read_payload(store.root / row.path)
    return record.payload_sha256 == files.get(row.dump_id)


def observed(work: Callable[[], Any], report: Path) -> Any:
    """The answer of `work` in a child of its own, so that no open pack or engine is shared."""
    status = forked(lambda: report.write_text(json.dumps(work())) and None)
    assert status == 0, "the observer itself failed"
    return json.loads(report.read_text())


def main(original: Path, work: Path, operation: str) -> list[dict[str, Any]]:
    """Every death, and what was left."""
    deaths, at = [], 0
    while True:
        at += 1
        copy = work / str(at)
        shutil.copytree(original, copy)
        store, log = Store(copy), work / f"{at}.log"

        def die(copy: Path = copy, at: int = at, log: Path = log) -> None:
            counting = Deaths(copy, at)
            with builtins.open(log, "w") as file:
                step = counting.step
                counting.step = lambda what: (file.write(what + "\n"), file.flush(), step(what))[-1]  # type: ignore
                operate(Store(copy), operation)

        status = forked(die)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        after = observed(lambda store=store: state(store), work / "report")
        assert forked(lambda store=store: operate(store, operation)) == 0, f"the second run failed at step {at}"
        again = observed(lambda store=store: state(store), work / "report")
        step = log.read_text().splitlines()[-1]
        deaths.append({"step": step, "killed": killed, "status": status, "after": after, "again": again})
        shutil.rmtree(copy)
        if not killed:
            return deaths


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
