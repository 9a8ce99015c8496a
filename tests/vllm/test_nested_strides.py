"""Nested strides say exactly what a list of positions says, or nothing. These tests need torch, but not vLLM."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from deltawire.engines.vllm.layout.nested_strides import compose, fit, inverse, is_contiguous, nest_of, positions_of  # noqa: E402
from deltawire.engines.vllm.layout.types import Nest  # noqa: E402


def targets(nests: list[Nest], count: int) -> torch.Tensor:
    """Evaluate nests that are blocks of one map."""
    found = torch.full((count,), -1, dtype=torch.int64)
    for nest in nests:
        here, there = nest.find(torch.arange(count))
        assert not (found[here] >= 0).any(), "a unit is in two blocks"
        found[here] = there
    return found


@st.composite
def permuted(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Draw a tensor of up to six dimensions, an order of them, and padding for each dimension of the result."""
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=6)))
    order = draw(st.permutations(range(len(sizes))))
    padding = [draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in sizes]
    return sizes, order, padding


def positions(sizes: tuple[int, ...], order: list[int], padding: list[int]) -> torch.Tensor:
    """Return where each element is after a permutation of the dimensions into padded memory."""
    padded = [sizes[each] + extra for each, extra in zip(order, padding, strict=True)]
    memory = torch.arange(math.prod(padded)).view(padded)
    for dimension, each in enumerate(order):
        memory = memory.narrow(dimension, 0, sizes[each])
    return memory.permute(*[order.index(each) for each in range(len(sizes))]).reshape(-1)


@given(permuted())
def test_a_permutation_with_padding_is_one_nest(drawn: tuple[tuple[int, ...], list[int], list[int]]) -> None:
    where = positions(*drawn)
    found = fit(where)
    assert found is not None
    assert len(found) == 1
    assert torch.equal(targets(found, where.numel()), where)
    memory = torch.randint(1000, (int(where.max()) + 1,))
    assert torch.equal(found[0].view(memory).reshape(-1), memory[where])


@given(permuted(), st.data())
def test_one_wrong_unit_is_never_overlooked(drawn: tuple[tuple[int, ...], list[int], list[int]], data: st.DataObject) -> None:
    where = positions(*drawn)
    wrong = data.draw(st.integers(0, where.numel() - 1))
    where[wrong] = data.draw(st.sampled_from([-1, int(where.max()) + 1, int(where[wrong]) + 7]))
    found = fit(where)
    assert found is None or torch.equal(targets(found, where.numel()), where)


@given(st.lists(st.integers(-1, 40), max_size=200))
def test_any_list_is_described_exactly_or_not_at_all(numbers: list[int]) -> None:
    where = torch.tensor(numbers, dtype=torch.int64)
    found = fit(where)
    assert found is None or torch.equal(targets(found, where.numel()), where)


def test_a_shuffled_list_has_no_nest() -> None:
    assert fit(torch.randperm(4096, generator=torch.Generator().manual_seed(1))) is None


def test_a_list_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.engines.vllm.layout.nested_strides._PIECE", 5)
    where = torch.arange(60).view(5, 12).t().reshape(-1).clone()
    assert fit(where) == [Nest((12, 5), (5, 1), (1, 12))]
    where[20:23] = -1
    found = fit(where)
    assert found is not None
    assert torch.equal(targets(found, 60), where)


def test_the_blocks_of_a_cut_tile_are_found() -> None:
    """200 rows of scales in tiles of 128 rows, as nvfp4 kernels have them: the last tile is not full."""
    tiles = torch.arange(256 * 8).view(2, 2, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(256, 8)
    found = fit(tiles[:200].reshape(-1))
    assert found is not None
    assert torch.equal(targets(found, 1600), tiles[:200].reshape(-1))


@given(permuted(), st.data())
def test_a_composition_is_both_moves(drawn: tuple[tuple[int, ...], list[int], list[int]], data: st.DataObject) -> None:
    second = fit(positions(*drawn))[0]  # type: ignore[index]
    sizes = drawn[0]
    raw = torch.arange(math.prod(sizes)).view(sizes)
    for dimension, size in enumerate(sizes):
        start = data.draw(st.integers(0, size - 1))
        raw = raw.narrow(dimension, start, data.draw(st.integers(1, size - start)))
    shape = data.draw(st.permutations(range(len(sizes))))
    first = fit(raw.permute(*shape).reshape(-1))[0]  # type: ignore[index]
    both = positions_of([first, second], 0, raw.numel(), torch.device("cpu"))
    composed = compose(first, second)
    if composed is not None:
        assert torch.equal(targets([composed], raw.numel()), both)
    assert (both >= 0).all()


def test_rows_of_a_tiled_matrix_compose() -> None:
    """A fused matrix is packed in tiles of 32 rows. Its parts begin at tiles, so each part is one nest."""
    tiles = torch.arange(96 * 64).view(3, 8, 32, 8).permute(0, 2, 1, 3).reshape(-1)
    packed = fit(tiles)
    assert packed is not None
    for start in (0, 32, 64):
        part = nest_of([(32 * 64, 1, 1)], 0, start * 64)
        assert part is not None
        composed = compose(part, packed[0])
        assert composed is not None
        assert torch.equal(targets([composed], 32 * 64), tiles[start * 64 :][: 32 * 64])


def test_a_composition_that_leaves_the_second_nest_is_refused() -> None:
    assert compose(Nest((8,), (1,), (1,)), Nest((4,), (1,), (1,))) is None
    assert compose(Nest((4,), (1,), (1,), 0, 2), Nest((4,), (1,), (1,))) is None
    assert compose(Nest((4,), (1,), (1,)), Nest((4,), (1,), (1,), 1)) is None


def test_dimensions_that_overlap_are_no_nest() -> None:
    assert nest_of([(4, 2, 1), (3, 2, 8)]) is None
    assert nest_of([(4, 0, 1)]) is None
    assert nest_of([(4, 1, 3), (2, 4, 12)]) == Nest((8,), (1,), (3,))


def test_units_outside_are_not_found() -> None:
    here, there = Nest((2, 3), (10, 2), (1, 50), 5, 7).find(torch.tensor([4, 5, 6, 7, 9, 11, 15, 19, 25, -3]))
    assert here.tolist() == [False, True, False, True, True, False, True, True, False, False]
    assert there.tolist() == [7, 57, 107, 8, 108]


def test_an_inverse_goes_back() -> None:
    nest = Nest((4, 5), (5, 1), (1, 4), 0, 3)
    back = inverse(nest)
    assert back == Nest((5, 4), (4, 1), (1, 5), 3, 0)
    assert inverse(Nest((4,), (1,), (0,))) is None
    assert is_contiguous(Nest((9,), (1,), (1,), 4, 2))
    assert not is_contiguous(nest)
