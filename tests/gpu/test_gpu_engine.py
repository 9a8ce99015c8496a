"""Engines whose weights are on a GPU pass the conformance tests, decode against the live weights, and keep no copy of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from emulator.build import compiler

from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines import HotSwap
from deltawire.engines.module import ModuleEngine
from deltawire.engines.weights.in_place import InPlaceWeights
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store.memory import MemoryStore
from deltawire.testing import EngineConformance, EngineRig
from deltawire.trainers import WeightSource

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402

DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu():
    with contextlib.nullcontext() if REAL else emulated(EmulatedGpu()):
        yield


class Net(torch.nn.Module):
    """A module with tied weights in bf16, strided tensors, integers, and tensors without elements or dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(40, 16, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(16, 40, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(7, 5).t())
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("counts", torch.randint(0, 100, (9,)))

    def forward(self, ids: Any) -> Any:
        return self.head(self.embed(ids)).float() * self.scale + self.turned.sum() + self.counts.sum()


def changed(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, device=DEVICE).to(parameter.dtype))


class NetRig(EngineRig):
    def __init__(self, **options: Any) -> None:
        trainer, self.module = Net(0).to(DEVICE), Net(99).to(DEVICE)
        self._states = []
        for _ in range(6):
            self._states.append({name: tensor.clone() for name, tensor in trainer.state_dict().items()})
            changed(trainer)
        self.engine = ModuleEngine(self.module, **options)

    def state(self, number: int) -> Any:
        return self._states[number]

    def weights(self) -> Any:
        return self.module.state_dict()

    def generate(self) -> bytes:
        with torch.no_grad():
            return self.module(torch.arange(40, device=DEVICE)).cpu().numpy().tobytes()


class TestModuleOnAGpu(EngineConformance):
    @pytest.fixture
    def rig(self) -> NetRig:
        return NetRig()


class TestModuleOnAGpuThatCanGoBack(EngineConformance):
    @pytest.fixture
    def rig(self) -> NetRig:
        return NetRig(undo_bytes=1 << 20)


def test_weights_on_a_gpu_are_changed_where_they_are():
    """The module's tensors are the state, and keep their memory."""
    store = MemoryStore()
    trainer, served = Net(0).to(DEVICE), Net(1).to(DEVICE)
    addresses = [p.data_ptr() for p in served.parameters()]
    with (
        Publisher(store, snapshot="device") as publisher,
        contextlib.closing(HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False))) as swap,
    ):
        for step in range(3):
            publisher.publish(trainer.state_dict(), step=step)
            swap.sync()
            assert all(torch.equal(a, b) for a, b in zip(trainer.state_dict().values(), served.state_dict().values(), strict=True))
            changed(trainer)
        assert type(swap._replica._weights.current) is InPlaceWeights
    assert addresses == [p.data_ptr() for p in served.parameters()]


@pytest.mark.parametrize("undo_bytes", [None, 1 << 20])
def test_update_steps_are_kept_on_a_gpu_only_on_request(undo_bytes):
    store = MemoryStore()
    trainer, served = Net(0).to(DEVICE), Net(1).to(DEVICE)
    engine = ModuleEngine(served, undo_bytes=undo_bytes)
    with (
        Publisher(store, snapshot="device") as publisher,
        contextlib.closing(HotSwap(store, engine, options=ReaderOptions(pin=False))) as swap,
    ):
        for _ in range(3):
            publisher.publish(trainer.state_dict())
            swap.sync()
            with torch.no_grad():
                trainer.scale.add_(1)
        assert len(swap._replica._undo) == (0 if undo_bytes is None else 2)


def test_tensors_that_the_module_does_not_have_are_kept_on_the_host():
    """A file of a delta may change tensors of the module, other tensors, or both."""
    store = MemoryStore()
    trainer, served = Net(0).to(DEVICE), Net(1).to(DEVICE)
    engine = ModuleEngine(served, keep_others=True)
    others = {"a": torch.arange(50.0, device=DEVICE), "head2": torch.arange(30.0, device=DEVICE), "z": torch.arange(9.0, device=DEVICE)}
    with (
        Publisher(store, snapshot="device", options=WriterOptions(segment_bytes=200)) as publisher,
        contextlib.closing(HotSwap(store, engine, options=ReaderOptions(pin=False))) as swap,
    ):
        for _ in range(3):
            publisher.publish({**trainer.state_dict(), **others})
            swap.sync()
            assert all(torch.equal(a, b) for a, b in zip(trainer.state_dict().values(), served.state_dict().values(), strict=True))
            kept = swap._replica._weights.current.live()
            assert all(kept[name].tolist() == others[name].tolist() for name in others)
            changed(trainer)
            for other in others.values():
                other.add_(1)


def test_fused_experts_on_a_gpu_are_changed_where_they_are():
    """Tensors of a checkpoint are views of one parameter, so they begin at addresses that are not aligned."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 12, "intermediate_size": 7, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 9}
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=2, max_position_embeddings=16)
    trainer, served = (transformers.MixtralForCausalLM(config).to(DEVICE, torch.bfloat16) for _ in range(2))
    source, store = WeightSource(trainer), MemoryStore()
    assert any(tensor.data_ptr() % 16 for tensor in source.snapshot().values())
    addresses = [parameter.data_ptr() for parameter in served.parameters()]
    with (
        Publisher(store, snapshot="device") as publisher,
        contextlib.closing(HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False))) as swap,
    ):
        for step in range(2):
            source.publish(publisher, step=step)
            swap.sync()
            assert all(torch.equal(a, b) for a, b in zip(trainer.state_dict().values(), served.state_dict().values(), strict=True))
            changed(trainer)
        assert type(swap._replica._weights.current) is InPlaceWeights
    assert addresses == [parameter.data_ptr() for parameter in served.parameters()]
