"""Writing elements at mapped positions equals loading them, for all views that a loader makes. These tests need torch, but not vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from deltawire.engines.vllm.mirror.element_map import ElementMap  # noqa: E402
from deltawire.engines.vllm.mirror.read_back import read_back  # noqa: E402
from deltawire.engines.vllm.mirror.staging import Change  # noqa: E402

View = Callable[[torch.Tensor], torch.Tensor]


class Loader(torch.nn.Module):
    """A model that copies views of one checkpoint tensor to views of its parameters."""

    def __init__(self, copies: list[tuple[View, View]], size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.copies = copies
        self.held = torch.nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            for source, target in self.copies:
                target(self.held.data).copy_(source(tensor))


def learn(model: Loader, tensor: torch.Tensor) -> ElementMap:
    with torch.no_grad():
        model.load_weights([("w", tensor)])
        readings = read_back(model, [("w", tensor)])
    assert readings.equal == {"w"}
    return ElementMap(model, readings.blocks)


def changed(tensor: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, Change]:
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(tensor.numel(), min(count, tensor.numel()), replace=False)).astype(np.int32)
    bits = tensor.clone().view(torch.int16)
    bits.view(-1)[torch.from_numpy(indices).long()] ^= 0x7FFF  # this also makes NaNs and infinities
    return bits.view(tensor.dtype), Change(indices, bits.view(-1).numpy()[indices].view(np.uint16))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int16)


def part(tensor: torch.Tensor, cuts: list[tuple[int, int]], order: list[int]) -> torch.Tensor:
    for dimension, (start, size) in enumerate(cuts):
        tensor = tensor.narrow(dimension, start, min(size, tensor.shape[dimension] - start))
    return tensor.permute(*order)


def place(held: torch.Tensor, number: int, sizes: tuple[int, ...]) -> torch.Tensor:
    room = held[number]
    for dimension, size in enumerate(sizes):
        room = room.narrow(dimension, 1, size)
    return room


@st.composite
def loaders(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[View, View]]]:
    """Draw the shape of a tensor and blocks of it, in any order of dimensions. Each block goes to the middle of a row of the parameter."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    copies: list[tuple[View, View]] = []
    for number in range(draw(st.integers(1, 3))):
        cuts = [draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))) for n in shape]
        source = functools.partial(part, cuts=cuts, order=draw(st.permutations(range(len(shape)))))
        copies.append((source, functools.partial(place, number=number, sizes=source(torch.empty(shape)).shape)))
    return shape, copies


@given(loader=loaders(), count=st.integers(0, 40), seed=st.integers(0, 99))
def test_writing_mapped_elements_equals_loading_them(
    loader: tuple[tuple[int, ...], list[tuple[View, View]]], count: int, seed: int
) -> None:
    shape, copies = loader
    model = Loader(copies, (3, *[7] * len(shape)))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    mapped = learn(model, tensor).map_changes({"w": changed(tensor, count, seed)[1]})
    assert mapped.tensors == {"w"}
    mapped.write()
    assert mapped.are_written()
    written = bits(model.held).clone()
    model.load_weights([("w", changed(tensor, count, seed)[0])])
    assert torch.equal(written, bits(model.held))


def test_elements_that_were_not_written_are_noticed() -> None:
    model = Loader([(lambda tensor: tensor, lambda held: held[2:6])], (8, 3))
    tensor = torch.randn(4, 3).bfloat16()
    mapped = learn(model, tensor).map_changes({"w": changed(tensor, 5, 1)[1]})
    mapped.write()
    bits(model.held)[mapped.scatters[0].indices[0] // 3, mapped.scatters[0].indices[0] % 3] ^= 1
    assert not mapped.are_written()


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (lambda tensor: tensor, torch.float32),  # the loader casts
        (lambda tensor: tensor.t().contiguous(), torch.bfloat16),  # the loader computes a copy
        (lambda tensor: tensor[:1].expand(4, 4), torch.bfloat16),  # one element goes to several positions
        (lambda tensor: tensor.mul_(-1).abs_(), torch.bfloat16),  # the loader computes in place
    ],
)
def test_copies_that_strides_cannot_describe_have_no_position(source: View, dtype: torch.dtype) -> None:
    model = Loader([(source, lambda held: held)], (4, 4), dtype)
    tensor = torch.randn(4, 4).bfloat16()
    assert not learn(model, tensor).map_changes({"w": changed(tensor, 5, 1)[1]}).tensors


def test_elements_of_another_width_have_no_position() -> None:
    model = Loader([(lambda tensor: tensor.view(torch.int32), lambda held: held[:, :2])], (4, 4), torch.int32)
    tensor = torch.randn(4, 4).bfloat16()
    assert not learn(model, tensor).map_changes({"w": changed(tensor, 5, 1)[1]}).tensors


def test_the_map_is_invalid_once_a_parameter_has_moved() -> None:
    model = Loader([(lambda tensor: tensor, lambda held: held)], (4, 4))
    element_map = learn(model, torch.randn(4, 4).bfloat16())
    assert element_map.is_valid_for(model)
    model.held.data = model.held.data.clone()
    assert not element_map.is_valid_for(model)
