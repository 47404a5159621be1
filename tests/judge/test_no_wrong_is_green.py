"""No WRONG is green anywhere: every rule of the product is broken once, and each list, page, filter and exit code shows it.

The rules are found by walking the modules of the product, so a new rule is tested without being named here. Those that judge a
replay are broken in a store, each in a replay and a dump of its own; every rule is broken in what its command shows.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commandline import invoke
from comparecases import tensors, write_replay
from replaycases import publish

import actordbg
from actordbg.api.checks import CheckResult, check_answer
from actordbg.api.pytest_plugin import Checker
from actordbg.base.errors import BadResult
from actordbg.campaign.matrix_document import MatrixContext, matrix_document, matrix_verdict
from actordbg.catalog.record_rows import answers_in
from actordbg.catalog.selections import BAD
from actordbg.document.blocks import FAILED, WRONG
from actordbg.document.command_result import CommandResult
from actordbg.document.found import answer_of, verdict_of
from actordbg.document.page import as_html
from actordbg.document.renderings import as_text
from actordbg.judge import check as checking
from actordbg.judge.check import run_check
from actordbg.judge.explanation import WHAT, WHERE, explain
from actordbg.judge.replay_findings import RANKS, RUNS
from actordbg.laws.rules import RULES as LAWS
from actordbg.locate.rules import FORMULA, KERNEL, OPERATION, PLACES, SAME_MODEL
from actordbg.records.comparison_record import TRUTH
from actordbg.records.finding import Finding, Findings, Rule, outcomes_of
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.records.replay_record import ResultRecord
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store


def rules_in(value: Any, depth: int = 3) -> Iterator[Rule]:
    """The rules in a module's value: one, or a table of them."""
    if isinstance(value, Rule):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from rules_in(each, depth - 1)


def registry() -> list[Rule]:
    """Every rule that a module of the product declares. Only modules that name the class are imported."""
    found: dict[Rule, None] = {}
    for module in pkgutil.walk_packages(actordbg.__path__, "actordbg."):
        spec = module.module_finder.find_spec(module.name, None)
        if isinstance(spec, ModuleSpec) and spec.origin and "Rule(" in Path(spec.origin).read_text():
            for value in vars(importlib.import_module(module.name)).values():
                found |= dict.fromkeys(rules_in(value))
    return list(found)


RULES = registry()
PLACE = {"dump": "20250619T052600.000000Z-000000-1-00000000", "module": "model.layers.1.mlp"}


def test_the_tables_of_rules_are_found() -> None:
    names = {rule.name for rule in RULES}
    assert {*LAWS, "truth", "fresh", "retokenized", "dp_size", "memory", "logs agree", "identity", "lengths"} <= names
    assert len(RULES) > 100


def shows(answer: CommandResult, finding: Finding) -> None:
    """Assert that an answer is wrong, and names what is, in each of its forms."""
    assert not answer.ok and answer["verdict"] == WRONG and not answer["good"]
    assert finding.rule.name in [each["rule"] for each in answer["findings"]]
    for text in (str(answer), answer.to_markdown()):
        assert text.lstrip("*").startswith(WRONG) and finding.what in text.replace("\\", "").replace("\n", " "), text
    assert WRONG in answer.to_html() and 'class="banner bad"' in answer.to_html()
    with pytest.raises(BadResult):
        answer.raise_if_wrong()
    with pytest.raises(pytest.fail.Exception, match=f"^{WRONG}"):  # what a trainer's own test gets
        Checker(None, "test")._judge(answer)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_broken_rule_is_wrong_in_every_form_of_its_answer(rule: Rule) -> None:
    finding = Finding(rule, "it is not", PLACE)
    findings = Findings(outcomes_of([rule], [finding], 1), "run made-up")
    answer = answer_of(findings, verdict_of(findings, "all is well"), title="rules")
    shows(answer, finding)
    assert finding.key == (rule.name, rule.side, "model.layers.N.mlp") and finding.rule.name in str(answer)
    assert [each["state"] for each in answer["rules"]] == ["broken"]


