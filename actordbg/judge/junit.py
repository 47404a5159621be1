"""A check for other programs: JUnit's XML, which every CI reads, and the annotations of a GitHub workflow.

Each dump is a test case up to four times: it ran, it kept the laws, it is as near the truth as its dtype allows, the training got
the same. What was not judged is skipped, with the reason. Both formats quote foreign text as they want it; hidden characters are
written out first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from actordbg.base.foreign_text import in_line, in_lines
from actordbg.judge.check import CheckAnswer, CheckFound
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED, DumpComparison
from actordbg.records.replay_record import PASSED, answers_of, in_words, violations


@dataclass(frozen=True)
class JunitCase:
    """One thing that was asked of one dump. failure, skipped: why, "" where it is not; `text`: the end of its log."""

    asked: str
    dump_id: str
    seconds: float = 0.0
    failure: str = ""
    skipped: str = ""
    text: str = ""


def cases(found: CheckFound) -> Iterator[JunitCase]:
    """Every case of a check, dump by dump."""
    results = {result.dump_id: result for result in found.data.results}
    compared, goldens = ({dump.dump_id: dump for dump in dumps} for dumps in (found.truths, found.goldens))
    for dump_id in (item.dump_id for item in found.data.spec.inputs):
        result, dump = results.get(dump_id), compared.get(dump_id)
        if result is None:
            yield JunitCase("replay", dump_id, failure="not run")
            continue
        passed = result.status == PASSED
        why = "" if passed else f"{result.status}: {result.error or result.error_class or ''}"
        yield JunitCase("replay", dump_id, result.forward_s or 0.0, why, text=result.log_excerpt or "" if why else "")
        if answers := answers_of(result.extra):
            broken = violations(answers, found.data.spec.config.accept)
            yield JunitCase("laws", dump_id, failure="; ".join(map(in_words, broken)))
        if passed:
            why = found.no_truth or next(iter(dump.not_compared.values() if dump else ()), "") or "not compared"
            left = dump is None or dump.verdict == NOT_COMPARED
            yield JunitCase("truth", dump_id, failure=_mismatch(dump), skipped=why if left else "")
        if own := goldens.get(dump_id):
            skipped = "" if own.log_probs else "; ".join(own.not_compared.values())
            yield JunitCase("golden", dump_id, failure=_mismatch(own), skipped=skipped)


def _mismatch(dump: DumpComparison | None) -> str:
    return "; ".join(dump.reasons) or dump.verdict if dump and dump.verdict == MISMATCH else ""


def junit_xml(found: CheckFound, answer: CheckAnswer) -> bytes:
    """The check as JUnit's XML. Its first property is the sentence."""
    every = list(cases(found))
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name="actordbg check",
        tests=str(len(every)),
        failures=str(sum(bool(case.failure) for case in every)),
        errors="0",
        skipped=str(sum(bool(case.skipped) for case in every)),
        timestamp=found.data.spec.created_at[:19],
        time=f"{sum(case.seconds for case in every):.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("sentence", "replay_id", "configuration", "next"):
        ElementTree.SubElement(properties, "property", name=name, value=_xml(str(getattr(answer, name))))
    for case in every:
        what = {"classname": f"actordbg.{case.asked}", "name": _xml(case.dump_id), "time": f"{case.seconds:.3f}"}
        element = ElementTree.SubElement(suite, "testcase", what)
        if case.failure:
            ElementTree.SubElement(element, "failure", message=_xml(case.failure)).text = _xml(case.text, in_lines) or None
        elif case.skipped:
            ElementTree.SubElement(element, "skipped", message=_xml(case.skipped))
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def workflow_commands(found: CheckFound, answer: CheckAnswer) -> Iterator[str]:
    """Workflow commands of GitHub: an error for each kind of failure of each dump, and a line about the whole check."""
    for one in cases(found):
        if one.failure:
            yield f"::error title={_property(f'actordbg check: {one.asked} {one.dump_id}')}::{_message(one.failure)}"
    yield f"::{'notice' if answer.good else 'error'} title=actordbg check::{_message(answer.sentence)}"


def _xml(text: str, shown: Callable[[str], str] = in_line) -> str:
    """`text` as XML can hold it: two characters that nobody hides are none of XML's."""
    return shown(text).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def _message(text: str) -> str:
    return in_line(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
