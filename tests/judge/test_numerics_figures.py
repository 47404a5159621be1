"""Figures of two tensors against numpy, computed the long way; what is not finite; and units of last place."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import torch_figures
from hypothesis import given, settings
from hypothesis import strategies as st

from actordbg.judge.tensor_figures import angle_of, figures, products, sequence_sums, ulp_distances, worst_tokens
from actordbg.records.comparison_record import Figures

INF, NAN = math.inf, math.nan
VALUES = st.floats(-50, 50, width=32)


def of(a: list[float], b: list[float], **options: Any) -> Figures:
    return figures(np.array(a, np.float32), np.array(b, np.float32), **options)


WILD = st.one_of(VALUES, st.floats(width=32), st.sampled_from([0.0, -0.0, -1.0, INF, NAN]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(WILD, WILD, st.booleans()), min_size=1, max_size=60), st.sampled_from(["bf16", "fp16", "fp32", None]))
def test_they_are_those_that_torch_computes(cells: list[tuple[float, float, bool]], dtype: str | None) -> None:
    """Sums of float64 may be rounded in another order; all else is equal, units of last place and worst tokens too."""
    a, b, mask = (np.array([column]) for column in zip(*cells, strict=True))
    ours, theirs = (torch.from_numpy(one[mask].astype(np.float32)) for one in (a, b))
    found = asdict(figures(ours.numpy(), theirs.numpy(), log_probs=True, dtype=dtype))
    wanted = asdict(torch_figures.figures(ours, theirs, log_probs=True, dtype=dtype))
    for name, value in wanted.items():
        assert (found[name] is None) == (value is None), name
        assert value is None or math.isclose(found[name], value, rel_tol=1e-11, abs_tol=1e-13), name
    tokens = worst_tokens(a, b, mask, 5)
    expected = torch_figures.worst_tokens(*(torch.from_numpy(one) for one in (a, b, mask)), 5)
    sizes = [[one.difference and abs(one.difference) for one in found] for found in (tokens, expected)]
    assert sizes[0] == sizes[1], "of equals torch takes any"


def test_kl_estimates_are_of_the_direction_that_they_say() -> None:
    """Samples of b: k1 is the mean of log b - log a, so it is positive where a gives the samples less probability."""
    found = of([-2.0, -3.0], [-1.0, -1.0], log_probs=True)
    assert found.kl_k1 == 1.5
    assert found.kl_k3 == pytest.approx((math.exp(-1) - 1 + 1 + math.exp(-2) - 1 + 2) / 2)


NOTHING_LEFT = dict.fromkeys(("max_abs", "mean_abs", "cosine", "kl_k3", "max_ulp"))
ONE_SIDE = {"count": 2, "nonfinite": 1, "clip_share": 0.5} | NOTHING_LEFT  # such a token has no ratio inside the band


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([NAN, -INF, INF, -1.0], [NAN, -INF, INF, -1.5],
         {"count": 4, "nonfinite": 0, "max_abs": 0.5, "mean_abs": 0.125, "clip_share": 0.25, "cosine": 1.0}),
        *(([one, -1.0], [other, -1.0], ONE_SIDE) for one, other in
          ((NAN, -1.0), (-1.0, NAN), (-INF, -1.0), (INF, -INF), (NAN, INF))),
        ([NAN, INF], [NAN, INF], {"max_abs": 0.0, "cosine": 1.0, "max_ulp": 0, "distance": 0.0}),
        ([0.0], [-2000.0], {"kl_k3": None}),
        ([], [], asdict(Figures(0))),
        ([0.0, 0.0], [0.0, -0.0], {"cosine": 1.0, "distance": 0.0, "max_rel": None, "max_ulp": 0}),
        ([1.0, 0.0], [0.0, 0.0], {"cosine": None, "distance": None, "max_rel": None, "max_abs": 1.0}),
    ],
)  # fmt: skip
def test_what_is_not_finite_and_what_is_zero(a: list[float], b: list[float], expected: dict[str, Any]) -> None:
    found = asdict(of(a, b, log_probs=True, dtype="fp32"))
    assert {name: found[name] for name in expected} == expected


def test_a_norm_that_overflows_gives_no_cosine() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        assert angle_of(products(np.array([1e200, 1.0]), np.array([1.0, 1e200]))) == {"cosine": None, "distance": None}


def test_sums_are_of_the_masked_tokens_of_rows_that_have_any() -> None:
    values = np.array([[-1.0, -2.0, NAN], [-4.0, -8.0, -16.0], [-5.0, -5.0, -5.0]])
    mask = np.array([[True, True, False], [False, True, True], [False, False, False]])
    assert sequence_sums(values, mask).tolist() == [-3.0, -24.0]


def test_the_worst_tokens_come_first_and_equal_ones_not_at_all() -> None:
    a = np.array([[-1.0, -2.0, NAN, -9.0], [-1.0, -INF, -1.0, NAN]])
    b = np.array([[-1.5, -2.0, NAN, -1.0], [-1.25, -3.0, -1.0, -7.0]])
    mask = np.ones((2, 4), bool)
    mask[0, 3] = False
    worst = worst_tokens(a, b, mask, 5)
    assert {(one.row, one.position) for one in worst[:2]} == {(1, 1), (1, 3)}, "what is finite on one side only is worst"
    assert all(one.difference is None for one in worst[:2])
    assert [(one.row, one.position, one.difference) for one in worst[2:]] == [(0, 0, 0.5), (1, 0, 0.25)]
    assert worst_tokens(a, b, mask, 1) == worst[:1]


class TestUnitsOfLastPlace:
    @pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
    def test_every_value_of_16_bits_is_in_its_place(self, name: str, dtype: torch.dtype) -> None:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        ordered = torch.unique(every[~every.isnan()].double()).numpy()  # sorted; -0 and 0 are one
        steps = ulp_distances(ordered[1:], ordered[:-1], name)
        assert steps.min() == steps.max() == 1
        assert ulp_distances(ordered[-1:], ordered[:1], name).tolist() == [ordered.size - 1]

    @settings(max_examples=200, deadline=None)
    @given(st.floats(-(2.0**127), 2.0**127, width=32), st.integers(0, 50))
    def test_steps_of_float32_are_numpys(self, start: float, steps: int) -> None:
        value = np.float32(start)
        for _ in range(steps):
            value = np.nextafter(value, np.float32(INF))
        pair = np.array([start], np.float32), np.array([value], np.float32)
        assert ulp_distances(*pair, "fp32").tolist() == [steps]
        assert ulp_distances(pair[1].astype(np.float64), pair[0].astype(np.float64), "fp32").tolist() == [steps]

    def test_it_is_counted_in_the_dtype_that_computed(self) -> None:
        """bf16 has 128 values between 1 and 2: 1.0078125 is the one after 1. In float32 the same two are 65,536 apart."""
        assert of([-1.0], [-1.0078125], dtype="bf16").max_ulp == 1
        assert of([-1.0], [-1.0078125], dtype="fp32").max_ulp == 2**16
        assert of([-1.0], [-1.001], dtype="bf16").max_ulp == 0, "bf16 cannot tell these apart"
        assert of([-1.0], [-1.001], dtype="fp64").max_ulp == of([-1.0], [-1.001], dtype="fp32").max_ulp
        assert of([-1.0], [-1.5]).max_ulp is None, "the two were computed in different dtypes"
        assert of([-1.0], [-1.5], dtype="float8_e4m3fn").max_ulp is None
