"""What a check of a store can find: the kinds, what each means, and what a repair does about it.

A finding is a path and a kind, with a sentence. `damage` is lost or cannot be used; a `leftover` harms nothing and is in the way;
a `note` is not a fault. A repair never loses anything: it moves what it cannot fix into `quarantine/`, below the same path.

Example::

    Finding(store.root / "dumps/ppo-1/rank0000/x.safetensors.zst", "damaged-dump", "damaged payload: ...")
"""

from __future__ import annotations

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
    SALVAGE = "write its good dumps as files of their own, then move it into quarantine/"
    HOME = "move it to where its record belongs; into quarantine/ if something lies there"
    REMOVE = "remove it"
    FORMAT = "write FORMAT again"
    MODE = "take the permissions of others away, give the owner's back"
    CATALOG = "make the catalog again from the files"


@dataclass(frozen=True)
class FindingKind:
    """One kind of finding."""

    severity: str
    meaning: str
    repair: Repair = Repair.NOTHING


def _quarantined(meaning: str) -> FindingKind:
    """Damage that a repair moves out of the way."""
    return FindingKind(DAMAGE, meaning, Repair.QUARANTINE)


KINDS = {
    "no-format": FindingKind(DAMAGE, "FORMAT is missing, yet there are files of a store", Repair.FORMAT),
    "bad-format": FindingKind(DAMAGE, "FORMAT is not a FORMAT file", Repair.FORMAT),
    "newer-store": FindingKind(DAMAGE, "the store has a format that this actordbg does not read; nothing else is checked"),
    "odd-file": _quarantined("a link, FIFO, socket, device or folder where a file belongs, or a huge file"),
    "odd-name": _quarantined("a name with control characters, or with bytes that are not UTF-8"),
    "foreign-file": FindingKind(NOTE, "a file or folder that is none of a store's"),
    "open-mode": FindingKind(LEFTOVER, "anybody on this machine may look at it, or its owner may not", Repair.MODE),
    "foreign-owner": FindingKind(NOTE, "it belongs to another user than the store"),
    "unreadable": FindingKind(DAMAGE, "it cannot be read: permissions, or the disk"),
    "newer-format": FindingKind(NOTE, "a newer actordbg wrote it"),
    "temporary-file": FindingKind(LEFTOVER, "an unfinished file of a writer that died", Repair.REMOVE),
    "unfinished-file": FindingKind(NOTE, "an unfinished file, perhaps of a writer that is at it"),
    "damaged-dump": _quarantined("a dump file that is broken"),
    "misplaced-dump": FindingKind(DAMAGE, "a sound dump under a wrong name, or in a wrong folder", Repair.HOME),
    "damaged-pack": _quarantined("a pack whose head, foot or index is broken: none of its dumps can be read"),
    "damaged-packed-dump": FindingKind(DAMAGE, "a dump in a pack that is broken, or does not belong there", Repair.SALVAGE),
    "double-dump": FindingKind(LEFTOVER, "a dump file whose dump lies in a pack too, with the same content", Repair.QUARANTINE),
    "double-differs": FindingKind(DAMAGE, "two dumps of one id with different content"),
    "damaged-spec": _quarantined("a replay whose spec.json is missing, broken or another replay's"),
    "damaged-journal": FindingKind(DAMAGE, "a journal with lines that cannot be read; readers skip them"),
    "torn-journal": FindingKind(NOTE, "a journal whose last line is cut; readers skip it"),
    "foreign-result": FindingKind(DAMAGE, "a result of another replay, or of a dump that is not among the inputs"),
    "missing-tensors": FindingKind(DAMAGE, "tensors that were kept, by the journal, and are gone"),
    "damaged-tensors": _quarantined("a file of kept tensors that is broken"),
    "stray-tensors": FindingKind(NOTE, "kept tensors of a dump that is not among the inputs"),
    "damaged-record": _quarantined("a comparison, noise floor or matrix that is broken, or another's"),
    "missing-replay": FindingKind(NOTE, "a comparison, noise floor or matrix of a replay that is gone"),
    "damaged-event": _quarantined("an event of a patch that is broken"),
    "damaged-backup": _quarantined("the backup of a patched file is not what its name says"),
    "damaged-control": _quarantined("a dump switch that is broken: jobs that follow it do not record"),
    "damaged-counters": _quarantined("counters that are broken"),
    "damaged-weights": _quarantined("hashes of weights that are broken"),
    "damaged-ring": FindingKind(DAMAGE, "a ring that is broken, or has broken slots"),
    "calls-in-ring": FindingKind(NOTE, "a ring of a dead process with calls: `actordbg dump recover` makes dumps of them"),
    "damaged-model": _quarantined("a model that actordbg built is incomplete; it is built again"),
    "damaged-catalog": FindingKind(DAMAGE, "the catalog is broken, or no catalog", Repair.CATALOG),
    "stale-catalog": FindingKind(LEFTOVER, "the catalog's rows are not what the files say", Repair.CATALOG),
    "other-catalog": FindingKind(NOTE, "the catalog has another revision than this actordbg's"),
}
"""What can be found, by code."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check found. `place`: the file. `detail`: what is wrong with it; empty where the kind says it all."""

    place: Path
    kind: str
    detail: str = ""

    @property
    def severity(self) -> str:
        return KINDS[self.kind].severity

    @property
    def repair(self) -> Repair:
        return KINDS[self.kind].repair


def unusable(path: Path, kind: str, error: Exception) -> Finding:
    """Say of a file what an error of reading it means; `kind` where its content is broken."""
    if isinstance(error, OSError):
        return Finding(path, "odd-file" if isinstance(error, OddFile) else "unreadable", str(error.strerror))
    detail = getattr(error, "message", f"it cannot be read: {error}")
    return Finding(path, "newer-format" if isinstance(error, NewerFormat) else kind, detail.removeprefix(f"{path}: "))
