"""Follow the logs and the rows of a run that continues: `lint PATH --watch`, `check PATH --watch`.

follower = Follower([Path("run")], print)
with reading(follower.judge, {}) as job:
    follower.look(job)        # what is found for the first time; only what is new since the last look is read

A file of lines or of TensorBoard's events is read on from where the last look ended, up to its last whole line or record; what
was replaced or cut is read from its beginning, and a log that was rotated continues. Any other file is read when it changed, rows
once it stays as it is from one look to the next, and none again before `AGAIN` times the time that its last reading took. Laws
of single calls judge a row when it comes. Those of steps judge a step when its run is two steps further, for ranks need not be
at one step, or when nothing more comes.
"""

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actordbg.api.desk import Desk
from actordbg.api.run_files import in_file
from actordbg.base.errors import ActordbgError, CorruptDump, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import listed, plural
from actordbg.document.blocks import RIGHT, UNCHECKED, WRONG
from actordbg.document.command_result import CommandResult
from actordbg.document.found import answer_of, in_words, verdict_of
from actordbg.dumps.archives import HEAD
from actordbg.dumps.containers import JSON_LINES, UNKNOWN, container_of
from actordbg.dumps.importer import Import, files_below, reading
from actordbg.dumps.layouts import columns_of
from actordbg.dumps.rows_import import RowFile
from actordbg.formats.dump_record import FORWARD, DumpRecord
from actordbg.formats.encoding import PlainTensor
from actordbg.measure.curves import curves_of
from actordbg.measure.log_exports import events_end, is_csv, is_events, is_whole
from actordbg.measure.log_lines import TrainLog, read_more
from actordbg.measure.run_logs import is_other_json, judge_logs, log_at, longest
from actordbg.recorded.lint import Linting
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.records.finding import Finding, Findings, NotChecked, Rule, RuleOutcome
from actordbg.store.layout import Store

BETWEEN_S = 2.0
"""Seconds between two looks."""
QUIET, MOST_CALLS = 30, 4096
"""Looks without anything new after which the newest step is complete; most calls that wait for that."""
MOST_LINES, MOST_OF_LOG = 2**26, 2**22
"""Most bytes of lines that are read at once: of rows, and of a log, whose values are counted before they are read."""
AGAIN = 20
"""How many times the time of its last reading passes before a whole file is read again."""
COMPLETE = Rule("complete steps")


@dataclass
class _File:
    """A file that is followed. place: bytes that were read; tail: the last of them. stat: its inode, size and time at the last
    look; read: when it was read. held: what its lines are read into. next: the time before which it is not read whole again.
    """

    path: Path
    place: int = 0
    tail: bytes = b""
    stat: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    held: RowFile | TrainLog | None = None
    next: float = 0.0

    def lines(self, most: int = MOST_LINES) -> Iterator[bytes]:
        """Yield the whole lines, or records of events, that are new, a part at a time. Before later parts stands what they need:
        the names of a table's columns, or the first record.
        """
        with self.path.open("rb") as file:
            file.seek(self.place - len(self.tail))
            if file.read(len(self.tail)) != self.tail:
                self.place, self.tail, self.held = 0, b"", None
            file.seek(0)
            head = file.read(HEAD)
            of_events, first = is_events(head), head.find(b"\n") + 1
            if of_events:
                first = 16 + int.from_bytes(head[:8], "little")
            heading = head[:first] if of_events or is_csv(head) else b""
            while True:
                file.seek(self.place)
                data = file.read(most)
                end = events_end(data) if of_events else max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
                if not end and len(data) == most < MOST_LINES:
                    most = MOST_LINES  # a long line
                    continue
                if not end:
                    return
                before = heading if self.place else b""
                self.place, self.tail = self.place + end, data[max(0, end - 64) : end]
                yield before + data[:end]


