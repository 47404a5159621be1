"""Figures of two arrays against torch's own, what is not finite, units of last place; and what a verdict makes of figures."""

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from casefiles import cases_of
from hypothesis import given, settings, strategies as st
from roots import ROOT

from actordbg.base.errors import UsageError
from actordbg.compare.dump_figures import angle_of, figures, products, scaled_gradients, worst_tokens
from actordbg.compare.thresholds import DEFAULTS, MEASURES, STRENGTH, applied_to, asked, judge, measures, weaker
from actordbg.records.comparison_record import MATCH, MISMATCH, DumpComparison, Figures

INF, NAN = math.inf, math.nan
VALUES = st.floats(-50, 50, width=32)


def of(a, b, **options):
    return figures(np.array(a, np.float32), np.array(b, np.float32), **options)


@settings(max_examples=300)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=60))
def test_they_are_those_that_torch_computes(cells):
    a, b = torch.tensor(cells, dtype=torch.float64).T
    apart = (a - b).abs()
    wanted = {
        **{f"{name}_abs": apart.quantile(q) for name, q in (("p95", 0.95), ("p99", 0.99), ("max", 1.0))}, "mean_abs": apart.mean(),
        "rms_abs": apart.square().mean().sqrt(),
        "kl_k1": (b - a).mean(), "kl_k3": ((a - b).exp() - 1 - (a - b)).mean(),
        "clip_share": (((a - b).exp() < 0.8) | ((a - b).exp() > 1.2)).double().mean(),
        **({"distance": apart.norm() / b.norm()} if b.norm() else {}),
        **({"cosine": torch.cosine_similarity(a, b, dim=0, eps=1e-300)} if a.norm() and b.norm() else {}),
    }  # fmt: skip
    found = asdict(of(a, b, log_probs=True))
    for name, value in wanted.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


FIGURES = cases_of("figures")


@pytest.mark.parametrize("case", FIGURES)
def test_what_is_not_finite_and_what_is_zero(case):
    (a, b), (expected,) = (map(json.loads, part) for part in FIGURES[case])
    found = asdict(of(a, b, log_probs=True))
    assert found == found | expected


def test_a_norm_that_overflows_gives_no_cosine():
    with np.errstate(over="ignore", invalid="ignore"):
        assert angle_of(products(np.array([1e200, 1.0]), np.array([1.0, 1e200]))) == {
            "cosine": None,
            "distance": None,
            "gain": None,
        }


def test_worst_tokens_are_of_the_mask_alone_and_equal_tokens_are_left_out():
    a = np.array([[-1.0, -2.0, NAN, -9.0], [-1.0, -INF, -1.0, NAN]])
    b = np.array([[-1.5, -2.0, NAN, -1.0], [-1.25, -3.0, -1.0, -7.0]])
    mask = np.ones((2, 4), bool)
    mask[0, 3] = False
    worst = worst_tokens(a, b, mask, 5)
    assert {(token.row, token.position) for token in worst[:2]} == {(1, 1), (1, 3)}, "finite on one side only is worst"
    assert all(token.difference is None for token in worst[:2])
    assert [(token.row, token.position, token.difference) for token in worst[2:]] == [(0, 0, 0.5), (1, 0, 0.25)]
    assert worst_tokens(a, b, mask, 1) == worst[:1]


def test_a_weaker_dtype_is_never_stricter_and_an_unknown_one_is_the_weakest_and_named():
    for weak, strong in pairwise(STRENGTH):
        assert set(DEFAULTS[weak]) == set(DEFAULTS[strong]) <= set(MEASURES)
        assert all(DEFAULTS[weak][name] >= DEFAULTS[strong][name] for name in DEFAULTS[weak])
    for dtype, said in ((None, "unknown"), ("float8_e4m3fn", "float8_e4m3fn")):
        applied = applied_to(dtype, {})
        assert applied.limits == DEFAULTS["bf16"] and said in applied.source
    for dtypes, weakest in (
        (["fp32", "bf16"], "bf16"), (["bf16", None], "bf16"), (["fp64", "fp32"], "fp32"),
        (["bf16", "float8_e4m3fn"], "float8_e4m3fn"), ([None, None], None),
    ):  # fmt: skip
        assert weaker(dtypes) == weakest


