"""A store behind a URL (`s3://bucket/store`, `hdfs://...`, whatever fsspec opens), worked on as a mirror in a local folder.

An object store has no rename and no create-exclusive, and a store needs both. So commands do not work there: `pull` copies new
files into a folder of this machine, commands work in that folder, and `push` uploads the files that they wrote, whole and under
the same names. While a command runs, `push` runs again every few seconds, so finished work survives a crash of the machine, and
`--resume` on another machine continues with it.

* **Nothing is ever deleted**, on either side.
* **If both sides changed a file**, the longer version counts if it begins with the shorter one: a journal or a log, which only
  grows, or a file that a killed push uploaded in part. Else the command refuses the file by name: which side is right is unknown.
* **Not mirrored**: the catalog (a cache), flight recorder buffers (`rings/`), models, quarantine, hidden files, and files about
  this machine's jobs and packages: dump switches, and the originals of patched files.
* **A file that cannot be copied is skipped**: a link, a FIFO, an unreadable file. `Moved.skipped` names each.
* **Downloaded records are not trusted**: an `origin_file` beside each is written first, so a command that continues with such a
  record asks for confirmation. A record that was already here with the same bytes stays this user's.

A manifest beside the folder holds the state of each file on both sides when they were last equal. It is valid for its URL, and
while neither side loses its store. A local file appears whole; a remote file as its file system writes it (S3: whole).
Nothing is locked: two commands may add files at once, but only one may run a replay. Journals and logs are uploaded last, so a
result never appears before its tensors.

A cluster node needs no mirror: `Fetched` downloads single files and uploads nothing.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem, UsageError, reason_of
from actordbg.base.fault import without_password
from actordbg.base.owners import origin_file
from actordbg.formats.record_reading import MOST_VALUES, strict_json
from actordbg.formats.store_files import KINDS, OddFile, atomic_write, make_folder, read_regular, temporary_name
from actordbg.store.layout import UNPRINTABLE, printable

EVERY_S = 3.0
"""Least seconds between two pushes."""
_REST_FACTOR = 5
"""A push is followed by a pause of at least this many times its duration, so that a growing journal does not fill the link."""
_AT_ONCE = 16
"""How many files move at once."""
_FORMAT_FILE = "FORMAT"
_GROWING = (".jsonl", ".log")
"""Journals and logs: uploaded after all other files."""
_LEFT_OUT = re.compile(  # paths that are not mirrored
    r"(?:rings|quarantine|cache|models|controls|backups)(?:/|\Z)|(?:catalog[^/]*|control\.json)\Z|(?:.*/)?\.",
    re.DOTALL | re.IGNORECASE,
)
_NEEDS_ORIGIN = re.compile(
    r"(?:replays|matrices|trainchecks|comparisons|noise|lints)/.*\.json|(?:.*/)?actordbg\.toml", re.IGNORECASE
)
"""Records that a command can continue with or believe, and settings files: a downloaded copy gets an origin file.
Case is ignored, since some file systems ignore it."""
_MOST_NAME_BYTES = 200
"""Most bytes of a name, so that a temporary name made of it is still valid."""
_MOST_BYTES = 2**40
"""Most bytes of a file that both sides changed: it is read whole."""
_ONE_FILE_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, OddFile)
"""Errors of a download that concern one file only: it is skipped, and the others are moved."""
_IN_THE_WAY = (IsADirectoryError, NotADirectoryError, FileExistsError)
"""Errors of an upload that concern one file only: a folder is in its place, or a file in the place of its folder."""

FileState = tuple[int, str]
"""Size of a file, and its modification time or tag: if either differs, the file has changed."""
Skipped = dict[str, str]
"""What could not be copied, by path, and why."""


@dataclass(frozen=True)
class Moved:
    """Files that were copied, and their bytes. skipped: what could not be copied, by path, and why."""

    files: int = 0
    bytes: int = 0
    skipped: Skipped = field(default_factory=dict)


class Fetched:
    """Local copies of files behind a URL, downloaded on demand. Several processes may use the same folder.

    Only for files that never change under their name: a file that is there is not checked again.
    url: without its password, since it is printed and stored.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = without_password(url), folder
        with as_store_problem(self.url):  # sftp and ftp connect
            self._files, self._root = opened(url)
        self._parts = set[Path]()  # the files that downloads are writing now

    def bring(self, paths: Iterable[str]) -> None:
        """Download the files that are not in the folder yet. A file that the URL lacks is skipped; opening it reports it."""
        with as_store_problem(self.url):
            missing = [path for path in dict.fromkeys(paths) if not (self.folder / path).exists()]
            self._move_each(self._get, missing, (FileNotFoundError,))

    def _get(self, path: str) -> None:
        """Download a file, whole or not at all. A record that is already here with the same bytes is left as it is."""
        here = self.folder / path
        part = here.with_name(temporary_name(here.name[:80]))
        make_folder(part.parent)
        self._parts.add(part)
        try:
            self._files.get_file(f"{self._root}/{path}", str(part))
            part.chmod(0o600)
            with contextlib.suppress(FileNotFoundError):
                if _NEEDS_ORIGIN.fullmatch(path) and filecmp.cmp(part, here, shallow=False):
                    return
            self._write_origin(path)
            os.replace(part, here)
        finally:
            part.unlink(missing_ok=True)
            self._parts.discard(part)

    def _move_each(self, move: Callable[[str], None], paths: Sequence[str], of_one_file: tuple[type[OSError], ...]) -> Skipped:
        """Move files, several at once. Return those that failed with an error `of_one_file`, and why; other errors are raised.

        Ctrl-C does not wait for the files that move: no file system can be asked to stop, so the threads end with the process.
        """
        left, problems, errors = deque(paths), Skipped(), list[Exception]()

        def work() -> None:
            with contextlib.suppress(IndexError):  # nothing is left
                while True:
                    path = left.popleft()
                    try:
                        move(path)
                    except of_one_file as error:
                        problems[path] = reason_of(error) or type(error).__name__
                    except Exception as error:  # noqa: BLE001  each file system raises its own
                        errors.append(error)
                        left.clear()

        threads = [threading.Thread(target=work, name="store-move", daemon=True) for _ in paths[:_AT_ONCE]]
        try:
            for step in (threading.Thread.start, threading.Thread.join):
                for thread in threads:
                    step(thread)
        finally:
            left.clear()
            for part in tuple(self._parts):
                part.unlink(missing_ok=True)
        if errors:
            raise errors[0]
        return {path: problems[path] for path in paths if path in problems}

    def _write_origin(self, path: str) -> None:
        """Write the `origin_file` of a record that is about to appear here: it says which URL the record comes from."""
        if _NEEDS_ORIGIN.fullmatch(path):
            atomic_write(origin_file(self.folder / path), self.url)


