"""A file of a store is opened only if it is a regular file, never through a link, never waiting, and read up to a limit."""

from __future__ import annotations

import os
import socket

import pytest

from actordbg.formats.store_files import OddFile, open_regular, read_regular


def test_a_regular_file_is_read_whole(tmp_path):
    path = tmp_path / "a"
    for data in (b"", b"x", b"x" * 65_536, b"x" * 200_000):
        path.write_bytes(data)
        assert read_regular(path) == data
        assert read_regular(path, len(data)) == data


def test_too_large_a_file_is_refused(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 101)
    with pytest.raises(OddFile, match="more than 100 bytes"):
        read_regular(path, 100)


def test_what_is_no_file_is_refused_at_once_and_named(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "to-a-file").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(tmp_path / "socket"))
        kinds = {"fifo": "FIFO", "link": "symbolic link", "to-a-file": "symbolic link", "folder": "folder", "socket": "socket"}
        before = len(os.listdir("/proc/self/fd"))
        for name, kind in kinds.items():
            for read in (open_regular, read_regular):
                with pytest.raises(OddFile, match=kind):
                    read(tmp_path / name)
        with pytest.raises(OddFile, match="FIFO"):
            open_regular(tmp_path / "fifo", os.O_WRONLY)
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OddFile, match="device"):
        read_regular("/dev/zero")


def test_what_is_not_there_is_said_as_ever(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "a")
