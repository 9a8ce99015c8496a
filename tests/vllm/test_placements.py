"""Reading and writing through placements of all kinds, made by hand. These tests need torch, but not vLLM."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deltawire.dtypes import dtype_named  # noqa: E402
from deltawire.engines.vllm.layout import model_layout, placements  # noqa: E402
from deltawire.engines.vllm.layout.loader_copies import WIDENING  # noqa: E402
from deltawire.engines.vllm.layout.model_layout import ModelLayout  # noqa: E402
from deltawire.engines.vllm.layout.types import Nest, Placement, Scatter, TensorLayout  # noqa: E402
from deltawire.subscribe.tensor_table import TensorSpec  # noqa: E402
from deltawire.tensors.torch_types import torch_dtype  # noqa: E402


def layout_of(kind: str, shape: tuple[int, ...], *places: Placement) -> ModelLayout:
    return ModelLayout({"w": TensorLayout(TensorSpec(dtype_named(kind), shape), "mapped", places)}, {})


def write(scatter: Scatter) -> None:
    indices = scatter.indices.long()
    assert indices.unique().numel() == indices.numel()
    if scatter.half is None:
        scatter.memory[indices] = scatter.new
    else:
        shift = 4 * scatter.half
        scatter.memory[indices] = (scatter.memory[indices] & (15 << (4 - shift))) | (scatter.new << shift)


def halves(tensor: Any) -> Any:
    some = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.stack([some & 15, some >> 4], -1).view(-1)


def packed(units: Any) -> Any:
    return (units[::2] | (units[1::2] << 4)).view(torch.int8)


TURNED = Nest((4, 6), (6, 1), (1, 4))
SIGNED = tuple(value ^ 8 for value in range(16))


def turned(tensor: Any) -> tuple[Placement, ...]:
    return (Placement((TURNED,), tensor.view(4, 6).t().contiguous().view(-1).view(torch.int16), 16),)


def widened(tensor: Any) -> tuple[Placement, ...]:
    wide = torch.cat([torch.zeros(3), tensor.float()])
    return (Placement((Nest((24,), (1,), (1,), 0, 3),), wide.view(torch.int32), 32, dtype_named("F32")),)


def in_two_steps(tensor: Any) -> tuple[Placement, ...]:
    """Rows 2 to 4 of a matrix that is then turned; the nests of both stages are kept apart."""
    raw = torch.cat([torch.zeros(12), tensor.float()]).bfloat16()
    return (
        Placement(
            (Nest((24,), (1,), (1,), 0, 12), Nest((6, 6), (6, 1), (1, 6))), raw.view(6, 6).t().contiguous().view(-1).view(torch.int16), 16
        ),
    )


def twice(tensor: Any) -> tuple[Placement, ...]:
    bits = tensor.view(torch.int16)
    return (*turned(tensor), Placement((Nest((24,), (1,), (1,)),), bits.clone(), 16))


def in_two_blocks(tensor: Any) -> tuple[Placement, ...]:
    bits = tensor.view(torch.int16)
    return (
        Placement((Nest((10,), (1,), (1,)),), bits[:10].clone(), 16),
        Placement((Nest((14,), (1,), (1,), 10, 0),), bits[10:].clone(), 16),
    )


@pytest.mark.parametrize("place", [turned, widened, in_two_steps, twice, in_two_blocks], ids=lambda place: place.__name__)
@pytest.mark.parametrize("piece", [1 << 22, 5])
def test_elements_are_read_and_written_where_placements_say(place: Any, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_layout, "PIECE", piece)
    monkeypatch.setattr(placements, "PIECE", piece)
    tensor = torch.randn(24, generator=torch.Generator().manual_seed(1)).bfloat16()
    layout = layout_of("BF16", (4, 6), *place(tensor))
    assert torch.equal(layout.gather("w"), tensor.view(4, 6))
    indices = torch.tensor([0, 5, 9, 10, 11, 23])
    tensor[indices] = -tensor[indices]
    for scatter in layout.locate("w", indices, tensor[indices]):
        write(scatter)
    assert torch.equal(layout.gather("w"), tensor.view(4, 6))
    if place is twice:  # each copy is written, not only one
        for number in range(2):
            layout.owned["w"] = frozenset([number])
            assert torch.equal(layout.gather("w", owned_only=True), tensor.view(4, 6))


@pytest.mark.parametrize("table", [None, SIGNED])
@pytest.mark.parametrize("kind", ["U8", "I32"])
@pytest.mark.parametrize("is_apart", [False, True])
def test_halves_of_bytes_are_read_and_written(table: tuple[int, ...] | None, kind: str, is_apart: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    flat = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=generator)
    tensor = flat.view({"U8": torch.uint8, "I32": torch.int32}[kind])
    units = halves(tensor)
    values = units if table is None else torch.tensor(table, dtype=torch.uint8)[units.long()]
    memory = packed(values.view(8, 12).t().contiguous().view(-1))
    nests = (Nest((96,), (1,), (1,)), Nest((8, 12), (12, 1), (1, 8))) if is_apart else (Nest((8, 12), (12, 1), (1, 8)),)
    layout = layout_of(kind, tuple(tensor.shape), Placement(nests, memory, 4, None, table))
    assert torch.equal(layout.gather("w"), tensor)
    indices = torch.tensor([1, 2, 7, tensor.numel() - 1])
    tensor[indices] = tensor[indices].flip(0)
    scatters = layout.locate("w", indices, tensor[indices])
    assert {scatter.half for scatter in scatters} == {0, 1}
    for scatter in scatters:
        write(scatter)
    assert torch.equal(layout.gather("w"), tensor)


def test_a_widened_element_with_foreign_bits_reads_as_another_one() -> None:
    tensor = torch.randn(24, generator=torch.Generator().manual_seed(1)).bfloat16()
    (placement,) = widened(tensor)
    layout = layout_of("BF16", (24,), placement)
    placement.memory[3 + 7] += 1  # a bit that bfloat16 does not have
    different = torch.nonzero(layout.gather("w").view(torch.int16) != tensor.view(torch.int16)).flatten()
    assert different.tolist() == [7]


def test_elements_that_another_worker_holds_are_left_out() -> None:
    tensor = torch.arange(24, dtype=torch.int16).view(torch.bfloat16)
    columns = tensor.view(4, 6)[:, :3].contiguous().view(-1).view(torch.int16)
    layout = layout_of("BF16", (4, 6), Placement((Nest((4, 3), (6, 1), (3, 1)),), columns, 16))
    assert torch.equal(layout.gather("w").view(torch.int16)[:, :3], tensor.view(torch.int16).view(4, 6)[:, :3])
    assert not layout.gather("w").view(torch.int16)[:, 3:].any()
    (scatter,) = layout.locate("w", torch.tensor([1, 4, 6]), torch.tensor([100, 101, 102], dtype=torch.int16))
    assert (scatter.indices.tolist(), scatter.new.tolist()) == ([1, 3], [100, 102])
    assert layout.locate("w", torch.tensor([4, 5]), torch.tensor([1, 2], dtype=torch.int16)) == []
    assert layout.blocks() == {"w": [(Nest((4, 3), (6, 1), (3, 1)),)]}


@pytest.mark.parametrize(("narrow", "wide"), sorted(WIDENING))
def test_every_element_of_a_narrow_type_is_read_back_from_a_wide_one(narrow: str, wide: str) -> None:
    dtype, held = dtype_named(narrow), dtype_named(wide)
    every = torch.arange(1 << dtype.width).to(getattr(torch, f"int{dtype.width}"))
    memory = torch.zeros(every.numel(), dtype=torch_dtype(held, bits=True))
    layout = layout_of(narrow, (every.numel(),), Placement((Nest((every.numel(),), (1,), (1,)),), memory, held.width, held))
    (scatter,) = layout.locate("w", torch.arange(every.numel()), every)
    write(scatter)
    loaded = torch.empty(every.numel(), dtype=torch_dtype(held)).copy_(every.view(torch_dtype(dtype)))  # as loaders do it
    assert torch.equal(memory, loaded.view(memory.dtype))
    is_wrong = layout.gather("w").view(every.dtype) != every
    assert not (is_wrong & ~loaded.isnan()).any()
    assert not is_wrong.any() or narrow != "BF16"
