"""`actordbg compare-logs`: how logs are read, which rule decides what, what it prints, and how it ends."""

import contextlib
import gzip
import json
import math
import re
import sqlite3
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import logcases
import pytest
from casefiles import cases_of
from commandline import run_here
from hypothesis import assume, given, settings, strategies as st
from roots import json_of, write_json

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.document import page
from actordbg.document.blocks import number
from actordbg.measure.align_logs import LEAST_COMMON, compare_logs, trend
from actordbg.measure.log_exports import LINE
from actordbg.measure.log_lines import TrainLog, read_log

LOGS = cases_of("train_logs")


def text_of(case):
    return re.sub(r"\\(\\|r|x1b)", lambda escaped: {"r": "\r", "x1b": "\x1b"}.get(escaped[1], "\\"), "\n".join(case.given)) + "\n"


SFT, PPO = (next(text_of(case) for name, case in LOGS.items() if word in name) for word in ("SFT", "PPO"))


@pytest.fixture
def logs(tmp_path):
    """Two runs of 24 steps, 2 % apart but for step 13, where they are far apart."""
    losses = [6 - 0.1 * i for i in range(24)]
    (tmp_path / "a.log").write_text(logcases.sft_bars(losses, epochs=3, chance=0.5))
    other = [6.0 if i == 12 else loss * 1.02 for i, loss in enumerate(losses)]
    (tmp_path / "b.log").write_text(logcases.sft_bars(other, epochs=3))
    return str(tmp_path / "a.log"), str(tmp_path / "b.log")


def invoke(*arguments, **options):
    return run_here("compare-logs", *arguments, catch_exceptions=False, **options)


def test_the_answer_has_figures_worst_steps_trend_and_verdict_in_80_columns(logs):
    done = invoke(*logs)
    assert done.exit_code == 0 and done.stdout.startswith(
        "NOT CHECKED: gpt_loss agrees: first value, mean and last value differ by less than 0.05\n  not checked: these "
    )
    assert re.search(r"\n  A +1-24 \(24\) .* falls, \S+ to \S+\n  B +1-24 \(24\) .* falls", done.stdout)
    assert re.search(r"\n +13 +4\.8 +6 +0\.2\n", done.stdout)
    assert "1 of 24 common steps differ by 0.05 or more" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()[1:] if "/" not in line) <= 80


def test_a_stricter_rule_or_threshold_ends_with_1_and_says_why(logs):
    done = invoke(*logs, "--rule", "every-step")
    assert done.exit_code == 1 and done.stdout.startswith("WRONG: 1 step differs by 0.05 or more\n")
    done = invoke(*logs, "--threshold", "0.01", "--limit", "2")
    assert done.exit_code == 1 and "the first value differs by 0.01961, which is not below 0.01" in done.stdout
    assert "and 22 more (--limit 0 lists all)" in done.stdout


def test_nothing_in_common_ends_with_1_and_names_what_each_log_has(tmp_path, logs):
    (tmp_path / "ppo.log").write_text(PPO)
    (tmp_path / "empty.log").write_text("nothing\n")
    done = invoke(logs[0], str(tmp_path / "ppo.log"))
    assert done.exit_code == 1 and "no loss that both logs have" in done.stdout
    assert re.search(r"gpt_loss \(\d+\).*policy_loss \(2\)", " ".join(done.stdout.split()))
    done = invoke(str(tmp_path / "empty.log"), logs[0])
    assert done.exit_code == 1 and "no loss in A" in done.stdout and "no metrics" in " ".join(done.stdout.split())
    done = invoke(*logs, "--metric", "reward", "--json")
    assert done.exit_code == 1 and json_of(done)["verdict"] == "NOT CHECKED"


def test_one_log_may_come_from_standard_input(logs, monkeypatch):
    done = invoke("-", logs[1], input=Path(logs[0]).read_bytes())
    assert done.exit_code == 0 and "1-24 (24)" in done.stdout
    with pytest.raises(UsageError, match="can be only one of the logs"):
        invoke("-", "-")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(EnvironmentProblem, match="standard input is closed"):
        read_log("-")


