"""Families: what is known, small models of them, and the command on real workers; its words are those of the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import program
from roots import ROOT
from typer.testing import CliRunner

from actordbg.actor import family_models
from actordbg.actor.family_models import FAMILIES, SMALL
from actordbg.base.errors import Conflict, Unsupported, UsageError
from actordbg.campaign import family_matrix
from actordbg.campaign.family_matrix import FamilyFinding, FamilyFolder, FamilyResult, families_document, open_folder, subject_of
from actordbg.cli.app import app
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.renderings import as_markdown
from actordbg.records.matrix_record import MatrixCell
from actordbg.store.layout import Store

PAGE = ROOT / "docs" / "reference" / "families.md"


def cell(index: int, packing: bool, dtype: str, **fields: Any) -> MatrixCell:
    settings = {"dtype": dtype, "packing": packing}
    return MatrixCell(index, f"{dtype}, {packing}", settings, "passed", {}, **({"verdict": "match"} | fields))


def test_a_family_has_a_name_in_any_spelling_and_a_folder_gives_its_own_flags(tmp_path: Path):
    assert subject_of("Qwen3.5").config == FAMILIES["qwen3_5"].config
    own = {"model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": 32, "hidden_size": 4096, "attention_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(own | {"torch_dtype": "bfloat16", "vocab_size": 32000}))
    found = subject_of(str(tmp_path)).config
    assert (found["hidden_size"], found["vocab_size"], found["sliding_window"]) == (SMALL["hidden_size"], SMALL["vocab_size"], 6)
    assert found["attention_bias"] and "torch_dtype" not in found
    with pytest.raises(UsageError, match="neither a family nor a folder"):
        subject_of("qwen99")
    code = {"auto_map": {"AutoModel": "own.M"}}
    for brought in (code, {"text_config": code}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | brought))
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
    assert "3 families: 1 right in every cell, 2 not." in text
    assert "| odd | Odd 1 | right | WRONG (bf16) |" in text and "| good | Good 2 | right | right |" in text
    assert "odd: WRONG, bf16, packed: neighbour broken: row 1 depends on row 0" in text.replace("\\", "")
    assert "actordbg families odd --dtype bf16 --packing on" in text
    assert "llama3: ValueError: no such rope" in text
    cannot = replace(cells[1], status="unavailable", verdict=None, reason="no CUDA")
    one = FamilyResult("good", "Good 2", "good", "good", cells=(cells[0], cannot))
    assert "1 family: 1 right in every cell that could run, 0 not." in as_markdown(families_document([one]))


def test_what_was_done_is_taken_only_where_the_same_was_asked(tmp_path: Path):
    subject, axes = subject_of("llama3"), {"dtype": ["fp32"]}
    before = FamilyFolder(open_folder(tmp_path / "work"), ReplayConfig(), axes)
    assert before.done(subject) is None
    before.keep(subject, FamilyResult("llama3", "Llama 3", "llama3", "llama", cells=(cell(0, True, "fp32"),)))
    again = FamilyFolder(open_folder(tmp_path / "work"), ReplayConfig(model="elsewhere"), axes)
    found = again.done(subject)
    assert found is not None and found.good and found.cells == (cell(0, True, "fp32"),)
    assert FamilyFolder(again.folder, ReplayConfig(backward=False), axes).done(subject) is None
    assert FamilyFolder(again.folder, ReplayConfig(), {"dtype": ["bf16"]}).done(subject) is None
    with again.locked(), pytest.raises(Conflict), before.locked():
        pass
    (tmp_path / "work" / "other").touch()
    with pytest.raises(UsageError, match="has files that `actordbg families` did not write"):
        open_folder(tmp_path / "work")


def test_two_folders_of_one_name_are_two_subjects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As checkpoints of two runs are: the second took the place of the first, in silence."""
    typed = [f"{tmp_path}/{run}/checkpoint-500" for run in "ab"]
    for layers, folder in enumerate(typed, 1):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 10_000.0 * layers}))

    def run(store: Store, subject: FamilyResult, *rest: object) -> FamilyResult:
        cells = (cell(0, True, "fp32", violations=() if subject.typed == typed[0] else ("x",)),)
        return FamilyResult(subject.name, subject.known_as, subject.typed, "llama", cells=cells)

    monkeypatch.setattr(family_matrix, "run_family", run)
    monkeypatch.setattr(family_models, "build_families", lambda models: {})
    for _ in range(2):  # the second time both are taken from the folder
        said = CliRunner().invoke(app, ["families", *typed, "--keep", str(tmp_path / "kept"), "--json"])
        found = json.loads(said.stdout)["families"]
        assert [(one["known_as"], one["cells"][0]["violations"]) for one in found] == [(typed[0], []), (typed[1], ["x"])]
        assert said.exit_code == 1
        monkeypatch.setattr(family_matrix, "run_family", lambda *given: pytest.fail("it was done"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_the_command_finds_what_the_page_says_in_one_process(tmp_path: Path):
    store = Store(tmp_path / "kept" / "store")
    given = f"families llama3 qwen3.5 --attn sdpa --dtype fp32,bf16 --keep {tmp_path / 'kept'} --format".split()
    done = program(*given, "json", OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stderr
    llama, qwen = json.loads(done.stdout)["families"]
    assert [one["verdict"] for one in llama["cells"]] == ["match"] * 4 and llama["findings"] == []
    (found,) = qwen["findings"]
    assert (found["word"], found["cells"]) == ("WRONG", ["fp32, packed", "bf16, packed"])
    assert "neighbour broken: row 1 depends on row 0" in found["words"]
    page = program(*given, "md", OMP_NUM_THREADS="1").stdout
    for row in (
        f"| llama3 | {FAMILIES['llama3'].known_as} | right | right |",
        "| qwen3_5 | Qwen3.5 | right | WRONG |",
        "- qwen3_5: WRONG, packed: neighbour broken: row 1 depends on row 0; also future, jacobian, order, alone",
    ):
        assert row in page and row in PAGE.read_text(), "run `make families`"
    boots = [json.loads(line)["pid"] for path in store.replays.glob("*/rank0.jsonl") for line in path.open() if '"boot"' in line]
    assert len(boots) >= 14 and len(set(boots)) == 1
    again = program(*given, "json", OMP_NUM_THREADS="1")
    assert json.loads(again.stdout)["families"] == [llama, qwen]
    assert len(list(store.replays.iterdir())) == len(boots), "what was done is not run again"
