"""Benchmarks do not rot: each runs at toy size, or at least finds everything that it imports. Their figures are judged by nobody here."""

import ast
import functools
import importlib
import os

import pytest
from amounts import WHOLE
from roots import ROOT


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """`benchmarks` is a folder of the checkout, and no part of what is installed; also for processes that it starts."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


def bench(name):
    return importlib.import_module(f"benchmarks.bench_{name}")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path):
    """Also what it imports inside of a function, and in a program that it starts."""
    text = path.read_text()
    programs = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for code in [text, *(one for one in programs if one.startswith("\nimport "))]:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("actordbg", "benchmarks"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}"), name.name


def recording_and_files(monkeypatch):
    capture = bench("capture")
    monkeypatch.setattr("benchmarks.real_step.SETTLE_SECONDS", 0.1)
    monkeypatch.setattr("actordbg.capture.watch.POLL_SECONDS", 0.02)
    monkeypatch.setattr(capture, "DEATHS", ("process",))
    monkeypatch.setattr(capture, "KILLED", 3)
    rows = {row.name: row for row in capture.run(1, 2, deaths=WHOLE)}
    assert len(rows) == 10 + 9 + 4 + 4 + 1 + 1 + (2 if WHOLE else 0)
    assert rows["bytes of a call, ours / pickle"].ratio < 0.5
    if WHOLE:
        assert rows["after kill -9, inputs left, process"].ratio == 1 and rows["full disk, steps made, process"].ratio in (0, 1)
    judged = [row.within is not None for row in bench("step").run(3, 2)]
    assert judged == [False, True, *5 * [False], False, True, False, True]
    assert len(bench("formats").run(6)) == 9


@pytest.mark.slow
def test_the_catalog_and_its_growth_are_measured_and_drawn(tmp_path):
    rows = bench("index").run(12, 3000, many=16)
    assert len(rows) == 8 and all(row.ours > 0 for row in rows)
    growth = bench("growth")
    rows = growth.run((8, 32), (50, 400), tmp_path / "growth.svg")
    assert len(rows) == len(growth.GOALS) and (tmp_path / "growth.svg").stat().st_size > 1000
    assert growth.exponent({10: 3.0, 100: 30.0, 1000: 300.0}) == pytest.approx(1)


@pytest.mark.slow
def test_loading_packs_and_comparing_are_measured(monkeypatch, tmp_path):
    load, pack = bench("load"), bench("pack")
    few = functools.partial(load._generate, count=6)
    for module in (load, pack):
        monkeypatch.setattr(module, "REAL", tmp_path / "nowhere")
        monkeypatch.setattr(module, "_generate", few)
    monkeypatch.setattr(pack, "_end_to_end", lambda: None)  # six replays with a real worker
    assert len(load.run(1)) == 4 and len(pack.run(1)) == 8
    lab = bench("lab")
    monkeypatch.setattr(lab, "DUMPS", 3)
    assert lab._compare().ours > 0


def commands(monkeypatch):
    cli = bench("cli")
    monkeypatch.setattr(cli, "every_command", lambda contents: [("dump ls", None), ("ui", None)])
    rows = cli.run(1, 1, dumps=2)
    assert len(rows) == 4 and all(0 < row.ours < 60 for row in rows)


def workers(monkeypatch):
    replay = bench("replay")
    with replay._environment():
        rows = [*bench("first").run(1, ("plain",)), replay._overhead(replay.Shape(1, 16, 3))]
    assert [row.within is not None and row.ours > 0 for row in rows] == [True, True]


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="make whole")
@pytest.mark.parametrize("what", [recording_and_files, commands, workers], ids=lambda one: one.__name__)
def test_what_starts_processes_is_measured(what, monkeypatch):
    what(monkeypatch)


def test_the_table_names_each_row_and_goes_on_after_one_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.best.FILE", tmp_path / "best.json")
    table, rows = importlib.import_module("benchmarks.__main__"), importlib.import_module("benchmarks.rows")
    for name in (*table.NAMES, *table.MORE):
        assert callable(bench(name).run)
    made = rows.Row("ours / theirs", 2.0, 3.0, "s", 0.6667, "<= 0.5", "busy", False)
    monkeypatch.setattr(bench("load"), "run", lambda: [made])
    monkeypatch.setattr(bench("replay"), "run", lambda: 1 // 0)
    assert table.main(["replay", "load"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "| ours / theirs | 2 s | 3 s | 0.6667 | <= 0.5 | NOT MET | busy |"
    assert "COULD NOT BE RUN" in said[-2] and "ZeroDivisionError" in said[-2]


def test_a_row_is_held_against_its_best_day_beyond_twice_its_noise(tmp_path):
    best, rows, file = (
        importlib.import_module("benchmarks.best"),
        importlib.import_module("benchmarks.rows"),
        tmp_path / "best.json",
    )

    def told(small, large):
        least = rows.Row("step, ours / off", 1, 1, "s", ratio=small, budget="<= 1.1", within=True)
        most = rows.Row("pickles / dumps", 1, 1, "s", ratio=large, budget=">= 3", within=True)
        aside = rows.Row("without a goal", 1, 1, "s", ratio=small, within=None)
        return [words.split(":")[0] for words in best.update([least, most, aside], file)]

    assert [told(1.00, 20), told(1.02, 21), told(1.01, 22)] == [[], [], []], "three runs tell the noise: 0.01 and 1"
    assert told(1.02, 20.5) == []
    assert told(1.10, 20.5) == ["step, ours / off"]
    assert told(1.00, 10.0) == ["pickles / dumps"]
    kept = best.read(file)
    assert sorted(kept) == ["pickles / dumps", "step, ours / off"] and kept["step, ours / off"].ratio == 1.0
    assert kept["pickles / dumps"].ratio == 22 and list(kept["pickles / dumps"].runs)[-1] == 10.0
