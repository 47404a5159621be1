"""`report --to`: what a tracker gets of a replay; and `report` of many, which begins with what differs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from comparecases import given, write_replay
from typer.testing import CliRunner

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.cli.app import app
from actordbg.store.layout import Store

INPUTS = [given(index) for index in range(3)]


def report(store: Store, *words: str) -> Any:
    done = CliRunner().invoke(app, ["--store", str(store.root), "report", *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture()
def measured(store: Store) -> Store:
    write_replay(
        store, "r-01", INPUTS, name="packed", packing=True, result=lambda index: {"forward_s": 1.0 + index, "tokens": 10}
    )
    return store


def test_tensorboard_gets_the_reports_figures_and_each_input(measured: Store, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    said = report(measured, "r-01", "--to", f"tensorboard:{tmp_path / 'runs'}").stderr
    assert "tensorboard --logdir" in said
    events = loader.EventAccumulator(str(tmp_path / "runs" / "packed-r-01"))
    events.Reload()
    assert [one.value for one in events.Scalars("inputs/passed")] == [3]
    assert [(one.step, one.value) for one in events.Scalars("input/forward_s")] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert [one.value for one in events.Scalars("time/forward_median_s")] == [2.5]
    page = tmp_path / "r.html"
    said = report(measured, "r-01", "--to", f"tensorboard:{tmp_path / 'more'}", "--output", str(page)).stderr
    assert "tensorboard --logdir" in said and page.read_text().startswith("<!")


def test_other_trackers_get_the_same_under_the_replays_name(measured: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []
    run = SimpleNamespace(log=lambda found, step: got.append((step, found)), summary={}, finish=lambda: got.append("end"))
    wandb = ModuleType("wandb")
    monkeypatch.setattr(wandb, "init", lambda **about: got.append(about) or run, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    report(measured, "packed", "--to", "wandb:ppo")
    assert (got[0]["project"], got[0]["name"], got[0]["config"]["packing"]) == ("ppo", "packed-r-01", "True")
    assert got[1] == (0, {"input/forward_s": 1.0}) and got[-1] == "end" and run.summary["inputs/passed"] == 3
    mlflow = ModuleType("mlflow")
    monkeypatch.setattr(
        mlflow, "set_tracking_uri", lambda where: (_ for _ in ()).throw(OSError(f"{where}\nis down")), raising=False
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with pytest.raises(EnvironmentProblem, match="mlflow at http://x did not take the figures: http://x is down"):
        report(measured, "--to", "mlflow:http://x")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(EnvironmentProblem, match="mlflow is not installed"):
        report(measured, "--to", "mlflow:http://x")
    for wrong in ("tensorboard", "tensorboard:", "elsewhere:x"):
        with pytest.raises(UsageError, match="is no tracker"):
            report(measured, "--to", wrong)


def test_a_report_of_many_says_what_differs_and_what_failed_and_not_each_ones_tables(measured: Store) -> None:
    failed = {"status": "failed", "error_class": "ValueError", "error": "no such thing"}
    for number in range(2, 8):
        write_replay(measured, f"r-0{number}", INPUTS, dtype="bf16", result=lambda index, bad=number == 5: failed if bad else {})
    said = report(measured, "--all").stdout
    assert len(said.splitlines()) < 60 and "7 replays side by side" in said and "ValueError: 3 inputs, 3 failed" in said
    assert "Time and memory" not in said and "Steady times" not in said and "actordbg report --explain" in said
    assert "Time and memory" in report(measured, "--all", "--format", "md").stdout
    assert "Time and memory" in report(measured, "r-01", "r-02").stdout
    assert "Steady times" in report(measured, "--explain").stdout
