"""Models in all layouts that run on a CPU, and chains of their versions. test_layout_matrix.py follows them on one rank and on two."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import unpacked_experts
from emulated_experts import fp8_experts_on_cpu, marlin_experts_on_cpu, nvfp4_experts_on_cpu, packed_experts_on_cpu
from emulated_kernels import mxfp4_on_cpu, nvfp4_on_cpu, requantise_on_cpu
from tiny_checkpoints import (
    FP8_PER_TENSOR,
    GPT_OSS_MXFP4,
    INT8_PER_CHANNEL,
    TinyFused,
    TinyGptOss,
    TinyLlama4,
    TinyMla,
    TinyModel,
    fp8_per_tensor,
    gpt_oss_mxfp4,
    int8_per_channel,
    train,
    train_visibly,
)

import deltawire
from deltawire import Publisher
from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.dtypes import dtype_named
from deltawire.format.records.record_parts import FileEntry
from deltawire.format.records.version_records import Commit
from deltawire.publish.writer_options import WriterOptions
from deltawire.quantise.recipe import DEFAULT_IGNORE, Recipe, RecipeLike
from deltawire.store import Store, open_store
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable

UPDATES = 20
CASES: dict[str, tuple[TinyModel, RecipeLike | None]] = {
    "dense": (TinyModel("dense"), None),
    "tied": (TinyModel("tied", tied=True), None),
    "computing-loaders": (TinyModel("dense"), None),
    "experts-packed": (TinyModel("moe", experts=4, layers=1), None),
    "experts-split": (TinyModel("moe", experts=4, layers=1), None),
    "experts-fused": (TinyFused("moe", experts=4, layers=1), None),
    "experts-fused-split": (TinyFused("moe", experts=4, layers=1), None),
    "experts-transposed": (TinyLlama4("moe", experts=4, layers=1), None),
    "experts-fp8-block": (TinyModel("moe", experts=4, scale=4, layers=1), "fp8-block"),
    "experts-fp8-block-refined": (
        TinyModel("moe", experts=4, scale=2, layers=1, expert=192),
        Recipe.parse("fp8-block", ignore=(*DEFAULT_IGNORE, "re:.*self_attn")),
    ),
    "experts-fp8-block-packed": (TinyModel("moe", experts=4, scale=4, layers=1), "fp8-block"),
    "experts-fp8-channel": (TinyModel("moe", experts=4, scale=2, layers=1), "fp8-channel"),
    "experts-int4": (TinyModel("moe", experts=4, scale=2, layers=1), "int4"),
    "experts-int4-packed": (TinyModel("moe", experts=4, scale=4, layers=1), "int4-128"),
    "experts-mxfp4": (TinyModel("moe", experts=4, scale=2, layers=1), "mxfp4"),
    "experts-nvfp4": (TinyModel("moe", experts=4, scale=2, layers=1), "nvfp4"),
    "gpt-oss": (TinyGptOss("moe", experts=4, scale=2, layers=1), None),
    "fp8-block": (TinyModel("quantised", scale=4, layers=1), "fp8-block"),
    "fp8-channel": (TinyModel("quantised", scale=4, layers=1), "fp8-channel"),
    "fp8-tensor": (TinyModel("quantised", scale=4, layers=1), None),
    "nvfp4": (TinyModel("quantised", scale=4, layers=1), "nvfp4"),
    "mxfp4": (TinyModel("quantised", scale=4, layers=1), "mxfp4"),
    "int4": (TinyModel("quantised", scale=4, layers=1), "int4"),
    "int8": (TinyModel("quantised", scale=4, layers=1), None),
    "mla": (TinyMla("mla", layers=2), None),
    "mla-fp8": (TinyMla("mla", scale=4, layers=1), "fp8-block"),
}
COMPUTED = {
    "experts-int4-packed": "reprocess",
    "experts-nvfp4": "reprocess",
    "mla-fp8": "recompute",
    "fp8-tensor": "reprocess",
    "nvfp4": "reprocess",
    "int8": "load_anew",
    "computing-loaders": "load_anew",
}
"""Models with tensors that are computed from weights, and how they follow updates."""
CONVERTED: dict[str, tuple[Any, Any]] = {
    "fp8-tensor": (fp8_per_tensor, FP8_PER_TENSOR),
    "int8": (int8_per_channel, INT8_PER_CHANNEL),
    "gpt-oss": (gpt_oss_mxfp4, GPT_OSS_MXFP4),
}
"""Models that are not quantised by a recipe of the publisher."""


class Chain:
    """A model in training, and the chain that its weights are published to."""

    def __init__(self, folder: Path, model: TinyModel, recipe: RecipeLike | None, converted: tuple[Any, Any] | None = None) -> None:
        self._folder = folder
        self._visibly = recipe is not None or converted is not None
        self._convert, config = converted or (dict, None)
        self._state = model.state()
        self._rng = np.random.default_rng(7)
        start = model.save(folder / "start", self._state, config)
        attachments = {path.name: path for path in start.iterdir() if path.suffix == ".json"}
        self.store: Store = open_store(str(folder / "store"))
        self._publisher = Publisher(
            self.store, quantise=recipe, attachments=attachments, options=WriterOptions(segment_bytes=1 << 16, skips=False)
        )
        self.commits: list[Commit] = []

    def publish(self) -> Commit:
        """Publish the weights. All but the first version have changes in every tensor."""
        if self.commits:
            train_visibly(self._state, self._rng) if self._visibly else train(self._state, self._rng)
        self._publisher.publish(self._convert(self._state))
        head = ChainLog(self.store).head()
        assert head is not None
        self.commits.append(head)
        return head

    def checkpoint(self) -> Path:
        """Write the newest version as a checkpoint."""
        folder = self._folder / f"version-{len(self.commits)}"
        deltawire.pull(self.store, folder, options=ReaderOptions(pin=False))
        return folder

    def read(self, entry: FileEntry) -> bytes:
        return self.store.get(entry.key, limit=entry.size)

    def close(self) -> None:
        self._publisher.close()


def table_of(checkpoint: Path) -> TensorTable:
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        found |= {name: TensorSpec(dtype_named(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items() if name[0] != "_"}
    return dict(sorted(found.items()))


def ways(case: str) -> set[str]:
    """Return how the modules of a case follow updates, apart from those whose weights are only written.

    Parameters
    ----------
    case
        A name in `CASES`.
    """
    return {COMPUTED[case] for _ in range(case in COMPUTED)}


def emulate(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change vLLM so that a case runs on a CPU. It must have been imported.

    Parameters
    ----------
    case
        A name in `CASES`.
    monkeypatch
        Undoes the changes.
    """
    if case in ("experts-split", "experts-fused-split"):
        unpacked_experts.install(monkeypatch.setattr)
    if case in ("experts-fp8-block", "experts-fp8-block-refined", "experts-fp8-channel"):
        fp8_experts_on_cpu(monkeypatch)
    if case in ("experts-fp8-block-packed", "experts-int4-packed"):
        packed_experts_on_cpu(monkeypatch)
    if case in ("experts-int4", "experts-mxfp4", "gpt-oss"):
        marlin_experts_on_cpu(monkeypatch)
    if case == "experts-nvfp4":
        nvfp4_experts_on_cpu(monkeypatch)
    if case == "fp8-tensor":
        requantise_on_cpu(monkeypatch)
    if case in ("nvfp4", "experts-nvfp4"):
        nvfp4_on_cpu(monkeypatch)
    if case in ("mxfp4", "experts-mxfp4"):
        mxfp4_on_cpu(monkeypatch)
    if case == "computing-loaders":
        load_norms_with(monkeypatch, lambda param, loaded_weight: param.data.copy_(2 * loaded_weight))


def load_norms_with(monkeypatch: pytest.MonkeyPatch, loader: Callable[..., Any]) -> None:
    """Let norms have another loader. Loaders of some models compute what they write."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    make = RMSNorm.__init__

    def make_with_loader(norm: Any, *args: Any, **kwargs: Any) -> None:
        make(norm, *args, **kwargs)
        norm.weight.weight_loader = loader

    monkeypatch.setattr(RMSNorm, "__init__", make_with_loader)


def visible(lines: list[str]) -> list[str]:
    """Return lines of a difference, without those of tensors that hold the addresses of objects of other libraries."""
    return [line for line in lines if "dnnl_handler" not in line]


def stays(places: dict[str, Any]) -> dict[str, Any]:
    return {path: place for path, place in places.items() if "dnnl_handler" not in path}
