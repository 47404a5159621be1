"""Which tokens a rank's tokens see, against the rule said token by token; with two processes: `test_actor_parallel`."""

import pytest
import torch

from actordbg.trainers.openrlhf.build import visible

BORDERS = [0, 3, 8, 9, 12]
"""Rows of 3, 5, 1 and 3 tokens."""


def row_of(place):
    return next(row for row, end in enumerate(BORDERS[1:]) if place < end)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
def test_a_token_sees_its_own_row_up_to_itself_and_no_further_back_than_its_window(size, window):
    tokens = BORDERS[-1] // size
    for rank in range(size):
        seen = visible(torch.tensor(BORDERS, dtype=torch.int32), tokens, rank, size, window)
        assert seen.shape == (tokens, BORDERS[-1])
        for own in range(tokens):
            place = rank * tokens + own
            least = 0 if window is None else place - window + 1
            expected = [row_of(other) == row_of(place) and least <= other <= place for other in range(BORDERS[-1])]
            assert seen[own].tolist() == expected


def test_the_window_is_that_of_transformers_sliding_masks():
    from transformers.masking_utils import sliding_window_causal_mask_function

    rule = sliding_window_causal_mask_function(4)
    places = torch.arange(12)
    theirs = rule(torch.tensor(0), torch.tensor(0), places[:, None], places)
    assert torch.equal(visible(torch.tensor([0, 12], dtype=torch.int32), 12, 0, 1, 4), theirs)
