"""Bundles: dumps, replays and comparisons of a store as one archive, which a colleague opens with `dump import` and `check`.

    pack_bundle(store, Path("case.tar.zst"), dumps, replays=["20261126T171646-6baf1c"])
    open_bundle(other, Path("case.tar.zst"))

A bundle is a tar, compressed with zstd. Its first member is `manifest.json`, with the size and SHA-256 of every other; those are
files of a store, byte for byte, without logs; or dumps without their token ids (`actordbg.dumps.redaction`).

**Nothing in it is trusted.** A member is a regular file that the manifest names, with a path that a store may have; sizes are
limited before anything is written; dumps, specifications, comparisons and headers of tensors are checked, and journals are read
later by a reader that skips damaged lines. An existing file is never replaced, and a replay that the store has gets no new files.
Nothing is executed; what an imported replay would run is approved like another user's, and what it or a comparison says is named
as theirs (`base.owners.origin_file`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import zstandard

from actordbg.base.errors import (
    Conflict,
    CorruptDump,
    EnvironmentProblem,
    NewerFormat,
    NothingToDo,
    Refused,
    StoreProblem,
    UnsafeInput,
    reason_of,
    system_errors,
)  # fmt: skip
from actordbg.base.owners import origin_file
from actordbg.base.units import plural
from actordbg.dumps.redaction import Redaction
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.encoding import pack_line
from actordbg.formats.record_reading import MOST_VALUES, values_in
from actordbg.formats.store_files import (
    MOST_BYTES,
    atomic_write,
    make_folder,
    open_regular,
    read_regular,
    remove,
    require_own_way,
)
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.records.journal import SPEC, TENSORS
from actordbg.records.replay_record import ReplaySpec
from actordbg.records.stored_record import stored_json
from actordbg.store.layout import Store
from actordbg.store.payload import encode_plain, load_plain
from actordbg.store.places import read_exactly

BUNDLE_SUFFIX = ".tar.zst"
FORMAT = 1
MANIFEST = "manifest.json"
MOST_FILES = 10**6
MOST_FILE = 2**34
"""Limits of what is read from a bundle: number of files, bytes of one file."""
_MOST_HEADER = 2**16
"""Bytes of a header that has a long name, or other facts, of a member."""
_FREE, _RATIO = 2**28, 100
"""A bundle may unpack to this many bytes, or to so many times its size: journals compress well, a bomb better."""
_NAME = r"(?!\.)[A-Za-z0-9._+@-]{1,200}"
_MEMBER = re.compile(
    rf"dumps/{_NAME}/rank\d{{4,}}/{_NAME}\.safetensors\.zst|replays/{_NAME}/(spec\.json|\w+\.jsonl)"
    rf"|replays/{_NAME}/tensors/{_NAME}\.safetensors|comparisons/{_NAME}\.json"
)


@dataclass(frozen=True)
class BundleSummary:
    """What was packed or imported. present: files that the store had, which no other
    figure counts. size: of the archive, bytes. replay: the newest of an imported bundle, without truths; "" without one.
    """

    path: Path
    dumps: int
    replays: int
    comparisons: int
    present: int = 0
    size: int = 0
    redacted: bool = False
    replay: str = ""

    @property
    def contents(self) -> str:
        """Return the numbers of what it has, in words."""
        named = ((self.dumps, "dump"), (self.replays, "replay"), (self.comparisons, "comparison"))
        return ", ".join(plural(count, word) for count, word in named if count) or "nothing"


def pack_bundle(
    store: Store, out: Path, dumps: Iterable[Path], *, replays: Sequence[str] = (), comparisons: Sequence[str] = (),
    redact: bool = False, keep: Collection[int] = (), model: str = "",
) -> BundleSummary:  # fmt: skip
    """Write a bundle. redact: permute token ids, except `keep`, padding, and the special tokens of `model`'s configuration.

    Raises NothingToDo for an empty selection, Refused for `redact` with replays: their results belong to the real ids.
    """
    if redact and (replays or comparisons):
        raise Refused("results of replays belong to the real token ids", hint="bundle dumps only, or drop --redact")
    places = list(dumps)
    for path in (*places, *(store.replays / name / SPEC for name in replays)):
        require_own_way(path, store.root)
    files = dict(_dump_files(places, Redaction(places, keep, model) if redact else None))
    for name in replays:
        files |= {store.relative(path): read_regular(path, MOST_FILE) for path in _replay_files(store.replays / name)}
    for name in comparisons:
        path = store.comparisons / f"{name}.json"
        files[store.relative(path)] = read_regular(path)
    if not files:
        raise NothingToDo("nothing was selected for the bundle", hint="name a replay or a comparison, or pass --where")
    listed = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    manifest = json.dumps({"format": FORMAT, "redacted": redact, "files": listed}, indent=1).encode()
    packed = io.BytesIO()
    with (
        zstandard.ZstdCompressor(level=9).stream_writer(packed, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, data in {MANIFEST: manifest, **files}.items():
            member = tarfile.TarInfo(name)  # its time and owner stay 0
            member.size, member.mode = len(data), 0o600
            archive.addfile(member, io.BytesIO(data))
    with system_errors(EnvironmentProblem, f"cannot write {out}", "choose another file with -o"):
        atomic_write(out.absolute(), packed.getvalue())
    return replace(_counted(out, files), size=len(packed.getvalue()), redacted=redact)


def _counted(path: Path, names: Iterable[str]) -> BundleSummary:
    kinds = [name.split("/") for name in names]
    return BundleSummary(
        path, sum(kind[0] == "dumps" for kind in kinds), sum(kind[-1] == SPEC for kind in kinds),
        sum(kind[0] == "comparisons" for kind in kinds),
    )  # fmt: skip


def _replay_files(folder: Path) -> Iterator[Path]:
    yield folder / SPEC
    yield from sorted(folder.glob("*.jsonl"))
    yield from sorted(folder.glob("tensors/*.safetensors"))


def _dump_files(places: Iterable[Path], redaction: Redaction | None) -> Iterator[tuple[str, bytes]]:
    for place in places:
        if redaction is None:
            record, line, payload = read_exactly(place)
            data = pack_line(line, payload)
        else:
            record, tensors = redaction.of(*load_plain(place))
            record, data = encode_plain(record, tensors)
        yield f"dumps/{record.run}/rank{record.rank:04d}/{record.dump_id}{SUFFIX}", data


# ---- opening ----


class _Member(tarfile.TarInfo):
    """A member whose further headers are small: `tarfile` reads each of them whole, before it gives the member."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if not member.isreg() and member.size > _MOST_HEADER:
            raise UnsafeInput(f"the bundle has a header of {member.size:,} bytes", hint="do not use this bundle")
        return member


