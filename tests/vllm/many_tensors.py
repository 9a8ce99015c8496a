"""A worker with as many tensors as a large model has, all tiny, in the memory and the layout of a vLLM model, without vLLM."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import torch
from fake_layout import FakeHop, State

from deltawire.chain.log import ChainLog
from deltawire.dtypes import dtype_of_numpy
from deltawire.engines.vllm.layout.model_layout import ModelLayout
from deltawire.engines.vllm.layout.placements import direct_view
from deltawire.engines.vllm.layout.types import Nest, Placement, TensorLayout
from deltawire.engines.vllm.live.live_weights import LiveWeights
from deltawire.engines.vllm.live.update_types import LiveVersion
from deltawire.format.records.record_parts import FileEntry
from deltawire.format.records.version_records import Commit
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable
from deltawire.tensors.torch_types import torch_dtype

Fused = dict[str, list[tuple[str, tuple[int, ...]]]]
"""For each parameter of the model, the tensors of the checkpoint that follow each other in it."""

_ROW = 32
"""The elements of a row. A tensor of one row begins at an address that the GPU codec can read."""


def qwen3(layers: int, experts: int = 0) -> Fused:
    """Return the parameters of a Qwen3 model as vLLM fuses them.

    With 36 layers there are 291 of 399 tensors, and with 16 layers of 128 experts 147 of 6,291.
    """
    found: Fused = {}
    for number in range(layers):
        at = f"model.layers.{number}"
        found[f"{at}.self_attn.qkv_proj"] = [(f"{at}.self_attn.{name}_proj.weight", (4, _ROW)) for name in "qkv"]
        inner = [("mlp.gate", 1)] if experts else [("mlp.down_proj", 8)]
        for name, rows in [("self_attn.o_proj", 4), ("self_attn.q_norm", 1), ("self_attn.k_norm", 1), *inner]:
            found[f"{at}.{name}"] = [(f"{at}.{name}.weight", (rows, _ROW))]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}"] = [(f"{at}.{name}.weight", (_ROW,))]
        each = [f"{at}.mlp.experts.{expert}." for expert in range(experts)]
        if experts:
            found[f"{at}.mlp.experts.w13"] = [(f"{one}{name}_proj.weight", (2, _ROW)) for one in each for name in ("gate", "up")]
            found[f"{at}.mlp.experts.w2"] = [(f"{one}down_proj.weight", (2, _ROW)) for one in each]
        else:
            found[f"{at}.mlp.gate_up_proj"] = [(f"{at}.mlp.{name}_proj.weight", (8, _ROW)) for name in ("gate", "up")]
    for name, shape in (("lm_head", (40, _ROW)), ("model.embed_tokens", (40, _ROW)), ("model.norm", (_ROW,))):
        found[name] = [(f"{name}.weight", shape)]
    return found


class ManyTensors:
    """A worker with the first version of a chain, and the chain.

    Parameters
    ----------
    fused
        The parameters of the model.
    files
        About the number of files of each version.
    options
        Those of `LiveWeights`.
    """

    def __init__(self, fused: Fused, *, files: int = 1, **options: Any) -> None:
        self._rng = np.random.default_rng(1)
        shapes = {name: shape for tensors in fused.values() for name, shape in tensors}
        self.state: State = {name: self._rng.standard_normal(shapes[name]).astype(ml_dtypes.bfloat16) for name in sorted(shapes)}
        total = sum(array.nbytes for array in self.state.values())
        self._store = MemoryStore()
        self._publisher = Publisher(self._store, options=WriterOptions(segment_bytes=max(1, total // files)))
        self.commits = [self._publish()]
        self.table: TensorTable = {name: TensorSpec(dtype_of_numpy(array.dtype), array.shape) for name, array in self.state.items()}
        self.model, self.layout = self._load(fused)
        self.weights = LiveWeights(self.model, lambda _: self.layout, threads=1, **options)
        self.weights.learn(self.table)
        assert self.commits[0].digest is not None
        self.weights.adopt(LiveVersion(ChainLog(self._store).ref(self.commits[0]), self.commits[0].digest))

    def step(self, names: Collection[str] | None = None) -> FakeHop:
        """Change some elements of each of these tensors by a bit, or of all, and publish that. Returns the hop."""
        for name in self.state if names is None else names:
            bits = self.state[name].view(np.uint16)
            bits[self._rng.random(bits.shape) < 0.05] ^= 1
            bits.reshape(-1)[0] ^= 1
        self.commits.append(self._publish())
        return FakeHop(self.commits[-2], self.commits[-1], self.commits[-1].files)

    def read(self, entry: FileEntry) -> bytes:
        return self._store.get(entry.key, limit=entry.size)

    def is_exact(self) -> bool:
        """Return whether the model has the newest version."""
        return all(
            torch.equal(self.layout.tensors[name].direct.view(torch.int16), torch.from_numpy(array.view(np.int16)))  # type: ignore[union-attr]
            for name, array in self.state.items()
        )

    def _publish(self) -> Commit:
        self._publisher.publish(self.state)
        head = ChainLog(self._store).head()
        assert head is not None
        return head

    def _load(self, fused: Fused) -> tuple[Any, ModelLayout]:
        """Return a model with these weights, and its layout."""
        model, tensors = torch.nn.Module(), {}
        held = []
        for number, parts in enumerate(fused.values()):
            module = torch.nn.Module()
            flat = np.concatenate([self.state[name].reshape(-1) for name, _ in parts])
            weight = torch.from_numpy(flat.view(np.int16).copy()).view(torch_dtype(self.table[parts[0][0]].dtype))
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
            model.add_module(str(number), module)
            held.append((module, ("weight",)))
            memory, start = module.weight.detach().view(torch.int16), 0
            for name, shape in parts:
                placement = Placement((Nest((math.prod(shape),), (1,), (1,), 0, start),), memory, 16)
                spec = self.table[name]
                tensors[name] = TensorLayout(spec, "direct", (placement,), direct_view(spec, (placement,)))
                start += math.prod(shape)
        return model, ModelLayout(dict(sorted(tensors.items())), {}, held, model=model)
