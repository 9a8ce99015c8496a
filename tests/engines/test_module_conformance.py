"""Modules pass the conformance tests as engines: transformers models, tied, fused and on "another device", and one with unusual tensors."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import clone, llama, logits, moe, qwen, step, torch

from deltawire.engines.module import ModuleEngine
from deltawire.engines.weights.host_copy import HostCopyWeights
from deltawire.testing import EngineConformance, EngineRig


class ModuleRig(EngineRig):
    def __init__(self, make: Any, **options: Any) -> None:
        self._trainer, self.module = make(0), make(99)
        self._states = [clone(self._trainer.state_dict())]
        for seed in range(1, 6):
            step(self._trainer, seed, rate=0.02)
            self._states.append(clone(self._trainer.state_dict()))
        self.engine = ModuleEngine(self.module, **options)

    def state(self, number: int) -> Any:
        return self._states[number]

    def weights(self) -> Any:
        return self.module.state_dict()

    def generate(self) -> bytes:
        return logits(self.module)


class TestTiedModel(EngineConformance):
    @pytest.fixture
    def rig(self) -> ModuleRig:
        return ModuleRig(qwen)


class TestUntiedModel(EngineConformance):
    @pytest.fixture
    def rig(self) -> ModuleRig:
        return ModuleRig(llama, undo_bytes=0)


class TestMixtureOfExperts(EngineConformance):
    @pytest.fixture
    def rig(self) -> ModuleRig:
        return ModuleRig(moe)


class TestDevicePath(EngineConformance):
    """Run the code for weights that the codec cannot reach on the CPU."""

    @pytest.fixture
    def rig(self, monkeypatch: pytest.MonkeyPatch) -> ModuleRig:
        monkeypatch.setattr("deltawire.engines.module.InPlaceWeights", HostCopyWeights)
        return ModuleRig(qwen)


class Odd(torch.nn.Module):
    """A module with non-contiguous parameters, buffers, integers, a shared submodule, an empty parameter and a scalar one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.turned = torch.nn.Parameter(torch.randn(7, 5).t())
        self.sparse_view = torch.nn.Parameter(torch.randn(12, 6)[::2, ::3])
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.shared = self.again = torch.nn.Linear(5, 5, dtype=torch.float64)
        self.register_buffer("counts", torch.randint(0, 100, (9,)))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, ids: Any) -> Any:
        total = self.turned.double().sum() + self.sparse_view.double().pow(2).sum() + self.scale + self.counts.sum()
        return type("Output", (), {"logits": self.shared(torch.ones(1, 5, dtype=torch.float64)) * total})


class TestOddModule(EngineConformance):
    @pytest.fixture
    def rig(self) -> ModuleRig:
        return ModuleRig(Odd)


class TestOddModuleOnADevice(EngineConformance):
    @pytest.fixture
    def rig(self, monkeypatch: pytest.MonkeyPatch) -> ModuleRig:
        monkeypatch.setattr("deltawire.engines.module.InPlaceWeights", HostCopyWeights)
        return ModuleRig(Odd)
