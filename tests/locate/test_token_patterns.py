"""The rule that covers the wrong tokens: it is found where there is one, and nothing is said where there is none."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from actordbg.locate.token_patterns import EVERY_TOKEN, PRECISION, RECALL, pattern_of

DUMP, ROW, POSITION = (each.ravel() for each in np.mgrid[0:3, 0:4, 0:512])
CHANCE = np.random.default_rng(0).random(len(ROW))
SIZE = np.array([256, 512, 768])[DUMP]
FEATURES = {
    "first": POSITION == 256,
    "packed": ROW > 0,
    "row": ROW,
    "position": POSITION,
    "seq_len": SIZE,
    "rank": DUMP % 2,
    "dump": np.array(["a", "b", "c"])[DUMP],
    "alike": np.zeros(len(ROW), int),
}
CASES = {
    "rows": (ROW >= 2, "rows >= 2"),
    "a row": (ROW == 2, "row 2"),
    "rows behind the first": (ROW > 0, "behind another row of the pack"),
    "positions": (POSITION >= 256, "positions >= 256"),
    "a range": ((POSITION >= 100) & (POSITION <= 200), "positions 100 to 200"),
    "long inputs": (SIZE > 512, "S = 768"),
    "longer inputs": (SIZE > 256, "S >= 512"),
    "the first token": (POSITION == 256, "the first token of an answer"),
    "two clauses": ((ROW >= 2) & (POSITION >= 256), "rows >= 2 and positions >= 256"),
    "half of a row's tokens, as in bf16": ((ROW >= 2) & (CHANCE < 0.6), "rows >= 2"),
    "a few tokens elsewhere": (((ROW >= 2) & (POSITION >= 256)) | (CHANCE < 0.002), "rows >= 2 and positions >= 256"),
    "all": (CHANCE >= 0, EVERY_TOKEN),
    "nearly all": (CHANCE < 0.98, EVERY_TOKEN),
    "all but a row": (ROW < 3, "rows <= 2"),
    "anywhere": (CHANCE < 0.6, None),
    "a few anywhere": (CHANCE < 0.0005, None),
    "none": (CHANCE < 0, None),
    "two kinds at once": ((ROW == 0) & (POSITION < 128) | (ROW == 3) & (POSITION > 384), None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_rule_is_named_or_none(case):
    wrong, words = CASES[case]
    pattern = pattern_of(wrong, FEATURES)
    assert (pattern and pattern.words) == words
    assert pattern == pattern_of(wrong, FEATURES)
    if pattern:
        assert (pattern.wrong, pattern.hits + pattern.extra <= len(ROW)) == (wrong.sum(), True)


def test_rules_that_fit_as_well_and_exceptions_are_counted():
    one_rank = pattern_of(DUMP == 1, FEATURES)
    assert one_rank is not None
    assert one_rank.sentence == "S = 512: 2,048 of 2,048 wrong tokens; fits as well: rank 1, dump b"
    wrong = ROW >= 2
    wrong[[2000, 1100]] = [False, True]
    wrong[[0, 1, 2]] = True
    pattern = pattern_of(wrong, FEATURES)
    assert pattern is not None and pattern.hits == wrong.sum() - 3 and pattern.extra == 1
    assert pattern.sentence == "rows >= 2: 3,071 of 3,074 wrong tokens, and 1 right one"


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.integers(2, 300))
def test_no_rule_is_named_of_tokens_that_are_wrong_at_random(seed, share, count):
    """And what is named is within the limits that its docstring states."""
    draw = np.random.default_rng(seed)
    wrong = draw.random(count) < share
    features = {"row": draw.integers(0, 4, count), "position": np.arange(count), "first": draw.random(count) < 0.1}
    pattern = pattern_of(wrong, features)
    assert pattern is None or pattern.words == EVERY_TOKEN
    row = pattern_of(features["row"] == 1, features)
    if row is not None and row.words != EVERY_TOKEN:
        assert row.hits >= RECALL * row.wrong and row.hits >= PRECISION * (row.hits + row.extra) and row.hits + row.extra < count
