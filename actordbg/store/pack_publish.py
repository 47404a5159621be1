"""Puts a pack into the store: written under a temporary name, read again and verified whole, and only then given its name.

The name is made of the first dump's time and the SHA-256 of the whole file, so the same dumps packed again get the same name,
and a pack never changes under its name. Whoever moves dumps (pack, unpack, prune) holds `exclusive` while it does.

Example::

    writer = PackWriter(store.packs / "ppo-1", level=19)
    writer.add(record, line, payload)
    published = writer.publish()         # now the dump's old place may go
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.errors import Conflict, CorruptDump, StoreProblem
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.store_files import TEMPORARY, make_folder, sync_folder
from actordbg.store.layout import Store
from actordbg.store.pack_build import DEFAULT_LEVEL, PackBuilder, PackFigures
from actordbg.store.pack_bytes import HINT, PACK_SUFFIX
from actordbg.store.pack_reader import Pack

_LOCK = ".lock"


@dataclass(frozen=True)
class Published:
    """A verified pack in its place, the dumps that it holds, and what it took."""

    path: Path
    dump_ids: list[str]
    figures: PackFigures


class PackWriter:
    """One pack on its way into a folder. `discard` leaves nothing behind."""

    def __init__(self, folder: Path, level: int = DEFAULT_LEVEL) -> None:
        make_folder(folder)
        self._folder = folder
        self._temporary = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}{PACK_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._temporary, flags, 0o600), "wb")
        self._builder = PackBuilder(self._file, level)
        self._expected: dict[str, tuple[bytes, str]] = {}

    @property
    def count(self) -> int:
        """Dumps so far."""
        return len(self._expected)

    @property
    def is_full(self) -> bool:
        """Whether the next dump belongs into another pack."""
        return self._builder.is_full

    def add(self, record: DumpRecord, line: bytes, payload: bytes) -> None:
        """Add a dump whose payload was checked against its record; see `PackBuilder.add`."""
        self._builder.add(record.dump_id, line, payload)
        self._expected[record.dump_id] = hashlib.sha256(line).digest(), record.payload_sha256

    def publish(self) -> Published:
        """Finish, flush to disk, read everything again, and give the pack its name.

        Raises CorruptDump if what was read is not what was written: then nothing was published, and nothing may be removed.
        """
        try:
            self._builder.finish()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._verify()
            first = next(iter(self._expected))[:15].rstrip("._+-")
            path = self._folder / f"{first}-{self._builder.sha256[:16]}{PACK_SUFFIX}"
            os.replace(self._temporary, path)
            sync_folder(self._folder)
        except BaseException:
            self.discard()
            raise
        return Published(path, list(self._expected), self._builder.figures)

    def discard(self) -> None:
        """Give up: the temporary file goes."""
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def _verify(self) -> None:
        pack = Pack(self._temporary)
        for dump_id, (line_digest, payload_sha256) in self._expected.items():
            line, payload = pack.read(dump_id)
            same = hashlib.sha256(line).digest() == line_digest
            if not same or hashlib.sha256(payload).hexdigest() != payload_sha256:
                raise CorruptDump(f"{dump_id}: the pack does not give back what went into it", hint=HINT)


@contextlib.contextmanager
def exclusive(store: Store) -> Iterator[None]:
    """Keep every other process from moving dumps of this store until the block ends; Conflict if one is at it.

    The lock ends with its process. Unfinished packs that a killed process left behind are removed.
    """
    make_folder(store.packs)
    descriptor = os.open(store.packs / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreProblem(
                    f"cannot lock {store.packs / _LOCK}: {error.strerror}", hint="pack on a host that can lock files there"
                ) from None
            raise Conflict(
                f"another actordbg is packing, unpacking or pruning in {store.root}", hint="wait until it is done"
            ) from None
        for leftover in store.packs.glob(f"*/{TEMPORARY}*"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)