def test_the_picture_is_written_and_what_has_nothing_to_draw_is_left_out_of_it(tmp_path, logs):
    """NaN, a single step, and logs without the metric."""
    (tmp_path / "wild.log").write_text(logcases.sft_bars([5.0, float("nan"), float("inf"), 4.0], epochs=1))
    (tmp_path / "single.log").write_text(logcases.sft_bars([float("nan")], epochs=1))
    wild, single = str(tmp_path / "wild.log"), str(tmp_path / "single.log")
    sound, other = lines(tmp_path / "c.log", gpt_loss=11), lines(tmp_path / "d.log", loss=10)
    for compared, name, begins in (
        (logs, "a.svg", b"<svg"), ((wild, wild), "b.png", b"\x89PNG"), ((single, single), "c.png", b"\x89PNG"),
        ((sound, other, wild), "d.pdf", b"%PDF"),
    ):  # fmt: skip
        assert invoke(*compared, "-o", str(tmp_path / name)).exit_code == (compared is not logs)
        assert (tmp_path / name).read_bytes().startswith(begins) and (tmp_path / name).stat().st_size > 1000
    assert "Relative difference" in (tmp_path / "a.svg").read_text()


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path):
    missing = str(tmp_path / "missing.log")
    with pytest.raises(UsageError, match=r"cannot write \.gif"):
        invoke(missing, missing, "-o", str(tmp_path / "x.gif"))
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        invoke(missing, missing, "-o", str(tmp_path / "no" / "x.png"))


def test_a_file_is_replaced_so_its_folder_must_be_writable(monkeypatch):
    old = Path(__file__)
    monkeypatch.setattr("os.access", lambda path, mode: path == old)
    with pytest.raises(EnvironmentProblem):
        page.check_place(old)


def test_without_vl_convert_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem) as caught:
        invoke("a.log", "b.log", "-o", str(tmp_path / "x.png"))
    assert f"{sys.executable} -m pip install vl-convert-python" in caught.value.hint


def lines(path, steps=10, **values):
    """A log in which each value falls as 1 / step."""
    told = ({name: value / n for name, value in values.items()} for n in range(1, steps + 1))
    path.write_text("".join(f"Global step {n}: {figures}\n" for n, figures in enumerate(told, 1)))
    return str(path)


def test_all_pairs_of_many_logs_are_of_one_metric_and_called_by_their_letters(tmp_path):
    """The second has the preferred loss only, the third and fourth another: A and B alone would be held together by gpt_loss."""
    a, b = lines(tmp_path / "a.log", gpt_loss=10, loss=50), lines(tmp_path / "b.log", gpt_loss=10.01)
    c, d = lines(tmp_path / "c.log", loss=50.01), lines(tmp_path / "d.log", loss=90)
    done = invoke(a, b, c, d, "-o", str(tmp_path / "x.html"), "-o", str(tmp_path / "x.svg"))
    assert done.exit_code == 1 and done.stdout.startswith("WRONG: the first value differs by 0.4444"), "A and D are far apart"
    assert "A B: no loss in B" in done.stdout and "B C" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()[1:] if str(tmp_path) not in line) <= 80
    assert re.search(r"\n  A +1-10 \(10\) +50 +14\.64 +5 +5 +50 +falls", done.stdout), "and not the figures of a pair without any"
    assert re.search(r"\n  B( +-){7}\n", done.stdout) and re.search(r"\n  A C +10 .* aligned\n", done.stdout)
    assert "44.44%" in (tmp_path / "x.html").read_text(), "the largest difference is that of all pairs"
    assert "C: " in (tmp_path / "x.svg").read_text()
    wild = invoke(a, d, lines(tmp_path / "n.log", loss=float("nan")))
    assert "A C: 10 values of C are NaN or infinite" in " ".join(wild.stdout.split())
    each = json_of(invoke(b, a, d, "--each", "--json"))
    assert each["metric"] == "gpt_loss" and [one["verdict"] for one in each["comparisons"]] == [
        "aligned", "nothing-in-common", "nothing-in-common"
    ]  # fmt: skip


def test_tensorboards_files_and_wandbs_exports_are_logs(tmp_path):
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
    answer = json_of(invoke(log, *exported, str(tmp_path / "events"), "--json"))
    assert [(one["verdict"], one["common"]) for one in answer["comparisons"]] == [("aligned", 12)] * 3
    assert max(one["max_relative"] for one in answer["comparisons"]) < 1e-6
    with pytest.raises(UsageError, match="holds several runs: run-a, run-b"):
        invoke(log, str(tmp_path / "chart.csv"))
    (events,) = (tmp_path / "events").iterdir()
    (tmp_path / "renamed.log").write_bytes(events.read_bytes()[:-9])
    assert read_log(str(tmp_path / "renamed.log")).metrics["gpt_loss"] >= 10, "what is whole of it"


LOSSES_BY_STEP = {2 * n: 6 / n for n in range(1, 9)}


def objects(step="step", name="loss", **more):
    return [{step: at, name: loss} | more for at, loss in LOSSES_BY_STEP.items()]


