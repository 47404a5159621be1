"""Reduce a replay or a comparison, hand the case over as a script or as a bundle, and say so."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from actordbg.api.desk import Desk
from actordbg.base.errors import CorruptDump, NothingToDo, Refused, StoreProblem, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import is_own, name_of
from actordbg.base.units import human_bytes, plural
from actordbg.catalog.query import get_replay, open_fresh, select_dumps
from actordbg.compare.sides import GOLDEN, TRUTH, own_comparisons
from actordbg.document.blocks import FAILED, WRONG, Block, Code, Heading, Verdict, section
from actordbg.document.command_result import CommandResult
from actordbg.dumps.bundle import pack_bundle
from actordbg.recorded.lint import READ
from actordbg.records.comparison_record import GOOD, MISMATCH, ComparisonRecord
from actordbg.records.finding import NotChecked
from actordbg.reduce.case import CRASH, ERROR, HANG
from actordbg.reduce.handover import Script, issue_text, script_of, title_of
from actordbg.reduce.reduction import RECORD, Reduction, folder_of_reduction, reduce_replay
from actordbg.replay.supervise import spec_and_owner
from actordbg.store.layout import Store, read_with_owner


@dataclass(frozen=True)
class Subject:
    """What is reduced. recorded: the outputs that the run recorded. compared: the comparison that says what is wrong."""

    reduction_id: str
    replay_id: str
    recorded: bool = False
    compared: ComparisonRecord | None = None


def subject_of(store: Store, name: str, *, good_too: bool = False) -> Subject:
    """Find a comparison, a reduction or a replay by its id, the beginning of an id, or a replay's handle."""
    store.require()
    files = [path for path in store.comparisons.glob("[!.]*.json") if name and path.name.startswith(name)]
    if len(files) == 1:
        record = ComparisonRecord.from_file(files[0])
        if record.good and not good_too:
            raise NothingToDo(f"comparison {record.comparison_id} has no mismatch", hint="name a comparison with a mismatch")
        if record.a.replay_id is None:
            raise UsageError(f"comparison {record.comparison_id} has no replay", hint="name a replay")
        return Subject(record.comparison_id, record.a.replay_id, record.b.kind == GOLDEN, record)
    replay_id = get_replay(store, name).replay_id
    rows = {row.against_kind: row for row in reversed(own_comparisons(open_fresh(store), replay_id))}
    wrong = [rows[kind] for kind in (TRUTH, "replay") if kind in rows and rows[kind].verdict == MISMATCH]
    for row in wrong[:1]:
        return Subject(replay_id, replay_id, compared=ComparisonRecord.from_file(store.comparisons / f"{row.comparison_id}.json"))
    verdicts = {kind: row.verdict for kind, row in rows.items()}
    return Subject(replay_id, replay_id, verdicts.get(GOLDEN) == MISMATCH and verdicts.get(TRUTH) in GOOD)


def reduced(desk: Desk, name: str, trials: int, seconds: float) -> Reduction:
    """Reduce what is named, or continue. Raises UsageError for a truth, Refused for what another user wrote."""
    store = desk.store.require_writable()
    subject = subject_of(store, name)
    spec = desk.replayed(subject.replay_id)
    with desk.client.progress("reducing", None) as advance:
        return reduce_replay(
            store, spec, reduction_id=subject.reduction_id, recorded=subject.recorded, compared=subject.compared, most=trials,
            seconds=seconds, on_step=lambda words: advance(0, note=words),
        )  # fmt: skip


def known_or_reduced(desk: Desk, name: str, trials: int, seconds: float) -> Reduction:
    """Read the reduction of what is named; reduce it if there is none that is confirmed. Errors as of `reduced`."""
    path = folder_of_reduction(desk.store, subject_of(desk.store, name).reduction_id) / RECORD
    if path.exists():
        data, owner = read_with_owner(path)
        desk.client.approve(f"reduction {path.parent.name}, whose script is run", owner)
        with contextlib.suppress(CorruptDump):  # another actordbg's fields, or damaged: it is reduced again
            if (record := Reduction.from_json(data, str(path))).confirmed:
                return record
    return reduced(desk, name, trials, seconds)


