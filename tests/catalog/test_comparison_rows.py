"""Files of comparisons as rows: incrementally, from damaged and vanished files, and the same again after a rebuild."""

import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import catalogcases as cases
import pytest
from catalogcases import contents
from comparecases import given, write_replay

from actordbg.catalog import query, record_rows
from actordbg.catalog.indexer import refresh
from actordbg.catalog.lab_columns import Comparison, ComparisonRun
from actordbg.compare.comparing import save
from actordbg.formats.store_files import atomic_write
from actordbg.records.comparison_record import (
    MATCH,
    MISMATCH,
    NOT_COMPARED,
    ComparisonRecord,
    DumpComparison,
    Figures,
    SideInfo,
)
from actordbg.store.layout import Store

INPUTS = [given(index) for index in range(3)]
TOKENS = Figures(10, max_abs=0.5, mean_abs=0.125, p99_abs=0.25, cosine=1.0, kl_k3=0.01, clip_share=0.1)


def comparison(name, a, b, *, verdict=MISMATCH, largest=0.5):
    """Two dumps compared, and one that was not."""
    dumps = (
        DumpComparison(
            INPUTS[0].dump_id,
            verdict,
            ("why",),
            seq_len=12,
            log_probs=replace(TOKENS, max_abs=largest),
            grad_norm_rel=0.25,
        ),
        DumpComparison(INPUTS[1].dump_id, MATCH, seq_len=12, log_probs=replace(TOKENS, count=30, max_abs=0.25, mean_abs=0.25)),
        DumpComparison(INPUTS[2].dump_id, NOT_COMPARED, seq_len=12, not_compared={"dump": "A: it hung"}),
    )
    other = SideInfo("replay" if b else "golden", b, "B's configuration", "bf16")
    return ComparisonRecord(
        name, f"2025-06-20T00:00:{name[-2:]}.000000Z", SideInfo("replay", a, "A's", "bf16"), other, {"max_abs": 0.1}, verdict,
        dumps, "defaults", noise_id="n-01", reasons=("a note",),
    )  # fmt: skip


def age(store):
    """As if the files and folders had been there for a minute: file times that young are not relied on."""
    then = time.time_ns() - 60_000_000_000
    for path in (*store.comparisons.glob("*.json"), store.comparisons):
        os.utime(path, ns=(then, then))


@pytest.fixture
def replayed(store):
    for name in ("r-01", "r-02"):
        write_replay(store, name, INPUTS, result=lambda index: {"golden_count": 5, "golden_max_abs": 0.75})
    return store


def test_everything_becomes_rows_and_again_after_a_rebuild(replayed):
    save(replayed, comparison("c-01", "r-02", "r-01"))
    save(replayed, comparison("c-02", "r-02", None))
    assert refresh(replayed).comparisons == 2
    found = contents(replayed)
    assert len(found["comparison"]) == 6, "three dumps of two comparisons"
    assert len(found["comparison_run"]) == 2
    refresh(replayed, rebuild=True)
    assert contents(replayed) == found
    of_golden = query.comparisons(replayed, "r-02")
    assert [(one.against, one.against_kind, one.verdict) for one in of_golden] == [
        ("golden", "golden", MISMATCH),
        ("r-01", "replay", MISMATCH),
    ]
    one = of_golden[1]
    assert (one.dumps, one.compared, one.mismatches, one.within_noise) == (3, 2, 1, 0)
    assert (one.max_abs, one.grad_norm_rel, one.worst_dump) == (0.5, 0.25, INPUTS[0].dump_id)
    assert one.mean_abs == pytest.approx((10 * 0.125 + 30 * 0.25) / 40)
    assert (one.thresholds, one.noise_id, one.reasons) == ({"max_abs": 0.1}, "n-01", "a note")
    assert query.comparisons(replayed, "r-01") == []
    found_dumps = query.table_rows(replayed, Comparison, "comparison_id = 'c-01' ORDER BY dump_id")
    assert [(row.dump_id, row.verdict, row.max_abs, row.clip_share, row.reasons) for row in found_dumps] == [
        (INPUTS[0].dump_id, MISMATCH, 0.5, 0.1, "why"),
        (INPUTS[1].dump_id, MATCH, 0.25, 0.1, None),
        (INPUTS[2].dump_id, NOT_COMPARED, None, None, "dump not compared: A: it hung"),
    ]


def test_nothing_is_read_when_nothing_changed(replayed, monkeypatch):
    save(replayed, comparison("c-01", "r-02", "r-01"))
    age(replayed)
    refresh(replayed)
    before = contents(replayed)

    def unexpected(*_):
        raise AssertionError("nothing is new")

    monkeypatch.setattr(record_rows, "comparison_rows", unexpected)
    files = Store.files
    monkeypatch.setattr(Store, "files", lambda *given: files(*given) if given[1].startswith("replays/") else unexpected())
    assert refresh(replayed).comparisons == 0
    assert contents(replayed) == before


