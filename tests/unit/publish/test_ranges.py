"""Tables list which process publishes which elements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.errors import PublishError
from deltawire.publish.sharded.ranges import Move, divide_tensor


@pytest.mark.parametrize(
    ("held", "elements", "ranges", "moves"),
    [
        ([(0, 8), (8, 16)], 16, [(0, 8), (8, 16)], []),
        ([(0, 6), (6, 11)], 11, [(0, 8), (8, 11)], [(1, 0, (6, 8))]),
        ([(0, 1), (1, 2), (2, 3)], 3, [(0, 3), (0, 0), (0, 0)], [(1, 0, (1, 2)), (2, 0, (2, 3))]),
        ([(0, 5), (5, 6), (6, 9)], 9, [(0, 8), (0, 0), (8, 9)], [(1, 0, (5, 6)), (2, 0, (6, 8))]),
        ([(0, 9)] * 2, 9, [(0, 4), (4, 9)], []),
        ([(0, 9)] * 3, 9, [(0, 4), (4, 8), (8, 9)], []),
        ([(0, 9), (0, 0), (7, 7)], 9, [(0, 9), (0, 0), (0, 0)], []),
        ([(0, 6), (6, 12), (0, 6), (6, 12)], 12, [(0, 4), (0, 0), (4, 8), (8, 12)], [(1, 2, (6, 8))]),
        ([(0, 0), (0, 0)], 0, [(0, 0), (0, 0)], []),
    ],
    ids=["aligned", "an edge", "one block", "a shard inside a block", "replicas", "more replicas", "one holder", "hybrid", "empty"],
)
def test_ranks_publish_the_elements_that_they_hold_except_at_edges(held, elements, ranges, moves):
    division = divide_tensor(held, elements, 4)
    assert division.ranges == tuple(ranges)
    assert division.moves == tuple(Move(*move) for move in moves)


@pytest.mark.parametrize("held", [[(0, 4)], [(0, 4), (5, 9)], [(0, 5), (4, 9)], [(1, 9)], [(0, 9), (0, 4)], [(0, 0)]])
def test_shards_that_are_not_the_whole_tensor_are_refused(held):
    with pytest.raises(PublishError):
        divide_tensor(held, 9, 4)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 16),
)
def test_every_element_is_published_once_by_a_rank_that_holds_it_or_receives_it(sizes, replicas, block):
    cuts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    held = [(cuts[index], cuts[index + 1]) for index in range(len(sizes))] * replicas
    division = divide_tensor(held, cuts[-1], block)
    published = sorted(each for each in division.ranges if each[0] < each[1])
    assert [start for start, _ in published] == [0, *(stop for _, stop in published[:-1])][: len(published)]
    assert (published[-1][1] if published else 0) == cuts[-1]
    assert all(start % block == 0 for start, _ in published)
    for rank, (start, stop) in enumerate(division.ranges):
        has = set(range(*held[rank]))
        for move in division.moves:
            if move.target == rank:
                assert set(range(*move.range)) <= set(range(*held[move.source]))
                assert not has & set(range(*move.range))
                has |= set(range(*move.range))
        assert set(range(start, stop)) <= has
    assert sum(move.range[1] - move.range[0] for move in division.moves) < block * max(len(sizes), 1)
