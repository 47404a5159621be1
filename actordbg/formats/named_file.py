"""A file that the user named, as opposed to one of a store: `named_file.write_named(Path("report.html"), data)`."""

from __future__ import annotations

from pathlib import Path

from actordbg.formats.store_files import atomic_write


def write_named(path: Path, data: bytes) -> None:
    """Write what a user asked for where he said: a file whole or not at all, behind a link too; a device or a pipe as it is."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        atomic_write(path.resolve(), data, mode=0o644)
