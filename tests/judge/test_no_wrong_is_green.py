"""No WRONG is green anywhere: every rule of the product is broken once, and each list, page, filter and exit code shows it.

The rules are found by walking the modules of the product, so a new rule is tested without being named here. Those that judge a
replay are broken in a store, each in a replay and a dump of its own; every rule is broken in what its command shows.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commandline import in_json, invoke
from comparecases import tensors, write_replay
from replaycases import publish
from reportcases import said_once

import actordbg
from actordbg.api import checks, explaining
from actordbg.api.checks import check_answer
from actordbg.api.pytest_plugin import Checker
from actordbg.base.errors import BadResult, StoreProblem
from actordbg.campaign.matrix_document import MatrixContext, matrix_document, matrix_verdict
from actordbg.catalog import query
from actordbg.catalog.indexer import refresh
from actordbg.catalog.record_rows import answers_in
from actordbg.catalog.selections import BAD
from actordbg.document.blocks import FAILED, WRONG, verdict_in
from actordbg.document.found import answer_of, verdict_of
from actordbg.document.page import as_html
from actordbg.document.renderings import as_text
from actordbg.dumps import checking as fsck
from actordbg.judge import check as checking
from actordbg.judge.check import run_check
from actordbg.judge.explanation import WHAT, WHERE, explain
from actordbg.judge.replay_findings import RANKS, RUNS
from actordbg.laws.rules import RULES as LAWS
from actordbg.locate.rules import FORMULA, KERNEL, OPERATION, PLACES, SAME_MODEL
from actordbg.recorded.lint import LintFindings
from actordbg.recorded.recorded_laws import LAWS as RECORDED_LAWS
from actordbg.records.comparison_record import TRUTH
from actordbg.records.finding import Finding, Findings, Rule, outcomes_of
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.records.replay_record import ResultRecord
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store
from actordbg.ui.ui_pages import dumps_page


def rules_in(value, depth=3):
    """The rules in a module's value: one, or a table of them."""
    if isinstance(value, Rule):
        yield value
    elif isinstance(rule := getattr(value, "rule", None), Rule):  # a row with more than the rule, such as its threshold
        yield rule
    elif depth and isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from rules_in(each, depth - 1)


def registry():
    """Every rule that a module of the product declares. Only modules that name the class are imported."""
    found = {}
    for module in pkgutil.walk_packages(actordbg.__path__, "actordbg."):
        spec = module.module_finder.find_spec(module.name, None)
        if isinstance(spec, ModuleSpec) and spec.origin and "Rule(" in Path(spec.origin).read_text():
            for value in vars(importlib.import_module(module.name)).values():
                found |= dict.fromkeys(rules_in(value))
    return list(found)


RULES = registry()
PLACE = {"dump": "20250619T052600.000000Z-000000-1-00000000", "module": "model.layers.1.mlp", "step": 3}


def test_the_tables_of_rules_are_found():
    names = {rule.name for rule in RULES}
    assert {*LAWS, "truth", "fresh", "retokenized", "dp_size", "memory", "logs agree", "identity", "lengths"} <= names
    assert len(RULES) > 100


def shows(answer, finding):
    """Assert that an answer is wrong, and names what is, in each of its forms."""
    assert not answer.ok and answer["verdict"] == WRONG and not answer["good"]
    assert finding.rule.name in [each["rule"] for each in answer["findings"]]
    for text in (str(answer), answer.to_markdown()):
        assert text.lstrip("*").startswith(WRONG) and finding.what in text.replace("\\", "").replace("\n", " "), text
    assert said_once(verdict_in(answer.blocks))
    assert WRONG in answer.to_html() and 'class="banner bad"' in answer.to_html()
    with pytest.raises(BadResult):
        answer.raise_if_wrong()
    with pytest.raises(pytest.fail.Exception, match=f"^{WRONG}"):  # what a trainer's own test gets
        Checker(None, "test")._judge(answer)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_broken_rule_is_wrong_in_every_form_of_its_answer(rule):
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


def judged(located={}, identity={}):  # noqa: B006
    extra = {"temperature": 1.0, "identity": [IDENTITY | identity], "located": LOCATED | located}
    return {"result": lambda _: {"extra": extra}}


