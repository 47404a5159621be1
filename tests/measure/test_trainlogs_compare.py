"""Two training logs held against each other: which rule decides what, and OpenRLHF's own decision on logs in its format."""

from __future__ import annotations

import math
from pathlib import Path

import logcases
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actordbg.base.errors import UsageError
from actordbg.measure.align_logs import LEAST_COMMON, LogComparison, compare_logs, trend
from actordbg.measure.log_lines import BAR, LINE, ORDER, Series, TrainLog, read_log


def log(values: dict[int, float] | list[float], name: str = "gpt_loss", kind: str = BAR, path: str = "x") -> TrainLog:
    points = values if isinstance(values, dict) else dict(enumerate(values, 1))
    series = Series(kind)
    for step, value in points.items():
        series.add(step, value)
    return TrainLog(path, metrics={name: len(points)}, series={name: {kind: series}})


def compared(a: object, b: object, **options: object) -> LogComparison:
    return compare_logs(a if isinstance(a, TrainLog) else log(a), b if isinstance(b, TrainLog) else log(b), **options)


# ---- OpenRLHF's own decision ----


def backends_aligned(a: list[float], b: list[float], threshold: float) -> bool | None:
    """What the archived compare_backends.py decides from the losses that its patterns find; None: it finds none.

    Losses between 0 and 100 count, the others are dropped. First values, means and last values are compared, each
    difference relative to the larger of the two; aligned when the largest of the three is below the threshold.
    """
    ours, theirs = ([value for value in values if 0 < value < 100] for values in (a, b))
    if not ours or not theirs:
        return None
    pairs = [(ours[0], theirs[0]), (sum(ours) / len(ours), sum(theirs) / len(theirs)), (ours[-1], theirs[-1])]
    largest = max(abs(x - y) / max(x, y) for x, y in pairs)
    assume(abs(largest - threshold) > 1e-9)  # how sums are rounded must not decide
    return largest < threshold


FORMS = ("'gpt_loss': {}", "gpt_loss: {}", '"gpt_loss": {}', "loss_mean: {}", "'loss_mean': {}")
LOSSES = st.integers(1, 9_999_999).map(lambda n: n / 100_000)
NEAR = st.integers(-120, 120).map(lambda n: 1 + n / 1000)
THRESHOLDS = st.sampled_from([0.01, 0.05, 0.1])


@st.composite
def two_runs(draw: st.DrawFn, odd: bool = False) -> tuple[list[float], list[float]]:
    """Losses of two runs that are often close, and with `odd` also 0, negative and huge ones; both may differ in length."""
    loss = LOSSES if not odd else st.one_of(LOSSES, st.sampled_from([0.0, -1.5, 100.0, 250.0]))
    a = draw(st.lists(loss, min_size=1, max_size=12))
    b = [round(value * draw(NEAR), 6) for value in a] if draw(st.booleans()) else draw(st.lists(loss, min_size=1, max_size=12))
    return a, [value if odd or 0 < value < 100 else 99.0 for value in b]