def reduction_answer(record: Reduction) -> CommandResult:
    """Build the answer of a reduction."""
    following = "" if record.finished else f"actordbg reduce {record.reduction_id}"
    if record.confirmed:
        following = f"actordbg repro {record.reduction_id} -o repro.py"
    failed = record.fingerprint.kind in (ERROR, CRASH, HANG)
    fault, left = record.fingerprint.finding, []
    if not record.finished:
        left.append(NotChecked(fault.rule, "smaller cases: the budget is used up, and the same command continues"))
    if not record.checked:
        left.append(NotChecked(fault.rule, f"the case as a replay: {record.unchecked}"))
    said = f"{title_of(record)}; shown by {record.case.words} (before: {record.start})"
    if not record.confirmed:
        said = f"{title_of(record)}; no case is reported: the smallest did not show it again"
    verdict = Verdict(
        FAILED if failed else WRONG,
        said,
        figures=[
            ("tokens", f"{sum(map(len, record.case.rows)):,}"),
            ("trials", f"{record.trials}"),
            ("time", f"{record.seconds:g} s"),
        ],
        not_checked=left,
        next=following,
        findings=[fault],
    )
    blocks: list[Block] = [Heading(f"reduce {record.reduction_id}", 1), verdict]
    lines = [f"{words}: {result}" for words, result in (record.tried or {}).items()]
    lines += [f"set aside, another fault: {fault} ({size})" for fault, size in (record.aside or {}).items()]
    return CommandResult(
        record.confirmed, {"good": record.confirmed, "reduction": record}, [*blocks, *section("Beside it", lines)]
    )


def write_repro(record: Reduction, out: Path, *, issue: Path | None, fixed: str | None) -> CommandResult:
    """Write the script, and the issue around it, after it ran in a fresh interpreter. Raises BadResult if it does not show it."""
    if not record.confirmed:
        raise NothingToDo(f"reduction {record.reduction_id} has no confirmed case", hint="give it more --trials or --seconds")
    script = script_of(record, fixed)
    out.write_text(script.text)
    if issue is not None:
        issue.write_text(issue_text(record, script))
    return _repro_answer(record, script, out, issue)


def _repro_answer(record: Reduction, script: Script, out: Path, issue: Path | None) -> CommandResult:
    lines = len(script.text.splitlines())
    gone = "; exits with 0 in the fixed environment" if script.fixed == 0 else ""
    said = f"{out} shows it: exit code 1 in a fresh interpreter without actordbg{gone} ({plural(lines, 'line')})"
    fixed = NotChecked(record.fingerprint.finding.rule, "that it exits with 0 once this is fixed", "--fixed PYTHON")
    left = [] if script.fixed == 0 else [fixed]
    verdict = Verdict("", said, not_checked=left, next=f"python -I {in_shell(str(out))}")
    data = {"good": True, "file": out, "issue": issue, "lines": lines, "title": title_of(record), "output": script.output}
    blocks: list[Block] = [Heading(title_of(record), 1), verdict, Code(script.output.strip())]
    return CommandResult(True, data, blocks)


def bundled(
    store: Store, names: Sequence[str], where: str | None, out: Path, *, redact: bool, keep: Collection[int], model: str,
) -> CommandResult:  # fmt: skip
    """Write a bundle of replays, comparisons and the dumps of a condition."""
    subjects = [subject_of(store, name, good_too=True) for name in names]
    owned = [spec_and_owner(store, subject.replay_id) for subject in subjects]
    specs = [spec for spec, _ in owned]
    for spec, owner in owned:  # the bundle goes to others: whose dumps would these be?
        if not is_own(owner) and any(Path(item.path).is_absolute() for item in spec.inputs):
            said = f"{name_of(owner)} wrote replay {spec.replay_id}, whose dumps lie outside of the store"
            raise Refused(said, hint="select dumps with --where")
    compared = {subject.reduction_id for subject in subjects if subject.reduction_id != subject.replay_id}
    replays, unread = {spec.replay_id for spec in specs}, []
    for path in sorted(store.comparisons.glob("*.json")) if not redact else ():
        try:
            record = ComparisonRecord.from_file(path)
        except StoreProblem as problem:
            unread.append(problem.message)
            continue
        if record.a.replay_id in replays:
            compared.add(record.comparison_id)
    for name in compared:
        record = ComparisonRecord.from_file(store.comparisons / f"{name}.json")
        replays |= {side for side in (record.a.replay_id, record.b.replay_id, record.rounding_id) if side}
    rows = select_dumps(store, where) if where is not None else []
    paths = dict.fromkeys([*(row.path for row in rows), *(item.path for spec in specs for item in spec.inputs)])
    summary = pack_bundle(
        store, out, [store.root / path for path in paths], replays=() if redact else sorted(replays),
        comparisons=() if redact else sorted(compared), redact=redact, keep=keep, model=model,
    )  # fmt: skip
    permuted = "token ids permuted" + ("" if model else ", special tokens too (no --model)")
    private = permuted if redact else "with the real token ids"
    said = f"{out}: {summary.contents}, {human_bytes(summary.size)}, {private}"
    left = [NotChecked(READ, message) for message in unread]
    verdict = Verdict("", said, not_checked=left, next=f"actordbg dump import {in_shell(str(out))}")
    return CommandResult(True, {"good": True, **vars(summary)}, [verdict])
