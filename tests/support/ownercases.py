"""A file that another user wrote: given away where the tests run as root, and looking like it elsewhere."""

import os

ANOTHER = 54321
"""A user who is not this one."""


def give_away(file, monkeypatch):
    """The file belongs to ANOTHER, as far as this process can tell."""
    if os.geteuid() == 0:
        os.chown(file, ANOTHER, -1, follow_symlinks=False)
        return
    inode = os.lstat(file).st_ino

    def as_anothers(look):
        def looked(what, **more):
            seen = look(what, **more)
            more_of_it = {name: getattr(seen, name) for name in dir(seen) if name.startswith("st_")}
            return os.stat_result((*seen[:4], ANOTHER, *seen[5:10]), more_of_it) if seen.st_ino == inode else seen

        return looked

    for name in ("fstat", "lstat"):
        monkeypatch.setattr(os, name, as_anothers(getattr(os, name)))