def of_lines(folder: Path, losses: list[float], form: str) -> TrainLog:
    path = folder / "losses.log"
    path.write_text(logcases.lines([format(value, "f") for value in losses], form))
    return read_log(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(two_runs(), two_runs(odd=True), st.sampled_from(FORMS), THRESHOLDS)
def test_the_default_rule_and_the_rule_of_its_name_decide_as_compare_backends_on_logs_in_its_format(
    folder: Path, usual: tuple[list[float], list[float]], odd: tuple[list[float], list[float]], form: str, threshold: float
):
    for runs, rule, least in ((usual, "first-mean-last", LEAST_COMMON), (odd, "compare-backends", 1)):
        a, b = ([float(format(value, "f")) for value in run] for run in runs)
        answer = compare_logs(of_lines(folder, a, form), of_lines(folder, b, form), threshold=threshold, rule=rule)
        assert answer.good is bool(backends_aligned(a, b, threshold) and min(len(a), len(b)) >= least)
        assert answer.a.left_out == (sum(not 0 < value < 100 for value in a) if rule == "compare-backends" else 0)


# ---- steps ----


def test_steps_are_matched_by_their_number_and_not_by_their_place():
    a = log({step: 5 - step / 100 for step in range(1, 101)})
    b = log({step: 5 - step / 100 for step in range(61, 101)})
    answer = compared(a, b, rule="every-step")
    assert answer.good and (answer.common, answer.only_a, answer.only_b, answer.max_relative) == (40, 60, 0, 0.0)
    assert "A has 100 steps, B 40; 40 are in both" in answer.notes
    assert compared(a, b).good and not compared(a, b, rule="compare-backends").good


def test_the_worst_steps_come_first_and_are_limited():
    a = dict.fromkeys(range(1, 11), 1.0)
    b = a | {3: 1.5, 5: 1.1, 7: 1.2}
    answer = compared(a, b, rule="every-step", limit=2)
    assert answer.median_relative == 0 and compared({1: 1.0, 2: 1.0}, {1: 1.0, 2: 0.5}).median_relative == 0.25
    assert ([one.step for one in answer.worst], answer.exceeding) == ([3, 7], 3)
    assert answer.worst[0].relative == pytest.approx(1 / 3)
    assert [one.step for one in compared(a, b, limit=0).worst] == [3, 7, 5]


WILD, ONE_BAD = [math.nan] * 3, [2.0] * 50 + [4.0] + [2.0] * 49


@pytest.mark.parametrize(
    ("a", "b", "options", "verdict"),
    [
        ({1: 5.0}, {2: 5.0}, {}, "nothing-in-common"),
        ([2.0] * 100, ONE_BAD, {}, "aligned"),
        ([2.0] * 100, ONE_BAD, {"rule": "every-step"}, "different"),
        ([100.0] * 8, [75.0] * 8, {"threshold": 0.25, "rule": "every-step"}, "different"),
        ([100.0] * 8, [76.0] * 8, {"threshold": 0.25, "rule": "every-step"}, "aligned"),
        (WILD, WILD, {}, "different"),
        (WILD, WILD, {"rule": "compare-backends"}, "different"),
        ([0.0, -0.5, 0.0], [0.0, -0.5, 0.0], {"rule": "every-step"}, "aligned"),
        ([-0.5] * 3, [0.5] * 3, {"rule": "every-step", "threshold": 1.9}, "different"),
    ],
)
def test_the_threshold_is_strict_and_a_step_in_the_middle_decides_only_under_every_step(
    a: object, b: object, options: dict[str, object], verdict: str
):
    assert compared(a, b, **options).verdict == verdict


@pytest.mark.parametrize(("rule", "wild"), [("first-mean-last", math.nan), ("every-step", -math.inf)])
@pytest.mark.parametrize("both", [True, False])
def test_nan_and_infinity_are_never_a_success(rule: str, wild: float, both: bool):
    a, b = [2.0] * 5 + [wild] + [2.0] * 5, [2.0] * 5 + [wild if both else 2.0] + [2.0] * 5
    answer = compared(a, b, rule=rule)
    assert not answer.good and answer.a.nonfinite_steps == (6,) and answer.b.nonfinite == int(both)
    assert "1 value of A is NaN or infinite (step 6)" in answer.reasons and answer.a.mean == 2.0
    assert (answer.worst[0].step, answer.worst[0].relative) == (6, None) and "A is" in answer.worst[0].note


# ---- which metric ----


def several(**series: list[float]) -> TrainLog:
    logs = {name: log(values, name) for name, values in series.items()}
    return TrainLog("x", metrics=dict.fromkeys(series, 1), series={name: one.series[name] for name, one in logs.items()})


def test_the_preferred_loss_that_both_have_is_compared():
    a = several(loss_mean=[1.0], act_loss=[1.0], zz_loss=[1.0], gpt_loss=[1.0])
    assert compared(a, a).metric == "gpt_loss"
    assert compared(a, several(zz_loss=[1.0], act_loss=[1.0], loss_mean=[1.0])).metric == "act_loss"
    assert compared(a, several(zz_loss=[1.0])).metric == "zz_loss"
    evaluated = several(**{"eval gpt_loss": [1.0], "zz_loss": [1.0]})
    assert compared(evaluated, evaluated).metric == "zz_loss"


def test_numbering_that_both_have_is_preferred():
    both = TrainLog(
        "x",
        series={"loss": log([1.0] * 4, "loss", ORDER).series["loss"] | log([2.0] * 4, "loss", LINE).series["loss"]},
    )
    ordered = log([1.0] * 4, "loss", ORDER)
    assert (compared(both, both).a.numbered_by, compared(both, ordered).a.numbered_by) == (LINE, ORDER)
    answer = compared(log([1.0] * 4, "loss", LINE), ordered)
    assert any("number their steps differently" in note for note in answer.notes)


def test_options_that_mean_nothing_are_usage_errors():
    for options in ({"threshold": 0}, {"threshold": math.nan}, {"rule": "best"}):
        with pytest.raises(UsageError):
            compared([1.0], [1.0], **options)


# ---- do they fall? ----


def noise(count: int, scale: float) -> list[float]:
    return [scale * (((i * 7919) % 101) / 50 - 1) for i in range(count)]


@pytest.mark.parametrize(
    ("values", "word"),
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
def test_a_trend_is_told_from_noise_and_outliers(values: list[float], word: str):
    assert trend(values).word == word