class _Limited(io.RawIOBase):
    """Reads what `stream` decompresses to, at most `most` bytes."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._left, self._most = stream, most, most

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise UnsafeInput(
                f"the bundle unpacks to more than {self._most:,} bytes",
                hint="ask for a smaller bundle, or for its dumps one by one",
            )
        return data


def open_bundle(store: Store, path: Path) -> BundleSummary:
    """Import a bundle into the store, which is made if it is missing. Nothing is written unless all of it is good.

    Raises UnsafeInput for a member that is not a plain file of a store or lies about its size, CorruptDump for damage,
    NewerFormat, Conflict if the store has another file of that name or that replay with other files, and StoreProblem if
    writing fails; then what was written is removed again.
    """
    try:
        most = max(_FREE, _RATIO * path.stat().st_size)
        with (
            open(open_regular(path.resolve()), "rb") as file,
            zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file) as stream,
        ):
            with tarfile.open(fileobj=_Limited(stream, most), mode="r|", tarinfo=_Member) as archive:  # type: ignore[call-overload]
                files = dict(_members(archive, MOST_VALUES + path.stat().st_size))
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {reason_of(error)}", hint="name a bundle that you can read") from None
    except (zstandard.ZstdError, tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        raise CorruptDump(f"{path} is not a bundle, or is damaged: {error}", hint="copy it again") from None
    for name, data in files.items():
        _check_as_its_kind(name, data)
    new = {name: data for name, data in files.items() if not _is_there(store, name, data)}
    _check_replays(files, new)
    store.create()  # not before: a bundle that is refused leaves nothing
    good, written = False, list[Path]()
    try:
        for name in sorted(new, key=lambda name: name.endswith(f"/{SPEC}")):  # a replay is one once it has its specification
            target = store.root / name
            make_folder(target.parent)
            contents = {target: new[name]}
            if name.endswith(f"/{SPEC}") or name.startswith("comparisons/"):  # who wrote it is known before it is there
                contents = {origin_file(target): os.fsencode(path.name), **contents}
            for place, data in contents.items():
                written.append(place)
                atomic_write(place, data)
        good = True
    except OSError as error:
        raise StoreProblem(f"cannot write into {store.root}: {error.strerror}", hint="make room, or name another store") from None
    finally:  # whatever stopped it, Ctrl-C too
        for place in reversed(written if not good else []):
            with contextlib.suppress(OSError):  # another user's link in its way, by now: the others go all the same
                remove(place)
    specs = [ReplaySpec.from_json(data) for name, data in files.items() if name.endswith(f"/{SPEC}")]
    replay = max((spec.replay_id for spec in specs if not (spec.config.truth or spec.config.vary)), default="")
    return replace(_counted(path, new), present=len(files) - len(new), size=path.stat().st_size, replay=replay)


def _check_replays(files: Collection[str], new: Collection[str]) -> None:
    """Raise unless each replay comes with its specification, and is new as a whole: who wrote it is known by that file alone."""
    for name in files:
        spec = f"{'/'.join(name.split('/')[:2])}/{SPEC}"
        if name.startswith("replays/") and spec not in files:
            raise UnsafeInput(f"{name} in the bundle belongs to a replay that is not in it", hint="do not use this bundle")
        if name.startswith("replays/") and name in new and spec not in new:
            hint = "import into a new store: `actordbg --store NEW dump import ...`"
            raise Conflict(f"the store has this replay without {name}", hint=hint)


def _members(archive: tarfile.TarFile, values: int) -> Iterator[tuple[str, bytes]]:
    """Yield the members that the manifest names, each with its bytes, after all that can be checked without its kind.

    values: those that all its JSON may have. Later each line of a journal is an object in memory, with all that it holds.
    """
    listed: dict[str, Any] | None = None
    for member in archive:
        if not member.isreg() or member.issparse():
            raise UnsafeInput(f"{member.name!r:.120} in the bundle is not a plain file", hint="ask for a bundle without links")
        if listed is None:
            if member.name != MANIFEST or member.size > MOST_BYTES:
                raise CorruptDump("it does not begin with a manifest: this is not a bundle", hint="`actordbg bundle` makes one")
            listed = _manifest(_content(archive, member))
            continue
        entry = listed.pop(member.name, None)
        if entry is None or not _MEMBER.fullmatch(member.name):
            raise UnsafeInput(f"{member.name!r:.120} does not belong into a bundle", hint="do not use this bundle")
        if member.size != entry["size"] or member.size > (MOST_BYTES if member.name.endswith(".json") else MOST_FILE):
            raise UnsafeInput(f"{member.name} is not of the size that the manifest says", hint="do not use this bundle")
        data = _content(archive, member)
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CorruptDump(f"{member.name} in the bundle is damaged", hint="copy the bundle again")
        values -= values_in(data) if member.name.endswith((".json", ".jsonl")) else 0
        if values < 0:
            raise UnsafeInput("the bundle's records have more values than its size allows", hint="do not use this bundle")
        yield member.name, data
    if listed is None or listed:
        missing = next(iter(listed or {"manifest.json": 0}))
        raise CorruptDump(f"{missing!r:.120} is missing in the bundle", hint="copy the bundle again")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


def _manifest(data: bytes) -> dict[str, Any]:
    try:
        manifest = stored_json(data)
        if manifest["format"] != FORMAT:
            raise NewerFormat(
                f"the bundle has format {manifest['format']!r:.40}, this actordbg reads {FORMAT}", hint="upgrade actordbg"
            )
        files = manifest["files"]
        if len(files) > MOST_FILES or not all(type(entry["size"]) is int and entry["sha256"] for entry in files.values()):
            raise ValueError("its list of files is wrong")
        return dict(files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDump(f"the bundle's manifest is damaged: {error}", hint="copy the bundle again") from None


def _check_as_its_kind(name: str, data: bytes) -> None:
    """Raise CorruptDump unless the bytes are what their path says: a dump, a specification, a comparison, tensors."""
    parts = name.split("/")
    if parts[0] == "dumps":
        record, payload = dumpfile.unpack(data, name)
        dumpfile.check(record, payload, name)
        if (record.run, f"rank{record.rank:04d}", f"{record.dump_id}{SUFFIX}") != tuple(parts[1:]):
            raise CorruptDump(f"{name} is another dump's file", hint="do not use this bundle")
    elif parts[0] == "comparisons":
        if ComparisonRecord.from_json(data, name).comparison_id != parts[1].removesuffix(".json"):
            raise CorruptDump(f"{name} is another comparison's file", hint="do not use this bundle")
    elif parts[2] == TENSORS:
        dumpfile.payload_entries(data, name)
    elif parts[-1] == SPEC and ReplaySpec.from_json(data).replay_id != parts[1]:
        raise CorruptDump(f"{name} is another replay's", hint="do not use this bundle")


def _is_there(store: Store, name: str, data: bytes) -> bool:
    target = store.root / name
    try:
        if read_regular(target, MOST_FILE) == data:
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise Conflict(f"{name} cannot be compared with the store's: {error.strerror}", hint="import into a new store") from None
    raise Conflict(f"the store has another {name}", hint="import into a new store: `actordbg --store NEW dump import ...`")
