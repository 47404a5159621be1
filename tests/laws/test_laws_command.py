"""Laws as a user meets them: which inputs are asked in which slot, what a replay and a matrix answer, what the catalog has."""

import csv
import io
import json
from dataclasses import replace

import pytest
from replaycases import publish
from stopcases import actordbg

from actordbg.actor.family_models import FAMILIES
from actordbg.campaign.matrix_document import MatrixContext, matrix_document, verdict_word
from actordbg.catalog.query import select_dumps
from actordbg.config.replay_config import ALL_LAWS, SETTINGS, ReplayConfig
from actordbg.document.renderings import as_text
from actordbg.judge.agreement import laws_in_words, laws_of
from actordbg.judge.exports import render_csv
from actordbg.records.journal import read_events
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.records.replay_record import PASSED, LawAnswer, ReplayInput, ReplaySpec, ResultRecord
from actordbg.replay.plan import affordable_laws, law_order
from actordbg.replay.replay_data import ReplayData
from actordbg.replay.work_order import EXIT_RESTART, WorkOrder
from actordbg.replay.worker import Worker
from benchmarks.families import build_model

BROKEN = LawAnswer("neighbour", "broken", "row 1 depends on row 0", 0.04, None, 1, 3, 17, 198, 199)


def result(dump_id, *answers):
    return ResultRecord("r", dump_id, PASSED, extra={"laws": [one.to_dict() for one in answers]} if answers else {})


class StandIn:
    """An engine that only notes of which inputs it was asked for laws."""

    tainted, out_of_step = False, ""

    def __init__(self, collective):
        self.collective = collective
        self.asked = {}

    def open(self):
        return {}

    def load(self, item):
        return None

    def run(self, item, loaded, *, recorded, asked, on_step):
        self.asked[item.dump_id] = "laws" in asked
        if "laws" in asked:
            on_step("rerun")
        return {"status": PASSED}

    def close(self): ...


def worked(folder, spec, slots, rank, engine):
    """The exit code of a worker of two ranks with this engine."""
    return Worker(folder, spec, WorkOrder(1, [0, 1], slots, stay=True), rank, engine).run()


@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_compute_together_ask_in_the_same_slots(tmp_path, collective, rank):
    shapes = [(1, 90), (2, 50), (1, 80), (1, 70), (1, 60)]
    inputs = tuple(ReplayInput(f"d{n}", "", 0, rows, 100, rows * tokens) for n, (rows, tokens) in enumerate(shapes))
    spec, engine = ReplaySpec("r", "now", ReplayConfig(nproc=2, laws=1), inputs), StandIn(collective)
    assert worked(tmp_path, spec, [[0, 1], [2, 3], [4, None]], rank, engine) == 0
    chosen = {"d1"} if rank else {"d0"} if collective else set()
    assert {name for name, asked in engine.asked.items() if asked} == chosen, "d1 is chosen, and d0 is in its slot"
    events = [event for event in read_events(tmp_path / f"rank{rank}.jsonl") if event["event"] == "law"]
    assert [event["slot"] for event in events] == [0] * len(chosen), "each step of a law is news, so it is not a hang"


def test_laws_are_asked_first_where_a_fault_has_room_to_show():
    """A leak that begins at row 3 was green while the two shortest inputs with several rows were asked."""
    shapes = [(2, 8, 12), (2, 8, 16), (4, 64, 250), (1, 900, 900), (2, 64, 40)]  # rows, positions, tokens
    inputs = [ReplayInput(f"d{n}", "", 0, *shape) for n, shape in enumerate(shapes)]
    assert law_order(inputs) == [2, 4, 0, 1, 3] and law_order([]) == []
    assert affordable_laws(inputs) == 2 and affordable_laws([*inputs, ReplayInput("long", "", 0, 1, 9000, 9000)]) == 4


def test_a_law_that_failed_among_several_ranks_costs_a_restart_and_not_the_result(tmp_path):
    inputs = tuple(ReplayInput(name, "", 0, 2, 8, 12) for name in ("d0", "d1"))
    engine = StandIn(collective=True)
    engine.out_of_step = "the law future failed"
    assert worked(tmp_path, ReplaySpec("r", "now", ReplayConfig(nproc=2, laws=1), inputs), [[0, 1]], 0, engine) == EXIT_RESTART
    events = {event["event"]: event for event in read_events(tmp_path / "rank0.jsonl")}
    assert events["end"]["status"] == PASSED and events["restart"]["reason"] == "the law future failed"