class Mirror(Fetched):
    """A folder and the URL that it mirrors. runs: download only dumps and packs of these runs; all if empty.

    is_there: the URL has a store. was_there: it had one at the last pull. Both are set by `pull`.
    """

    def __init__(self, url: str, folder: Path, runs: Sequence[str] = ()) -> None:
        super().__init__(url, folder)
        self._local_system, self._runs = opened("file:///")[0], tuple(runs)
        self._manifest_path = folder.with_name(f"{folder.name}.staged.json")
        self._equal: dict[str, tuple[FileState, FileState]] = {}
        """The manifest: the local and the remote state of each file when both sides were last equal, by path."""
        self.is_there = self.was_there = False
        self._one_at_a_time, self._making_folders = threading.Lock(), threading.Lock()

    def pull(self) -> Moved:
        """Download new and changed files."""
        with self._one_at_a_time, as_store_problem(self.url):
            skipped: Skipped = {}
            self._files.invalidate_cache()
            remote, local = _listed(self._files, self._root, self._runs, skipped), self._local({})
            for run in self._runs:
                if not any(path.startswith((f"dumps/{run}/", f"packs/{run}/")) for path in remote):
                    skipped[f"#{run}"] = "no dumps of that run are there"
            self._equal = _read_manifest(self._manifest_path, self.url)
            self.is_there, self.was_there = _FORMAT_FILE in remote, _FORMAT_FILE in self._equal and _FORMAT_FILE in local
            if _FORMAT_FILE in self._equal and not (self.was_there and self.is_there):  # a side lost its store: compare all files
                self._equal = {}
            changed = {path for path, state in remote.items() if self._known(path)[1] != state}
            conflicts = {
                path for path in changed if self._known(path)[0] != local.get(path, ()) and os.path.lexists(self.folder / path)
            }
            downloads = sorted(changed - conflicts)
            try:
                skipped |= self._move_each(lambda path: self._download(path, remote[path]), downloads, _ONE_FILE_ERRORS)
                for conflict in sorted(conflicts):  # one at a time: both versions are read whole
                    skipped |= self._move_each(lambda path: self._settle(path, remote[path]), [conflict], _ONE_FILE_ERRORS)
            finally:  # what an interrupted command has moved is not moved again
                if self._equal:
                    self._write_manifest()
            return _moved(downloads, remote, skipped)

    def push(self) -> Moved:
        """Upload new and changed files."""
        with self._one_at_a_time, as_store_problem(self.url):
            skipped: Skipped = {}
            local = self._local(skipped)
            changed = [path for path, state in sorted(local.items()) if self._known(path)[0] != state and self._may_upload(path)]
            skipped |= {path: "no permission to read it" for path in changed if not os.access(self.folder / path, os.R_OK)}
            try:
                for last in (False, True):
                    paths = [path for path in changed if path not in skipped and path.endswith(_GROWING) == last]
                    skipped |= self._move_each(lambda path: self._put(path, local[path]), paths, _IN_THE_WAY)
            finally:
                if changed:
                    self._files.invalidate_cache()
                    self._write_manifest()
            return _moved(changed, local, skipped)

    def _download(self, path: str, remote: FileState) -> None:
        self._get(path)
        self._note_equal(path, remote)

    def _put(self, path: str, state: FileState) -> None:
        """Upload a file that is in this state here, and note its state there. `file` and `sftp` need its folder first."""
        here, there = str(self.folder / path), f"{self._root}/{path}"
        try:
            self._files.put_file(here, there)
        except FileNotFoundError:
            with self._making_folders:  # `sftp` looks first, then makes
                self._files.makedirs(there.rpartition("/")[0], exist_ok=True)
            self._files.put_file(here, there)
        self._equal[path] = state, _state_of(self._files.info(there))

    def _may_upload(self, path: str) -> bool:
        """Check whether the local file may replace the remote file, which is unchanged or a beginning of the local file.

        If the remote file is the longer version instead, it is downloaded.
        """
        if path not in self._equal:
            return True
        try:
            remote = _state_of(self._files.info(f"{self._root}/{path}"))
        except FileNotFoundError:
            return True
        if remote != self._equal[path][1]:
            self._settle(path, remote)
            return self._equal[path][1] != remote
        return True

    def _known(self, path: str) -> tuple[FileState | None, FileState | None]:
        """Return the local and the remote state of a file when both sides were last equal; None if they never were."""
        return self._equal.get(path, (None, None))

    def _local(self, skipped: Skipped) -> dict[str, FileState]:
        return _listed(self._local_system, str(self.folder), (), skipped)

    def _note_equal(self, path: str, remote: FileState) -> None:
        """Note that both sides now have the same file."""
        self._equal[path] = _state_of(self._local_system.info(str(self.folder / path))), remote

    def _settle(self, path: str, remote: FileState) -> None:
        """Resolve a file that both sides changed: keep the version that begins with the other, or raise StoreProblem."""
        ours, theirs = read_regular(self.folder / path, _MOST_BYTES), bytes(self._files.cat_file(f"{self._root}/{path}"))
        if not (ours.startswith(theirs) or theirs.startswith(ours)):
            hint = f"compare both, and remove the wrong version: {self.folder / path}, or its copy below {self.url}"
            raise StoreProblem(f"{path} was changed both here and in {self.url}", hint=hint)
        if len(theirs) > len(ours):
            self._write_origin(path)
            atomic_write(self.folder / path, theirs)
        if len(theirs) >= len(ours):
            self._note_equal(path, remote)

    def _write_manifest(self) -> None:
        atomic_write(self._manifest_path, json.dumps({"url": self.url, "equal": dict(self._equal)}))


