"""Processes agree on who publishes what by short messages, however many tensors and processes there are."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from deltawire.dtypes import dtype_named
from deltawire.format.digest import PART_ALIGNMENT
from deltawire.publish.sharded.division import HeldLayout, Splitter
from deltawire.publish.sharded.ranges import divide_tensor


class Recorded:
    """One of many ranks. The messages of the others are computed from their layouts."""

    def __init__(self, rank, layouts):
        self.rank, self.size = rank, len(layouts)
        self.largest = 0
        self._layouts = layouts

    def exchange(self, message):
        content = json.loads(message)
        if "facts" not in content:  # whether the layout is the same as before
            return [message] * self.size
        self.largest = max(self.largest, len(message))
        return [json.dumps(content | {"held": layout.runs()}).encode() for layout in self._layouts]


def agreed(layouts, rank=0):
    ranks = Recorded(rank, layouts)
    return Splitter(ranks).agree(lambda: layouts[rank]), ranks


def layout_of(shapes, held):
    names = tuple(f"t{number:05}" for number in range(len(shapes)))
    return HeldLayout(names, ("BF16",) * len(shapes), tuple(shapes), tuple(held))


def rows_of(shape, rank, size):
    each, row = -(-shape[0] // size), math.prod(shape[1:])
    start, stop = (min(number * each, shape[0]) * row for number in (rank, rank + 1))
    return (start, stop) if start < stop else (0, 0)


def test_what_two_thousand_ranks_tell_each_other_does_not_grow_with_the_number_of_tensors():
    size = 2048
    shapes = [(8192, 1024), (1024, 1024), (1024,)] * 40
    layouts = [layout_of(shapes, [rows_of(shape, rank, size) for shape in shapes]) for rank in range(size)]
    division, ranks = agreed(layouts, 5)
    assert ranks.largest < 512
    assert len({id(tensor) for tensor in division.tensors}) == 3
    for index in range(3):
        block = PART_ALIGNMENT // 2
        expected = divide_tensor([layout.held[index] for layout in layouts], math.prod(shapes[index]), block)
        assert division.tensors[index] == division.tensors[index + 3] == expected
    mine = {(index, move) for index, tensor in enumerate(division.tensors) for move in tensor.moves if 5 in (move.source, move.target)}
    assert set(division.moves_of(5)) == mine
    assert mine


@given(st.lists(st.lists(st.sampled_from([(0, 0), (0, 600)]), min_size=3, max_size=3), min_size=1, max_size=12))
def test_tensors_of_one_shape_may_be_held_in_any_way(choices):
    """Each tensor is held as a whole by some ranks, as experts are, or by one rank if no other was chosen."""
    held = [[(0, 600), *each[1:]] if not any(stop for _, stop in each) else each for each in choices]
    layouts = [layout_of([(600,)] * len(held), [each[rank] for each in held]) for rank in range(3)]
    division, _ = agreed(layouts)
    block = PART_ALIGNMENT // dtype_named("BF16").itemsize
    assert division.held == tuple(tuple(each) for each in held)
    assert division.tensors == tuple(divide_tensor(each, 600, block) for each in held)