@dataclass(frozen=True)
class Broken:
    """A rule that judges a replay, and what to write of a replay that breaks it (`comparecases.write_replay`)."""

    rule: Rule
    replayed: dict[str, Any]
    word: str = WRONG


IDENTITY = {"looked_at": 9, "differences": [], "unchecked": [], "rank": 0, "ran": True}
LOCATED = {"places": 9, "wrong": [], "count": 0, "unchecked": [], "dtype": "float32"}


def judged(located: dict[str, Any] = {}, identity: dict[str, Any] = {}) -> dict[str, Any]:  # noqa: B006
    extra = {"temperature": 1.0, "identity": [IDENTITY | identity], "located": LOCATED | located}
    return {"result": lambda _: {"extra": extra}}


def law(name: str) -> dict[str, Any]:
    answer = {"law": name, "verdict": "broken", "words": "something else depends on it"}
    return {"result": lambda _: {"extra": {"temperature": 1.0, "laws": [answer]}}}


def place(kind: str) -> dict[str, Any]:
    wrong = {"module": "lm_head", "kind": kind, "what": "lm_head", "ratio": 4.3, "limit": 1.1, "gain": 1.0}
    return judged({"wrong": [wrong], "count": 1})


def off(_index: int, made: Any) -> Any:
    return made | {"log_probs": made["log_probs"] + 0.1}


DIFFERENCE = {"name": "lm_head.weight", "kind": "factor", "said": "lm_head.weight is twice the checkpoint's"}
LANE = {"extra": {"temperature": 1.0, "lane": {"differ": {"1": {"output_digest": "other"}}}}}
BROKEN = [
    *(Broken(rule, law(name)) for name, rule in LAWS.items()),
    *(Broken(rule, place(kind)) for kind, rule in PLACES.items()),
    Broken(SAME_MODEL, judged(identity={"count": 1, "differences": [DIFFERENCE]})),
    Broken(FORMULA, judged({"formulas": {"modules": 3, "tokens": 9, "differs": "lm_head is not its formula's", "count": 1}})),
    Broken(OPERATION, judged({"operation": {"module": "model.layers.0.self_attn", "word": "soft cap", "said": "it has none"}})),
    Broken(KERNEL, judged({"kernel": "sdpa ignores the soft cap"})),
    Broken(TRUTH, {"change": off}),
    Broken(RANKS, {"result": lambda _: LANE, "nproc": 2, "align": "same"}),
    Broken(RUNS, {"result": lambda _: {"status": "failed", "error_class": "E", "error": "no"}}, FAILED),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.rule.name)
def test_the_catalog_has_a_broken_answer_of_each_result_that_is_wrong(broken: Broken) -> None:
    """Lists and filters read these answers alone, and no module of a result."""
    extra = broken.replayed.get("result", lambda _: {})(0).get("extra", {})
    config = {"align": broken.replayed.get("align")}
    answers = [answer["verdict"] for answer in answers_in(ResultRecord("r", "d", "passed", extra=extra), config)]
    assert "broken" in answers or broken.rule in (TRUTH, RUNS), "those are rows of their own"


