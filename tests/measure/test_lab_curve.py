"""Memory and time over length: which inputs are points, which lengths fit, and how each answer came about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from curvecases import LENGTHS, gigabytes, run, square

from actordbg.config.replay_config import ReplayConfig
from actordbg.measure.curves import At, CurveAnswer, CurvesAnswer, answer
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
        (2, "sdpa", (4096,)), (8, "sdpa", (4096,)), (1, "sdpa", ()), (2, "eager", ())
    ]  # fmt: skip


@pytest.mark.parametrize("turned", [1, -1])
def test_what_does_not_fit_forward_does_not_fit_backward_either_but_not_the_other_way_round(turned: int):
    trained = run("b", backward=square, oom=[4096])
    trained.results[-1].forward_s = 1.0
    forward = [run("b", backward=square), run("a", oom=[4096], config=ReplayConfig(backward=False))]
    assert [m.out_of_memory for m in gather([run("a"), trained])] == [(), (4096,)]
    assert [m.out_of_memory for m in gather(forward[::turned])] == [(4096,), (4096,)]


def test_a_length_that_ran_out_of_memory_is_never_said_to_fit():
    longer = one(run(oom=[1024]), budget=80e9, at=[2048])  # though a longer one passed
    assert (longer.longest.measured, longer.longest.by_curve, longer.at[0].fits) == (512, 1023, "no")
    found = one(run(oom=[4096]), budget=80e9, at=[4095, 4096, 10_000])
    assert (found.longest.how, found.longest.measured, found.longest.too_long) == ("measured", 2048, 4096)
    assert found.longest.by_curve == 4095 and found.longest.high == 4095
    assert [(at.how, at.fits) for at in found.at] == [
        ("extrapolated", "yes"),
        ("out of memory", "no"),
        ("out of memory", "no"),
    ]


# ---- budgets ----


def test_a_budget_within_the_measured_lengths_is_answered_by_what_ran():
    longest = one(run(), budget=1.6e9).longest
    assert (longest.how, longest.measured, longest.too_long, longest.by_curve) == ("measured", 512, 1024, 600)
    assert not longest.far and longest.exceptions == ()
    below = one(run(), budget=1.03e9).longest
    assert (below.measured, below.too_long, below.how, below.by_curve) == (None, 64, "extrapolated", 30)
    assert one(run(), budget=1e8).longest.by_curve is None


def test_a_budget_beyond_them_is_extrapolated_with_a_caution_when_far_and_refused_when_too_far():
    longest = one(run(), budget=9e9).longest
    assert (longest.how, longest.measured, longest.too_long, longest.far) == ("extrapolated", 2048, None, True)
    assert longest.by_curve == pytest.approx(8_000, rel=0.01) and longest.refused is None
    assert not one(run(), budget=4e9).longest.far
    found = curves(run(), budget=80e9, at=[8192, 8193])
    longest, (near, far) = found.curves[0].longest, found.curves[0].at
    assert (longest.measured, longest.by_curve, longest.high) == (2048, None, None) and not found.good
    assert longest.refused == pytest.approx(79_000, rel=0.01)
    assert (near.how, near.fits, far.how, far.fits, far.value) == ("extrapolated", "yes", "unknown", "unsure", None)


def test_one_wild_measurement_does_not_hide_the_lengths_that_fit():
    data = run()
    data.results[3].peak_memory_bytes = 30 * 10**9
    longest = one(data, budget=2.8e9).longest
    assert (longest.measured, longest.too_long, longest.exceptions) == (1536, 2048, (256,))


@pytest.mark.parametrize("last", [5e8, 5.5e8])
def test_beyond_a_flat_curve_nothing_is_sure_to_fit(last: float):
    """Scores of eager attention under a floor of libraries: at 65,536 they take 430 GB."""
    found = one(run(memory=lambda n: last if n == 2048 else 5e8), budget=4e9, at=[100, 4096, 65_536])
    assert [(at.low is None, at.fits) for at in found.at] == [(False, "yes"), (True, "unsure"), (True, "unsure")]


def test_what_is_longer_than_a_length_over_the_budget_does_not_fit():
    """The longest one is far above the line through the others, which the curve takes for an outlier."""
    found = one(run(memory=lambda n: 2e10 if n == 2048 else gigabytes(n)), budget=5e9, at=[1000, 2049, 3000])
    assert (found.longest.too_long, [at.fits for at in found.at]) == (2048, ["yes", "no", "no"])
    (short,) = one(run(lengths=(128,)), budget=1.1e9, at=[129]).at
    assert (short.how, short.fits) == ("unknown", "no")


# ---- single lengths ----


def test_each_length_says_where_its_figure_comes_from():
    found = {at.n: at for at in one(run(), at=[100, 512, 700, 3000, 5000]).at}
    assert [(n, at.how, at.far) for n, at in found.items()] == [
        (100, "interpolated", False), (512, "measured", False), (700, "interpolated", False),
        (3000, "extrapolated", False), (5000, "extrapolated", True),
    ]  # fmt: skip
    assert found[5000].value == pytest.approx(gigabytes(5000), rel=0.01) and found[700].fits is None


def test_a_length_within_the_curves_error_of_the_budget_is_unsure():
    def wavy(n: int) -> float:
        return gigabytes(n) * (1.1 if n in (256, 1024, 2048) else 0.9)

    def fits(budget: float) -> str | None:
        found = curves(run(memory=wavy), budget=budget, at=[800])
        assert found.good is (found.curves[0].at[0].fits == "yes")
        return found.curves[0].at[0].fits

    assert [fits(budget) for budget in (1.0e9, 1.8e9, 6e9)] == ["no", "unsure", "yes"]


def test_too_few_lengths_make_no_curve_but_what_ran_still_counts():
    found = one(run(lengths=(128,)), budget=80e9, at=[128, 4096])
    assert found.curve is None and found.longest.measured == 128
    assert found.at == (At(128, "measured", *[gigabytes(128)] * 3, fits="yes"), At(4096, "unknown", fits="unsure"))


def test_extrapolation_that_nothing_could_check_is_unsure():
    (at,) = one(run(lengths=(128, 256)), budget=80e9, at=[1000]).at
    assert (at.how, at.low, at.fits) == ("extrapolated", None, "unsure") and at.value == pytest.approx(gigabytes(1000))


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


def test_nothing_measured_is_not_good():
    assert not curves().good and not curves(run(lengths=(), oom=[64]), budget=80e9, at=[32, 64]).good
    assert curves(run()).good and curves(run(), budget=1.0, quantity="time").good
