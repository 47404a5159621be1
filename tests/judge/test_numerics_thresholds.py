"""Thresholds: which apply, where they are from, and what no file may say; and what a verdict makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from roots import ROOT

from actordbg.base.errors import UsageError
from actordbg.judge.thresholds import DEFAULTS, FLAGS, MEASURES, STRENGTH, Thresholds, judge, measures, weaker
from actordbg.records.comparison_record import MATCH, MISMATCH, WITHIN_NOISE, DumpComparison, Figures


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "thresholds.toml"
    path.write_text(text)
    return path


def test_a_weaker_dtype_is_never_stricter() -> None:
    for weak, strong in pairwise(STRENGTH):
        assert set(DEFAULTS[weak]) == set(DEFAULTS[strong]) <= set(MEASURES)
        assert all(DEFAULTS[weak][name] >= DEFAULTS[strong][name] for name in DEFAULTS[weak])


@pytest.mark.parametrize(("dtype", "said"), [(None, "unknown"), ("float8_e4m3fn", "float8_e4m3fn")])
def test_an_unknown_dtype_is_taken_for_the_weakest_and_named(dtype: str | None, said: str) -> None:
    applied = Thresholds().for_dtype(dtype)
    assert applied.limits == DEFAULTS["bf16"]
    assert said in applied.source


def test_the_weaker_of_two() -> None:
    assert weaker(["fp32", "bf16"]) == weaker(["bf16", None]) == "bf16"
    assert weaker(["fp64", "fp32"]) == "fp32"
    assert weaker(["bf16", "float8_e4m3fn"]) == "float8_e4m3fn"
    assert weaker([None, None]) is None


def test_a_file_and_flags(tmp_path: Path) -> None:
    path = written(tmp_path, "mean-abs = 1\nmax_abs = 0.25\n[bf16]\nmax-abs = 0.75\nclip-share = inf\n[fp32]\nmax_abs = 0\n")
    asked = Thresholds.from_file(path)
    bf16, fp32, fp16 = (asked.for_dtype(name) for name in ("bf16", "fp32", "fp16"))
    assert (bf16.limits["max_abs"], fp32.limits["max_abs"], fp16.limits["max_abs"]) == (0.75, 0.0, 0.25)
    assert "clip_share" not in bf16.limits and "clip_share" in fp16.limits
    assert bf16.limits["p99_abs"] == DEFAULTS["bf16"]["p99_abs"]
    assert bf16.source == f"defaults for bf16; clip_share, max_abs, mean_abs from {path}"
    flagged = asked.override({"max_abs": 0.125, "mean_abs": 0.5, "loss_abs": None}, "flags").for_dtype("bf16")
    assert (flagged.limits["max_abs"], flagged.limits["mean_abs"]) == (0.125, 0.5)
    assert flagged.source == f"defaults for bf16; max_abs, mean_abs from flags; clip_share from {path}"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max_abs = -1", "no threshold"),
        ("max_abs = nan", "no threshold"),
        ("max_abs = true", "no threshold"),
        ("max_abs = '1'", "no threshold"),
        ("max_abs = [1]", "no threshold"),
        ("maximum = 1", "not a threshold"),
        ("[bf17]\nmax_abs = 1", "not a dtype"),
        ("[bf16]\nmaximum = 1", "not a threshold"),
        ("[bf16.max_abs]\na = 1", "no threshold"),
        ("max_abs = ", "not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_a_hint(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as raised:
        Thresholds.from_file(written(tmp_path, text))
    assert raised.value.hint


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, what in (("none.toml", "cannot read"), ("", "cannot read"), ("binary.toml", "not TOML")):
        with pytest.raises(UsageError, match=what):
            Thresholds.from_file(tmp_path / name)


def test_bad_flags_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--max-abs -0\.5 is no threshold"):
        Thresholds().override({"max_abs": -0.5}, FLAGS)


TOKENS = Figures(count=100, max_abs=0.3, p99_abs=0.2, mean_abs=0.01, clip_share=0.04)
DUMP = DumpComparison("d1", MATCH, log_probs=TOKENS, sequences=Figures(2, max_abs=1.5), loss_abs=0.25, grad_norm_rel=0.5)


def test_the_measures_of_a_dump() -> None:
    full = replace(DUMP, entropy=Figures(3, max_abs=4.0), gradients=Figures(3, distance=5.0), parameter_distance=6.0)
    assert measures(full) == {
        "max_abs": 0.3, "p99_abs": 0.2, "mean_abs": 0.01, "clip_share": 0.04, "sequence_max_abs": 1.5, "loss_abs": 0.25,
        "grad_norm_rel": 0.5, "entropy_max_abs": 4.0, "gradient_distance": 5.0, "parameter_distance": 6.0,
    }  # fmt: skip
    assert set(measures(replace(full, log_probs=replace(TOKENS, max_ulp=7)))) == set(MEASURES)


def test_within_outside_and_at_a_threshold() -> None:
    assert judge(DUMP, {"max_abs": 0.3, "mean_abs": 0.02}, {})[0].verdict == MATCH
    found, severity = judge(DUMP, {"max_abs": 0.1, "mean_abs": 0.02}, {})
    assert (found.verdict, found.reasons) == (MISMATCH, ("max_abs 0.3 is above 0.1",))
    assert severity == pytest.approx(3.0)
    assert judge(DUMP, {}, {})[0].verdict == MATCH, "what has no threshold is not judged"
    assert judge(DUMP, {"max_ulp": 0}, {})[0].verdict == MATCH, "what was not measured is not judged"


def test_a_difference_is_real_only_outside_the_noise() -> None:
    limits = {"max_abs": 0.1, "mean_abs": 0.001}
    inside, _ = judge(DUMP, limits, {"max_abs": 0.3, "mean_abs": 0.01})
    assert inside.verdict == WITHIN_NOISE
    assert inside.reasons[0] == "max_abs 0.3 is above 0.1, within the noise 0.3"
    outside, _ = judge(DUMP, limits, {"max_abs": 0.3, "mean_abs": 0.009})
    assert (outside.verdict, outside.reasons) == (MISMATCH, ("mean_abs 0.01 is above 0.001 and the noise 0.009",))
    assert judge(DUMP, limits, {"max_abs": 0.3})[0].verdict == MISMATCH, "a floor that was not measured covers nothing"
    assert judge(DUMP, {"max_abs": 0.5}, {"max_abs": 0.2})[0].verdict == MATCH


def test_a_single_token_outside_the_clip_band_is_no_share() -> None:
    one = replace(DUMP, log_probs=replace(TOKENS, count=25, clip_share=0.04))
    two = replace(DUMP, log_probs=replace(TOKENS, count=50, clip_share=0.04))
    assert judge(one, {"clip_share": 0.01}, {})[0].verdict == MATCH
    assert judge(two, {"clip_share": 0.01}, {})[0].verdict == MISMATCH


def test_the_reference_page_has_the_defaults_that_are() -> None:
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
