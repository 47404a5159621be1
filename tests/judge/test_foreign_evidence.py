"""What somebody else wrote is computed again, or named as theirs in the first line: it turns no verdict of one's own.

A colleague's bundle has forged truths and comparisons, whose ids and settings are those that this store would look for.
"""

import shutil

import pytest
import safetensors.torch
from amounts import first_or_all
from commandline import in_json, invoke
from comparecases import write_replay
from ownercases import give_away
from replaycases import publish
from roots import json_of

from actordbg.base.owners import origin_file
from actordbg.base.units import new_replay_id
from actordbg.catalog.query import open_fresh, select_dumps
from actordbg.compare.comparing import compare, save
from actordbg.compare.find_truth import find_truth, wanted_rounding, wanted_truth
from actordbg.compare.noise_floor import measure, newest_for, save as save_noise
from actordbg.dumps.bundle import open_bundle, pack_bundle
from actordbg.judge.replay_list import listed
from actordbg.records.journal import SPEC, TENSORS
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

REPLAY, TRUTH, OTHER = "20250619T050100-000001", "20250619T050200-000002", "20250619T050300-000003"


def moved(path, by):
    """Move every log-prob in a file of kept tensors."""
    made = safetensors.torch.load_file(path)
    safetensors.torch.save_file(made | {"log_probs": made["log_probs"] + by}, path)


def of_a_colleague(store, folder, *replays, comparisons=()):
    """Take these records out of the store into a bundle, and import that."""
    bundle = folder / "case.tar.zst"
    pack_bundle(store, bundle, (), replays=replays, comparisons=comparisons)
    for path in (*(store.replays / name for name in replays), *(store.comparisons / f"{name}.json" for name in comparisons)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    open_bundle(store, bundle)


@pytest.mark.forked
@pytest.mark.parametrize("of_replay, of_truth, word", first_or_all([(1.2, 1.2, "WRONG"), (0.0, 1.2, "RIGHT")]))
def test_an_imported_truth_neither_saves_a_wrong_replay_nor_breaks_a_healthy_one(
    store, tmp_path, monkeypatch, of_replay, of_truth, word
):
    monkeypatch.setattr("actordbg.api.comparing.with_explanation", lambda _, record, **__: record)  # no cause is fitted
    publish(store, 2, length=24)
    invoke(store, "replay --all --dtype fp32 --keep-tensors --laws 0 --yes")
    (row,) = listed(open_fresh(store))
    for path in (store.replays / row["replay_id"] / TENSORS).iterdir():
        moved(path, of_replay)
    made = invoke(store, "compare", row["replay_id"], "truth", "--json")
    assert json_of(made)["verdict"] == word
    truths = [path.name for path in store.replays.iterdir() if path.name != row["replay_id"]]
    for name in truths:
        for path in (store.replays / name / TENSORS).iterdir():
            moved(path, of_truth)
    mine = tuple(path.stem for path in store.comparisons.glob("*.json"))
    of_a_colleague(store, tmp_path, *truths, comparisons=mine)
    answer = in_json(store, "compare", row["replay_id"], "truth")
    assert (answer["verdict"], answer.get("whose")) == (word, None) and answer["b"]["replay_id"] not in truths
    by_theirs = invoke(store, "compare", row["replay_id"], truths[0])
    assert "case.tar.zst" in by_theirs.stdout.splitlines()[0] and by_theirs.exit_code == 1, "asked for by name, it is named"
    assert {dump.verdict for dump in select_dumps(store)} == {word}
    assert invoke(store, "replay ls --json").stdout.count(f'"{word}"') == 1


@pytest.fixture(params=["imported", "another user's"])
def mark(request, monkeypatch):
    """Make a record somebody else's."""
    if request.param == "imported":
        return lambda path: origin_file(path).write_text("case.tar.zst") and None
    return lambda path: give_away(path, monkeypatch)


def test_no_record_of_others_is_reused(store, mark):
    inputs = publish(store, 2)
    write_replay(store, REPLAY, inputs, dtype="bf16", resolved={"compute_dtype": "bf16"})
    spec = load_spec(store, REPLAY)
    write_replay(store, TRUTH, inputs, dtype="bf16", truth="fp32")
    write_replay(store, OTHER, inputs, dtype="bf16", truth="bf16")
    rounding = wanted_rounding(store, spec)
    assert rounding is not None
    assert (find_truth(store, wanted_truth(store, spec)), find_truth(store, rounding)) == (TRUTH, OTHER)
    varied = "20250619T050400-000004"
    write_replay(store, varied, inputs, dtype="bf16", resolved={"compute_dtype": "bf16"}, vary="repeat")
    floor = save_noise(store, measure(store, REPLAY, {"repeat": varied}))
    assert newest_for(store, REPLAY) is not None
    for path in (store.replays / TRUTH / SPEC, store.replays / OTHER / SPEC, floor):
        mark(path)
    assert find_truth(store, wanted_truth(store, spec)) is find_truth(store, rounding) is newest_for(store, REPLAY) is None


@pytest.mark.parametrize("what", ["comparison", "truth"])
def test_a_comparison_that_rests_on_others_is_not_mine(store, mark, what):
    inputs = publish(store, 1)
    write_replay(store, REPLAY, inputs)
    write_replay(store, TRUTH, inputs, truth="fp32")
    path = save(store, record := compare(store, REPLAY, TRUTH))
    assert record.good and invoke(store, "report", REPLAY).stdout.startswith("RIGHT")
    mark(path if what == "comparison" else store.replays / TRUTH / SPEC)
    assert invoke(store, "report", REPLAY).stdout.startswith("NOT CHECKED")
    assert [row["verdict"] for row in listed(open_fresh(store))] == ["NOT CHECKED"]


def test_the_report_of_an_imported_replay_names_whose_it_is_and_follows_the_import(store, tmp_path):
    inputs = publish(store, 1)
    write_replay(store, REPLAY, inputs, result=lambda index: {"extra": {"laws": [{"law": "neighbour", "verdict": "broken"}]}})
    write_replay(store, TRUTH, inputs, truth="fp32")
    record = compare(store, REPLAY, TRUTH)
    save(store, record)
    bundle = tmp_path / "case.tar.zst"
    pack_bundle(store, bundle, store.iter_dumps(), replays=[REPLAY, TRUTH], comparisons=[record.comparison_id])
    other = Store(tmp_path / "other")
    said = invoke(other, "dump import", bundle).output
    assert f"next: actordbg report {REPLAY}" in said
    report = invoke(other, "report", REPLAY)
    assert report.stdout.startswith("WRONG (") and "case.tar.zst" in report.stdout.splitlines()[0]
    assert json_of(invoke(other, "report", REPLAY, "--format", "json"))["whose"].endswith("case.tar.zst")
    (row,) = select_dumps(other)
    assert (row.verdict, row.broken, row.theirs) == (None, None, "WRONG")
    assert "theirs: WRONG" in invoke(other, "dump ls").stdout and "theirs: WRONG" in invoke(other, "replay ls").stdout
    mine = new_replay_id()
    write_replay(other, mine, inputs)
    assert [replay["replay_id"] for replay in listed(open_fresh(other))] == [mine], "`last` is one's own"
    (row,) = select_dumps(other)
    assert (row.verdict, row.theirs) == ("NOT CHECKED", "WRONG")