def test_what_was_typed_replaces_single_defaults():
    own = asked({"max_abs": 0.125, "mean_abs": 0.5, "clip_share": math.inf, "loss_abs": None})
    applied = applied_to("bf16", own)
    assert (applied.limits["max_abs"], applied.limits["mean_abs"], applied.limits["loss_abs"]) == (0.125, 0.5, 0.02)
    assert "clip_share" not in applied.limits and applied.own == {"max_abs", "mean_abs", "clip_share"}
    assert applied.source == "defaults for bf16; clip_share, max_abs, mean_abs from flags"
    for bad in (-0.5, math.nan):
        with pytest.raises(UsageError, match=r"--max-abs \S+ is not a threshold") as raised:
            asked({"max_abs": bad})
        assert raised.value.hint


TOKENS = Figures(count=100, max_abs=0.3, p99_abs=0.2, mean_abs=0.01, clip_share=0.04)
DUMP = DumpComparison("d1", MATCH, log_probs=TOKENS, loss_abs=0.25, grad_norm_rel=0.5)


def test_the_measures_of_a_dump():
    full = replace(DUMP, entropy=Figures(3, max_abs=4.0), gradients=Figures(3, distance=5.0), parameter_distance=6.0)
    assert measures(full) == {
        "max_abs": 0.3, "p99_abs": 0.2, "mean_abs": 0.01, "clip_share": 0.04, "loss_abs": 0.25,
        "grad_norm_rel": 0.5, "entropy_max_abs": 4.0, "gradient_distance": 5.0, "parameter_distance": 6.0,
    }  # fmt: skip
    assert set(measures(full)) == set(MEASURES)


THRESHOLDS = cases_of("thresholds")


def numbers(words):
    return {name: float(value) for name, value in (word.split("=") for word in words.split())}


@pytest.mark.parametrize("case", THRESHOLDS)
def test_the_verdict_of_a_dump(case):
    given, (verdict, *reasons) = THRESHOLDS[case]
    said = dict(line.partition(" ")[::2] for line in given)
    limits = said["thresholds"]
    own = numbers(said.get("dump", ""))
    tokens = replace(TOKENS, count=int(own.pop("count", TOKENS.count)))
    allowed = DEFAULTS[limits.split()[-1]] if limits.startswith("defaults") else numbers(limits)
    judged, severity = judge(replace(DUMP, log_probs=tokens, **own), allowed, numbers(said.get("noise", "")))
    assert (judged.verdict, judged.reasons) == (verdict, tuple(reasons))
    assert (severity > 1) == bool(reasons)


def test_the_reference_page_has_the_defaults_that_are():
    page = (ROOT / "docs" / "reference" / "thresholds.md").read_text()
    lines = [
        [cell.strip() for cell in line.replace("\\|", "").split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")
    ]
    dtypes = lines[0][2:]
    found = {cells[0].strip("`").replace("-", "_"): cells[2:] for cells in lines[2:]}
    assert set(found) == set(MEASURES)
    for name, cells in found.items():
        for dtype, cell in zip(dtypes, cells, strict=True):
            assert (None if cell == "-" else float(cell)) == DEFAULTS[dtype].get(name), (name, dtype)


@pytest.mark.parametrize("factor, noise, named", [(2.0, 1e-3, 2.0), (-1.0, 1e-3, -1.0), (1.0, 1e-3, None), (2.0, 0.5, None)])
def test_gradients_that_are_a_multiple_are_told_from_others(factor, noise, named):
    random = np.random.default_rng(0)
    theirs = random.normal(size=1000)
    ours = factor * theirs + noise * random.normal(size=1000)
    compared = DumpComparison("dump", MISMATCH, gradients=figures(ours, theirs))
    assert scaled_gradients([compared, compared, replace(compared, verdict=MATCH, gradients=None)]) == named