@pytest.mark.parametrize("gone", ["r-01", "r-02"])
def test_comparisons_go_with_either_replay_and_come_back_with_it(replayed, tmp_path, gone):
    save(replayed, comparison("c-01", "r-02", "r-01"))
    age(replayed)
    refresh(replayed)
    before = contents(replayed)
    shutil.move(replayed.replays / gone, tmp_path / gone)
    refresh(replayed)
    assert not query.comparisons(replayed)
    shutil.move(tmp_path / gone, replayed.replays / gone)
    refresh(replayed)
    assert contents(replayed) == before


def test_a_comparison_may_come_before_its_replays_and_from_many_processes_at_once(store):
    for number in range(1, 6):
        save(store, comparison(f"c-0{number}", "r-02", "r-01" if number % 2 else None))
    age(store)
    with ProcessPoolExecutor(3) as pool:
        assert all(one.damaged == [] for one in pool.map(refresh, [store] * 6))
    assert not query.comparisons(store)
    for name in ("r-01", "r-02"):
        write_replay(store, name, INPUTS)
    assert {one.comparison_id for one in query.comparisons(store)} == {"c-05", "c-04"}
    found = contents(store)
    assert len(found["comparison"]) == 15
    refresh(store, rebuild=True)
    assert contents(store) == found


def test_a_file_that_is_replaced_at_the_same_moment_is_read_again(replayed):
    for largest in (0.5, 0.4):
        save(replayed, comparison("c-01", "r-02", "r-01", largest=largest))
        refresh(replayed)
    assert [run.max_abs for run in query.comparisons(replayed)] == [0.4]


def test_damaged_files_are_noted_and_forgotten(store):
    damages = {
        '{"format": 1, "half': "corrupt-dump",
        '{"format": 9}': "newer-format",
        comparison("c-01", "r-02", "r-01").to_json(): "corrupt-dump",
    }
    paths = [store.comparisons / f"x-0{number}.json" for number in range(3)]
    for path, text in zip(paths, damages, strict=True):
        atomic_write(path, text.encode())
    age(store)
    assert [item.code for item in refresh(store).damaged] == [*damages.values()]
    assert query.damaged_files(store) == [], "`dump verify` and `dump prune --damaged` are about dumps"
    assert refresh(store).comparisons == 1, "only what a newer actordbg wrote may become readable on its own"
    for path in paths:
        path.unlink()
    assert refresh(store).damaged == []
    assert not query.table_rows(store, ComparisonRun, "1")


def test_a_damaged_file_whose_name_begins_as_another_leaves_that_ones_rows(replayed):
    save(replayed, comparison("c-01", "r-02", "r-01"))
    odd = replayed.comparisons / "c-01#copy.json"
    shutil.copy(replayed.comparisons / "c-01.json", odd)
    age(replayed)
    for count in range(3):
        assert [damaged.path for damaged in refresh(replayed).damaged] == [replayed.relative(odd)]
        assert [row.comparison_id for row in query.comparisons(replayed)] == ["c-01"]
        (replayed.comparisons / f"{count}.txt").touch()  # the folder is listed again


def test_where_knows_the_last_comparison_of_a_dump(replayed):
    dumps = [cases.record(index, dump_id=item.dump_id, run="run", rank=0) for index, item in enumerate(INPUTS)]
    for described in dumps:
        cases.publish(replayed, described)
    save(replayed, comparison("c-01", "r-02", None, verdict=MATCH, largest=0.01))
    save(replayed, comparison("c-02", "r-02", "r-01"))
    catalog = query.open_fresh(replayed)

    def select(where):
        return [row.dump_id for row in query.select_dumps(catalog, where)]

    save(replayed, comparison("c-00", "r-02", "r-01", verdict=MATCH))
    assert [(one.comparison_id, one.verdict) for one in query.comparisons(replayed)] == [("c-02", MISMATCH), ("c-01", MATCH)]
    assert select("compared = 'mismatch'") == [INPUTS[0].dump_id], "the older one was a match"
    assert select("max_abs > 0.2 and against = 'r-01'") == [INPUTS[0].dump_id, INPUTS[1].dump_id]
    assert select("compared = 'not-compared' or max_abs >= 0.5") == [INPUTS[0].dump_id, INPUTS[2].dump_id]
    (replayed.comparisons / "c-02.json").unlink()
    catalog = query.open_fresh(replayed)
    assert [one.comparison_id for one in query.comparisons(catalog)] == ["c-01", "c-00"], "an older one of the pair counts again"
    assert select("compared = 'match'") == [INPUTS[0].dump_id, INPUTS[1].dump_id]
    assert query.count_dumps(catalog, "compared is null") == 0
