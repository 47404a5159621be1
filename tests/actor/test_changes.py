"""What the laws change in a dump, and what the judges make of a difference. No model runs here."""

import pytest
import torch
from lawcases import dump_of

from actordbg.actor import changes
from actordbg.laws.jacobian import halves, judge, judge_additivity, target_of
from actordbg.laws.judging import ForwardValues, answer, change
from actordbg.records.finding import BROKEN, KEPT, NOT_CHECKED
from actordbg.records.replay_record import WITHIN_ROUNDING, LawAnswer, answers_of, in_words, violations

VOCAB = 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_anew_moves_every_value_by_its_last_bit_up_or_down(dtype):
    values = 1.5 + torch.rand(512, dtype=torch.float64).to(dtype) / 4
    model = torch.nn.Identity()
    with changes.rounded_anew(model):
        moved = model(values) - values
    assert {float(abs(step)) for step in moved} == {torch.finfo(dtype).eps} and 0.4 < float((moved > 0).double().mean()) < 0.6


def asked(**shape):
    return changes.plain_call(dump_of(**shape), VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["left", "right", "both", "none"])
def test_other_tokens_are_other_ids_of_the_same_dump_exactly_where_asked(side):
    dump = asked(side=side)
    before = dump.inputs["sequences"].clone()
    where = (torch.arange(3) % 2 == 1)[:, None] & changes.attended(dump)
    after = changes.with_other_tokens(dump, where).inputs["sequences"]
    assert torch.equal(after != before, where)
    assert set(after.flatten().tolist()) <= set(before.flatten().tolist())
    assert torch.equal(dump.inputs["sequences"], before), "a dump is never changed in place"


def test_what_later_tokens_must_not_reach_ends_before_the_label_of_the_first_changed_one():
    dump = asked(side="both")
    where = changes.behind_the_middle(dump)
    watched = changes.before(where) & changes.next_tokens(dump)
    for row in range(3):
        first = int(where[row].nonzero()[0])
        assert watched[row].nonzero().flatten().tolist()[-1] == first - 2, "a log-prob at column j is of token j + 1"
        assert not watched[row, first - 1 :].any()


def test_packed_positions_are_the_real_ones_and_a_ring_has_an_equal_part_of_them():
    dump = asked(side="both")
    whole = changes.places(dump, packing=True)
    assert torch.equal(whole, changes.attended(dump).nonzero())
    parts = [changes.places(dump, True, rank, 4) for rank in range(4)]
    assert len({len(part) for part in parts}) == 1 and torch.equal(torch.cat(parts)[: len(whole)], whole)
    assert len(changes.places(dump, packing=False)) == dump.inputs["sequences"].numel()


def test_a_difference_names_its_first_place_and_nan_is_equal_to_nan():
    ids, mask = torch.arange(12).reshape(2, 6), torch.ones(2, 5, dtype=torch.bool)
    base = torch.zeros(2, 5)
    base[0, 0] = torch.nan
    moved = base.clone()
    moved[1, 2] += 0.25

    def asked(ours, where=mask, **more):
        return answer("order", change(ForwardValues(ours), ForwardValues(base), where), ids, "row 1 depends on row 0", **more)  # type: ignore[arg-type]

    found = asked(moved)
    assert (found.verdict, found.row, found.position, found.token, found.size, found.count) == (BROKEN, 1, 3, 9, 0.25, 1)
    assert "row 1 depends on row 0" in in_words(found) and "position 3, token 9" in in_words(found)
    others = asked(base), asked(moved, limit=0.3), asked(moved, ~mask)
    assert [one.verdict for one in others] == [KEPT, WITHIN_ROUNDING, NOT_CHECKED]
    moved[0, 0] = 1.0
    assert asked(moved).size == torch.inf, "a number where there was none"


def test_the_jacobian_names_other_rows_later_tokens_and_padding_apart():
    dump = asked(side="left")
    asked_for = target_of(dump)
    assert asked_for.row == 2
    places = changes.places(dump, packing=False)
    real = changes.attended(dump).flatten()
    own = (places[:, 0] == 2) & (places[:, 1] <= asked_for.columns[-1]) & real
    right = torch.cat((places.double(), own.double()[:, None]), 1)
    assert judge(right, asked_for, dump).verdict == KEPT
    wrong = right.clone()
    wrong[(places[:, 0] == 1) & real, 2] = 1e-30
    wrong[-1, 2] = 1.0
    wrong[(places[:, 0] == 2) & ~real, 2] = 1.0
    found = judge(wrong, asked_for, dump)
    assert found.verdict == BROKEN and (found.row, found.position) == (1, 3)
    assert (
        found.words
        == "row 2 depends on row 1 (21 of 21 tokens); row 2 depends on 1 tokens after position 13; row 2 depends on 6 positions of padding"
    )
    assert judge(torch.cat((places.double(), torch.zeros(len(places), 1)), 1), asked_for, dump).verdict == NOT_CHECKED


def test_halves_add_up_and_a_gradient_that_is_not_their_sum_is_named():
    terms = changes.next_tokens(asked(side="both"))
    one, other = halves(terms)
    assert torch.allclose(one + other, terms.double() / terms.sum()) and bool(one.any()) and bool(other.any())
    lone = halves(terms[:1])
    assert bool(lone[0].any()) and bool(lone[1].any()), "a single row is cut by its tokens"
    parts = [{"grad/a": torch.ones(4), "grad/b": torch.full((4,), value)} for value in (1.0, 2.0)]
    whole = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert judge_additivity("fp32", whole, *parts).verdict == KEPT
    found = judge_additivity("bf16", whole | {"grad/b": torch.zeros(4)}, *parts)
    assert found.verdict == BROKEN and "gradient of b" in found.words and found.count == 1
    assert judge_additivity("bf16", {}, {}, {}).verdict == NOT_CHECKED


def test_answers_travel_as_plain_data_and_only_what_was_accepted_by_name_is_let_through():
    told = [
        LawAnswer("neighbour", BROKEN, "row 1 depends on row 0", 0.5),
        LawAnswer("rerun", "nondeterministic", size=float("inf")),
    ]
    read = answers_of({"laws": [one.to_dict() | {"new": 1} for one in told] + ["nonsense", {}]})
    assert [one.law for one in read] == ["neighbour", "rerun"] and read[1].size is None
    assert [one.law for one in violations(read)] == ["neighbour", "rerun"]
    assert answers_of({}) == [] and answers_of({"laws": 3}) == []
