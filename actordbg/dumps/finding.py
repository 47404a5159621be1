"""Findings of a store's checks: the kinds, what each means, and what a repair does about it.

A finding is a path and a kind, with a sentence. `damage` is lost or unusable; a `leftover` does no harm but is in the way; a
`note` is not a fault. A repair never loses anything: it moves what it cannot fix into `quarantine/`, below the same path.

Example::

    StoreFault(store.root / "dumps/ppo-1/rank0000/x.safetensors.zst", "damaged-dump", "damaged payload: ...")
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from actordbg.base.errors import NewerFormat
from actordbg.formats.store_files import OddFile

DAMAGE, LEFTOVER, NOTE = "damage", "leftover", "note"


class Repair(Enum):
    """What a repair does about a finding, in words."""

    NOTHING = ""
    QUARANTINE = "move it into quarantine/"
    SALVAGE = "write its good dumps as separate files, then move it into quarantine/"
    HOME = "move it to where its record belongs; into quarantine/ if something lies there"
    REMOVE = "remove it"
    FORMAT = "rewrite FORMAT"
    MODE = "remove the permissions of others, restore the owner's"
    CATALOG = "rebuild the catalog from the files"


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding."""

    severity: str
    meaning: str
    repair: Repair = Repair.NOTHING


def _quarantined(meaning: str) -> FindingKind:
    """Make a kind of damage that a repair moves into quarantine."""
    return FindingKind(DAMAGE, meaning, Repair.QUARANTINE)


KINDS = {
    "no-format": FindingKind(DAMAGE, "FORMAT is missing, but there are files of a store", Repair.FORMAT),
    "bad-format": FindingKind(DAMAGE, "FORMAT is not a FORMAT file", Repair.FORMAT),
    "newer-store": FindingKind(DAMAGE, "this actordbg does not read the store's format; nothing else is checked"),
    "odd-file": _quarantined("a link, FIFO, socket, device or folder where a file belongs, or a huge file"),
    "odd-name": _quarantined("a name with control characters, or with bytes that are not UTF-8"),
    "foreign-file": FindingKind(NOTE, "a file or folder that does not belong to a store"),
    "open-mode": FindingKind(LEFTOVER, "anybody on this machine may read it, or its owner may not", Repair.MODE),
    "foreign-owner": FindingKind(NOTE, "it and the store belong to different users"),
    "unreadable": FindingKind(DAMAGE, "it cannot be read: permissions, or the disk"),
    "newer-format": FindingKind(NOTE, "a newer actordbg wrote it"),
    "temporary-file": FindingKind(LEFTOVER, "an unfinished file of a writer that died", Repair.REMOVE),
    "unfinished-file": FindingKind(NOTE, "an unfinished file, perhaps of a live writer"),
    "damaged-dump": _quarantined("a dump file that is broken"),
    "misplaced-dump": FindingKind(DAMAGE, "a sound dump under the wrong name, or in the wrong folder", Repair.HOME),
    "damaged-pack": _quarantined("a pack whose head, foot or index is broken: none of its dumps can be read"),
    "damaged-packed-dump": FindingKind(DAMAGE, "a dump in a pack that is broken, or does not belong there", Repair.SALVAGE),
    "double-dump": FindingKind(LEFTOVER, "a dump file whose dump is also in a pack, with the same content", Repair.QUARANTINE),
    "double-differs": FindingKind(DAMAGE, "two dumps with the same id and different content"),
    "damaged-spec": _quarantined("a replay whose spec.json is missing, broken or another replay's"),
    "damaged-journal": FindingKind(DAMAGE, "a journal with lines that cannot be read; readers skip them"),
    "foreign-result": FindingKind(DAMAGE, "a result of another replay, or of a dump that is not among the inputs"),
    "missing-tensors": FindingKind(DAMAGE, "tensors that the journal lists as kept are gone"),
    "damaged-tensors": _quarantined("a file of kept tensors that is broken"),
    "damaged-record": _quarantined("a comparison, noise floor or matrix that is broken, or under the wrong name"),
    "damaged-control": _quarantined("a dump switch that is broken: jobs that follow it do not record"),
    "damaged-counters": _quarantined("counters that are broken"),
    "damaged-weights": _quarantined("hashes of weights that are broken"),
    "damaged-turns": _quarantined("recorded turns that are broken"),
    "damaged-ring": FindingKind(DAMAGE, "a ring that is broken, or has broken slots"),
    "calls-in-ring": FindingKind(NOTE, "a ring of a dead process with calls: `actordbg dump recover` turns them into dumps"),
    "damaged-catalog": FindingKind(DAMAGE, "the catalog is broken, or not a catalog", Repair.CATALOG),
    "stale-catalog": FindingKind(LEFTOVER, "the catalog's rows do not match the files", Repair.CATALOG),
}
"""What can be found, by code."""


@dataclass(frozen=True)
class StoreFault:
    """A finding of a check. `place`: the file. `detail`: what is wrong with it; empty where the kind says it all."""

    place: Path
    kind: str
    detail: str = ""

    @property
    def severity(self) -> str:
        return KINDS[self.kind].severity

    @property
    def repair(self) -> Repair:
        return KINDS[self.kind].repair


def unusable(path: Path, kind: str, error: Exception) -> StoreFault:
    """Turn an error of reading a file into a finding; `kind` if its content is broken."""
    if isinstance(error, OSError):
        return StoreFault(path, "odd-file" if isinstance(error, OddFile) else "unreadable", str(error.strerror))
    detail = getattr(error, "message", f"it cannot be read: {error}")
    return StoreFault(path, "newer-format" if isinstance(error, NewerFormat) else kind, detail.removeprefix(f"{path}: "))
