"""A worker that holds a few tensors in layouts like those of vLLM, without vLLM: as they are, turned, widened, and in 4-bit units."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from deltawire.chain.log import ChainLog
from deltawire.delta.patch import TensorPatch
from deltawire.dtypes import dtype_named, dtype_of_numpy
from deltawire.engines.vllm.layout import placements
from deltawire.engines.vllm.layout.types import ModuleRule, Nest, Placement, Scatter, TensorLayout
from deltawire.engines.vllm.live.live_weights import LiveWeights
from deltawire.engines.vllm.live.update_types import LiveVersion
from deltawire.format.records.record_parts import CommitRef, FileEntry, record_hash
from deltawire.format.records.version_records import Commit
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable
from deltawire.tensors.torch_types import torch_dtype

State = dict[str, np.ndarray[Any, Any]]


def first_state(rng: np.random.Generator) -> State:
    return {
        "direct": rng.standard_normal((64, 48)).astype(ml_dtypes.bfloat16),
        "direct.too": rng.standard_normal(200).astype(np.float32),
        "nibbles": rng.integers(0, 256, (16, 32), np.uint8),
        "scale": rng.standard_normal(40).astype(ml_dtypes.bfloat16),
        "turned": rng.standard_normal((24, 56)).astype(ml_dtypes.bfloat16),
    }


def stepped(state: State, rng: np.random.Generator) -> None:
    """Change about every tenth element of each tensor by one bit."""
    for array in state.values():
        bits = array.view(f"u{array.itemsize}")
        bits[rng.random(bits.shape) < 0.1] ^= 1


class FakeLayout:
    """Implements `interfaces.Layout`. `memory` is what the worker holds."""

    def __init__(self, state: State, *, tied: Mapping[str, str] | None = None, modules: Mapping[str, ModuleRule] | None = None) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self.modules: Mapping[str, ModuleRule] = modules or {}
        self.is_valid = True
        self.owned: dict[str, frozenset[int]] = {}
        found = {name: self._hold(name, array) for name, array in state.items() if name not in (tied or {})}
        self.tensors: Mapping[str, TensorLayout] = dict(
            sorted({**found, **{name: found[first] for name, first in (tied or {}).items()}}.items())
        )

    def blocks(self) -> Mapping[str, Sequence[tuple[Nest, ...]]]:
        whole = {name: Nest((math.prod(layout.spec.shape),), (1,), (1,)) for name, layout in self.tensors.items()}
        return {name: [each.nests for each in layout.placements] or [(whole[name],)] for name, layout in self.tensors.items()}

    def is_valid_for(self, model: Any) -> bool:
        return self.is_valid

    def _hold(self, name: str, array: np.ndarray[Any, Any]) -> TensorLayout:
        spec = TensorSpec(dtype_of_numpy(array.dtype), array.shape)
        bits = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
        modules = tuple(rule.name for rule in self.modules.values() if name in rule.inputs)
        if name == "nibbles":  # units of a row of 64 go in steps of 16: a, a + 16, a + 32, a + 48, a + 1, …
            units = torch.stack([bits & 15, (bits >> 4) & 15], -1).reshape(16, 4, 16).transpose(1, 2).reshape(-1, 2)
            self.memory[name] = units[:, 0] | units[:, 1] << 4
            nest = Nest((16, 4, 16), (64, 16, 1), (64, 1, 4))
            return TensorLayout(spec, "mapped", (Placement((nest,), self.memory[name], 4),), modules=modules)
        if name == "scale":  # bfloat16 in float32, after 8 elements of padding
            wide = torch.cat([torch.zeros(8), bits.view(torch.bfloat16).float()])
            self.memory[name] = wide.view(torch.int32)
            nest = Nest((40,), (1,), (1,), 0, 8)
            return TensorLayout(spec, "mapped", (Placement((nest,), self.memory[name], 32, dtype_named("F32")),), modules=modules)
        if name == "turned":
            rows, columns = array.shape
            self.memory[name] = bits.t().contiguous().view(-1)
            nest = Nest((rows, columns), (columns, 1), (1, rows))
            return TensorLayout(spec, "mapped", (Placement((nest,), self.memory[name], 16),), modules=modules)
        self.memory[name] = bits.view(-1)
        return TensorLayout(spec, "direct", direct=bits.view(torch_dtype(spec.dtype)), modules=modules)

    def gather(self, name: str, *, owned_only: bool = False) -> torch.Tensor:
        layout = self.tensors[name]
        (placement,), dtype = layout.placements, torch_dtype(layout.spec.dtype)
        (nest,) = placement.nests
        if placement.unit_bits == 4:
            units = torch.stack([placement.memory & 15, (placement.memory >> 4) & 15], -1).view(-1)
            units = nest.view(units).reshape(-1, 2)
            return (units[:, 0] | units[:, 1] << 4).view(dtype).view(layout.spec.shape)
        if placement.widened is not None:
            return placements.gather(layout.spec, layout.placements, placement.memory.device)
        return nest.view(placement.memory).contiguous().view(dtype).view(layout.spec.shape)

    def locate(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> list[Scatter]:
        layout = self.tensors[name]
        if not layout.placements:
            return []
        (placement,) = layout.placements
        (nest,) = placement.nests
        if placement.unit_bits == 4:
            units = torch.cat([indices * 2, indices * 2 + 1])
            here, targets = nest.find(units)
            nibbles = torch.cat([values & 15, (values >> 4) & 15])[here]
            return [
                Scatter(placement.memory, targets[targets % 2 == half] // 2, nibbles[targets % 2 == half], half=half) for half in (0, 1)
            ]
        here, targets = nest.find(indices)
        if placement.widened is not None:
            values = values.view(torch.bfloat16).float().view(torch.int32)
        return [Scatter(placement.memory, targets, values[here])]


class HalfLayout(FakeLayout):
    """One of two workers. It holds half of the columns of "turned", half of the rows of "direct", all of "direct.too", and "nibbles" and
    "scale" only if it is the first.
    """

    def __init__(self, state: State, rank: int, **options: Any) -> None:
        self._rank = rank
        super().__init__(state, **options)

    def _hold(self, name: str, array: np.ndarray[Any, Any]) -> TensorLayout:
        spec = TensorSpec(dtype_of_numpy(array.dtype), array.shape)
        if name == "direct.too":
            return super()._hold(name, array)
        if name in ("nibbles", "scale"):
            return TensorLayout(spec, "absent") if self._rank else super()._hold(name, array)
        rows, columns = array.shape
        bits = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
        if name == "direct":
            half, nest = bits.chunk(2)[self._rank], Nest((rows // 2 * columns,), (1,), (1,), self._rank * rows // 2 * columns)
        else:
            half = bits.chunk(2, dim=1)[self._rank].contiguous()
            nest = Nest((rows, columns // 2), (columns, 1), (columns // 2, 1), self._rank * columns // 2)
        self.memory[name] = half.clone().view(-1)
        return TensorLayout(spec, "partial", (Placement((nest,), self.memory[name], 16),), reason="split")

    def gather(self, name: str, *, owned_only: bool = False) -> torch.Tensor:
        layout = self.tensors[name]
        if layout.kind != "partial":
            return super().gather(name)
        whole = torch.zeros(math.prod(layout.spec.shape), dtype=torch.int16)
        for number, placement in enumerate(layout.placements):
            if not owned_only or number in self.owned[name]:
                (nest,) = placement.nests
                whole.as_strided(nest.sizes, nest.sources, nest.source_start).copy_(nest.view(placement.memory))
        return whole.view(torch_dtype(layout.spec.dtype)).view(layout.spec.shape)

    def blocks(self) -> Mapping[str, Sequence[tuple[Nest, ...]]]:
        return {name: [] if self.tensors[name].kind == "absent" else blocks for name, blocks in super().blocks().items()}


class KeptState:
    """A `BaseSource` that has whole tensors."""

    def __init__(self, state: State) -> None:
        self.arrays = {name: array.copy() for name, array in state.items()}

    def hold(self, wanted: TensorTable, absent: TensorTable | None = None, near: Any = ()) -> str | None:
        return None

    def writes(self, name: str) -> bool:
        return True

    def base(self, name: str) -> np.ndarray[Any, Any]:
        return self.arrays[name]

    def settled(self, ref: CommitRef, changes: Mapping[str, Sequence[TensorPatch]]) -> None:
        for name, patches in changes.items():
            for patch in patches:
                bits = self.arrays[name].view(f"i{self.arrays[name].itemsize}").reshape(-1)
                bits[np.asarray(patch.indices)] = patch.values.view(getattr(torch, f"int{8 * bits.itemsize}")).numpy()


@dataclass(frozen=True)
class FakeHop:
    base: Commit
    target: Commit
    files: tuple[FileEntry, ...]

    @property
    def target_ref(self) -> CommitRef:
        return self.target.ref(record_hash(self.target.to_bytes()))


class FakeWorker:
    """A worker with the first version of a chain, and the chain. Files have direct and other tensors if they are `mixed`."""

    def __init__(
        self,
        *,
        layout: Any = FakeLayout,
        mixed: bool = True,
        tied: Mapping[str, str] | None = None,
        more: Mapping[str, tuple[int, ...]] | None = None,
        adopt: bool = True,
        segment_bytes: int | None = None,
        **options: Any,
    ) -> None:
        self._rng = np.random.default_rng(1)
        self.state = first_state(self._rng)
        self.state |= {name: self._rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in (more or {}).items()}
        self.state |= {name: self.state[first].copy() for name, first in (tied or {}).items()}
        self.new_layout: Any = functools.partial(layout, tied=tied)
        self._store = MemoryStore()
        self.publisher = Publisher(self._store, options=WriterOptions(segment_bytes=segment_bytes or (8000 if mixed else 1)))
        self.commits = [self._publish()]
        self.layout: FakeLayout = self.new_layout(self.state)
        table: TensorTable = {name: TensorSpec(dtype_of_numpy(array.dtype), array.shape) for name, array in sorted(self.state.items())}
        self.weights = LiveWeights(None, lambda _: self.layout, threads=1, **options)
        self.table = table
        if adopt:
            self.weights.learn(table)
            self.weights.adopt(self.version)

    def _publish(self) -> Commit:
        self.publisher.publish(self.state)
        head = ChainLog(self._store).head()
        assert head is not None
        return head

    @property
    def version(self) -> LiveVersion:
        """The newest version."""
        commit = self.commits[-1]
        assert commit.digest is not None
        return LiveVersion(ChainLog(self._store).ref(commit), commit.digest)

    def step(self, change: Any = None) -> FakeHop:
        """Publish another version. Returns the hop to it."""
        stepped(self.state, self._rng) if change is None else change(self.state)
        self.commits.append(self._publish())
        return FakeHop(self.commits[-2], self.commits[-1], self.commits[-1].files)

    def read(self, entry: FileEntry) -> bytes:
        return self._store.get(entry.key, limit=entry.size)

    def held(self) -> dict[str, bytes]:
        """Return all memory of the worker."""
        return {name: tensor.numpy().tobytes() for name, tensor in self.layout.memory.items()}

    def expected(self) -> dict[str, bytes]:
        """Return what a worker would hold that has loaded the newest version."""
        return {name: tensor.numpy().tobytes() for name, tensor in self.new_layout(self.state).memory.items()}


def alone(failed: bool, digests: Any) -> list[int]:
    """Agree with nobody."""
    return [0] if failed else []
