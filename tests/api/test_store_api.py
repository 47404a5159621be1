"""`import actordbg`: what it loads, a store as an object, and answers as values."""

import ast
import json
import runpy
import sys
from dataclasses import replace

import pytest
from replaycases import publish
from roots import ROOT, environment
from runkit import python

import actordbg
from actordbg.base.errors import BadResult, NothingToDo, UsageError, WhereError
from actordbg.document.blocks import Heading, Paragraph, Verdict
from actordbg.document.command_result import CommandResult
from actordbg.records.finding import Finding, NotChecked, Rule
from actordbg.store.layout import Store

MODEL = NotChecked(Rule("model"), "your model")
FOUND = Finding(Rule("neighbour"), "row 1 depends on row 0", {"row": 1})
VERDICT = Verdict("WRONG", FOUND.said, [("max diff", "0.1 nats")], [MODEL], "actordbg locate last", findings=[FOUND])


def test_importing_it_loads_no_heavy_module_and_each_name_is_there_when_it_is_used():
    code = """
import json, sys
before = set(sys.modules)
import actordbg
loaded = sorted(set(sys.modules) - before)
names = [getattr(actordbg, name).__name__ for name in actordbg.__all__]
print("\\n" + json.dumps([loaded, names, [name for name in ("pytest", "typer", "rich") if name in sys.modules]]))
"""
    loaded, names, after = json.loads(python(code, environment()).splitlines()[-1])
    assert (
        {name.partition(".")[0] for name in loaded} <= {"actordbg", *sys.stdlib_module_names}
        and len(names) == len(actordbg.__all__)
        and after == []
    )
    with pytest.raises(AttributeError, match="no attribute 'replays'"):
        _ = actordbg.replays  # type: ignore[attr-defined]


def test_the_api_prints_nothing_and_ends_no_process():
    ends = {"print", "exit", "_exit", "SystemExit", "Exit", "echo"}
    for path in (ROOT / "actordbg" / "api").glob("*.py"):
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(path.read_text()))}
        assert not names & ends, path


def test_dumps_are_a_lazy_sequence_of_typed_rows(tmp_path):
    store = actordbg.open(tmp_path / "store")
    records = publish(Store(tmp_path / "store").create(), 5)
    dumps = store.dumps()
    assert (len(dumps), [dump.dump_id for dump in dumps]) == (5, [record.dump_id for record in records])
    assert [dump.dump_id for dump in dumps[1:4][::-1]] == [record.dump_id for record in records[3:0:-1]]
    assert dumps[-1].dump_id == store.dump().dump_id == records[-1].dump_id and dumps[4:9][0] == dumps[4]
    first = dumps[0]
    assert first.record.dump_id == first.dump_id and first.tensors["sequences"].shape == (first.batch_size, first.seq_len)
    assert list(dumps[:2].to_pandas()["seq_len"]) == [first.seq_len] * 2

    class Words:
        def decode(self, token_ids):
            return f"{len(token_ids)} tokens"

    assert sum(int(text.partition(" ")[0]) for text in first.text(Words())) == first.tokens
    with pytest.raises(WhereError):
        len(store.dumps("nothing>3"))
    with pytest.raises(IndexError):
        dumps[5]


def test_what_is_added_and_recorded_can_be_selected_and_has_its_outputs(tmp_path):
    import torch

    store = actordbg.open(tmp_path / "store")
    ids, mask = torch.randint(3, 90, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    added = store.add(ids, mask, action_mask=mask[:, -5:].bool(), log_probs=torch.zeros(2, 5), temperature=0.7)
    assert (added.tokens, added.action_len, added.temperature, added.with_outputs, added.run) == (20, 5, 0.7, True, "added")

    @store.record
    def score(input_ids, attention_mask):
        return -input_ids[:, 1:].float()

    assert torch.equal(score(ids, mask), -ids[:, 1:].float())
    (dump,) = score.dumps()
    assert torch.equal(dump.tensors["output.log_probs"], -ids[:, 1:].float()) and len(store.dumps(score.where)) == 1
    with pytest.warns(UserWarning, match="there was none"), store.record(torch.nn.Linear(2, 2)) as nothing:
        pass
    assert nothing.dump_ids == []


def test_an_answer_is_what_json_prints_and_raises_where_it_is_asked_to():
    wrong = CommandResult(False, {"good": False, "replay_id": "r1"}, (Heading("replay r1", 1), VERDICT), ())
    assert (wrong.ok, wrong.verdict, wrong["replay_id"], wrong.figures) == (False, "WRONG", "r1", {"max diff": "0.1 nats"})
    left = replace(
        VERDICT,
        not_checked=[NotChecked(MODEL.rule, "gradients", "--backward"), NotChecked(MODEL.rule, "the run", "run --hash-weights")],
    )
    named = CommandResult(False, {}, (left,))
    assert named.not_checked == ("gradients (backward=True)", "the run (run --hash-weights)")
    assert "gradients (backward=True)" in named.sentence and "(--backward)" in named.to_json()
    assert (
        wrong.not_checked == ("your model",)
        and wrong["unchecked"] == [MODEL.data]
        and json.loads(wrong.to_json()) == wrong.record == {**wrong}
    )
    with pytest.raises(BadResult, match="WRONG: row 1 depends on row 0; not checked: your model") as raised:
        wrong.raise_if_wrong()
    assert (raised.value.hint, raised.value.exit_code) == (wrong.next, 1) and wrong.next == VERDICT.next
    page = CommandResult(True, {}, (VERDICT,), (Heading("t", 1), VERDICT, Heading("Replay", 2), Paragraph("below")))
    assert "below" in page.to_html() and "row 1 depends" in page._repr_html_() and "below" not in page._repr_html_()
    assert "<script" not in page._repr_html_()
    page.raise_if_wrong()


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"modle": "tiny"}, "unknown key 'modle'"),
        ({"packing": "yes"}, "is not of type bool"),
        ({"attn": "flash"}, "is not known"),
    ],
)
def test_a_setting_that_is_unknown_or_of_another_type_is_refused(settings, why, tmp_path):
    publish(Store(tmp_path / "store").create(), 1)
    with pytest.raises(UsageError, match=why):
        actordbg.open(tmp_path / "store").replay(**settings)


def test_nothing_selected_is_an_error_that_says_what_there_is(tmp_path):
    publish(Store(tmp_path / "store").create(), 1)
    with pytest.raises(NothingToDo, match="nothing to check: no dump matches seq_len>9999"):
        actordbg.open(tmp_path / "store").check("seq_len>9999")


@pytest.mark.forked
@pytest.mark.parametrize("name", ["check_model", "use_store"])
def test_the_examples_of_the_page_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "store")])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    assert "RIGHT" in capsys.readouterr().out
