"""The noise floor out of finished replays: what counts, what is left out, and which floor belongs to which configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparecases import Tensors, given, write_replay

from actordbg.base.errors import StoreProblem
from actordbg.compare.comparing import compare
from actordbg.compare.noise_floor import ROUNDING_MARGIN, conclusion, deterministic, measure, newest_for, noise_page, save
from actordbg.document.renderings import as_text
from actordbg.records.comparison_record import NoiseRecord
from actordbg.store.layout import Store

UNCHANGED, UNCHANGED_FP32 = "20250619T050000-000001", "20250619T050000-00000a"


def replay_id(number: int) -> str:
    return f"20250619T050000-{number:06x}"


def moved(by: float, *, only: int | None = None) -> Callable[[int, Tensors], Tensors | None]:
    """Each log-prob of row 1 moved, in every dump or in one."""

    def change(index: int, made: Tensors) -> Tensors | None:
        if only in (None, index):
            made["log_probs"][1] += by
        return made

    return change


INPUTS = [given(0), given(1)]
Settings = dict[str, Any]


@pytest.fixture
def two(store: Store) -> Store:
    """An unchanged replay of two dumps in bf16, and one in fp32."""
    write_replay(store, UNCHANGED, INPUTS, dtype="bf16")
    write_replay(store, UNCHANGED_FP32, INPUTS, dtype="fp32")
    return store


def measured(store: Store, varied: dict[str, Settings], rounding: Settings | None = None, dtype: str = "bf16") -> NoiseRecord:
    """The floor of the unchanged replay of this dtype. varied: by variation what its replay is made up of. rounding: what the
    rows alone are made up of in this dtype; None: they were not measured.
    """
    ids = {
        name: write_replay(store, replay_id(number), INPUTS, **({"dtype": dtype, "vary": name} | settings))
        for number, (name, settings) in enumerate(varied.items(), 0x20)
    }
    alone = None
    if rounding is not None:
        wider = {"bf16": "fp32", "fp32": "fp64"}[dtype]
        narrow = write_replay(store, replay_id(0x30), INPUTS, dtype=dtype, truth=dtype, **rounding)
        alone = narrow, write_replay(store, replay_id(0x31), INPUTS, dtype=dtype, truth=wider)
    return measure(store, UNCHANGED if dtype == "bf16" else UNCHANGED_FP32, ids, rounding=alone)


def test_the_floor_is_the_largest_movement_over_all_variants(two: Store) -> None:
    failed = {"status": "failed", "error_class": "OutOfMemoryError"}
    varied: dict[str, Settings] = {
        "repeat": {}, "repad": {"change": moved(0.25)}, "reorder": {"change": moved(0.5, only=1)},
        "rebatch": {"result": lambda index: failed if index else {}},
    }  # fmt: skip
    found = measured(two, varied)
    first, second = found.dumps
    assert first.floor["max_abs"] == pytest.approx(0.25, abs=1e-6)
    assert second.floor["max_abs"] == found.floor["max_abs"] == pytest.approx(0.5, abs=1e-6)
    assert second.floor["mean_abs"] == pytest.approx(0.25, abs=1e-6), "one row of two"
    by_name = {variant.name: variant.log_probs for variant in found.variants}
    assert by_name["repeat"] is not None and by_name["repeat"].max_abs == 0
    assert by_name["repad"] is not None and by_name["repad"].count == 24
    (reason,) = found.reasons
    assert (found.dtype, found.config["dtype"]) == ("bf16", "bf16")
    assert reason.startswith("rebatch of ") and "OutOfMemoryError" in reason, "what a variant could not run is said"


def test_what_no_input_passed_with_is_not_said_to_move_nothing(two: Store) -> None:
    failed = {"result": lambda index: {"status": "failed", "error_class": "OutOfMemoryError"}}
    found = measured(two, {"repeat": {}, "reorder": failed}, failed)
    said = " ".join(conclusion(found))
    assert as_text(noise_page(found)).endswith(f"\nnext: actordbg compare {found.replay_id} truth --noise {found.noise_id}\n")
    assert "bit-identical" in said and "Not measured: reorder; no input passed both unchanged and varied." in said
    assert "move no log-prob" not in said and "nearer to the truth" not in said


def test_a_nan_that_comes_and_goes_is_no_floor_and_a_floor_of_nothing_is_refused(two: Store) -> None:
    def spoiled(index: int, made: Tensors) -> Tensors:
        made["log_probs"][0, 0] = torch.nan if index == 0 else made["log_probs"][0, 0]
        return made

    found = measured(two, {"repeat": {"change": spoiled}})
    assert "max_abs" not in found.dumps[0].floor and found.floor["max_abs"] == 0
    assert "finite in one run and not in the other" in found.reasons[0]
    write_replay(two, replay_id(2), [given(5)], vary="repeat")
    with pytest.raises(StoreProblem, match="noise floor cannot be measured"):
        measure(two, UNCHANGED, {"repeat": replay_id(2)})


def test_the_newest_floor_of_the_same_configuration_is_found_past_a_damaged_one(two: Store) -> None:
    assert newest_for(two, UNCHANGED) is None
    saved = measured(two, {"repeat": {}})
    assert NoiseRecord.from_json(save(two, saved).read_bytes()) == saved
    (two.noise / "99990101T000000-ffffff.json").write_text("{")
    same = write_replay(two, replay_id(6), [given(1)], dtype=None, timeout_s=5.0, resolved={"dtype": "bf16"})
    packed = write_replay(two, replay_id(7), INPUTS, dtype="bf16", packing=True)
    elsewhere = write_replay(two, replay_id(8), [given(9)], dtype="bf16")
    assert [newest_for(two, one) for one in (same, packed, elsewhere)] == [saved, None, None]


def test_what_rounding_does_not_explain_is_a_fault_and_no_floor(two: Store) -> None:
    varied: dict[str, Settings] = {
        "repeat": {}, "repad": {"change": moved(0.04)}, "reorder": {"change": moved(3.0, only=1)},
    }  # fmt: skip
    found = measured(two, varied, {"change": moved(0.05)})
    assert found.floor["max_abs"] == pytest.approx(ROUNDING_MARGIN * 0.05, rel=1e-3)
    assert found.reasons == (
        f"reorder of {INPUTS[1].dump_id}: max_abs 3, where rounding and rerunning explain 0.05: counted as a fault, "
        "left out of the noise floor",
    )
    largest = {one.name: one.log_probs.max_abs for one in found.variants if one.log_probs}
    assert largest["reorder"] == pytest.approx(3.0), "it is shown all the same"
    unknown = measure(two, UNCHANGED, {name: replay_id(number) for number, name in enumerate(varied, 0x20)})
    assert unknown.floor["max_abs"] == pytest.approx(3.0) and not unknown.reasons


def test_what_moves_by_itself_does_not_excuse_itself(two: Store) -> None:
    """Random noise on each token: running again explains nothing that rounding does not."""
    varied = {"repeat": {"change": moved(0.6)}, "repad": {"change": moved(0.5)}}
    found = measured(two, varied, {"change": moved(3e-6)}, "fp32")
    assert found.floor["max_abs"] < 1e-5 and deterministic(found) is False
    assert len(found.reasons) == 4 and found.reasons[0].startswith("repeat of ") and "where rounding explains" in found.reasons[0]


def test_the_floor_of_a_gradient_norm_is_what_an_engines_sum_rounds(store: Store) -> None:
    def trained(norm: float) -> Settings:
        return {"result": lambda index: {"loss": 2.0, "grad_norm": norm, "backward_s": 0.5}}

    write_replay(store, UNCHANGED_FP32, INPUTS, **trained(4.0))
    floor = measured(store, {"repeat": trained(4.0)}, dtype="fp32")
    write_replay(store, replay_id(3), INPUTS, truth="fp32", **trained(4.0 * (1 + 3e-6)))
    record = compare(store, UNCHANGED_FP32, replay_id(3), noise=floor)
    assert record.verdict == "match" and all(not dump.beyond_noise for dump in record.dumps)