class Follower:
    """What is new at each look at files, and below folders. job: reads their rows, and gives them to `judge`."""

    def __init__(self, paths: Sequence[Path], note: Callable[[str], None]) -> None:
        self.paths, self.note, self.linting = paths, note, Linting()
        self.files: dict[int, _File] = {}
        self.logs: dict[Path, TrainLog] = {}
        self.seen: dict[tuple[str, str, str], Finding] = {}
        self.looks = self.quiet = 0

    def judge(self, record: DumpRecord, tensors: Mapping[str, PlainTensor]) -> None:
        """Judge a call."""
        self.linting.judge(RecordedCall(record, tensors))
        if record.point == FORWARD:
            self.linting.findings.rows += record.batch_size
        self._gather([record])

    def look(self, job: Import) -> list[Finding]:
        """Read what is new, and return what is found for the first time."""
        before, self.looks, self.quiet = len(self.seen), self.looks + 1, self.quiet + 1
        for path in self.paths:
            for each in files_below(path):
                with contextlib.suppress(OSError, CorruptDump):  # a state that is being written ends in the middle
                    if each.is_file():
                        file = self.files.setdefault(each.stat().st_ino, _File(each))
                        file.path = each  # a log that is rotated has another name then
                        self._read(file, job)
        for refused in job.summary.refused:
            self.note(f"refused[{refused.code}]: {refused.path}: {refused.told}")
        job.summary.refused.clear()
        self._judge_steps()
        if not self.quiet:
            for outcome in judge_logs(self._known_logs()):
                for finding in outcome.found:
                    self.seen.setdefault((finding.rule.name, "", ""), finding)
        return list(self.seen.values())[before:]

    def _judge_steps(self) -> None:
        """Judge the steps that are complete, and drop their calls."""
        kept, newest = self.linting.kept, dict[str, int]()
        for call in kept:
            newest[call.record.run] = max(call.record.step or 0, newest.get(call.record.run, 0))
        parts: tuple[list[RecordedCall], list[RecordedCall]] = [], []
        every = self.quiet >= QUIET or len(kept) > MOST_CALLS
        for call in kept:
            settled = (call.record.step or 0) < newest[call.record.run] - 1
            parts[every or settled].append(call)
        self.linting.kept, complete = parts
        if complete:
            self.linting.judge_steps(complete)
            self._gather([call.record for call in complete])

    def _gather(self, records: Sequence[DumpRecord]) -> None:
        """Keep the first of findings of each rule, side and run, in these calls."""
        by_id = {record.dump_id: record for record in records}
        for outcome in self.linting.findings.outcomes:
            for finding in outcome.found:
                record = by_id[finding.place["dump"]]
                placed = in_file(finding, {record.dump_id: record.origin})
                placed = replace(placed, place={**placed.place, "step": record.step})
                self.seen.setdefault((finding.rule.name, finding.of_side, record.run), placed)
            outcome.found = []

    def _read(self, file: _File, job: Import) -> None:
        """Read what is new of a file."""
        of, before = file.path.stat(), file.stat
        file.stat = of.st_ino, of.st_size, of.st_mtime_ns
        if file.stat == file.read or not of.st_size:
            return
        with file.path.open("rb") as opened:
            head = opened.read(HEAD)
        kind = container_of(file.path)
        of_rows, history = kind not in (JSON_LINES, UNKNOWN), b'"log_history"' in head
        if of_rows or history or (kind == UNKNOWN and is_whole(head) and not is_events(head)):
            begun = time.monotonic()
            if begun < file.next or (of_rows and file.stat != before):
                return
            if of_rows:
                self.quiet = 0
                job.take(file.path)
            elif log := log_at(file.path):
                self.quiet, self.logs[file.path] = 0, log
            file.read = file.stat  # not of a state that ends in the middle: it is named as not checked
            file.next = time.monotonic() + AGAIN * (time.monotonic() - begun)
            return
        file.read = file.stat
        of_rows = kind == JSON_LINES and is_other_json(file.path)
        for lines in file.lines(MOST_LINES if of_rows else MOST_OF_LOG):
            self.quiet = 0
            if file.held is None:
                log = self.logs.get(file.path) or TrainLog(str(file.path), every=True)
                file.held = job.lines_of(file.path) if of_rows else log
            if isinstance(file.held, RowFile):
                file.held.lines = io.BytesIO(lines)
                job.take(file.path, file.held)
            else:
                self.logs[Path(file.held.path)] = file.held
                with contextlib.suppress(ActordbgError):
                    read_more(file.held, lines)

    def _known_logs(self) -> list[TrainLog]:
        return longest(log for log in self.logs.values() if curves_of(log).of)

    def answer(self) -> CommandResult:
        """Return what was found until now, and what was not judged."""
        of_rows, logs = self.linting.findings, self._known_logs()
        of_rows.imported = True
        of_rows.finish()
        outcomes = [*(of_rows.outcomes if of_rows.rows or not logs else ()), *(judge_logs(logs) if logs else ())]
        findings = Findings(
            [replace(each, found=[seen for seen in self.seen.values() if seen.rule == each.rule]) for each in outcomes]
        )
        if self.linting.kept:
            findings.left.append(NotChecked(COMPLETE, "the newest step", "`actordbg lint` when it is complete"))
        waiting = [each.path.name for each in self.files.values() if each.stat and each.stat[1] and each.read != each.stat]
        if waiting:  # whole files that changed since they were read
            findings.left.append(NotChecked(COMPLETE, f"the newest of {listed(waiting)}", "`actordbg lint`, which reads all"))
        held, files = plural(len(findings.held), "rule"), " ".join(in_shell(str(path)) for path in self.paths)
        said = f"{held} hold on {plural(of_rows.rows, 'row')} and {plural(len(logs), 'log')}"
        verdict = verdict_of(findings, said, {WRONG: f"actordbg lint {files}", RIGHT: f"actordbg check {files}"})
        if len(findings.held) < 2 and not findings.found:  # finite figures alone say nothing of a training's course
            verdict = replace(verdict, word=UNCHECKED)
        return answer_of(findings, verdict, title=f"watch of {files}", looks=self.looks)


def watched(desk: Desk, paths: Sequence[Path], columns: Sequence[str]) -> CommandResult:
    """Follow a run until Ctrl-C, and tell the client each finding when it is first seen. Raises UsageError without a path."""
    if not paths or any(Store(path).exists() for path in paths):
        raise UsageError("--watch follows the files of a run", hint="name its folder, or its logs and files of rows")
    follower = Follower(paths, desk.client.note)
    desk.client.note(f"watching {listed(paths)}; Ctrl-C ends it", minor=True)
    with reading(follower.judge, columns_of(columns)) as job, contextlib.suppress(KeyboardInterrupt):
        while True:
            for finding in follower.look(job):
                at = f"step {finding.place['step']}, {finding.of_side}".removesuffix(", ")
                text = f"{at}: {in_words(Findings([RuleOutcome(finding.rule, found=[finding])]))}"
                desk.client.found(text, finding.data)
            time.sleep(BETWEEN_S)
    return follower.answer()