def test_laws_all_is_a_number_with_a_name():
    laws = SETTINGS["laws"]
    assert laws.parse("all") == ALL_LAWS and laws.parse("3") == 3 and laws.typed(ALL_LAWS) == "all"
    assert laws.options(ALL_LAWS) == ["--laws", "all"] and "all" in laws.hint
    with pytest.raises(ValueError):
        laws.parse("many")


def test_the_first_line_says_what_is_broken_and_how_much_was_not_asked():
    moved = LawAnswer("rerun", "nondeterministic", "a rerun gave different numbers", 0.4)
    unasked = LawAnswer("jacobian", "not-checked", "a compiled graph cannot have a hook")
    results = [result("d0", BROKEN, unasked), result("d1", LawAnswer("neighbour", "kept"), moved), result("d2")]
    summary = laws_of(results, ReplayConfig(laws=2))
    assert summary is not None and not summary.good
    assert summary.headline == "laws of 2 of 3 inputs: BROKEN neighbour; NONDETERMINISTIC rerun; 1 kept, 1 not checked"
    text = "\n".join(laws_in_words(summary))
    assert "row 1 depends on row 0 (198 of 199; first: row 1, position 3, token 17; up to 0.04) in d0" in text
    assert "not checked: jacobian: a compiled graph cannot have a hook (1 input)" in text
    accepted = laws_of(results[1:], ReplayConfig(laws=2, accept="nondeterministic"))
    assert accepted is not None and accepted.good and not accepted.raised and "nondeterministic accepted" in accepted.headline
    spec = ReplaySpec("r", "now", ReplayConfig(laws=2), tuple(ReplayInput(one.dump_id, "", 0, 2, 8, 12) for one in results))
    rows = list(csv.DictReader(io.StringIO(render_csv([ReplayData(spec, {}, "complete", tuple(results))]))))
    assert [(row["laws_violated"], row["laws_not_checked"]) for row in rows] == [
        ("neighbour", "jacobian"),
        ("rerun", ""),
        ("", ""),
    ]
    assert laws_of([result("d2")], ReplayConfig()) is None
    nothing = laws_of([result("d2")], ReplayConfig(laws=2))
    assert nothing is not None and nothing.headline == "no law checked" and not nothing.raised


def test_a_cell_that_breaks_a_law_is_wrong_whatever_the_comparison_says():
    unasked = MatrixCell(0, "packed", {}, PASSED, {}, "r", verdict="match")
    good = replace(unasked, laws="laws of 1 of 1 input: 9 kept")
    said = ("neighbour broken: row 1 depends on row 0",)
    bad = replace(unasked, index=1, laws="laws of 1 of 1 input: BROKEN neighbour", violations=said)
    assert (verdict_word(good), verdict_word(bad)) == ("passed", "WRONG")
    record = MatrixRecord("m", "now", "complete", {}, (good, bad), ("d0",))
    assert not record.good
    text = as_text(matrix_document(record, MatrixContext()))
    assert "cell 1, packed: neighbour broken: row 1 depends on row 0" in text and "cell 0: laws of 1 of 1 input: 9 kept" in text
    alone = MatrixRecord("m", "now", "complete", {}, (unasked,), ("d0",))
    assert "no laws checked in 1 of 1 that finished" in as_text(matrix_document(alone, MatrixContext()))


@pytest.mark.forked
def test_a_matrix_is_red_for_a_packed_qwen3_5_in_bf16_and_green_unpacked(store, tmp_path):
    (published,) = publish(store, 1, length=32)
    build_model(tmp_path / "qwen", FAMILIES["qwen3_5"].config)
    ran = actordbg(
        store, "matrix", "--model", str(tmp_path / "qwen"), "--dtype", "bf16", "--attn", "sdpa", "--compile", "off",
        "--packing", "off,on", "--no-backward", "--no-truth", "--json",
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    unpacked, packed = json.loads(ran.stdout)["matrix"]["cells"]
    assert (unpacked["status"], unpacked["violations"]) == ("passed", [])
    assert any(one.startswith("neighbour broken: row 1 depends on row 0") for one in packed["violations"])
    assert any("row 1 depends on row 0 (24 of 24 tokens)" in one for one in packed["violations"])
    assert [row.dump_id for row in select_dumps(store, "broken is not null")] == [published.dump_id]