class Pusher:
    """A thread that pushes periodically until `close`, which pushes once more and raises any error."""

    def __init__(self, mirror: Mirror, note: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self.mirror, self._note, self._every_s = mirror, note, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-push", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rest, last_problem = self._every_s, ""
        while not self._over.wait(rest):
            began = time.monotonic()
            try:
                self.mirror.push()
                last_problem = ""
            except (StoreProblem, OSError) as error:
                if last_problem != str(error):
                    self._note(f"push failed, trying again: {error}")
                last_problem = str(error)
            rest = max(self._every_s, _REST_FACTOR * (time.monotonic() - began))

    def close(self) -> Moved:
        """Stop the thread, and push what is left."""
        self._over.set()
        self._thread.join()
        return self.mirror.push()


def split_runs(text: str) -> tuple[str, tuple[str, ...]]:
    """Split a URL from the runs after its "#": `s3://bucket/store#ppo-7b,ppo-8b`."""
    url, _, runs = text.partition("#")
    if "@" in runs:  # neither part would be known to hold a password
        raise UsageError("bad URL: @ after #", hint="write # in a password as %23")
    return url, tuple(run for run in runs.split(",") if run)


def opened(url: str) -> tuple[Any, str]:
    """Return (file system, path of the store in it)."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        hint = "run pip install 'actordbg[remote]', or name a folder that all machines see"
        raise EnvironmentProblem(f"a store at {url} needs fsspec, which is not installed", hint=hint) from None
    try:
        files, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        hint = "install s3fs for s3, pyarrow for hdfs"
        raise EnvironmentProblem(f"a store at {url} needs a driver of fsspec: {error}", hint=hint) from None
    except ValueError as error:
        hint = "name s3://bucket/folder, hdfs://host/folder, or a local folder"
        raise UsageError(f"bad store URL {url}: {error}", hint=hint) from None
    except TypeError:
        files, root = url_to_fs(url)  # a file system that knows no listings cache
    return files, str(root).rstrip("/")


@contextlib.contextmanager
def as_store_problem(url: str, then: str = "results are in the local mirror, and the next command pushes them") -> Iterator[None]:
    """Turn errors of a file system into a StoreProblem that names the URL. then: what becomes of what could not be written."""
    try:
        yield
    except ActordbgError:
        raise
    except Exception as error:  # noqa: BLE001  each file system raises its own, and credentials fail in all of them
        hint = f"check address, network and credentials; {then}"
        raise StoreProblem(f"{url}: {type(error).__name__}: {error}", hint=hint) from None


def _moved(paths: Sequence[str], states: Mapping[str, FileState], skipped: Skipped) -> Moved:
    sizes = [states[path][0] for path in paths if path not in skipped]
    return Moved(len(sizes), sum(sizes), skipped)


def _listed(files: Any, root: str, runs: Sequence[str], skipped: Skipped) -> dict[str, FileState]:
    """List the mirrored files of a store, by path. Of dumps and packs, list only those of `runs`, or all if it is empty.

    Files that cannot be copied are added to `skipped`, with the reason. Sockets are left out silently: they belong to a running
    process.
    """
    states: dict[str, FileState] = {}
    try:
        entries = files.find(root, withdirs=True, detail=True)
    except FileNotFoundError:
        return {}
    with_entries = {str(name).rpartition("/")[0] for name in entries}
    for name, info in entries.items():
        path, kind = str(name)[len(root) :].lstrip("/"), "link" if info.get("islink") else info.get("type", "file")
        run = path.split("/")[1:2] if runs and path.startswith(("dumps/", "packs/")) else []
        if not path or path.endswith("/") or _LEFT_OUT.match(path) or (run and run[0] not in runs):
            continue
        mode = {"file": stat.S_IFREG, "link": stat.S_IFLNK}.get(kind, info.get("mode") or 0)
        if kind == "directory":
            try:
                if name not in with_entries:  # it is empty, or may not be listed
                    files.ls(name)
            except PermissionError as error:
                skipped[path] = reason_of(error)
        elif not path.isprintable():
            skipped[printable(path)] = UNPRINTABLE
        elif "//" in path or any(len(part.encode()) > _MOST_NAME_BYTES for part in path.split("/")):
            skipped[path] = "its name has an empty or too long part"
        elif stat.S_ISREG(mode):
            states[path] = _state_of(info)
        elif not stat.S_ISSOCK(mode):
            skipped[path] = f"it is {KINDS.get(stat.S_IFMT(mode), 'a device')}, not a file"
    return states


def _state_of(info: dict[str, Any]) -> FileState:
    tags = ("ETag", "etag", "mtime", "LastModified", "last_modified", "modificationTime", "created")
    return int(info.get("size") or 0), next((str(info[name]) for name in tags if info.get(name)), "")


def _read_manifest(path: Path, url: str) -> dict[str, tuple[FileState, FileState]]:
    """Read the state of files on both sides when they were last equal; empty if the manifest is about another URL, or damaged."""
    try:
        manifest = strict_json(read_regular(path), most=MOST_VALUES)
        equal = {
            name: ((int(size), str(tag)), (int(size_there), str(tag_there)))
            for name, ((size, tag), (size_there, tag_there)) in manifest["equal"].items()
        }
        return equal if manifest["url"] == url else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # then all files are compared, and nothing is lost
