"""The noise floor out of finished replays: what counts, what is left out, and which floor belongs to which configuration."""

import pytest
from casefiles import cases_of
from comparecases import given, write_replay
from replaylines import write_replays

from actordbg.base.errors import StoreProblem
from actordbg.compare.comparing import compare
from actordbg.compare.noise_floor import conclusion, deterministic, measure, newest_for, noise_page, save
from actordbg.document.blocks import number
from actordbg.document.renderings import as_text
from actordbg.records.comparison_record import NoiseRecord

INPUTS = [given(0), given(1)]
CASES = cases_of("noise_floors")


def measured(store, lines):
    """The floor of r-01 from replays that lines of `noise_floors.test` write, and the floor told as lines."""
    pairs = [line.split() for line in write_replays(store, lines, INPUTS)]
    rounding = next(((narrow, wide) for name, narrow, *wide_of in pairs if name == "rounding" for wide in wide_of), None)
    record = measure(store, "r-01", {name: ids[0] for name, *ids in pairs if name != "rounding"}, rounding=rounding)
    floors = {"floor": record.floor} | {f"of {at}": dump.floor for at, dump in enumerate(record.dumps)}
    said = [f"{name}: " + ", ".join(f"{key} {number(each, 3)}" for key, each in floor.items()) for name, floor in floors.items()]
    moves = [
        f"{each.name} moved {each.log_probs.count} tokens by {number(each.log_probs.max_abs, 3)}"
        for each in record.variants
        if each.log_probs
    ]
    return record, [*said, *moves, f"repeats: {deterministic(record)}", *record.reasons]


@pytest.mark.parametrize("case", CASES)
def test_the_floor_is_what_variations_move_and_rounding_explains(store, case):
    record, said = measured(store, CASES[case].given)
    assert said == CASES[case].expected
    assert NoiseRecord.from_json(save(store, record).read_bytes()) == record


def test_what_no_input_passed_with_is_not_said_to_move_nothing(store):
    found, _ = measured(store, CASES["a variation that no input passed with"].given)
    said = " ".join(conclusion(found))
    assert as_text(noise_page(found)).endswith(f"\nnext: actordbg compare {found.replay_id} truth --noise {found.noise_id}\n")
    assert "bit-identical" in said and "Not measured: reorder; no input passed both unchanged and varied." in said
    assert "move no log-prob" not in said and "nearer to the truth" not in said


def test_a_floor_of_nothing_is_refused(store):
    write_replay(store, "r-01", INPUTS)
    write_replay(store, "r-02", [given(5)], vary="repeat")
    with pytest.raises(StoreProblem, match="noise floor cannot be measured"):
        measure(store, "r-01", {"repeat": "r-02"})


def test_the_newest_floor_of_the_same_configuration_is_found_past_a_damaged_one(store):
    write_replay(store, "r-01", INPUTS, dtype="bf16")
    write_replay(store, "r-02", INPUTS, dtype="bf16", vary="repeat")
    assert newest_for(store, "r-01") is None
    saved = measure(store, "r-01", {"repeat": "r-02"})
    save(store, saved)
    (store.noise / "99990101T000000-ffffff.json").write_text("{")
    same = write_replay(store, "r-03", [given(1)], dtype=None, timeout_s=5.0, resolved={"dtype": "bf16"})
    packed = write_replay(store, "r-04", INPUTS, dtype="bf16", packing=True)
    elsewhere = write_replay(store, "r-05", [given(9)], dtype="bf16")
    assert [newest_for(store, one) for one in (same, packed, elsewhere)] == [saved, None, None]


def test_the_floor_of_a_gradient_norm_is_what_an_engines_sum_rounds(store):
    for name, norm, more in (("r-01", 4.0, {}), ("r-02", 4.0, {"vary": "repeat"}), ("r-03", 4.0 * (1 + 3e-6), {"truth": "fp32"})):
        trained = {"loss": 2.0, "grad_norm": norm, "backward_s": 0.5}
        write_replay(store, name, INPUTS, result=lambda index, trained=trained: trained, **more)
    record = compare(store, "r-01", "r-03", noise=measure(store, "r-01", {"repeat": "r-02"}))
    assert record.verdict == "match" and all(not dump.beyond_noise for dump in record.dumps)
