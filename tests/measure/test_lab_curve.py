"""Memory and time over length: which inputs are points, which lengths fit, and how each answer came about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from curvecases import LENGTHS, gigabytes, run, square

from actordbg.config.replay_config import ReplayConfig
from actordbg.measure.curves import CurveAnswer, CurvesAnswer, answer
from actordbg.measure.measurements import gather
from actordbg.replay.replay_data import ReplayData


def curves(*replays: ReplayData, quantity: str = "memory", by: str = "seq_len", **asked: object) -> CurvesAnswer:
    return answer(gather(replays, by), quantity, by, **asked)


def one(*replays: ReplayData, **asked: object) -> CurveAnswer:
    (found,) = curves(*replays, **asked).curves
    return found


# ---- points ----


def test_memory_is_the_largest_and_time_the_median_of_a_lengths_inputs():
    data = run(lengths=(128, 256), backward=square)
    data.results[1].peak_memory_bytes, data.results[1].forward_s = 5 * 10**9, 3.0
    points = {point.n: point for point in gather([data])[0].points}
    assert (points[128].inputs, points[128].memory) == (2, 5e9)
    assert points[128].forward == pytest.approx((3.0 + square(128)) / 2)
    assert points[256].both == pytest.approx(2 * square(256))


def test_warm_up_is_no_time_and_compiling_no_memory():
    data = run(lengths=(128, 256))
    data.results[3].graphs, data.results[3].peak_memory_bytes, data.results[3].forward_s = 1, 9 * 10**9, 60.0
    (found,) = gather([data])
    points = {point.n: point for point in found.points}
    assert points[64].forward is None and points[64].memory == gigabytes(64)
    assert points[256].memory == gigabytes(256) and points[256].forward == square(256)
    assert found.left_out == 2


def test_configurations_batch_sizes_and_passes_are_kept_apart():
    found = gather([run("a"), run("b", attn="eager"), run("c", batch=4), run("d", backward=square), run("e")])
    assert [(len(m.replays), m.settings["attn"], m.batch_size, m.backward) for m in found] == [
        (2, "sdpa", 2, False), (1, "eager", 2, False), (1, "sdpa", 4, False), (1, "sdpa", 2, True)
    ]  # fmt: skip
    (padded,) = gather([run("a"), run("b", batch=4)], "padded")
    assert {point.n for point in padded.points} >= {256, 512, 8192}
    assert [point.n for point in gather([run("a", lengths=(128,))], "tokens")[0].points] == [118, 246]


def test_truths_noise_variants_and_failures_are_no_points():
    data = run()
    others = [
        replace(data, spec=replace(data.spec, config=ReplayConfig(**extra))) for extra in ({"truth": "fp32"}, {"vary": "repad"})
    ]
    assert gather(others) == []
    for result in data.results[:-1]:
        result.status = "failed"
    assert [point.n for point in gather([data])[0].points] == [2048], "nor are failures"


# ---- out of memory ----


def test_out_of_memory_bounds_its_configuration_and_larger_batches_of_it():
    found = gather([run("a", oom=[4096]), run("b", batch=8), run("c", batch=1), run("d", attn="eager")])
    assert [(m.batch_size, m.settings["attn"], m.out_of_memory) for m in found] == [
        (2, "sdpa", [4096]), (8, "sdpa", [4096]), (1, "sdpa", []), (2, "eager", [])
    ]  # fmt: skip


@pytest.mark.parametrize("turned", [1, -1])
def test_what_does_not_fit_forward_does_not_fit_backward_either_but_not_the_other_way_round(turned: int):
    trained = run("b", backward=square, oom=[4096])
    trained.results[-1].forward_s = 1.0
    forward = [run("b", backward=square), run("a", oom=[4096], config=ReplayConfig(backward=False))]
    assert [m.out_of_memory for m in gather([run("a"), trained])] == [[], [4096]]
    assert [m.out_of_memory for m in gather(forward[::turned])] == [[4096], [4096]]


FLAT, EIGHT = {"measured": 2048, "by_curve": None}, {"budget": 80e9}


@pytest.mark.parametrize(
    ("replayed", "asked", "longest", "lengths"),
    [
        ({"oom": [1024]}, EIGHT | {"at": [2048]}, {"measured": 512, "by_curve": 1023}, [("out of memory", "no", False)]),
        (
            {"oom": [4096]}, EIGHT | {"at": [4095, 4096]},
            {"how": "measured", "measured": 2048, "too_long": 4096, "by_curve": 4095, "high": 4095},
            [("extrapolated", "yes", False), ("out of memory", "no", False)],
        ),
        ({}, {"budget": 1.6e9}, {"how": "measured", "measured": 512, "too_long": 1024, "by_curve": 600, "far": False}, []),
        ({}, {"budget": 1.03e9}, {"measured": None, "too_long": 64, "how": "extrapolated", "by_curve": 30}, []),
        ({}, {"budget": 1e8}, {"by_curve": None}, []),
        ({}, {"budget": 4e9}, {"far": False}, []),
        (
            {}, {"budget": 9e9},
            {"how": "extrapolated", "measured": 2048, "too_long": None, "far": True, "by_curve": pytest.approx(8000, rel=0.01), "refused": None},
            [],
        ),
        (
            {}, EIGHT | {"at": [8192, 8193]}, {"measured": 2048, "by_curve": None, "high": None, "refused": pytest.approx(79_000, rel=0.01)},
            [("extrapolated", "yes", True), ("unknown", "unsure", True)],
        ),
        # one wild measurement; the longest far above the line, which the curve takes for an outlier
        ({"memory": lambda n: 3e10 if n == 256 else gigabytes(n)}, {"budget": 2.8e9}, {"measured": 1536, "too_long": 2048}, []),
        (
            {"memory": lambda n: 2e10 if n == 2048 else gigabytes(n)}, {"budget": 5e9, "at": [1000, 2049]}, {"too_long": 2048},
            [("interpolated", "yes", False), ("extrapolated", "no", False)],
        ),
        # scores of eager attention under a floor of libraries: at 65,536 they take 430 GB
        *(
            (
                {"memory": lambda n, last=last: last if n == 2048 else 5e8}, {"budget": 4e9, "at": [100, 4096]}, {"measured": 2048},
                [("interpolated", "yes", False), ("extrapolated", "unsure", False)],
            )
            for last in (5e8, 5.5e8)
        ),
        ({"lengths": (128,)}, {"budget": 1.1e9, "at": [128, 129]}, {"measured": 64}, [("measured", "no", False), ("unknown", "no", False)]),
        ({"lengths": (128,)}, EIGHT | {"at": [4096]}, {"measured": 128}, [("unknown", "unsure", False)]),
        ({"lengths": (128, 256)}, EIGHT | {"at": [1000]}, {"measured": 256}, [("extrapolated", "unsure", True)]),
        (
            {}, {"budget": 6e9, "at": [100, 512, 700, 3000, 5000]}, {},
            [("interpolated", "yes", False), ("measured", "yes", False), ("interpolated", "yes", False),
             ("extrapolated", "yes", False), ("extrapolated", "unsure", True)],
        ),
    ],
)  # fmt: skip
def test_a_length_says_whether_it_fits_and_where_the_answer_comes_from(
    replayed: dict[str, Any], asked: dict[str, Any], longest: dict[str, Any], lengths: list[tuple[str, str, bool]]
):
    """What ran out of memory never fits, nor what is longer; far beyond what ran nothing is said."""
    answered = curves(run(**replayed), **asked)
    (found,) = answered.curves
    assert {name: getattr(found.longest, name) for name in longest} == longest
    assert [(at.how, at.fits, at.far) for at in found.at] == lengths
    assert answered.good is (all(fits == "yes" for _, fits, _ in lengths) and not (found.longest.refused and not lengths))


def test_a_length_within_the_curves_error_of_the_budget_is_unsure():
    def wavy(n: int) -> float:
        return gigabytes(n) * (1.1 if n in (256, 1024, 2048) else 0.9)

    def fits(budget: float) -> str | None:
        found = curves(run(memory=wavy), budget=budget, at=[800])
        assert found.good is (found.curves[0].at[0].fits == "yes")
        return found.curves[0].at[0].fits

    assert [fits(budget) for budget in (1.0e9, 1.8e9, 6e9)] == ["no", "unsure", "yes"]


# ---- time ----


@pytest.mark.parametrize(("passes", "factor"), [("both", 3), ("forward", 1), ("backward", 2)])
def test_times_of_each_pass_follow_their_law(passes: str, factor: int):
    found = one(run(backward=lambda n: 2 * square(n)), quantity="time", passes=passes, budget=factor * square(1800))
    assert found.curve.form == "a + c n^2" and found.curve.at(5000) == pytest.approx(factor * square(5000), rel=1e-3)
    assert (found.longest.measured, found.longest.by_curve) == (1536, pytest.approx(1800, abs=2))
    assert [n for n, _ in found.values] == list(LENGTHS)


def test_eager_attentions_memory_has_a_square_in_it():
    def law(n: int) -> float:
        return gigabytes(n) + 20.0 * n * n

    assert "n^2" in one(run(memory=law, attn="eager")).curve.form
    assert one(run(memory=gigabytes, attn="eager")).curve.form == "a + b n"


def test_nothing_measured_is_not_good():
    assert not curves().good and not curves(run(lengths=(), oom=[64]), budget=80e9, at=[32, 64]).good
    assert curves(run()).good and curves(run(), budget=1.0, quantity="time").good
