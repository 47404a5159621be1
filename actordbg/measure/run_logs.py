"""The logs of a run, found by content among its files, and what their curves say: `answer(logs_below([Path("run")]))`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from actordbg.base.errors import CorruptDump, EnvironmentProblem, UsageError
from actordbg.base.units import plural
from actordbg.document.blocks import UNCHECKED, WRONG, Grid, number
from actordbg.document.command_result import CommandResult
from actordbg.document.found import answer_of, verdict_of
from actordbg.dumps.importer import files_below
from actordbg.measure.curve_rules import RULES, judge
from actordbg.measure.curves import LEAST, SUPERVISED_LOSS, curves_of
from actordbg.measure.log_lines import TrainLog, read_log
from actordbg.records.finding import Findings, NotChecked, Rule, RuleOutcome

MOST_BYTES = 2**27
"""Largest file that is looked at for a log."""
EACH_STEP = Rule("each step once")


def log_at(path: Path) -> TrainLog | None:
    """Return a file's figures, if it is a log with a curve that is known; None for anything else, told by its content.

    Raises CorruptDump for a trainer's state that ends in the middle.
    """
    try:
        if path.is_file() and path.stat().st_size <= MOST_BYTES and not is_other_json(path):
            log = read_log(str(path), every=True)
            return log if curves_of(log).of else None
    except CorruptDump:
        raise
    except (UsageError, EnvironmentProblem, OSError):
        return None
    return None


def is_other_json(path: Path) -> bool:
    """Check by a file's head whether it is JSON without a history of figures: rows of tokens, which have lists, or one object
    over several lines or in a long one, such as a tokenizer.
    """
    with path.open("rb") as file:
        head = file.read(2**16).lstrip()
    if head.startswith(b"[") and head[1:].lstrip().startswith(b"{"):
        return b"[" in head[1:]
    line = head.partition(b"\n")[0].rstrip()
    if not head.startswith(b"{") or b'"log_history"' in head:
        return False
    if not line.endswith(b"}"):
        return head[1:].lstrip().startswith(b'"')
    return b"[" in max(head.splitlines()[:4], key=len)


def logs_below(paths: Sequence[Path]) -> list[TrainLog]:
    """Return the logs among files and below folders, each run once."""
    return longest(filter(None, (log_at(file) for path in paths for file in files_below(path))))


def longest(logs: Iterable[TrainLog]) -> list[TrainLog]:
    """Return logs; of several states of one run, a checkpoint each, the longest."""
    by_run: dict[tuple[str, ...], TrainLog] = {}
    for log in logs:
        # Checkpoints of one run have the same metrics, under the same name, one folder apart.
        file = Path(log.path)
        same = (file.name, str(file.parents[min(1, len(file.parents) - 1)]), *sorted(log.metrics))
        if same not in by_run or _steps_of(log) > _steps_of(by_run[same]):
            by_run[same] = log
    return list(by_run.values())


def _steps_of(log: TrainLog) -> int:
    return max(log.metrics.values(), default=0)


def judge_logs(logs: Sequence[TrainLog]) -> list[RuleOutcome]:
    """Return the outcome of each rule over several logs; a finding names its log."""
    together = [RuleOutcome(each.rule) for each in RULES]
    for log in logs:
        for whole, outcome in zip(together, judge(curves_of(log)).outcomes, strict=True):
            whole.looked_at += outcome.looked_at
            whole.found += [replace(found, place={"file": Path(log.path).name, **found.place}) for found in outcome.found]
            whole.lacks = outcome.lacks or whole.lacks
    return together


def left_of(logs: Sequence[TrainLog]) -> list[NotChecked]:
    """Return what of logs was not judged: the first values of steps that a log has twice."""
    left = []
    for log in logs:
        twice = max((series.rerun for kinds in log.series.values() for series in kinds.values()), default=0)
        if twice:
            said = f"{plural(twice, 'step')} of {Path(log.path).name} before a later run of the same steps"
            left.append(NotChecked(EACH_STEP, said, "a log for each run"))
    return left


def curve_table(logs: Sequence[TrainLog]) -> Grid:
    """Return a table of the known curves of logs."""
    head: Sequence[str] = ("log", "metric", "steps", "first third", "last third", "trend")
    rows: list[tuple[str, ...]] = [
        (Path(log.path).name, curve.name, str(len(curve.values)), number(curve.early, 3), number(curve.late, 3), curve.trend.word)
        for log in logs
        for curve in curves_of(log).of.values()
        if curve.values
    ]
    if len(logs) == 1:
        head, rows = head[1:], [row[1:] for row in rows]
    rows = [*dict.fromkeys(rows)]  # a supervised loss is a loss, too
    return Grid(head, rows, {"log", "metric", "trend"}, wraps=True)


def answer(logs: Sequence[TrainLog]) -> CommandResult:
    """Return what the curves of logs say: the verdict, and a table of the curves. The logs were read with all metrics."""
    names = ", ".join(Path(log.path).name for log in logs)
    findings = Findings(judge_logs(logs), left=left_of(logs))
    held = len(findings.held)
    right = f"the curves of {names} keep {plural(held, 'rule')}; a fault that leaves them as they are is not seen"
    verdict = verdict_of(findings, right, {WRONG: "actordbg dump enable --calls forward,loss"})
    known = [(quantity, curve) for log in logs for quantity, curve in curves_of(log).of.items()]
    short = not any(curve.long for quantity, curve in known if quantity not in ("loss", SUPERVISED_LOSS))
    if (held < 2 or short) and not findings.found:
        # All figures are finite, or the loss falls, which says nothing of a training's course.
        verdict = replace(verdict, word=UNCHECKED, said=f"{names} has no known curve of {LEAST} steps")
    return answer_of(findings, verdict, curve_table(logs), title=f"curves of {names}", logs=[log.path for log in logs])
