"""The benchmark of families: small models of configurations, and its program on real workers; its words are those of the page."""

import json
from dataclasses import replace

import pytest
from amounts import WHOLE
from roots import ROOT, write_json

from actordbg.actor.family_models import FAMILIES, SMALL
from actordbg.base.errors import Unsupported, UsageError
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.renderings import as_markdown
from actordbg.records.matrix_record import MatrixCell
from actordbg.store.layout import Store
from benchmarks import families
from benchmarks.families import FamilyFinding, FamilyFolder, FamilyResult, families_document, subject_of

PAGE = ROOT / "docs" / "reference" / "families.md"


def cell(index, packing, dtype, **fields):
    settings = {"dtype": dtype, "packing": packing}
    return MatrixCell(index, f"{dtype}, {packing}", settings, "passed", {}, **({"verdict": "match"} | fields))


def test_a_family_has_a_name_in_any_spelling_and_a_folder_gives_its_own_flags(tmp_path):
    assert subject_of("Qwen3.5").config == FAMILIES["qwen3_5"].config
    own = {"model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": 32, "hidden_size": 4096, "attention_bias": True}
    write_json(tmp_path / "config.json", own | {"torch_dtype": "bfloat16", "vocab_size": 32000})
    found = subject_of(str(tmp_path)).config
    assert (found["hidden_size"], found["vocab_size"], found["sliding_window"]) == (SMALL["hidden_size"], SMALL["vocab_size"], 6)
    assert found["attention_bias"] and "torch_dtype" not in found
    with pytest.raises(UsageError, match="neither a family nor a folder"):
        subject_of("qwen99")
    code = {"auto_map": {"AutoModel": "own.M"}}
    for brought in (code, {"text_config": code}):
        write_json(tmp_path / "config.json", {"model_type": "llama"} | brought)
        with pytest.raises(Unsupported, match="ships with code"):
            subject_of(str(tmp_path))


def test_the_document_says_where_a_family_is_wrong_and_how_to_see_it():
    cells = [cell(0, False, "fp32"), cell(1, True, "fp32"), cell(2, False, "bf16"), cell(3, True, "bf16", violations=("x",))]
    broken = FamilyFinding("WRONG", "neighbour broken: row 1 depends on row 0", ("bf16, True",))
    wrong = FamilyResult("odd", "Odd 1", "odd", "odd", cells=tuple(cells), findings=(broken,))
    right = FamilyResult("good", "Good 2", "good", "good", cells=tuple(cells[:3]))
    gone = replace(subject_of("llama3"), problem="ValueError: no such rope", config={})
    assert (wrong.good, right.good, gone.good) == (False, True, False)
    text = as_markdown(families_document([wrong, right, gone]))
    assert "3 families: 1 right in every cell, 1 not, 1 not built." in text
    assert "| odd | Odd 1 | right | WRONG (bf16) |" in text and "| good | Good 2 | right | right |" in text
    assert "odd: WRONG, bf16, packed: neighbour broken: row 1 depends on row 0" in text.replace("\\", "")
    assert "python -m benchmarks.families odd --dtype bf16 --packing on" in text
    assert "llama3: ValueError: no such rope" in text
    cannot = replace(cells[1], status="unavailable", verdict=None, reason="no CUDA")
    one = FamilyResult("good", "Good 2", "good", "good", cells=(cells[0], cannot))
    assert "1 family: 1 right in every cell that could run, 0 not." in as_markdown(families_document([one]))


def test_what_was_done_is_taken_only_where_the_same_was_asked(tmp_path):
    subject, axes = subject_of("llama3"), {"dtype": ["fp32"]}
    (work := tmp_path / "work" / "families").mkdir(parents=True)
    before = FamilyFolder(work.parent, ReplayConfig(), axes)
    assert before.done(subject) is None
    before.keep(subject, FamilyResult("llama3", "Llama 3", "llama3", "llama", cells=(cell(0, True, "fp32"),)))
    again = FamilyFolder(before.folder, ReplayConfig(model="elsewhere"), axes)
    found = again.done(subject)
    assert found is not None and found.good and found.cells == (cell(0, True, "fp32"),)
    assert FamilyFolder(again.folder, ReplayConfig(backward=False), axes).done(subject) is None
    assert FamilyFolder(again.folder, ReplayConfig(), {"dtype": ["bf16"]}).done(subject) is None


@pytest.mark.parametrize(
    "own, small",
    [
        pytest.param({"layer_types": ["a", "a", "b", "a"]}, {"layer_types": ["a", "b"]}, id="one of each kind"),
        pytest.param(
            {"window": [1, 1, 1, 1], "kinds": [0, 0, 0, 1]}, {"window": [1, 1], "kinds": [0, 1]}, id="lists stay aligned"
        ),
        pytest.param({"kinds": [0, 1, 0, 1], "own": {"1": 5, "3": 7}}, {"kinds": [0, 1], "own": {"1": 5}}, id="a table by layer"),
        pytest.param({"eos": [7, 8], "rope": {"theta": 1}}, {"eos": [7, 8], "rope": {"theta": 1}}, id="what is of no layer"),
    ],
)
def test_what_a_configuration_says_of_each_layer_is_cut_with_its_layers(own, small, tmp_path):
    """`layer_types` kept its length, and 36 of 171 causal models of transformers could not be built."""
    write_json(tmp_path / "config.json", {"model_type": "none", "num_hidden_layers": 4} | own)
    config = subject_of(str(tmp_path)).config
    assert {name: config[name] for name in own} == small and config["num_hidden_layers"] == 2


@pytest.mark.forked
def test_a_family_that_cannot_be_built_is_said_and_is_no_fault(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "llama", "hidden_act": "no such"})
    assert families.main([str(tmp_path), "--output", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "0 right in every cell, 0 not, 1 not built" in page and "no such" in page.partition("## Not built")[2]


@pytest.mark.forked
def test_the_program_finds_what_the_page_says_in_one_process(tmp_path):
    store = Store(tmp_path / "kept" / "store")
    names, dtypes = ("llama3 qwen3.5", "fp32,bf16") if WHOLE else ("qwen3.5", "fp32")
    given = f"{names} --attn sdpa --dtype {dtypes} --keep {tmp_path / 'kept'} --output {tmp_path / 'page.md'}".split()
    assert families.main(given) == 1
    page = (tmp_path / "page.md").read_text()
    for row in (
        *[f"| llama3 | {FAMILIES['llama3'].known_as} | right | right |"] * WHOLE,
        "| qwen3_5 | Qwen3.5 | right | WRONG |",
        ": WRONG, packed: neighbour broken: row 1 depends on row 0; also future, jacobian, order, alone",
    ):
        assert row in page and row in PAGE.read_text(), "run `make families`"
    boots = [json.loads(line)["pid"] for path in store.replays.glob("*/rank0.jsonl") for line in path.open() if '"boot"' in line]
    assert len(boots) >= 3 and len(set(boots)) == 1
    assert families.main(given) == 1 and (tmp_path / "page.md").read_text() == page
    assert len(list(store.replays.iterdir())) == len(boots), "what was done is not run again"