@pytest.fixture(scope="module")
def broken_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a dump and a replay for each of `BROKEN`, and the truth of all of them."""
    store = Store(tmp_path_factory.mktemp("broken") / "store").create()
    inputs = publish(store, len(BROKEN), length=16)

    def made(index: int, _: Any) -> Any:
        return tensors(index)

    for name, dtype in (("r-90", "fp64"), ("r-91", "fp32")):
        write_replay(store, name, inputs, truth=dtype, change=made)
    for index, (item, broken) in enumerate(zip(inputs, BROKEN, strict=True)):
        change = broken.replayed.get("change", lambda _, values: values)
        about = {name: value for name, value in broken.replayed.items() if name != "change"}
        own = {"change": lambda _, __, at=index, change=change: change(at, tensors(at))}
        write_replay(store, f"r-{index:02}", [item], **own, **about)
    return store


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(BROKEN)), ids=lambda index: BROKEN[index].rule.name)
def test_a_replay_that_breaks_a_rule_is_wrong_wherever_it_is_shown(
    broken_store: Store, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, name = BROKEN[index], f"r-{index:02}"
    monkeypatch.setattr(checking, "with_explanation", lambda _, record, **__: record)
    monkeypatch.setattr(checking, "worst_unlocated", lambda _: [])
    checked = run_check(broken_store, load_spec(broken_store, name))
    answer = check_answer(broken_store, checked, of=1)
    finding = next(each for each in checked.judged.found if each.rule.name.partition(":")[0] == broken.rule.name)
    assert answer.verdict == broken.word and not answer.ok
    if broken.word == WRONG:
        shows(answer, finding)
        assert finding.rule.name in [each["rule"] for each in answer["findings"]]
    in_the_tests_of_ci(answer, finding)
    verdict = checked.verdict(of=1)
    said = explain(broken_store, checked, verdict).lines
    assert finding.said in [*said[WHAT], *said[WHERE]]
    report = invoke(broken_store, "report", name).stdout
    assert report.startswith(f"{broken.word} (TOY MODEL)"), report
    assert json.loads(invoke(broken_store, "report", name, "--json").stdout)["verdict"] == broken.word


def in_the_tests_of_ci(answer: CheckResult, finding: Finding) -> None:
    """Assert that JUnit and annotations have a failure of the rule."""
    suite = ElementTree.fromstring(answer.to_junit())[0]
    kinds = [failure.get("type") or "" for failure in suite.iter("failure")]
    assert finding.rule.name.partition(":")[0] in kinds and int(suite.get("failures") or 0) == len(kinds) > 0
    errors = [line for line in answer.to_annotations() if line.startswith("::error")]
    assert len(errors) == len(kinds) + 1, "one for each failure, and one for the verdict"


def wanted_words() -> dict[str, str]:
    return {f"r-{index:02}": broken.word for index, broken in enumerate(BROKEN)}


@pytest.mark.slow
def test_lists_and_filters_have_every_replay_and_dump_that_is_wrong(broken_store: Store) -> None:
    for index in range(len(BROKEN)):
        run_check(broken_store, load_spec(broken_store, f"r-{index:02}"))
    replays = json.loads(invoke(broken_store, "replay", "ls", "--json").stdout)
    words = {each["replay_id"]: each["verdict"] for each in replays}
    assert {name: words[name] for name in wanted_words()} == wanted_words()
    ids = [item.dump_id for index in range(len(BROKEN)) for item in load_spec(broken_store, f"r-{index:02}").inputs]
    for where, wanted in (
        ("verdict='WRONG'", {WRONG}),
        ("verdict='FAILED'", {FAILED}),
        (BAD, {WRONG, FAILED}),  # `--lf`
    ):
        rows = json.loads(invoke(broken_store, "dump", "ls", "--where", where, "--json", "--limit", "0").stdout)
        listed = {row["dump_id"] for row in rows}
        assert listed == {dump_id for dump_id, broken in zip(ids, BROKEN, strict=True) if broken.word in wanted}, where
    right = json.loads(invoke(broken_store, "dump", "ls", "--where", "verdict='RIGHT'", "--json", "--limit", "0").stdout)
    assert right == []


@pytest.mark.parametrize("rule", [*LAWS.values(), TRUTH], ids=lambda rule: rule.name)
def test_a_cell_of_a_matrix_that_breaks_a_rule_is_wrong_in_its_table(rule: Rule) -> None:
    about: dict[str, Any] = {"violations": ("it is not",), "broken": (rule.name,)}
    if rule == TRUTH:
        about = {"verdict": "mismatch", "reason": "max_abs is above its limit"}
    cell = MatrixCell(0, "sdpa", {}, "passed", {"model": "/m"}, replay_id="r-01", **about)
    record = MatrixRecord("m", "2025-06-19T05:26:00Z", "complete", {}, (cell,), ("d",))
    verdict = matrix_verdict(record)
    assert (verdict.word, verdict.good, record.good) == (WRONG, False, False)
    assert [finding.rule.name for finding in verdict.findings] == [rule.name]
    blocks = matrix_document(record, MatrixContext())
    assert as_text(blocks).startswith(WRONG) and rule.name in as_text(blocks) and rule.name in as_html(blocks)
