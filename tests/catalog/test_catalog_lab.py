"""Files of comparisons, noise floors and matrices as rows: incrementally, from damaged and vanished files, and the same again after a rebuild."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import catalogcases as cases
import pytest
from catalogcases import contents
from comparecases import given, write_replay

from actordbg.catalog import query, record_rows
from actordbg.catalog.indexer import refresh
from actordbg.formats.store_files import atomic_write
from actordbg.judge.comparing import save
from actordbg.records.comparison_record import (
    MATCH,
    MISMATCH,
    NOT_COMPARED,
    ComparisonRecord,
    DumpComparison,
    DumpNoise,
    Figures,
    NoiseRecord,
    SideInfo,
)
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.store.layout import Store


def cells_of(store: Store) -> list[Any]:
    return query.table_rows(store, "matrix_cell", "1 ORDER BY cell")


INPUTS = [given(index) for index in range(3)]
TOKENS = Figures(10, max_abs=0.5, mean_abs=0.125, p99_abs=0.25, cosine=1.0, kl_k3=0.01, clip_share=0.1, max_ulp=3)


def comparison(name: str, a: str, b: str | None, *, verdict: str = MISMATCH, largest: float = 0.5) -> ComparisonRecord:
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


def noise(name: str, largest: float = 0.5) -> NoiseRecord:
    floor = {"max_abs": largest, "clip_share": 0.1}
    return NoiseRecord(
        name, "2025-06-20T00:00:00.000000Z", "r-01", {"dtype": "bf16"}, "tiny bf16", "bf16", (),
        (DumpNoise(INPUTS[0].dump_id, floor),), floor,
    )  # fmt: skip


def matrix(name: str, status: str, *cells: MatrixCell) -> MatrixRecord:
    return MatrixRecord(name, "2025-06-20T00:00:00.000000Z", status, {"attn": ["sdpa"]}, cells, (INPUTS[0].dump_id,), loads=1)


def cell(index: int, **values: Any) -> MatrixCell:
    return MatrixCell(index, f"cell {index}", {"attn": "sdpa"}, values.pop("status", "passed"), {}, **values)


def write(store: Store, record: NoiseRecord | MatrixRecord) -> Path:
    folder, name = (store.noise, record.noise_id) if isinstance(record, NoiseRecord) else (store.matrices, record.matrix_id)
    path = folder / f"{name}.json"
    atomic_write(path, record.to_json().encode())
    return path


def age(store: Store) -> None:
    """As if the files and folders had been there for a minute: file times that young are not relied on."""
    then = time.time_ns() - 60_000_000_000
    for folder in (store.comparisons, store.noise, store.matrices):
        for path in [*folder.glob("*.json"), *([folder] if folder.is_dir() else [])]:
            os.utime(path, ns=(then, then))


@pytest.fixture
def replayed(store: Store) -> Store:
    for name in ("r-01", "r-02"):
        write_replay(store, name, INPUTS, result=lambda index: {"golden_count": 5, "golden_max_abs": 0.75})
    return store


def test_everything_becomes_rows_and_again_after_a_rebuild(replayed: Store) -> None:
    save(replayed, comparison("c-01", "r-02", "r-01"))
    save(replayed, comparison("c-02", "r-02", None))
    write(replayed, noise("n-01"))
    write(
        replayed,
        matrix(
            "m-01",
            "complete",
            cell(0, verdict=MATCH, replay_id="r-01", max_abs=0.1, excludes={"token": 0.3}),
            cell(1, violations=("x", "y")),
        ),
    )
    assert refresh(replayed).lab == 4
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
    found_dumps = query.table_rows(replayed, "comparison", "comparison_id = 'c-01' ORDER BY dump_id")
    assert [(row.dump_id, row.verdict, row.max_abs, row.max_ulp, row.reasons) for row in found_dumps] == [
        (INPUTS[0].dump_id, MISMATCH, 0.5, 3, "why"),
        (INPUTS[1].dump_id, MATCH, 0.25, 3, None),
        (INPUTS[2].dump_id, NOT_COMPARED, None, None, "dump not compared: A: it hung"),
    ]
    (floor,), (made,) = query.table_rows(replayed, "noise_floor", "1"), query.table_rows(replayed, "matrix", "1")
    assert (floor.noise_id, floor.inputs, floor.floor) == ("n-01", 1, {"max_abs": 0.5, "clip_share": 0.1})
    assert (made.matrix_id, made.status, made.axes, made.loads) == ("m-01", "complete", {"attn": ["sdpa"]}, 1)
    assert [(c.name, c.status, c.verdict, c.max_abs, c.excludes, c.violations) for c in cells_of(replayed)] == [
        ("cell 0", "passed", MATCH, 0.1, {"token": 0.3}, None),
        ("cell 1", "passed", None, None, {}, "x; y"),
    ]


def test_nothing_is_read_when_nothing_changed(replayed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(replayed, comparison("c-01", "r-02", "r-01"))
    write(replayed, noise("n-01"))
    write(replayed, matrix("m-01", "complete", cell(0)))
    age(replayed)
    refresh(replayed)
    before = contents(replayed)

    def unexpected(*_: Any) -> Any:
        raise AssertionError("nothing is new")

    monkeypatch.setattr(record_rows, "read_record", unexpected)
    files = Store.files
    monkeypatch.setattr(Store, "files", lambda *given: files(*given) if given[1].startswith("replays/") else unexpected())
    assert refresh(replayed).lab == 0
    assert contents(replayed) == before


@pytest.mark.parametrize("gone", ["r-01", "r-02"])
def test_comparisons_go_with_either_replay_and_come_back_with_it(replayed: Store, tmp_path: Path, gone: str) -> None:
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


def test_a_comparison_may_come_before_its_replays_and_from_many_processes_at_once(store: Store) -> None:
    for number in range(1, 6):
        save(store, comparison(f"c-0{number}", "r-02", "r-01" if number % 2 else None))
        write(store, matrix(f"m-0{number}", "running", cell(0), cell(1)))
    age(store)
    with ProcessPoolExecutor(3) as pool:
        assert all(one.damaged == [] for one in pool.map(refresh, [store] * 6))
    assert not query.comparisons(store)
    for name in ("r-01", "r-02"):
        write_replay(store, name, INPUTS)
    assert {one.comparison_id for one in query.comparisons(store)} == {"c-05", "c-04"}
    found = contents(store)
    assert (len(found["comparison"]), len(found["matrix_cell"])) == (15, 10)
    refresh(store, rebuild=True)
    assert contents(store) == found


def test_a_matrix_is_read_again_while_it_runs(store: Store) -> None:
    write(store, matrix("m-01", "running", cell(0, status="not run")))
    refresh(store)
    write(store, matrix("m-01", "running", cell(0, status="passed ")))
    refresh(store)
    assert [one.status for one in cells_of(store)] == ["passed "], "of the same size, in the same moment"
    write(store, matrix("m-01", "complete", cell(0), cell(1)))
    age(store)
    refresh(store)
    (made,) = query.table_rows(store, "matrix", "1")
    assert (made.status, len(cells_of(store))) == ("complete", 2)
    (store.matrices / "m-01.json").unlink()
    assert not query.table_rows(store, "matrix", "1") and not cells_of(store)


@pytest.mark.parametrize("folder", ["comparisons", "matrices"])
def test_damaged_files_are_noted_and_forgotten(store: Store, folder: str) -> None:
    other = comparison("c-01", "r-02", "r-01") if folder == "comparisons" else matrix("m-01", "complete")
    damages = {
        '{"format": 1, "half': "corrupt-dump",
        '{"format": 9}': "newer-format",
        other.to_json(): "corrupt-dump",
    }
    paths = [store.root / folder / f"x-0{number}.json" for number in range(3)]
    for path, text in zip(paths, damages, strict=True):
        atomic_write(path, text.encode())
    age(store)
    assert [item.code for item in refresh(store).damaged] == [*damages.values()]
    assert query.damaged_files(store) == [], "`dump verify` and `dump prune --damaged` are about dumps"
    assert refresh(store).lab == 1, "only what a newer actordbg wrote may become readable on its own"
    for path in paths:
        path.unlink()
    assert refresh(store).damaged == []
    assert not query.table_rows(store, "comparison_run", "1") and not query.table_rows(store, "matrix", "1")


def test_a_damaged_file_whose_name_begins_as_another_leaves_that_ones_rows(replayed: Store) -> None:
    save(replayed, comparison("c-01", "r-02", "r-01"))
    odd = replayed.comparisons / "c-01#copy.json"
    shutil.copy(replayed.comparisons / "c-01.json", odd)
    age(replayed)
    for count in range(3):
        assert [damaged.path for damaged in refresh(replayed).damaged] == [replayed.relative(odd)]
        assert [row.comparison_id for row in query.comparisons(replayed)] == ["c-01"]
        (replayed.comparisons / f"{count}.txt").touch()  # the folder is listed again


def test_where_knows_the_last_comparison_of_a_dump(replayed: Store) -> None:
    dumps = [cases.record(index, dump_id=item.dump_id, run="run", rank=0) for index, item in enumerate(INPUTS)]
    for described in dumps:
        cases.publish(replayed, described)
    save(replayed, comparison("c-01", "r-02", None, verdict=MATCH, largest=0.01))
    save(replayed, comparison("c-02", "r-02", "r-01"))
    catalog = query.open_fresh(replayed)

    def select(where: str) -> list[str]:
        return [row.dump_id for row in query.select_dumps(catalog, where)]

    save(replayed, comparison("c-00", "r-02", "r-01", verdict=MATCH))
    assert [(one.comparison_id, one.verdict) for one in query.comparisons(replayed)] == [("c-02", MISMATCH), ("c-01", MATCH)]
    assert select("verdict = 'mismatch'") == [INPUTS[0].dump_id], "the older one was a match"
    assert select("max_abs > 0.2 and against = 'r-01'") == [INPUTS[0].dump_id, INPUTS[1].dump_id]
    assert select("verdict = 'not-compared' or max_abs >= 0.5") == [INPUTS[0].dump_id, INPUTS[2].dump_id]
    (replayed.comparisons / "c-02.json").unlink()
    catalog = query.open_fresh(replayed)
    assert [one.comparison_id for one in query.comparisons(catalog)] == ["c-01", "c-00"], "an older one of the pair counts again"
    assert select("verdict = 'match'") == [INPUTS[0].dump_id, INPUTS[1].dump_id]
    assert query.count_dumps(catalog, "verdict is null") == 0
