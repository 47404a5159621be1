"""What median, p95 and seq_len bucket mean in a report."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actordbg.records.replay_record import bucket_of, percentile, spread, weighted_mean


@settings(deadline=None)  # the first example pays for numpy's import, others for a busy machine
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_a_percentile_is_numpys_default(values, percent):
    numpy = pytest.importorskip("numpy")
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), abs=1e-6)


def test_a_spread_leaves_out_what_is_missing_and_nothing_measured_is_none_not_zero():
    some, empty = spread([1.0, None, 3.0]), spread([None, math.nan, math.inf])
    assert (some.median, some.total) == (2.0, 4.0)
    assert (empty.count, empty.median, empty.p95, empty.largest) == (0, None, None, None)
    assert weighted_mean([(None, 3), (2.0, 0)]) is None and weighted_mean([(1.0, 1), (4.0, 2)]) == 3.0


@pytest.mark.parametrize(
    ("seq_len", "bucket"),
    [(0, (0, 127)), (127, (0, 127)), (128, (128, 255)), (255, (128, 255)), (1861, (1024, 2047)), (2048, (2048, 4095))],
)
def test_buckets_are_powers_of_two_from_128(seq_len, bucket):
    assert bucket_of(seq_len) == bucket


@settings(deadline=None)
@given(st.integers(0, 10**7))
def test_every_seq_len_lies_in_its_bucket(seq_len):
    low, high = bucket_of(seq_len)
    assert low <= seq_len <= high