def law(name):
    answer = {"law": name, "verdict": "broken", "words": "something else depends on it"}
    return {"result": lambda _: {"extra": {"temperature": 1.0, "laws": [answer]}}}


def place(kind):
    wrong = {"module": "lm_head", "kind": kind, "what": "lm_head", "ratio": 4.3, "limit": 1.1, "gain": 1.0}
    return judged({"wrong": [wrong], "count": 1})


def off(_index, made):
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
def test_the_catalog_has_a_broken_answer_of_each_result_that_is_wrong(broken):
    """Lists and filters read these answers alone, and no module of a result."""
    extra = broken.replayed.get("result", lambda _: {})(0).get("extra", {})
    config = {"align": broken.replayed.get("align")}
    answers = [answer["verdict"] for answer in answers_in(ResultRecord("r", "d", "passed", extra=extra), config)]
    assert "broken" in answers or broken.rule in (TRUTH, RUNS), "those are rows of their own"


@pytest.fixture(autouse=True, scope="module")
def nothing_is_fitted():
    """No cause is searched for, and no module of another input is judged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "with_explanation", lambda _, record, **__: record)
        patch.setattr(checking, "worst_unlocated", lambda _: [])
        yield


def checked_again(store, name):
    """A check of a replay that is there, with its truth: nothing runs."""
    return run_check(store, load_spec(store, name), run=lambda *_, **__: None)


@pytest.fixture(scope="module")
def broken_store(tmp_path_factory):
    """A store with a dump and a replay for each of `BROKEN`, and the truth of all of them."""
    store = Store(tmp_path_factory.mktemp("broken") / "store").create()
    inputs = publish(store, len(BROKEN), length=16)

    def made(index, _):
        return tensors(index)

    for name, dtype in (("r-90", "fp64"), ("r-91", "fp32")):
        write_replay(store, name, inputs, truth=dtype, change=made)
    for index, (item, broken) in enumerate(zip(inputs, BROKEN, strict=True)):
        change = broken.replayed.get("change", lambda _, values: values)
        about = {name: value for name, value in broken.replayed.items() if name != "change"}
        own = {"change": lambda _, __, at=index, change=change: change(at, tensors(at))}
        write_replay(store, f"r-{index:02}", [item], **own, **about)
    return store


@pytest.fixture(scope="module")
def checks_of(broken_store, nothing_is_fitted):
    return [checked_again(broken_store, f"r-{index:02}") for index in range(len(BROKEN))]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(BROKEN)), ids=lambda index: BROKEN[index].rule.name)
def test_a_replay_that_breaks_a_rule_is_wrong_wherever_it_is_shown(broken_store, checks_of, index):
    broken, name = BROKEN[index], f"r-{index:02}"
    checked = checks_of[index]
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
    assert in_json(broken_store, "report", name)["verdict"] == broken.word


def in_the_tests_of_ci(answer, finding):
    """Assert that JUnit and annotations have a failure of the rule."""
    suite = ElementTree.fromstring(answer.to_junit())[0]
    kinds = [failure.get("type") or "" for failure in suite.iter("failure")]
    assert finding.rule.name.partition(":")[0] in kinds and int(suite.get("failures") or 0) == len(kinds) > 0
    errors = [line for line in answer.to_annotations() if line.startswith("::error")]
    assert len(errors) == len(kinds) + 1, "one for each failure, and one for the verdict"


def wanted_words():
    return {f"r-{index:02}": broken.word for index, broken in enumerate(BROKEN)}


@pytest.mark.slow
@pytest.mark.usefixtures("checks_of")
def test_lists_and_filters_have_every_replay_and_dump_that_is_wrong(broken_store):
    replays = in_json(broken_store, "replay ls")
    words = {each["replay_id"]: each["verdict"] for each in replays}
    assert {name: words[name] for name in wanted_words()} == wanted_words()
    ids = [item.dump_id for index in range(len(BROKEN)) for item in load_spec(broken_store, f"r-{index:02}").inputs]
    for where, wanted in (
        ("verdict='WRONG'", {WRONG}),
        ("verdict='FAILED'", {FAILED}),
        (BAD, {WRONG, FAILED}),  # `--lf`
    ):
        rows = in_json(broken_store, "dump ls --where", where, "--limit", "0")
        listed = {row["dump_id"] for row in rows}
        assert listed == {dump_id for dump_id, broken in zip(ids, BROKEN, strict=True) if broken.word in wanted}, where
    right = in_json(broken_store, "dump ls --where", "verdict='RIGHT'", "--limit", "0")
    assert right == []


@pytest.mark.parametrize("rule", [*LAWS.values(), TRUTH], ids=lambda rule: rule.name)
def test_a_cell_of_a_matrix_that_breaks_a_rule_is_wrong_in_its_table(rule):
    about = {"violations": ("it is not",), "broken": (rule.name,)}
    if rule == TRUTH:
        about = {"verdict": "mismatch", "reason": "max_abs is above its limit"}
    cell = MatrixCell(0, "sdpa", {}, "passed", {"model": "/m"}, replay_id="r-01", **about)
    record = MatrixRecord("m", "2025-06-19T05:26:00Z", "complete", {}, (cell,), ("d",))
    verdict = matrix_verdict(record)
    assert (verdict.word, verdict.good, record.good) == (WRONG, False, False)
    assert [finding.rule.name for finding in verdict.findings] == [rule.name]
    blocks = matrix_document(record, MatrixContext())
    assert as_text(blocks).startswith(WRONG) and rule.name in as_text(blocks) and rule.name in as_html(blocks)


@pytest.fixture
def lint_of(monkeypatch):
    """A function that lints a store whose dumps are found to break laws, (law, dump) each. looked_at: how often each is judged."""

    def linted(store, *broken, looked_at=9, where="rank=0"):
        def found(_, paths, *__):
            findings = LintFindings(read={Path(path).name.partition(".safetensors")[0] for path in paths})
            for outcome in findings.outcomes:
                outcome.looked_at = looked_at
                outcome.found = [
                    Finding(outcome.rule, "it is not", {"dump": at}) for law, at in broken if law == outcome.rule.name
                ]
            return findings

        monkeypatch.setattr(checks, "lint", found)
        return invoke(store, "lint --where", where)

    return linted


def verdicts_of(store):
    return {row.dump_id: (row.verdict, row.broken) for row in query.select_dumps(store)}


def test_a_dump_that_breaks_a_law_of_recorded_data_is_wrong_wherever_it_is_shown(store, lint_of):
    inputs = publish(store, len(RECORDED_LAWS) + 1, length=16)
    pairs = [(law.name, item.dump_id) for law, item in zip(RECORDED_LAWS, inputs, strict=False)]
    assert lint_of(store, *pairs).exit_code == 1
    wanted = {dump_id: (WRONG, law) for law, dump_id in pairs} | {inputs[-1].dump_id: (None, None)}
    assert verdicts_of(store) == wanted
    for where in ("verdict='WRONG'", BAD):
        rows = in_json(store, "dump ls --where", where, "--limit", "0")
        assert {row["dump_id"]: row["broken"] for row in rows} == {dump_id: law for law, dump_id in pairs}
    text, page = invoke(store, "dump ls --limit 0").stdout, dumps_page(store, {"verdict": WRONG})
    for law, dump_id in pairs:
        assert f"WRONG: {law}" in text and f"WRONG: {law}" in page
        assert f"WRONG: {law}" in invoke(store, "dump show", dump_id).stdout
    again = in_json(store, "replay --lf --dry-run")
    assert {name for share in again["shares"] for name in share["dumps"]} == {dump_id for _, dump_id in pairs}
    assert in_json(store, "status")["holds"]["bad"] == len(pairs)
    assert not list(fsck.catalog(store, deep=True)) and not [each for each in fsck.check(store) if "lints" in str(each.place)]
    refresh(store, rebuild=True)
    assert verdicts_of(store) == wanted, "files are the authority"


def test_a_right_replay_takes_no_broken_law_of_recorded_data_away(store, lint_of):
    inputs = publish(store, 2, length=16)
    for name, truth in (("r-01", None), ("r-90", "fp32")):
        write_replay(store, name, inputs, truth=truth, change=lambda index, _: tensors(index))
    invoke(store, "compare r-01 r-90")
    bad, good = (item.dump_id for item in inputs)
    assert verdicts_of(store) == {bad: ("RIGHT", None), good: ("RIGHT", None)}
    lint_of(store, ("ratio", bad))
    assert verdicts_of(store) == {bad: (WRONG, "ratio"), good: ("RIGHT", None)}
    report = invoke(store, "report r-01")
    assert report.stdout.startswith(f"{WRONG} (TOY MODEL; trainer)") and "recorded data: ratio" in report.stdout, report.stdout
    write_replay(store, "r-02", inputs, change=lambda index, _: tensors(index))
    assert verdicts_of(store)[bad] == (WRONG, "ratio"), "whatever is replayed later"
    (path,) = store.lints.iterdir()
    path.unlink()
    assert verdicts_of(store)[bad][0] != WRONG


@pytest.mark.slow
def test_a_check_and_an_explanation_of_fewer_dumps_say_what_a_lint_of_more_found_in_them(store, lint_of, monkeypatch):
    inputs = publish(store, 2, length=16)
    for name, truth in (("r-01", None), ("r-90", "fp64"), ("r-91", "fp32")):
        write_replay(store, name, inputs, truth=truth, change=lambda index, _: tensors(index))
    lint_of(store, ("ratio", inputs[0].dump_id), looked_at=9)
    lint_of(store, looked_at=5)  # as few as the check's
    monkeypatch.setattr(checks, "_run", lambda *_: checked_again(store, "r-01"))
    said = invoke(store, "check --where", f"dump_id='{inputs[0].dump_id}'")
    assert said.exit_code == 1 and said.stdout.startswith(WRONG) and "recorded data: ratio" in said.stdout, said.output
    assert invoke(store, "check --where", f"dump_id='{inputs[1].dump_id}'").stdout.startswith("RIGHT")
    monkeypatch.setattr(explaining, "run_located", lambda *_: ("", []))
    said = invoke(store, "explain r-01")
    assert said.exit_code == 1 and said.stdout.startswith(WRONG) and "the ratio is 1" in said.stdout, said.output


def test_laws_of_recorded_data_that_hold_judge_no_dump_and_take_back_what_they_judge_as_well(store, lint_of):
    first, second = (item.dump_id for item in publish(store, 2, length=16))
    lint_of(store)
    assert verdicts_of(store) == {first: (None, None), second: (None, None)} and not store.lints.exists()
    for _ in range(2):  # the second says nothing new
        lint_of(store, ("ratio", first), ("mask", first), looked_at=9)
    assert verdicts_of(store)[first] == (WRONG, "mask, ratio") and len(list(store.lints.iterdir())) == 1
    lint_of(store, looked_at=5)
    lint_of(store, looked_at=9, where=f"dump_id='{second}'")
    assert verdicts_of(store)[first] == (WRONG, "mask, ratio"), "narrower lints see less"
    lint_of(store, ("mask", first), looked_at=9)
    assert verdicts_of(store)[first] == (WRONG, "mask")
    lint_of(store, looked_at=10)
    assert verdicts_of(store)[first] == (None, None)
    lint_of(store, ("ratio", first))
    assert verdicts_of(store)[first] == (WRONG, "ratio")


def test_where_nothing_can_be_kept_lint_says_so_and_judges(store, lint_of, monkeypatch):
    (item,) = publish(store, 1, length=16)

    def full(*_):
        raise StoreProblem("cannot write: Read-only file system")

    monkeypatch.setattr(Store, "publish_text", full)
    answer = lint_of(store, ("ratio", item.dump_id))
    assert answer.exit_code == 1 and answer.stdout.startswith(WRONG)
    assert "not kept for the dumps' last verdicts: cannot write: Read-only file system" in answer.stderr
    assert verdicts_of(store) == {item.dump_id: (None, None)}


def test_what_lint_said_elsewhere_is_not_believed(store, lint_of):
    (item,) = publish(store, 1, length=16)
    lint_of(store, ("ratio", item.dump_id))
    (path,) = store.lints.iterdir()
    path.with_name(f".{path.name}.from").write_text("s3://elsewhere")
    refresh(store, rebuild=True)
    assert verdicts_of(store) == {item.dump_id: (None, None)}
    lint_of(store, ("ratio", item.dump_id))
    assert verdicts_of(store) == {item.dump_id: (WRONG, "ratio")}, "and keeps no own answer back"
