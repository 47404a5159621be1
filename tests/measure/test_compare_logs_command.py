"""`actordbg compare-logs`: what it prints, in 80 columns, its JSON, its picture, and how it ends."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import logcases
import pytest
from typer.testing import CliRunner, Result

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.cli.app import app
from actordbg.document import page
from actordbg.measure.log_lines import read_log


@pytest.fixture
def logs(tmp_path: Path) -> tuple[str, str]:
    """Two runs of 24 steps, 2 % apart but for step 13, where they are far apart."""
    losses = [6 - 0.1 * i for i in range(24)]
    (tmp_path / "a.log").write_text(logcases.sft_bars(losses, epochs=3, chance=0.5))
    other = [6.0 if i == 12 else loss * 1.02 for i, loss in enumerate(losses)]
    (tmp_path / "b.log").write_text(logcases.sft_bars(other, epochs=3))
    return str(tmp_path / "a.log"), str(tmp_path / "b.log")


def invoke(*arguments: str, catch: bool = False) -> Result:
    return CliRunner().invoke(app, ["compare-logs", *arguments], catch_exceptions=catch)


def test_the_answer_has_figures_worst_steps_trend_and_verdict_in_80_columns(logs: tuple[str, str]):
    done = invoke(*logs)
    assert done.exit_code == 0 and "aligned (first value, mean and last value differ by less than 0.05)" in done.stdout
    assert re.search(r"\n  A +1-24 \(24\) .* falls, \S+ to \S+\n  B +1-24 \(24\) .* falls", done.stdout)
    assert re.search(r"\n +13 +4\.8 +6 +0\.2\n", done.stdout)
    assert "1 of 24 common steps differ by 0.05 or more" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "/" not in line) <= 80


def test_a_stricter_rule_or_threshold_ends_with_1_and_says_why(logs: tuple[str, str]):
    done = invoke(*logs, "--rule", "every-step")
    assert done.exit_code == 1 and "A B: 1 step differs by 0.05 or more\n\ndifferent\n" in done.stdout
    done = invoke(*logs, "--threshold", "0.01", "--limit", "2")
    assert done.exit_code == 1 and "the first value differs by 0.01961, which is not below 0.01" in done.stdout
    assert "and 22 more (--limit 0 names all)" in done.stdout


def test_nothing_in_common_ends_with_1_and_names_what_each_log_has(tmp_path: Path, logs: tuple[str, str]):
    (tmp_path / "ppo.log").write_text(logcases.PPO)
    (tmp_path / "empty.log").write_text("nothing\n")
    done = invoke(logs[0], str(tmp_path / "ppo.log"))
    assert done.exit_code == 1 and "no loss that both logs have" in done.stdout
    assert "policy_loss (2)" in " ".join(done.stdout.split()) and re.search(r"gpt_loss \(\d+\)", done.stdout)
    done = invoke(str(tmp_path / "empty.log"), logs[0])
    assert done.exit_code == 1 and "no loss in A" in done.stdout and "no figures at all" in " ".join(done.stdout.split())
    done = invoke(*logs, "--metric", "reward", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["verdict"] == "nothing-in-common"


def test_one_log_may_come_from_standard_input(logs: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    done = CliRunner().invoke(app, ["compare-logs", "-", logs[1]], input=Path(logs[0]).read_bytes())
    assert done.exit_code == 0 and "1-24 (24)" in done.stdout
    with pytest.raises(UsageError, match="cannot be both"):
        invoke("-", "-")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(EnvironmentProblem, match="standard input is closed"):
        read_log("-")


def test_the_picture_is_written_and_what_has_nothing_to_draw_is_left_out_of_it(tmp_path: Path, logs: tuple[str, str]):
    """NaN, a single step, and logs without the metric."""
    (tmp_path / "wild.log").write_text(logcases.sft_bars([5.0, float("nan"), float("inf"), 4.0], epochs=1))
    (tmp_path / "single.log").write_text(logcases.sft_bars([float("nan")], epochs=1))
    wild, single = str(tmp_path / "wild.log"), str(tmp_path / "single.log")
    sound, other = lines(tmp_path / "c.log", gpt_loss=11), lines(tmp_path / "d.log", loss=10)
    for compared, name, begins in (
        (logs, "a.svg", b"<svg"), ((wild, wild), "b.png", b"\x89PNG"), ((single, single), "c.png", b"\x89PNG"),
        ((sound, other, wild), "d.pdf", b"%PDF"),
    ):  # fmt: skip
        assert invoke(*compared, "--plot", str(tmp_path / name)).exit_code == (compared is not logs)
        assert (tmp_path / name).read_bytes().startswith(begins) and (tmp_path / name).stat().st_size > 1000
    assert "How far apart" in (tmp_path / "a.svg").read_text()


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path):
    missing = str(tmp_path / "missing.log")
    with pytest.raises(UsageError, match=r"no picture has the suffix .\.gif"):
        invoke(missing, missing, "--plot", str(tmp_path / "x.gif"))
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        invoke(missing, missing, "--plot", str(tmp_path / "no" / "x.png"))


def test_without_vl_convert_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem) as caught:
        page.check("--plot", tmp_path / "x.png")
    assert f"{sys.executable} -m pip install vl-convert-python" in caught.value.hint


def lines(path: Path, steps: int = 10, **values: float) -> str:
    """A log in which each value falls as 1 / step."""
    told = ({name: value / n for name, value in values.items()} for n in range(1, steps + 1))
    path.write_text("".join(f"Global step {n}: {figures}\n" for n, figures in enumerate(told, 1)))
    return str(path)


def test_all_pairs_of_many_logs_are_of_one_metric_and_called_by_their_letters(tmp_path: Path):
    """The second has the preferred loss only, the third and fourth another: A and B alone would be held together by gpt_loss."""
    a, b = lines(tmp_path / "a.log", gpt_loss=10, loss=50), lines(tmp_path / "b.log", gpt_loss=10.01)
    c, d = lines(tmp_path / "c.log", loss=50.01), lines(tmp_path / "d.log", loss=90)
    done = invoke(a, b, c, d, "--html", str(tmp_path / "x.html"), "--plot", str(tmp_path / "x.svg"))
    assert done.exit_code == 1 and done.stdout.startswith("loss by step") and done.stdout.rstrip().endswith("nothing-in-common")
    assert "A B: no loss in B" in done.stdout and "B C" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 80
    assert re.search(r"\n  A +1-10 \(10\) +50 +14\.64 +5 +5 +50 +falls", done.stdout), "and not the figures of a pair without any"
    assert re.search(r"\n  B( +-){7}\n", done.stdout) and re.search(r"\n  A C +10 .* aligned\n", done.stdout)
    assert "44.44%" in (tmp_path / "x.html").read_text(), "the largest difference is that of all pairs"
    assert "C: " in (tmp_path / "x.svg").read_text()
    wild = invoke(a, d, lines(tmp_path / "n.log", loss=float("nan")))
    assert "A C: 10 values of C are NaN or infinite" in " ".join(wild.stdout.split())
    each = json.loads(invoke(b, a, d, "--each", "--json").stdout)
    assert each["metric"] == "gpt_loss" and [one["verdict"] for one in each["comparisons"]] == [
        "aligned", "nothing-in-common", "nothing-in-common"
    ]  # fmt: skip


def test_tensorboards_files_and_wandbs_exports_are_logs(tmp_path: Path):
    """All of them hold the same losses, so each is aligned with a log of lines, at a difference of nothing but fp32's."""
    losses = {step: 6 / step for step in range(1, 13)}
    log = lines(tmp_path / "lines.log", 12, gpt_loss=6)
    heads = '"Step","run-a - train/gpt_loss","run-a - train/gpt_loss__MIN","run-b - train/gpt_loss"'
    rows = [f'"{step}","{loss}","0","{2 * loss}"' for step, loss in losses.items()]
    (tmp_path / "chart.csv").write_text("\n".join([heads, *rows]))
    note = "a\u2028b\x85c"  # a line separator in a text ends no row
    history = [json.dumps({"_step": n, "train/gpt_loss": loss, "note": note}, ensure_ascii=False) for n, loss in losses.items()]
    (tmp_path / "history.jsonl").write_text("\n".join(history), encoding="utf-8")
    exported = [f"{tmp_path / 'chart.csv'}#run-a", str(tmp_path / "history.jsonl")]
    summary = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path / "events"))
    for step, loss in losses.items():
        summary.add_scalar("train/gpt_loss", loss, step)
    summary.close()
    answer = json.loads(invoke(log, *exported, str(tmp_path / "events"), "--json").stdout)
    assert [(one["verdict"], one["common"]) for one in answer["comparisons"]] == [("aligned", 12)] * 3
    assert max(one["max_relative"] for one in answer["comparisons"]) < 1e-6
    with pytest.raises(UsageError, match="holds several runs: run-a, run-b"):
        invoke(log, str(tmp_path / "chart.csv"))
    (tmp_path / "damaged.tfevents.1").write_bytes(b"\x00" * 64)
    assert json.loads(invoke(log, str(tmp_path / "damaged.tfevents.1"), "--json").stdout)["verdict"] == "nothing-in-common"
