"""The noise floor out of finished replays: what counts, what is left out, and which floor belongs to which configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparecases import Tensors, given, write_replay

from actordbg.base.errors import StoreProblem
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.renderings import as_text
from actordbg.judge import find_truth, noise_floor
from actordbg.judge.comparing import compare
from actordbg.judge.noise_document import conclusion, noise_page
from actordbg.judge.noise_floor import ROUNDING_MARGIN, measure, measure_noise, newest_for, runs_of, save
from actordbg.records.comparison_record import NoiseRecord
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord
from actordbg.replay.supervise import ReplayOutcome
from actordbg.store.layout import Store

UNCHANGED = "20250619T050000-000001"


def replay_id(number: int) -> str:
    return f"20250619T050000-{number:06x}"


def moved(by: float, *, only: int | None = None) -> Callable[[int, Tensors], Tensors | None]:
    """Each log-prob of row 1 moved, in every dump or in one."""

    def change(index: int, made: Tensors) -> Tensors | None:
        if only in (None, index):
            made["log_probs"][1] += by
        return made

    return change


@pytest.fixture
def two(store: Store) -> Store:
    """An unchanged replay of two dumps."""
    write_replay(store, UNCHANGED, [given(0), given(1)], dtype="bf16")
    return store


def test_the_floor_is_the_largest_movement_over_all_variants(two: Store) -> None:
    inputs = [given(0), given(1)]
    write_replay(two, replay_id(2), inputs, dtype="bf16", vary="repeat")
    write_replay(two, replay_id(3), inputs, dtype="bf16", vary="repad", change=moved(0.25))
    write_replay(two, replay_id(4), inputs, dtype="bf16", vary="reorder", change=moved(0.5, only=1))
    found = measure(two, UNCHANGED, {"repeat": replay_id(2), "repad": replay_id(3), "reorder": replay_id(4)})
    first, second = found.dumps
    assert first.floor["max_abs"] == pytest.approx(0.25, abs=1e-6)
    assert second.floor["max_abs"] == found.floor["max_abs"] == pytest.approx(0.5, abs=1e-6)
    assert second.floor["mean_abs"] == pytest.approx(0.25, abs=1e-6), "one row of two"
    by_name = {one.name: one.log_probs for one in found.variants}
    assert by_name["repeat"] is not None and by_name["repeat"].max_abs == 0
    assert by_name["repad"] is not None and by_name["repad"].count == 24
    assert (found.dtype, found.config["dtype"], found.reasons) == ("bf16", "bf16", ())


def test_rounding_counts_with_its_margin(two: Store) -> None:
    inputs = [given(0), given(1)]
    write_replay(two, replay_id(2), inputs, dtype="bf16", vary="repeat")
    write_replay(two, replay_id(3), inputs, dtype="bf16", truth="bf16", change=moved(0.125))
    write_replay(two, replay_id(4), inputs, dtype="bf16", truth="fp32")
    found = measure(two, UNCHANGED, {"repeat": replay_id(2)}, rounding=(replay_id(3), replay_id(4)))
    assert found.floor["max_abs"] == pytest.approx(ROUNDING_MARGIN * 0.125, abs=1e-6)
    assert found.variants[-1].name == "rounding"
    assert found.variants[-1].log_probs is not None
    assert found.variants[-1].log_probs.max_abs == pytest.approx(0.125, abs=1e-6)


def test_what_a_variant_could_not_run_is_said(two: Store) -> None:
    inputs = [given(0), given(1)]
    failed = {"status": "failed", "error_class": "OutOfMemoryError"}
    write_replay(two, replay_id(2), inputs, vary="rebatch", result=lambda index: failed if index else {})
    write_replay(two, replay_id(3), inputs, vary="repad", change=moved(0.25))
    found = measure(two, UNCHANGED, {"rebatch": replay_id(2), "repad": replay_id(3)})
    assert [round(one.floor["max_abs"], 3) for one in found.dumps] == [0.25, 0.25]
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("rebatch of ") and "OutOfMemoryError" in found.reasons[0]


def test_what_no_input_passed_with_is_not_said_to_move_nothing(two: Store) -> None:
    inputs = [given(0), given(1)]
    failed = {"status": "failed", "error_class": "OutOfMemoryError"}
    write_replay(two, replay_id(2), inputs, vary="repeat")
    write_replay(two, replay_id(3), inputs, vary="reorder", result=lambda index: failed)
    write_replay(two, replay_id(4), inputs, dtype="bf16", truth="bf16", result=lambda index: failed)
    write_replay(two, replay_id(5), inputs, dtype="bf16", truth="fp32")
    varied = {"repeat": replay_id(2), "reorder": replay_id(3)}
    found = measure(two, UNCHANGED, varied, rounding=(replay_id(4), replay_id(5)))
    said = " ".join(conclusion(found))
    command = f"\n  next: actordbg compare {found.replay_id} truth --noise {found.noise_id}\n"
    assert command in as_text(noise_page(found)), "in one line, so that it can be pasted"
    assert "the same bits" in said and "Not measured: reorder; no input passed unchanged and so." in said
    assert "move no log-prob at all" not in said and "nearer to the truth" not in said


def test_a_nan_that_comes_and_goes_is_no_floor(two: Store) -> None:
    inputs = [given(0), given(1)]

    def spoiled(index: int, made: Tensors) -> Tensors:
        made["log_probs"][0, 0] = torch.nan if index == 0 else made["log_probs"][0, 0]
        return made

    write_replay(two, replay_id(2), inputs, vary="repeat", change=spoiled)
    found = measure(two, UNCHANGED, {"repeat": replay_id(2)})
    assert "max_abs" not in found.dumps[0].floor and found.floor["max_abs"] == 0
    assert "finite in one run and not in the other" in found.reasons[0]


def test_a_floor_of_nothing_is_refused(two: Store) -> None:
    write_replay(two, replay_id(2), [given(5)], vary="repeat")
    with pytest.raises(StoreProblem, match="no floor to measure"):
        measure(two, UNCHANGED, {"repeat": replay_id(2)})


def test_a_difference_inside_the_floor_is_no_mismatch_and_outside_it_is(two: Store) -> None:
    inputs = [given(0), given(1)]
    write_replay(two, replay_id(2), inputs, dtype="fp32", vary="repad", change=moved(0.25))
    write_replay(two, replay_id(3), inputs, dtype="fp32", change=moved(-0.2))
    write_replay(two, replay_id(4), inputs, dtype="fp32", change=moved(-0.3))
    floor = measure(two, UNCHANGED, {"repad": replay_id(2)})
    write_replay(two, replay_id(5), inputs, dtype="fp32")
    assert compare(two, replay_id(3), replay_id(5)).verdict == "mismatch"
    assert compare(two, replay_id(3), replay_id(5), noise=floor).verdict == "within-noise"
    assert compare(two, replay_id(4), replay_id(5), noise=floor).verdict == "mismatch"


def test_the_newest_floor_of_the_same_configuration_is_found(two: Store) -> None:
    inputs = [given(0), given(1)]
    write_replay(two, replay_id(2), inputs, dtype="bf16", vary="repeat")
    assert newest_for(two, UNCHANGED) is None
    saved = measure(two, UNCHANGED, {"repeat": replay_id(2)})
    assert NoiseRecord.from_json(save(two, saved).read_bytes()) == saved
    same = write_replay(two, replay_id(6), [given(1)], dtype=None, timeout_s=5.0, resolved={"dtype": "bf16"})
    packed = write_replay(two, replay_id(7), inputs, dtype="bf16", packing=True)
    elsewhere = write_replay(two, replay_id(8), [given(9)], dtype="bf16")
    found = [newest_for(two, one) for one in (same, packed, elsewhere)]
    assert found == [saved, None, None]


def test_a_damaged_floor_does_not_stand_in_the_way_of_the_others(two: Store) -> None:
    write_replay(two, replay_id(2), [given(0), given(1)], dtype="bf16", vary="repeat")
    saved = measure(two, UNCHANGED, {"repeat": replay_id(2)})
    save(two, saved)
    (two.noise / "99990101T000000-ffffff.json").write_text("{")
    assert newest_for(two, UNCHANGED) == saved


def test_what_rounding_does_not_explain_is_a_fault_and_no_floor(two: Store) -> None:
    inputs = [given(0), given(1)]
    write_replay(two, replay_id(2), inputs, dtype="bf16", vary="repeat")
    write_replay(two, replay_id(3), inputs, dtype="bf16", vary="repad", change=moved(0.04))
    write_replay(two, replay_id(4), inputs, dtype="bf16", vary="reorder", change=moved(3.0, only=1))
    write_replay(two, replay_id(5), inputs, dtype="bf16", truth="bf16", change=moved(0.05))
    write_replay(two, replay_id(6), inputs, dtype="bf16", truth="fp32")
    varied = {"repeat": replay_id(2), "repad": replay_id(3), "reorder": replay_id(4)}
    found = measure(two, UNCHANGED, varied, rounding=(replay_id(5), replay_id(6)))
    assert found.floor["max_abs"] == pytest.approx(2 * 0.05, rel=1e-3)
    assert found.reasons == (
        f"reorder of {inputs[1].dump_id}: max_abs 3, where rounding and running again explain 0.05: taken for a fault, "
        "and left out of the floor",
    )
    largest = {one.name: one.log_probs.max_abs for one in found.variants if one.log_probs}
    assert largest["reorder"] == pytest.approx(3.0), "it is shown all the same"
    unknown = measure(two, UNCHANGED, varied)
    assert unknown.floor["max_abs"] == pytest.approx(3.0) and not unknown.reasons


def test_what_moves_by_itself_does_not_excuse_itself(two: Store) -> None:
    """Random noise on each token: running again explains nothing that rounding does not."""
    inputs = [given(0), given(1)]
    write_replay(two, replay_id(1), inputs, dtype="fp32")
    write_replay(two, replay_id(2), inputs, dtype="fp32", vary="repeat", change=moved(0.6))
    write_replay(two, replay_id(3), inputs, dtype="fp32", vary="repad", change=moved(0.5))
    write_replay(two, replay_id(5), inputs, dtype="fp32", truth="fp32", change=moved(3e-6))
    write_replay(two, replay_id(6), inputs, dtype="fp32", truth="fp64")
    varied = {"repeat": replay_id(2), "repad": replay_id(3)}
    found = measure(two, replay_id(1), varied, rounding=(replay_id(5), replay_id(6)))
    assert found.floor["max_abs"] < 1e-5
    assert len(found.reasons) == 4 and found.reasons[0].startswith("repeat of ") and "where rounding explains" in found.reasons[0]


def test_the_floor_of_a_gradient_norm_is_what_an_engines_sum_rounds(two: Store) -> None:
    def trained(norm: float) -> Callable[[int], dict[str, float]]:
        return lambda index: {"loss": 2.0, "grad_norm": norm, "backward_s": 0.5}

    inputs = [given(0), given(1)]
    write_replay(two, replay_id(1), inputs, dtype="fp32", result=trained(4.0))
    write_replay(two, replay_id(2), inputs, dtype="fp32", vary="repeat", result=trained(4.0))
    floor = measure(two, replay_id(1), {"repeat": replay_id(2)})
    write_replay(two, replay_id(3), inputs, dtype="fp32", truth="fp32", result=trained(4.0 * (1 + 3e-6)))
    record = compare(two, replay_id(1), replay_id(3), noise=floor)
    assert record.verdict == "match" and all(not dump.beyond_noise for dump in record.dumps)


def test_the_steps_that_a_bar_counts_are_those_that_were_announced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the rows alone are in the store; the truth has no rounding."""
    ran: list[str] = []

    def run_replay(where: Store, spec: ReplaySpec, **more: Any) -> ReplayOutcome:
        config = spec.config
        settings = {"dtype": config.dtype or "bf16", "truth": config.truth, "vary": config.vary, "model": config.model}
        write_replay(where, spec.replay_id, list(spec.inputs), **settings)
        for item in spec.inputs:
            ran.append(item.dump_id)
        record = ResultRecord(spec.replay_id, spec.inputs[0].dump_id, PASSED)
        return ReplayOutcome(spec.replay_id, where.replays, "complete", len(spec.inputs), {record.dump_id: record})

    monkeypatch.setattr(noise_floor, "run_replay", run_replay)
    monkeypatch.setattr(find_truth, "run_replay", run_replay)
    inputs = (given(0), given(1))
    for round_of, truth, expected in ((1, None, 14), (2, None, 14), (3, "fp32", 10)):
        config = ReplayConfig(dtype="bf16", keep_tensors=True, truth=truth)
        spec = ReplaySpec(replay_id(9 + round_of), "2025-06-19T05:00:00.000000Z", config, inputs)
        passed_over: list[int] = []
        ran.clear()
        measure_noise(store, spec, on_passed_over=passed_over.append)
        assert len(ran) + sum(passed_over) == len(inputs) * runs_of(spec) == expected
        assert sum(passed_over) == (4 if round_of == 2 else 0)
