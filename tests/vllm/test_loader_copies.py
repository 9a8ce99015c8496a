"""Loaders that run on meta tensors: what they copy is recorded, and everything else that they do is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from loaded_models import import_vllm, load_model, read_checkpoint
from tiny_checkpoints import TinyModel

from deltawire.dtypes import dtype_named
from deltawire.subscribe.tensor_table import TensorSpec

pytestmark = pytest.mark.slow

Load = Callable[[dict[str, Any], str, Any], None]


@functools.cache
def config() -> Any:
    import_vllm()
    from vllm.config import VllmConfig

    return VllmConfig()


def record(load: Load, parameters: dict[str, Any], table: dict[str, tuple[str, tuple[int, ...]]]) -> Any:
    """Record what a model does that calls `load` for each tensor. Checks that the model is as before."""
    import torch

    settings = config()
    from deltawire.engines.vllm.layout.loader_copies import record_copies

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in parameters.items():
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
            self.attribute = "before"

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
            for name, tensor in weights:
                self.attribute = name
                load(dict(self.named_parameters()), name, tensor)

    model = Model()
    held = {name: (id(each), each.clone()) for name, each in model.named_parameters()}
    found = record_copies(model, settings, {name: TensorSpec(dtype_named(kind), shape) for name, (kind, shape) in sorted(table.items())})
    assert {name: id(each) for name, each in model.named_parameters()} == {name: number for name, (number, _) in held.items()}
    assert all(torch.equal(each, held[name][1]) for name, each in model.named_parameters())
    assert model.attribute == "before"
    return found


def targets(copy: Any, count: int) -> list[int]:
    """Return the position of each element in the parameter; −1 if it is not copied."""
    import torch

    here, there = copy.nest.find(torch.arange(count))
    positions = torch.full((count,), -1)
    positions[here] = there
    return positions.tolist()


def test_a_shard_of_a_fused_matrix_is_recorded() -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        parameters["w"].data.narrow(0, {"q": 0, "k": 2}[name], 2).copy_(tensor.narrow(1, 3, 3))

    found = record(load, {"w": torch.ones(4, 3)}, {"q": ("F32", (2, 6)), "k": ("F32", (2, 6))})
    assert found.refused == {}
    (copy,) = found.copies["k"]
    assert (copy.parameter.name, copy.widened) == ("w", None)
    assert targets(copy, 12) == [-1, -1, -1, 6, 7, 8, -1, -1, -1, 9, 10, 11]


def test_a_transposed_copy_is_recorded_through_a_temporary() -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        parameters["w"].data.copy_(tensor.t().contiguous()[1:])

    found = record(load, {"w": torch.ones(2, 2)}, {"t": ("F32", (2, 3))})
    assert targets(found.copies["t"][0], 6) == [-1, 0, 2, -1, 1, 3]


@pytest.mark.parametrize(("kind", "held", "is_exact"), [("BF16", "float32", True), ("F32", "bfloat16", False), ("F16", "bfloat16", False)])
def test_only_casts_that_keep_every_number_are_taken(kind: str, held: str, is_exact: bool) -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        parameters["s"].data.copy_(tensor)

    found = record(load, {"s": torch.ones(4, dtype=getattr(torch, held))}, {"s": (kind, (4,))})
    assert bool(found.copies.get("s")) is is_exact
    assert ("s" in found.refused) is not is_exact
    if is_exact:
        assert found.copies["s"][0].widened == dtype_named("F32")


def test_a_scalar_that_goes_to_several_places_is_recorded_at_each() -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        if name == "one":
            parameters["s"].data[1:].fill_(tensor.item())
        else:
            parameters["s"].data[0] = tensor

    found = record(load, {"s": torch.ones(3)}, {"one": ("F32", ()), "two": ("F32", ())})
    assert [targets(copy, 1) for copy in found.copies["one"]] == [[1], [2]]
    assert [targets(copy, 1) for copy in found.copies["two"]] == [[0]]


@pytest.mark.parametrize(("rank", "expected"), [(0, [{0: {0, 1}}, {0: {2, 3}}, {1: {4, 5}}]), (1, [{1: {0, 1}}, {2: {2, 3}}, {2: {4, 5}}])])
def test_elements_that_a_loader_repeats_are_recorded_at_each_index(rank: int, expected: list[dict[int, set[int]]]) -> None:
    """Each rank has half of six rows that were three. The second row, which both ranks have, is a part of its own on both of them."""
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        finer = tensor.repeat_interleave(2, dim=-2).repeat_interleave(1, dim=-1)
        parameters["s"].data.copy_(finer.narrow(0, 3 * rank, 3))

    found = record(load, {"s": torch.ones(3, 2)}, {"scale": ("F32", (3, 2))})
    assert found.refused == {}
    rows: list[dict[int, set[int]]] = []
    for copy in found.copies["scale"]:
        places = {element: place for element, place in enumerate(targets(copy, 6)) if place >= 0}
        rows.append({row: {places[2 * row], places[2 * row + 1]} for row in {element // 2 for element in places}})
    assert sorted(rows, key=lambda row: min(map(min, row.values()))) == expected


@pytest.mark.parametrize("dim", [0, 1])
def test_a_table_of_repeated_elements_equals_what_the_loader_copies(dim: int) -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        finer = tensor.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
        parameters["s"].data[1].copy_(finer.narrow(dim, 3, 3))

    values = torch.arange(12.0).view(3, 4)
    wanted = torch.full((2, 3, 8) if dim == 0 else (2, 6, 3), -1.0)
    load({"s": torch.nn.Parameter(wanted, requires_grad=False)}, "scale", values)
    found = record(load, {"s": torch.full_like(wanted, -1.0)}, {"scale": ("F32", (3, 4))})
    filled = torch.full((wanted.numel(),), -1.0)
    parts = []
    for copy in found.copies["scale"]:
        places = {element: place for element, place in enumerate(targets(copy, 12)) if place >= 0}
        parts.append(frozenset(places))
        for element, place in places.items():
            assert filled[place] == -1, "two parts have the same place"
            filled[place] = values.view(-1)[element]
    assert torch.equal(filled.view(wanted.shape), wanted)
    assert all(one == other or not one & other for one in parts for other in parts), "parts overlap without being equal"


def test_elements_that_are_repeated_too_often_are_refused() -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        parameters["s"].data.copy_(tensor.repeat_interleave(65, dim=0))

    found = record(load, {"s": torch.ones(130)}, {"scale": ("F32", (2,))})
    assert found.copies == {}
    assert "strides cannot describe" in found.refused["scale"]


def test_the_last_of_several_small_tensors_in_one_position_is_the_one_that_is_held() -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        parameters["shape"].data.copy_(tensor)

    found = record(load, {"shape": torch.ones(2, dtype=torch.int64)}, {"k": ("I64", (2,)), "q": ("I64", (2,))})
    assert "same memory" in found.refused["k"]
    assert len(found.copies["q"]) == 1


def test_large_tensors_in_exactly_one_place_are_tied_and_others_that_overlap_are_refused() -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        parameters["w"].data[: len(tensor)].copy_(tensor)

    found = record(load, {"w": torch.ones(32)}, {"a": ("F32", (32,)), "b": ("F32", (32,))})
    assert found.refused == {}
    assert found.copies["a"][0].nest == found.copies["b"][0].nest
    found = record(load, {"w": torch.ones(32)}, {"a": ("F32", (32,)), "b": ("F32", (20,))})
    assert set(found.refused) == {"a"}


def _partly_zeroed(parameters: dict[str, Any], name: str, tensor: Any) -> None:
    tensor[1:].zero_()
    parameters["w"].data.copy_(tensor)


def _zeroed_and_written(parameters: dict[str, Any], name: str, tensor: Any) -> None:
    parameters["w"].data.copy_(tensor.clone().zero_().copy_(tensor * 2))


def _scaled(parameters: dict[str, Any], name: str, tensor: Any) -> None:
    parameters["w"].data.copy_(tensor * 2)


def _added(parameters: dict[str, Any], name: str, tensor: Any) -> None:
    parameters["w"].data.add_(tensor)


def _replaced(parameters: dict[str, Any], name: str, tensor: Any) -> None:
    parameters["w"].data.copy_(tensor)
    parameters["w"].data = tensor.clone()


def _viewed(parameters: dict[str, Any], name: str, tensor: Any) -> None:
    import torch

    parameters["w"].data.view(torch.int16).copy_(tensor.view(torch.int16))


def _failing(parameters: dict[str, Any], name: str, tensor: Any) -> None:
    if name == "w":
        raise KeyError(name)
    parameters["w"].data.copy_(tensor)


@pytest.mark.parametrize(
    "load", [_partly_zeroed, _zeroed_and_written, _scaled, _added, _replaced, _viewed, _failing], ids=lambda load: load.__name__
)
def test_anything_but_a_copy_is_refused(load: Load) -> None:
    import torch

    found = record(load, {"w": torch.ones(4, 6)}, {"w": ("F32", (4, 6))})
    assert set(found.refused) == {"w"}
    assert found.copies == {}


def test_a_tensor_that_a_loader_replaces_by_zeros_is_absent() -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        parameters["w"].data.copy_(tensor.view(-1).zero_()[:2] if name == "bias" else tensor)

    found = record(load, {"w": torch.ones(2)}, {"bias": ("F32", (2, 2)), "here": ("F32", (2,))})
    assert found.copies["bias"] == []
    assert len(found.copies["here"]) == 1
    assert found.refused == {}


def test_a_loader_that_fails_for_one_tensor_goes_on_with_the_next() -> None:
    import torch

    found = record(_failing, {"w": torch.ones(2)}, {"a": ("F32", (2,)), "w": ("F32", (2,)), "z": ("F32", (3,))})
    assert set(found.refused) == {"w", "z"}
    assert len(found.copies["a"]) == 1


def test_a_tensor_that_is_not_copied_is_absent() -> None:
    import torch

    def load(parameters: dict[str, Any], name: str, tensor: Any) -> None:
        if name == "here":
            parameters["w"].data.copy_(tensor)

    found = record(load, {"w": torch.ones(2)}, {"elsewhere": ("F32", (2,)), "here": ("F32", (2,))})
    assert found.copies["elsewhere"] == []
    assert found.refused == {}


def test_a_model_that_was_loaded_anew_is_learnt_as_before(tmp_path: Path) -> None:
    """vLLM leaves its own loaders in the raw parameters after such a load. They copy nothing until the next one."""
    model = TinyModel("dense", layers=1)
    checkpoint = model.save(tmp_path / "model", model.state())
    loaded = load_model(checkpoint)
    from deltawire.engines.vllm.layout.loader_copies import record_copies
    from deltawire.engines.vllm.loading import load_tensors

    table = {name: TensorSpec(dtype_named("BF16"), array.shape) for name, array in sorted(model.state().items())}

    def nests() -> dict[str, list[Any]]:
        found = record_copies(loaded.model, loaded.vllm_config, table)
        assert not found.refused
        return {name: [copy.nest for copy in copies] for name, copies in found.copies.items()}

    first = nests()
    assert all(first.values())
    with loaded.active():
        load_tensors(loaded.model, loaded.vllm_config.model_config, iter(read_checkpoint(checkpoint).items()))
    assert nests() == first
