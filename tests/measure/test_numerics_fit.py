"""Curves through points whose law is known: linear, quadratic, flat, noisy, with outliers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actordbg.measure.curves import fit

LENGTHS = (128, 256, 512, 1024, 1536, 2048, 3072, 4096)


def points(law, lengths=LENGTHS, noise: float = 0.0, seed: int = 3):
    generator = random.Random(seed)
    return [(n, law(n) * (1 + generator.gauss(0, noise))) for n in lengths]


def linear(n: float) -> float:
    return 5e8 + 3e5 * n


def quadratic(n: float) -> float:
    return 5e8 + 1e5 * n + 120 * n * n


@pytest.mark.parametrize(
    ("law", "form"),
    [(linear, "a + b n"), (quadratic, "a + b n + c n^2"), (lambda n: 1e9 + 50 * n * n, "a + c n^2"), (lambda n: 7e8, "a")],
)  # fmt: skip
def test_a_law_without_noise_is_found_exactly(law, form: str):
    curve = fit(points(law))
    ahead = None if form == "a" else pytest.approx(0, abs=1e-6)
    assert (curve.form, curve.error, curve.ahead) == (form, pytest.approx(0, abs=1e-6), ahead)
    assert curve.at(20_000) == pytest.approx(law(20_000), rel=1e-6)
    reached = None if form == "a" else pytest.approx(6000, rel=1e-6)
    assert (curve.reaches(law(6000) * (1 + 1e-12)), curve.reaches(law(0) / 2)) == (reached, None)


def test_noise_of_two_percent_moves_the_curve_little_and_does_not_make_a_line_bend():
    curves = [fit(points(linear, noise=0.02, seed=seed)) for seed in range(20)]
    for law, some in ((linear, curves[:4]), (quadratic, [fit(points(quadratic, noise=0.02, seed=seed)) for seed in range(4)])):
        for curve in some:
            assert all(curve.at(n) == pytest.approx(law(n), rel=0.06) for n in LENGTHS) and 0.003 < curve.error < 0.08
    assert [curve.form for curve in curves].count("a + b n") >= 12
    assert all(0.8 < curve.at(8192) / linear(8192) < 1.35 for curve in curves)


@pytest.mark.parametrize("place", range(len(LENGTHS)))
@pytest.mark.parametrize("law", [linear, quadratic])
def test_one_wild_point_hardly_moves_the_curve(law, place: int):
    measured = points(law, noise=0.002)
    measured[place] = (measured[place][0], 3 * measured[place][1])
    curve = fit(measured)
    others = [n for i, n in enumerate(LENGTHS) if i != place]
    assert all(curve.at(n) == pytest.approx(law(n), rel=0.06) for n in others)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e12)), max_size=25, unique_by=lambda point: point[0]))
def test_any_points_give_a_curve_that_does_not_fall_or_none(measured):
    curve = fit(measured)
    assert (curve is None) is (len(measured) < 3)
    if curve is not None:
        assert min(curve.a, curve.b, curve.c) >= 0 and max(curve.a, curve.b, curve.c) > 0


def test_the_error_beyond_the_longest_is_what_extrapolation_was_wrong_by():
    def bend(n: float) -> float:
        return 1e9 + 1e5 * n + (0 if n < 1500 else 1e6 * (n - 1500))

    curve = fit(points(bend))
    assert curve.ahead > 0.3 and curve.error_at(2 * 4096) >= curve.ahead
    assert curve.error_at(8 * 4096) == pytest.approx(3 * max(curve.error, curve.ahead))
    assert curve.error_at(3000) == curve.error
    few = fit(points(linear)[:3])
    assert few.ahead is None and few.error_at(10_000) is None and few.error_at(300) == few.error


def test_beyond_one_doubling_no_error_is_known_where_the_longer_half_could_not_be_predicted():
    """Peaks of a process on a CPU, which took 496 MiB at 512 and 776 at 2,048: the square said 702 (5 % off) and 5,168."""
    lengths = (64, 128, 192, 256)
    few = fit(list(zip(lengths, (401.1, 415.7, 433.5, 473.1), strict=True)))
    assert few.form == "a + c n^2" and few.ahead > 0.15
    assert few.error_at(512) == few.ahead and few.error_at(513) is None
    assert fit(points(linear, (64, 128, 192, 512))).error_at(10**6) is not None


def test_thousands_of_lengths_take_no_minutes():
    many = points(quadratic, lengths=range(1, 6000), noise=0.05)
    assert fit(many).at(3000) == pytest.approx(quadratic(3000), rel=0.03)
