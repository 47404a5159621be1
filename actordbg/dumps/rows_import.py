"""Rows of a run's files as dumps: a forward for a few rows, and beside it a loss if the file has what a trainer computed.

They are the records that an adapter writes (decision 0079): `sequences` and `attention_mask` [B, S], padded on the right;
`action_mask`, log-probs and other values [B, S-1], where column j is of token j + 1. So every command reads them as it reads a
recorded call. A file without log-probs or advantages of a trainer gives forwards alone, beside them the rollout's log-probs.

A dump has rows of one step and rank, and one set of parts. A row with values that do not fit its tokens is a dump of its own,
with those values as they are: the law `lengths` names them. Ids are made of the file's SHA-256: a second import adds nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from actordbg.base.errors import ActordbgError, CorruptDump, EnvironmentProblem, LaunchProblem, StoreProblem, Unsupported
from actordbg.dumps import containers
from actordbg.dumps.archives import LISTS
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.containers import JSON_LINES
from actordbg.dumps.file_rows import IDS, MASK, OF_TOKENS, Fields, FileLayout, FileRow, Values, row_of
from actordbg.dumps.layouts import layout_of
from actordbg.dumps.pickle_notes import corrupt
from actordbg.formats.dump_record import (
    FORWARD,
    LOSS,
    OUTPUT_PREFIX,
    DumpRecord,
    contiguous_strides,
    format_timestamp,
    make_dump_id,
)
from actordbg.formats.dumpfile import IMPORTED
from actordbg.formats.encoding import PlainTensor
from actordbg.formats.nested_values import CONTEXT

MOST_REPLAYED, MOST_JUDGED = (8, 2**16), (256, 2**18)
"""Most rows of a dump, and most positions of several, padding included: where it is replayed, and where it is only judged."""
_OF_LOSS = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")
"""Parts that a loss got, by its own names; others are beside them."""
MOST_HEAD = 3
"""Most lines of JSON before the first row."""


class RowFile:
    """A file of rows. notes: what a reader has to know of it. left_out: why rows were left out, in words. lines: of a file of
    lines that grows, those that `dumps` has not had.
    """

    lines: BinaryIO | None = None

    def __init__(self, path: Path, kind: str, columns: dict[str, str], trees: LegacyReader) -> None:
        self.path, self._kind, self._columns, self._trees = path, kind, columns, trees
        self.layout: FileLayout | None = None
        self.notes: list[str] = []
        self.left_out: list[str] = []
        stat = path.stat()
        self._time = format_timestamp(datetime.fromtimestamp(stat.st_mtime, timezone.utc))
        self._digest, self._number, self._at = "", 0, 0

    def dumps(self, most_rows: int, most_places: int) -> Iterator[tuple[DumpRecord, dict[str, PlainTensor]]]:
        """Yield the dumps. Raises CorruptDump, UnsafeInput, Unsupported and OSError, also after some."""
        longest, kept = 0, list[FileRow]()
        for row in self.rows():
            longest, count = max(longest, len(row.ids)), len(kept) + 1
            if kept and (count > most_rows or count * longest > most_places or not _alike(kept, row)):
                yield from self._dumps_of(kept)
                longest, kept = len(row.ids), []
            kept.append(row)
        if kept:
            yield from self._dumps_of(kept)
        elif not self.left_out:
            raise CorruptDump("it has no rows", hint="look at what wrote it")

    def rows(self) -> Iterator[FileRow]:
        """Yield the rows that can be read. Raises as `dumps`, which has them."""
        others: list[Any] = []
        for content in containers.contents(self.path, self._kind, self._trees, self.lines):
            if self._kind == JSON_LINES and not self._is_row(content):
                others.append(content)
                self.left_out.append(f"row {self._at}: it has no token ids")
                self._at += 1
                continue
            layout = self.layout or self._known(content)
            try:
                step = layout.step(content, self.path)
                for fields in layout.rows(content):
                    row = self._row(layout, fields, self._at)
                    self._at += 1
                    if row is not None:
                        row.step = row.step if row.step is not None else step if step is not None else 0
                        yield row
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
                raise corrupt(f"after row {self._at}: {error!s:.200}") from None
        if self.layout is None and others:
            self._known(others[0])

    def _is_row(self, line: Fields) -> bool:
        """Check whether a line of JSON is a row, or what refuses the file; others, such as a head of settings, are left out."""
        if self.layout is None:
            return self._at >= MOST_HEAD or layout_of(line, self._kind, self._columns) is not None
        return self.layout.fields[IDS] in line or layout_of(line, self._kind, {}) is not None

    def _known(self, content: Any) -> FileLayout:
        """Return the layout of the first content, and begin: nothing is written for a file without one."""
        layout = layout_of(content, self._kind, self._columns)
        if layout is None:
            names = content[0] if isinstance(content, LISTS) and content else content
            listed = ", ".join(sorted(map(str, names))[:8]) if isinstance(names, dict) else type(content).__name__
            raise containers.text_error(names) or Unsupported(
                f"it is {self._kind} without token ids: {listed:.200}",
                hint="docs/reference/layouts.md lists what is read; name its columns with --column ids=NAME",
            )
        self.layout = layout
        if why := layout.incomplete(self.path):
            self.notes.append(why)
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            for block in iter(partial(file.read, 2**20), b""):
                digest.update(block)
        if self._columns:
            columns = repr(sorted(self._columns.items()))
            digest.update(columns.encode())
        self._digest = digest.hexdigest()[:16]
        return layout

    def _row(self, layout: FileLayout, fields: Fields, number: int) -> FileRow | None:
        try:
            row = row_of(layout, fields, number)
        except ActordbgError as error:
            self.left_out.append(error.message)
            return None
        if row is None:
            self.left_out.append(f"row {number}: it has fewer than two tokens")
        return row

    def _dumps_of(self, rows: Sequence[FileRow]) -> Iterator[tuple[DumpRecord, dict[str, PlainTensor]]]:
        assert self.layout is not None
        number, self._number = self._number, self._number + 2
        first, arrays, about = rows[0], _padded(rows), {"name": self.path.name, "layout": self.layout.name, "row": rows[0].number}
        given = {name: arrays.pop(name) for name in ("sequences", "attention_mask", MASK)}
        of_rows = {CONTEXT + name: np.array([row.of_row[name] for row in rows]) for name in first.of_row}
        if learned := bool({"log_probs", "advantages"} & arrays.keys()):
            shown = {"log_probs": "action_log_probs", "entropy": "entropy"} if "log_probs" in arrays else {}
            beside = {
                OUTPUT_PREFIX + new: arrays[name] for name, new in shown.items() if name in arrays and name not in first.odd
            }
        else:
            beside = {CONTEXT + name: values for name, values in arrays.items()} | of_rows
        (batch, length), actions = given["sequences"].shape, given[MASK].shape[1]
        common: dict[str, Any] = {
            "rank": first.rank, "world_size": first.ranks, "step": first.step, "source": IMPORTED, "timestamp": self._time,
            "batch_size": batch, "seq_len": length, "tokens": int(given["attention_mask"].sum()), "action_len": actions,
            "actor": {"trainer": self.layout.name, "adapter": self.layout.name}, "origin": about, "run": "",
        }  # fmt: skip
        forward = DumpRecord(dump_id=self._id(number), role="policy" if learned else "rollout", point=FORWARD, **common)
        yield forward, _plain(given | beside)
        if learned:
            arguments = {CONTEXT + "forward": forward.dump_id, "dp_size": first.ranks}
            more = {name if name in _OF_LOSS else CONTEXT + name: values for name, values in arrays.items() if name != "entropy"}
            loss: dict[str, Any] = {"role": "policy loss", "point": LOSS, "replayable": False, "arguments": arguments}
            yield DumpRecord(dump_id=self._id(number + 1), **common, **loss), _plain(given | more | of_rows)

    def _id(self, number: int) -> str:
        return make_dump_id(self._time, number, 0, self._digest)


def _alike(rows: Sequence[FileRow], row: FileRow) -> bool:
    """Check whether the next row of a file may share a dump with rows: they follow each other, and have the same parts."""
    first = rows[0]
    alike = all(getattr(first, name) == getattr(row, name) for name in ("step", "rank", "ranks"))
    alike = alike and first.values.keys() == row.values.keys() and first.of_row.keys() == row.of_row.keys()
    return alike and not first.odd and not row.odd and row.number == first.number + len(rows)


def _padded(rows: Sequence[FileRow]) -> dict[str, Values]:
    """Return the arrays of a dump: ids and masks, and the values of each part, [B, S-1]; those that do not fit as they are."""
    longest = max(len(row.ids) for row in rows)
    arrays: dict[str, Values] = {
        "sequences": np.zeros((len(rows), longest), np.int64), "attention_mask": np.zeros((len(rows), longest), np.int64),
    }  # fmt: skip
    names = [part for part in OF_TOKENS if part in rows[0].values]
    arrays |= {name: np.zeros((len(rows), longest - 1)) for name in names}
    for at, row in enumerate(rows):
        arrays["sequences"][at, : len(row.ids)] = row.ids
        arrays["attention_mask"][at, : len(row.ids)] = 1
        for name in names:
            end = len(row.ids) - 1
            values = row.values[name][-end:]  # of the first token there is nothing to learn
            arrays[name][at, end - len(values) : end] = values
        for name, values in row.odd.items():
            arrays[name] = values.reshape(1, -1)
    arrays[MASK] = arrays[MASK] != 0
    return arrays


def _plain(arrays: dict[str, Values]) -> dict[str, PlainTensor]:
    tensors = {}
    for name, values in arrays.items():
        if values.dtype.kind == "f" and not (np.abs(values) > np.finfo(np.float32).max).any(where=np.isfinite(values)):
            values = values.astype(np.float32)
        tensors[name] = PlainTensor(values.dtype.name, np.ascontiguousarray(values), contiguous_strides(values.shape))
    return tensors


def problem_of(error: ActordbgError | OSError, path: Path) -> ActordbgError:
    """Return why a file is refused, named for what it is where that is known; a problem of the store or of starting as it is."""
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        return EnvironmentProblem(f"cannot be read: {why}", hint="check its permissions")
    if error.code in (StoreProblem.code, LaunchProblem.code, EnvironmentProblem.code):
        return error
    known = containers.other_at(path)
    if known is None or isinstance(error, Unsupported):
        return known or error
    return type(error)(f"{known.message} ({known.hint})", hint=known.hint)
