"""Export results for other programs: a report as CSV; a check as JUnit XML and as GitHub workflow commands.

In the CSV, an input that was not run has no row. Times are in seconds, memory in bytes, log-probs in nats; a figure that was not
measured is an empty cell. `warm_up` says why a row is not part of steady timing: "first", "compiled", or empty.

In a check, each dump is up to five test cases: `replay` (it ran), `laws`, `modules` (in the dump whose model was judged module by
module), `truth` (it matches the truth to its dtype's rounding) and `golden` (it matches the run's recorded outputs). Unchecked
cases are skipped, with the reason. Each format does its own quoting; invisible characters are escaped first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from actordbg.base.foreign_text import in_line, in_lines
from actordbg.base.units import grouped
from actordbg.config.as_ran import as_ran, label
from actordbg.config.replay_config import SETTINGS
from actordbg.document.blocks import UNCHECKED, Verdict
from actordbg.document.renderings import as_csv
from actordbg.judge.replay_findings import RUNS
from actordbg.laws.rules import RULES
from actordbg.records.comparison_record import NOT_COMPARED, RECORDED, TRUTH
from actordbg.records.finding import NOT_CHECKED, Finding
from actordbg.records.replay_record import PASSED, ResultRecord, answers_of, violations, warm_up_of
from actordbg.replay.replay_data import ReplayData

if TYPE_CHECKING:
    from actordbg.judge.check import CheckedReplay
    from actordbg.locate.verdict import LocalVerdict

_INPUT = ("rank", "batch_size", "seq_len")
_CONFIGURATION = tuple(setting for setting in SETTINGS.values() if setting.numbers or setting.cost)
"""Settings that distinguish configurations. Every row repeats them as they ran, so rows of several replays can be pivoted."""
COLUMNS = (
    *(field.name for field in fields(ResultRecord) if field.name not in ("log_excerpt", "extra")), *_INPUT, "warm_up",
    *(setting.stored for setting in _CONFIGURATION), "laws_violated", "laws_not_checked",
)  # fmt: skip
"""Every column of the CSV, in order. The last two list the laws that forbid a green verdict, and those that could not be checked;
both are empty if no law was requested."""


def render_csv(replays: Sequence[ReplayData]) -> str:
    """Render a header row and a row for each result of `replays`."""
    return as_csv(COLUMNS, (row for data in replays for row in _rows(data)))


def _rows(data: ReplayData) -> Iterator[dict[str, Any]]:
    """Yield each result with its input and the settings as they ran, including the resolved number of layers and seed."""
    by_id = {given.dump_id: given for given in data.spec.inputs}
    first, compiling = warm_up_of(data.results)
    values = as_ran(data.spec.config, data.resolved)
    settings = {setting.stored: values[setting.name] for setting in _CONFIGURATION}
    settings |= {name: data.resolved[name] for name in ("num_layers", "seed") if name in data.resolved}
    for result in data.results:
        answers = answers_of(result.extra)
        yield result.to_dict() | settings | {
            **{name: getattr(by_id.get(result.dump_id), name, None) for name in _INPUT},
            "warm_up": "first" if result.dump_id in first else "compiled" if result.dump_id in compiling else "",
            "laws_violated": " ".join(answer.law for answer in violations(answers)),
            "laws_not_checked": " ".join(answer.law for answer in answers if answer.verdict == NOT_CHECKED),
        }  # fmt: skip


class JunitCase(NamedTuple):
    """A test case: one `check` of one dump, or of the whole. found: what is wrong. skipped: why it was not judged. text: the end
    of the log.
    """

    check: str
    name: str
    found: Sequence[Finding] = ()
    skipped: str = ""
    seconds: float = 0.0
    text: str = ""

    @property
    def failure(self) -> str:
        """Return what is wrong, in words."""
        return "; ".join(dict.fromkeys(finding.said for finding in self.found))


def cases(check: CheckedReplay, verdict: Verdict) -> Iterator[JunitCase]:
    """Yield every test case of a check, dump by dump, with what is wrong in each; then what is wrong beside them."""
    results = {result.dump_id: result for result in check.data.results}
    compared = [finding for record in filter(None, (check.comparison, check.own)) for finding in record.differing]
    told = {finding.rule for finding in compared}  # of each dump
    found = [finding for finding in compared if results[finding.place["dump"]].status == PASSED]
    found += [each for each in verdict.findings if each.rule not in told and each.rule.holds != RUNS.holds]
    by_case = grouped((_case_of(check.local, finding), finding) for finding in found)
    for item in check.data.spec.inputs:
        for case in _judged(check, item.dump_id, results.get(item.dump_id)):
            yield case._replace(found=[*case.found, *by_case.pop((case.check, case.name), ())])
    for (name, dump_id), rest in by_case.items():
        yield JunitCase(name, dump_id or "check", rest)


def _case_of(local: LocalVerdict | None, finding: Finding) -> tuple[str, str]:
    """Return the check and the dump in which a finding is shown."""
    if local is not None and finding in local.found:
        return "modules", local.dump_id
    name = "laws" if finding.rule.name in RULES else {TRUTH: "truth", RECORDED: "golden"}.get(finding.rule, finding.rule.name)
    return name, str(finding.place.get("dump", ""))


def _judged(check: CheckedReplay, dump_id: str, result: ResultRecord | None) -> Iterator[JunitCase]:
    """Yield the test cases of a dump; that of its replay with its own failure."""
    if result is None:
        return (yield JunitCase("replay", dump_id, [Finding(RUNS, "not run")]))
    passed = result.status == PASSED
    error = result.error or result.error_class or ""
    failed = [] if passed else [Finding(RUNS, f"{result.status}: {error}")]
    log = "" if passed else result.log_excerpt or ""
    yield JunitCase("replay", dump_id, failed, seconds=result.forward_s or 0.0, text=log)
    if answers_of(result.extra):
        yield JunitCase("laws", dump_id)
    if (local := check.local) is not None and local.dump_id == dump_id:
        yield JunitCase("modules", dump_id, skipped=local.said if local.word == UNCHECKED else "")
    if passed:
        dump = next((dump for dump in check.truths if dump.dump_id == dump_id), None)
        why = check.no_truth or next(iter(dump.not_compared.values() if dump else ()), "") or "not compared"
        compared = dump is not None and dump.verdict != NOT_COMPARED
        yield JunitCase("truth", dump_id, skipped="" if compared else why)
    for own in check.owns:
        if own.dump_id == dump_id:
            yield JunitCase("golden", dump_id, skipped="" if own.log_probs else "; ".join(own.not_compared.values()))


def junit_xml(check: CheckedReplay, verdict: Verdict) -> bytes:
    """Render the check as JUnit XML. The first property is the verdict sentence."""
    every, spec = list(cases(check, verdict)), check.data.spec
    root = ElementTree.Element("testsuites")
    about = {
        "name": "actordbg check",
        "tests": len(every),
        "failures": sum(bool(case.found) for case in every),
        "errors": 0,
        "skipped": sum(bool(case.skipped) for case in every),
        "timestamp": spec.created_at[:19],
        "time": f"{sum(case.seconds for case in every):.3f}",
    }
    suite = ElementTree.SubElement(root, "testsuite", {name: str(value) for name, value in about.items()})
    properties = ElementTree.SubElement(suite, "properties")
    configuration = label(as_ran(spec.config, check.data.resolved))
    stated = {"sentence": verdict.sentence, "replay_id": spec.replay_id, "configuration": configuration, "next": verdict.next}
    for name, value in stated.items():
        ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
    for case in every:
        what = {"classname": _xml(f"actordbg.{case.check}"), "name": _xml(case.name), "time": f"{case.seconds:.3f}"}
        element = ElementTree.SubElement(suite, "testcase", what)
        if case.found:
            failure = {"message": _xml(case.failure), "type": _xml(case.found[0].rule.name)}
            ElementTree.SubElement(element, "failure", failure).text = _xml(case.text, in_lines) or None
        elif case.skipped:
            ElementTree.SubElement(element, "skipped", message=_xml(case.skipped))
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def workflow_commands(check: CheckedReplay, verdict: Verdict) -> Iterator[str]:
    """Yield GitHub workflow commands: an error for each failed test case, and a line for the whole check."""
    for case in cases(check, verdict):
        if case.found:
            rule = case.found[0].rule.name
            title = _message(f"actordbg check: {rule} {case.name}").replace(":", "%3A").replace(",", "%2C")
            yield f"::error title={title}::{_message(case.failure)}"
    kind = "notice" if verdict.good else "error"
    yield f"::{kind} title=actordbg check::{_message(verdict.sentence)}"


def _xml(text: str, shown: Callable[[str], str] = in_line) -> str:
    """Escape `text` for XML, including U+FFFE and U+FFFF, which XML forbids."""
    return shown(text).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def _message(text: str) -> str:
    return in_line(text).replace("%", "%25")
