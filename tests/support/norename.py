"""A file system for fsspec that can only do what an object store can: put, get, list. It lies in a local folder.

    import norename                      # registers it
    Mirror("norename:///some/folder", ...)

Renaming, copying on the other side, deleting, appending and creating exclusively fail the test that needs them.
"""

import shutil
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class NoRename(LocalFileSystem):
    """Local files without what S3 lacks."""

    protocol = "norename"

    @classmethod
    def _strip_protocol(cls, path):
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return LocalFileSystem._strip_protocol(str(path).removeprefix("norename://"))

    def put_file(self, lpath, rpath, **_):
        Path(rpath).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(lpath, rpath)

    def get_file(self, rpath, lpath, **_):
        shutil.copyfile(rpath, lpath)

    def _never(self, *_, **__):
        raise NotImplementedError("an object store cannot do this")

    mv = mv_file = rename = cp_file = copy = rm = rm_file = rmdir = link = symlink = touch = _never

    def open(self, path, mode="rb", **options):
        if mode not in ("rb", "wb"):
            raise NotImplementedError(f"an object store has no mode {mode}")
        return super().open(path, mode, **options)


fsspec.register_implementation("norename", NoRename, clobber=True)