def trackio(path, rows, table="metrics"):
    """A database as trackio 0.43 makes it: metrics as blobs of JSON, NaN as a text."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        for run, step, value in rows:
            blob = json.dumps({"train/loss": value, "note": "text"}).encode()
            database.execute(f"INSERT INTO {table} VALUES (NULL, 'id', 'now', ?, ?, ?)", (run, step, blob))
        database.commit()


@pytest.mark.parametrize("case", LOGS)
def test_what_a_log_says_of_each_step_is_read_whatever_wrote_it(tmp_path, case):
    text, expected = text_of(LOGS[case]), dict(line.split(": ", 1) for line in LOGS[case].expected)
    nulls = json.loads(expected.pop("nulls", "{}"))
    for line, figures in expected.items():
        metric, kind = line.rsplit(" ", 1)
        series = log_of(tmp_path, text, metric).series[metric]
        values = {int(step): float(value) for step, value in (each.split("=") for each in figures.split())}
        assert points(series[kind]) == pytest.approx(values, nan_ok=True), line
    log = read_log(str(tmp_path / "train.log")) if expected else log_of(tmp_path, text)
    assert bool(expected) == bool(log.series) and log.nulls == nulls


def test_exports_that_are_no_text_are_recognised_by_content(tmp_path):
    (tmp_path / "packed").write_bytes(gzip.compress(json.dumps(objects()).encode()))
    trackio(tmp_path / "database", [("a", at, loss) for at, loss in reversed(LOSSES_BY_STEP.items())])
    for name in ("packed", "database"):
        series = read_log(str(tmp_path / name)).series["loss"]
        assert {kind: points(one) for kind, one in series.items()} == {LINE: pytest.approx(LOSSES_BY_STEP)}


def test_an_export_is_read_from_a_pipe(tmp_path):
    state = json.dumps({"log_history": objects()}, indent=2)
    (tmp_path / "a").write_text(state)
    told = json_of(invoke("-", str(tmp_path / "a"), "--json", input=state.encode()))
    assert (told["common"], told["a"]["last_step"]) == (8, 16)


def test_of_several_runs_in_a_database_one_is_named(tmp_path):
    trackio(tmp_path / "b.db", [("x", 1, 2.0), ("x", 2, "NaN"), ("y", 1, 3.0)])
    with pytest.raises(UsageError, match="several runs: x, y"):
        read_log(str(tmp_path / "b.db"))
    first, second = points(read_log(f"{tmp_path / 'b.db'}#x").series["loss"][LINE]).values()
    assert first == 2.0 and math.isnan(second)
    assert points(read_log(f"{tmp_path / 'b.db'}#y").series["loss"][LINE]) == {1: 3.0}


@pytest.mark.parametrize(
    "begins, named",
    [
        (b"PAR1\x15\x04", "Parquet"), (b"PK\x03\x04", "zip"), (b"\x80\x04\x95", "pickle"), (b":W&B\xe1\xbe\x01", "W&B"),
        (b"\xff\xfel\0", "UTF-16"), (b"\0" * 64, "binary"), (b"SQLite format 3\0", "SQLite"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused_by_its_name(tmp_path, begins, named):
    (tmp_path / "a.log").write_bytes(begins + b"\nstep 1 loss: 2\nstep 2 loss: 1\n")
    with pytest.raises((UsageError, EnvironmentProblem), match=named):
        read_log(str(tmp_path / "a.log"))


@pytest.mark.parametrize(
    "make",
    [
        "CREATE TABLE metrics (loss REAL)", "CREATE VIEW metrics AS SELECT 1 AS run_name, 2 AS step, '{}' AS metrics",
        "CREATE TABLE metrics (run_name, step, metrics, id AS (length(hex(zeroblob(9)))))",
        "CREATE VIRTUAL TABLE metrics USING rtree(id, run_name, step, metrics, more)",
    ],
)  # fmt: skip
def test_a_database_of_another_program_is_refused(tmp_path, make):
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute(make)
    with pytest.raises(UsageError, match="not trackio's"):
        read_log(str(tmp_path / "a.db"))


def test_unequal_numbering_is_not_checked_and_never_wrong(tmp_path):
    """A run that logs each tenth step, beside lines of each step."""
    write_json(tmp_path / "state", {"log_history": [{"step": 10 * n, "loss": 6 / n} for n in range(1, 9)]})
    (tmp_path / "lines").write_text("".join(f"{{'loss': {10 / (n + 1)}}}\n" for n in range(80)))
    done = invoke(str(tmp_path / "state"), str(tmp_path / "lines"), str(tmp_path / "state"), "--json")
    assert (done.exit_code, json_of(done)["verdict"]) == (1, "NOT CHECKED")


def log_of(tmp_path, text, metric=None):
    path = tmp_path / "train.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(str(path), metric)


def points(series):
    assert list(series.points) == sorted(series.points)
    return series.points


def test_a_real_training_has_metrics_besides_its_losses(tmp_path):
    log = log_of(tmp_path, SFT)
    series = log.series["gpt_loss"]["bar"]
    assert (series.rerun, series.totals) == (0, (24,))
    assert set(log.metrics) == {"gpt_loss", "lr", "grad_norm"} and set(log.series) == {"gpt_loss"}
    other = log_of(tmp_path, PPO, "no_such_thing")
    assert other.series == {} and {"policy_loss", "reward", "act_loss"} <= set(other.metrics)


@pytest.mark.parametrize("hurry", [0.0, 0.5, 1.0])
def test_when_a_bar_was_printed_does_not_matter(tmp_path, hurry):
    """tqdm prints on its own clock besides what the trainer asks for; both orders of counting and setting figures."""
    losses = [5 - 0.1 * i for i in range(24)]
    for bar in (logcases.sft_bars, logcases.dpo_bars):
        text = bar(losses, epochs=3, chance=hurry, seed=7)
        (series,) = log_of(tmp_path, text).series["gpt_loss"].values()
        assert points(series) == {i + 1: pytest.approx(loss, abs=0.006) for i, loss in enumerate(losses)}


def test_a_resumed_run_keeps_its_step_numbers(tmp_path):
    whole = logcases.sft_bars([5 - 0.1 * i for i in range(24)], epochs=3)
    second = "Train step of epoch 1" + whole.split("Train step of epoch 1", 1)[1]
    resumed = points(log_of(tmp_path, second).series["gpt_loss"]["bar"])
    assert min(resumed) == 9 and max(resumed) == 24
    both = log_of(tmp_path, whole + second).series["gpt_loss"]["bar"]
    assert (len(both.points), both.rerun) == (24, 16)


def test_gzip_is_read_and_damage_is_said(tmp_path):
    packed = gzip.compress(SFT.encode())
    assert points(log_of(tmp_path, packed).series["gpt_loss"]["bar"])[24] == 7.19
    for broken in (packed[:-9], packed[:40] + b"\0" * 40 + packed[80:]):
        with pytest.raises(EnvironmentProblem, match="damaged"):
            log_of(tmp_path, broken)


@pytest.mark.parametrize("text", ['[{"loss": 1},' + "[]," * 2**21 + "[]]", "step,loss\n" + "1,2\n" * 2**21], ids=["JSON", "CSV"])
def test_few_bytes_do_not_become_millions_of_objects(tmp_path, text):
    with pytest.raises(EnvironmentProblem, match="values"):
        log_of(tmp_path, gzip.compress(text.encode(), 1))


def test_a_database_that_would_be_read_without_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("actordbg.measure.log_exports._MOST_TURNS", 0)
    trackio(tmp_path / "a.db", [("r", step, 1.5) for step in range(100_000)])
    with pytest.raises(EnvironmentProblem, match="interrupted"):
        read_log(str(tmp_path / "a.db"))


def test_what_is_no_file_is_a_usage_error(tmp_path):
    for name, what in (("missing.log", "missing"), (".", "a folder"), ("missing.csv", "missing")):
        with pytest.raises(UsageError, match=what):
            read_log(str(tmp_path / name))


def test_a_folder_that_cannot_be_listed_is_said_to_be_unreadable(tmp_path, monkeypatch):
    def refuse(name):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(EnvironmentProblem, match="cannot read"):
        read_log(str(tmp_path))


def test_memory_does_not_grow_with_repeated_states(tmp_path):
    text = logcases.sft_bars([5 - i / 1000 for i in range(100)], epochs=1)
    (tmp_path / "train.log").write_text(text * 100)
    tracemalloc.start()
    (series,) = read_log(str(tmp_path / "train.log")).series["gpt_loss"].values()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(series.points) == 100 and peak < 12 * 2**20


@pytest.mark.parametrize(
    "text", ["step=1 loss={}x", "8%|8  | 2/24 [1, loss={}x]", "{}%|x", "step{}x loss=1", "eval {}x 8%|8  | 2/24 [1, loss=1]"]
)
@pytest.mark.parametrize("run", ["1", " "])
def test_a_long_run_of_digits_or_spaces_is_read_in_one_go(text, run, tmp_path):
    """A pattern that tried each of them twice would not end today."""
    assert log_of(tmp_path, text.format(run * 1_000_000).encode()).segments == 1


PAIRS = cases_of("log_pairs")


def compared_pair(lines):
    """What the comparison of the logs says that lines of `log_pairs.test` write."""
    logs, asked = {"a": TrainLog("x"), "b": TrainLog("x")}, dict[str, Any]()
    for line in lines:
        name, metric, *values = line.split()
        if name == "null":
            logs["a"].nulls[metric] = 1
        elif name not in logs:
            asked[name] = json.loads(metric)
        if name not in logs:
            continue
        kind, *values = values
        for value in values:
            step, _, figure = value.rpartition("=")
            figure, _, times = figure.partition("*")
            for _ in range(int(times or 1)):
                logs[name].add(metric, kind, int(step) if step else None, float(figure))
    answer = compare_logs(logs["a"], logs["b"], **asked)
    a, b = answer.a, answer.b
    differ = f"median {number(answer.median_relative)}, largest {number(answer.max_relative)}"
    sides = f"{answer.common} common steps by {a.numbered_by} and {b.numbered_by}, means {number(a.mean)} and {number(b.mean)}; {differ}"
    worst = [
        f"step {step.step}: {number(step.a)} {number(step.b)}, {step.note or number(step.relative)}" for step in answer.worst
    ]
    return [f"{answer.metric} {answer.verdict}", sides, *answer.reasons, *answer.notes, *worst]


@pytest.mark.parametrize("case", PAIRS)
def test_a_comparison_says_which_steps_and_metric_decide_and_why(case):
    assert compared_pair(PAIRS[case].given) == PAIRS[case].expected


# ---- OpenRLHF's own decision ----


def backends_aligned(a, b, threshold):
    """What the archived compare_backends.py decides from losses between 0 and 100: it drops others.

    First values, means and last values are compared, each difference relative to the larger of the two; aligned when the
    largest of the three is below the threshold.
    """
    pairs = [(a[0], b[0]), (sum(a) / len(a), sum(b) / len(b)), (a[-1], b[-1])]
    largest = max(abs(x - y) / max(x, y) for x, y in pairs)
    assume(abs(largest - threshold) > 1e-9)  # how sums are rounded must not decide
    return largest < threshold


FORMS = ("'gpt_loss': {}", "gpt_loss: {}", '"gpt_loss": {}', "loss_mean: {}", "'loss_mean': {}")
LOSSES = st.integers(2, 8_900_000).map(lambda n: n / 100_000)
NEAR = st.integers(-120, 120).map(lambda n: 1 + n / 1000)
"""What the second run's loss is of the first's."""


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.tuples(LOSSES, NEAR), min_size=1, max_size=12), st.integers(1, 12), st.sampled_from(FORMS),
    st.sampled_from([0.01, 0.05, 0.1]),
)  # fmt: skip
def test_the_default_rule_decides_as_compare_backends_on_logs_in_its_format(tmp_path_factory, pairs, length, form, threshold):
    """Runs of which the second is often close, or shorter."""
    runs = [loss for loss, _ in pairs], [round(loss * near, 5) for loss, near in pairs][:length]
    read = []
    for name, run in zip("ab", runs, strict=True):
        path = tmp_path_factory.getbasetemp() / name
        path.write_text(logcases.lines([format(loss, "f") for loss in run], form))
        read.append(read_log(str(path)))
    good = backends_aligned(*runs, threshold) and min(map(len, runs)) >= LEAST_COMMON
    assert compare_logs(*read, threshold=threshold).good is good


@pytest.mark.parametrize("options", [{"threshold": 0}, {"threshold": math.nan}, {"rule": "best"}])
def test_options_that_mean_nothing_are_usage_errors(options):
    with pytest.raises(UsageError):
        compare_logs(TrainLog("x"), TrainLog("x"), **options)


# ---- do they fall? ----


def noise(count, scale):
    return [scale * (((i * 7919) % 101) / 50 - 1) for i in range(count)]


@pytest.mark.parametrize(
    "values, word",
    [
        ([5 - 0.02 * i + n for i, n in enumerate(noise(120, 0.3))], "falls"),
        ([3 + 0.02 * i + n for i, n in enumerate(noise(120, 0.3))], "rises"),
        ([3 + n for n in noise(120, 0.3)], "neither falls nor rises"),
        ([2.0] * 50, "neither falls nor rises"),
        ([5 - 0.02 * i for i in range(119)] + [1e6], "falls"),
        ([1e6] + [3 + n for n in noise(119, 0.3)], "neither falls nor rises"),
        ([3.0, 2.0, 1.0], "too few steps to tell"),
    ],
)  # fmt: skip
def test_a_trend_is_told_from_noise_and_outliers(values, word):
    assert trend(values).word == word
