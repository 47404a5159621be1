"""`actordbg curve memory|time`: which inputs are points, which lengths fit, what it prints in 80 columns, and how it ends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import commandline
import pytest
from click.testing import Result
from curvecases import LENGTHS, gigabytes, keep, run, square

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.config.replay_config import ReplayConfig
from actordbg.measure.curves import CurveAnswer, CurvesAnswer, answer
from actordbg.measure.measurements import gather
from actordbg.replay.replay_data import ReplayData
from actordbg.store.layout import Store


def invoke(store: Store, typed: str, *more: str) -> Result:
    return commandline.invoke(store, "curve", *typed.split(), *more)


def shown(done: Result) -> str:
    """What was printed, after a look at its width."""
    assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
    return done.stdout


@pytest.fixture
def replayed(store: Store) -> Store:
    """Two replays: `r1` under sdpa, and `r2` under eager with a backward, which ran out of memory at 4096."""
    keep(store, run("r1"))
    keep(store, run("r2", backward=square, attn="eager", oom=[4096], memory=lambda n: gigabytes(n) + 500.0 * n * n))
    return store


def test_every_configuration_has_its_points_curve_and_longest_length(replayed: Store):
    done = invoke(replayed, "memory --budget 8GB")
    text = shown(done)
    assert done.exit_code == 0
    assert "Longest seq_len in 8 GB (7.451 GiB)" in text
    assert re.search(r"\n  A +2,048 +- +7,000(?: \(\S+ to \S+\))? +extrapolated\n", text)
    assert re.search(r"\n  B +2,048 +4,096 +2,\d+(?: \(\S+ to \S+\))? +measured\n", text)
    assert "A: caution: 3.4 times the longest measured length" in text
    assert "out of memory at 4,096: these and longer inputs never fit" in text
    assert re.search(r"\n +1,024 +2 +1\.885 GiB +1\.885 GiB +[+-]0\.0%\n", text)
    assert "the process's resident memory" in " ".join(text.split())


def test_a_budget_that_a_small_model_reaches_far_beyond_what_ran_is_refused(replayed: Store):
    done = invoke(replayed, "memory r1 --budget 80GB --at 1200000")
    text = " ".join(shown(done).split())
    assert done.exit_code == 1 and re.search(r" A +2,048 +- +- ", text) and "79," not in text
    refused = "times the longest measured length, 2,048, beyond the limit of 4 times; measure longer inputs with "
    command = "actordbg curve memory r1 --measure 4096,8192 --model PATH"
    assert f"A: refused: 39 {refused}`{command}`" in text
    assert f"A: refused: 586 {refused}`{command}`" in text and "1,200,000 - - unknown, far unsure" in text


def test_times_show_each_pass(replayed: Store):
    text = shown(invoke(replayed, "time r2 --budget 1s --of backward"))
    assert "backward time by seq_len" in text and "Longest seq_len in 1.00 s" in text
    assert re.search(r"\n +512 +2 +0\.282 +0\.282 +0\.564 +0\.282 +[+-]0\.0%\n", text)
    assert "1 input excluded: warm-up or compiling" in text


def test_json_is_the_whole_answer(replayed: Store):
    answer = json.loads(invoke(replayed, "memory --budget 8GB --at 3000 --json").stdout)
    first = answer["curves"][0]
    assert (answer["quantity"], answer["budget"], answer["replays"]) == ("memory", 8e9, 2)
    assert first["curve"]["b"] == pytest.approx(1e6, rel=1e-6) and first["at"][0]["how"] == "extrapolated"
    assert first["measurements"]["points"][1]["memory"] == gigabytes(128)
    text = invoke(replayed, "memory --format md").stdout
    assert "| seq\\_len | inputs | peak | curve | off |" in text or "| seq_len | inputs | peak | curve | off |" in text


def test_too_few_lengths_come_with_a_command_that_measures_more_and_exists(store: Store):
    from docpages import parse

    keep(store, run("r1", lengths=(128,), compile=True))
    done = invoke(store, "memory --budget 80GB")
    text = " ".join(shown(done).split())
    assert done.exit_code == 0 and "no curve: 2 lengths measured, at least 3 are needed" in text
    (command,) = re.findall(r"More lengths: actordbg (curve memory r1 --measure \S+)", text)
    parse(command.split())


def test_the_picture_is_written(tmp_path: Path, replayed: Store):
    picture = tmp_path / "b.svg"
    assert invoke(replayed, "time --budget 2s --at 9000 --plot", str(picture)).exit_code == 1
    assert "budget" in picture.read_text()
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        invoke(replayed, "memory --plot", str(tmp_path / "no" / "x.png"))


@pytest.mark.parametrize(
    "typed",
    ["memory --budget 2s", "time --budget 80GB", "memory nothing", "memory --measure 512", "memory r1 --measure 512,x",
     "memory r1 --measure 1", "memory --plot x.gif", "memory --batch-size 4", "memory --dtype bf16", "memory --budget 0GB"],
)  # fmt: skip
def test_what_means_nothing_is_a_usage_error(replayed: Store, typed: str):
    with pytest.raises(UsageError):
        invoke(replayed, typed)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_measuring_replays_made_up_inputs_as_the_named_replay_was(store: Store):
    """For real: the tiny model, eager attention and a backward, which made-up inputs do not ask for by themselves."""
    pytest.importorskip("openrlhf")
    keep(store, run("r1", lengths=(), batch=1, backward=square, attn="eager"))
    journal = store.replays / "r1" / "rank0.jsonl"
    journal.write_text(journal.read_text().replace('"attn": "eager"', '"attn": "eager", "backward": true'))
    done = invoke(store, "memory r1 --measure 32,64,96 --json")
    assert done.exit_code == 0, done.stdout
    (found,) = json.loads(done.stdout)["curves"]
    assert found["measurements"]["replays"][0] == "r1" and len(found["measurements"]["replays"]) == 2
    assert found["measurements"]["backward"] and found["measurements"]["settings"]["attn"] == "eager"
    assert [(point["n"], point["inputs"]) for point in found["measurements"]["points"]] == [(32, 2), (64, 3), (96, 2)]
    assert found["measurements"]["left_out"] == 2 and found["curve"] is not None


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
    told = ", ".join(f"{len(m.replays)} {m.settings['attn']} {m.batch_size} {m.backward}" for m in found)
    assert told == "2 sdpa 2 False, 1 eager 2 False, 1 sdpa 4 False, 1 sdpa 2 True"
    (tokens,) = gather([run("a", lengths=(128,)), run("b", lengths=(128,), batch=4)], "tokens")
    assert [point.n for point in tokens.points] == [118, 246, 502]


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
        ({"oom": [1024]}, EIGHT | {"at": [2048]}, {"measured": 512, "by_curve": 1023}, "out of memory, no"),
        (
            {"oom": [4096]}, EIGHT | {"at": [4095, 4096]},
            {"how": "measured", "measured": 2048, "too_long": 4096, "by_curve": 4095, "high": 4095},
            "extrapolated, yes; out of memory, no",
        ),
        ({}, {"budget": 1.6e9}, {"how": "measured", "measured": 512, "too_long": 1024, "by_curve": 600, "far": False}, ""),
        ({}, {"budget": 1.03e9}, {"measured": None, "too_long": 64, "how": "extrapolated", "by_curve": 30}, ""),
        ({}, {"budget": 1e8}, {"by_curve": None}, ""),
        ({}, {"budget": 4e9}, {"far": False}, ""),
        (
            {}, {"budget": 9e9},
            {"how": "extrapolated", "measured": 2048, "too_long": None, "far": True, "by_curve": pytest.approx(8000, rel=0.01),
            "refused": None},
            "",
        ),
        (
            {}, EIGHT | {"at": [8192, 8193]}, {"measured": 2048, "by_curve": None, "high": None, "refused":
            pytest.approx(79_000, rel=0.01)},
            "extrapolated, yes, far; unknown, unsure, far",
        ),
        # one wild measurement; the longest far above the line, which the curve takes for an outlier
        ({"memory": lambda n: 3e10 if n == 256 else gigabytes(n)}, {"budget": 2.8e9}, {"measured": 1536, "too_long": 2048}, ""),
        (
            {"memory": lambda n: 2e10 if n == 2048 else gigabytes(n)}, {"budget": 5e9, "at": [1000, 2049]}, {"too_long": 2048},
            "interpolated, yes; extrapolated, no",
        ),
        # scores of eager attention under a floor of libraries: at 65,536 they take 430 GB
        *(
            (
                {"memory": lambda n, last=last: last if n == 2048 else 5e8}, {"budget": 4e9, "at": [100, 4096]}, {"measured":
                2048},
                "interpolated, yes; extrapolated, unsure",
            )
            for last in (5e8, 5.5e8)
        ),
        ({"lengths": (128,)}, {"budget": 1.1e9, "at": [128, 129]}, {"measured": 64}, "measured, no; unknown, no"),
        ({"lengths": (128,)}, EIGHT | {"at": [4096]}, {"measured": 128}, "unknown, unsure"),
        ({"lengths": (128, 256)}, EIGHT | {"at": [1000]}, {"measured": 256}, "extrapolated, unsure, far"),
        (
            {}, {"budget": 6e9, "at": [100, 512, 700, 3000, 5000]}, {},
            "interpolated, yes; measured, yes; interpolated, yes; extrapolated, yes; extrapolated, unsure, far",
        ),
    ],
)  # fmt: skip
def test_a_length_says_whether_it_fits_and_where_the_answer_comes_from(
    replayed: dict[str, Any], asked: dict[str, Any], longest: dict[str, Any], lengths: str
):
    """What ran out of memory never fits, nor what is longer; far beyond what ran nothing is said."""
    answered = curves(run(**replayed), **asked)
    (found,) = answered.curves
    assert {name: getattr(found.longest, name) for name in longest} == longest
    assert "; ".join(f"{at.how}, {at.fits}{', far' * at.far}" for at in found.at) == lengths
    assert answered.good is (all(at.fits == "yes" for at in found.at) and not (found.longest.refused and not lengths))


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
