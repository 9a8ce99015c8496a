"""Segments are contiguous and never empty, and their number is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.errors import BadTensorName, PublishError, UnsupportedDtype
from deltawire.publish.upload.segments import MOST_SEGMENTS, Segment, TensorTable, cut_batches, cut_segments
from deltawire.tensors.bits import TensorPart


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0], [Segment(0, 1, 0)]),
        ([10, 10, 10], [Segment(0, 1, 10), Segment(1, 1, 10), Segment(2, 1, 10)]),
        ([4, 4, 4, 4], [Segment(0, 3, 12), Segment(3, 1, 4)]),
        ([100, 1, 1], [Segment(0, 1, 100), Segment(1, 2, 2)]),
        ([0, 0, 10, 0], [Segment(0, 3, 10), Segment(3, 1, 0)]),
    ],
)
def test_a_segment_is_closed_once_it_is_large_enough(sizes, expected):
    assert list(cut_segments(sizes, segment_bytes=10)) == expected


@given(st.lists(st.integers(0, 1000), max_size=400), st.integers(1, 5000))
def test_segments_cover_every_tensor_once_and_are_few(sizes, segment_bytes):
    segments = cut_segments(sizes, segment_bytes=segment_bytes)
    assert [i for s in segments for i in range(s.first, s.first + s.count)] == list(range(len(sizes)))
    assert all(s.count and s.raw == sum(sizes[s.first : s.first + s.count]) for s in segments)
    assert len(segments) <= MOST_SEGMENTS + 1


def test_tables_are_ordered_by_name_whatever_the_order_of_the_state():
    a, b = np.zeros(3, np.float32), np.zeros((2, 2), np.int8)
    table = TensorTable.of({"b": b, "a": a})
    assert table.names == ("a", "b")
    assert table == TensorTable.of({"a": a, "b": b})
    assert (table.sizes, table.state_bytes) == ((12, 4), 16)
    assert table != TensorTable.of({"a": a, "b": b.reshape(4)})


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({}, PublishError),
        ([1], PublishError),
        (None, PublishError),
        ({"": np.zeros(1)}, BadTensorName),
        ({3: np.zeros(1)}, BadTensorName),
        ({"a": np.zeros(1, np.complex64)}, UnsupportedDtype),
    ],
)
def test_a_value_that_is_no_state_is_refused_by_name(state, error):
    with pytest.raises(error):
        TensorTable.of(state)


def test_parts_of_tensors_are_no_state_to_publish_alone() -> None:
    with pytest.raises(PublishError, match="parts"):
        TensorTable.of({"x": TensorPart(np.zeros(4, np.float32), (8,), 0)})


@pytest.mark.parametrize(
    ("costs", "expected"),
    [([], []), ([3, 3, 4, 5, 5], [[0, 1, 2], [3, 4]]), ([20, 1, 20], [[0], [1], [2]]), ([0, 0, 10, 0], [[0, 1, 2, 3]])],
)
def test_batches_have_all_segments_in_order_and_cost_little(costs, expected):
    assert [list(batch) for batch in cut_batches(costs, 10)] == expected
