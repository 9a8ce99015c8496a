"""Weights are read back through loaders, on a module that loads weights as models of vLLM do. These tests need torch, but not vLLM."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deltawire.engines.vllm.mirror import read_back as module  # noqa: E402
from deltawire.engines.vllm.mirror.read_back import read_back  # noqa: E402


class Fused(torch.nn.Module):
    """A module with two projections in one parameter, a vocabulary with padding, and tensors that it does not load."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16), requires_grad=False)
        self.words = torch.nn.Parameter(torch.zeros(6, 3), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("q", "k"):
                place = 0 if name == "q" else 2
                self.qk.data.narrow(0, place, 2).copy_(tensor)
            elif name == "words":
                assert self.words.shape[1:] == tensor.shape[1:]
                self.words[: len(tensor)].data.copy_(tensor)
                self.words[len(tensor) :].data.fill_(0)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"q": torch.randn(2, 3), "k": torch.randn(2, 3), "words": torch.randn(5, 3), "unused": torch.randn(7)}


@pytest.fixture
def model(weights: dict[str, torch.Tensor]) -> Fused:
    model = Fused()
    model.load_weights(weights.items())
    return model


def test_loaded_tensors_read_back_equal_in_the_type_of_the_model(model: Fused, weights: dict[str, torch.Tensor]) -> None:
    readings = read_back(model, weights.items())
    assert readings.equal == {"q", "k", "words"}
    assert readings.absent == {"unused"}
    assert not readings.different
    assert not readings.untouched
    del weights["words"]
    assert read_back(model, weights.items()).untouched == {"words"}


def test_a_single_bit_is_noticed_and_nothing_is_changed(model: Fused, weights: dict[str, torch.Tensor]) -> None:
    weights["k"][1, 1] = 5.0
    before = model.qk.clone()
    readings = read_back(model, weights.items())
    assert readings.different == {"k"}
    assert not readings.mostly_different
    assert torch.equal(model.qk, before)
    model.words.data[5, 0] = -0.0  # as a number it equals the zero of the padding, and padding is never used
    assert "words" in read_back(model, weights.items()).equal


def test_another_layout_is_mostly_different(model: Fused, weights: dict[str, torch.Tensor]) -> None:
    model.qk.data = model.qk.data.flip(1).contiguous()
    assert read_back(model, weights.items()).mostly_different >= {"q", "k"}
    model.words = torch.nn.Parameter(torch.empty(0), requires_grad=False)  # the weights are packed elsewhere
    readings = read_back(model, weights.items())
    assert "words" in readings.mostly_different
    assert readings.absent == {"unused"}


class Joined(Fused):
    """A module that collects all tensors, and then writes what it computes from them."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = {name: tensor.bfloat16() if name == "unused" else tensor for name, tensor in weights}
        self.words[:5].data.copy_(tensors["words"])
        if "q" in tensors:
            self.qk.data.copy_(torch.cat([tensors["q"].bfloat16(), tensors["k"]]))


def test_tensors_that_a_loader_joins_are_neither_absent_nor_loaded_one_by_one(weights: dict[str, torch.Tensor]) -> None:
    model = Joined()
    model.load_weights(weights.items())
    readings = read_back(model, weights.items())
    assert readings.equal == readings.blocks.keys() == {"words"}
    assert readings.different == {"q", "k", "unused"}, "they are used, but their positions are unknown"
    assert not readings.absent


def test_computed_values_are_attributed_to_their_sources(weights: dict[str, torch.Tensor]) -> None:
    halves = {name: weights[name].bfloat16() for name in ("unused", "q", "k", "words")}

    class Late(Fused):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights([(name, tensor.flip(0).flip(0)) for name, tensor in weights if name != "unused"])

    late = Late()
    late.load_weights(halves.items())
    readings = read_back(late, halves.items())
    assert readings.equal == {"q", "k", "words"}
    assert not readings.blocks
    assert readings.absent == {"unused"}


class PeakBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest result of an operation that is not a view, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, result.nbytes)
        return result


@pytest.mark.parametrize("is_strided", [False, True])
def test_a_large_tensor_is_compared_in_pieces_and_its_last_bit_counts(monkeypatch: pytest.MonkeyPatch, is_strided: bool) -> None:
    monkeypatch.setattr(module, "_PIECE", 100)
    held = torch.randn(3, 501, 7) if not is_strided else torch.randn(7, 501, 3).permute(2, 1, 0)
    source = held.to(torch.float32, copy=True)
    with PeakBytes() as memory:
        assert int(module._count_equal(held, source)) == held.numel()
    assert memory.largest <= 100 * 8
    source[-1, -1, -1] = -0.0 if source[-1, -1, -1] != 0 else 1.0
    assert int(module._count_equal(held, source)) == held.numel() - 1
    assert int(module._count_equal(held, torch.tensor(0.5).expand_as(held))) == int((held == 0.5).sum())
