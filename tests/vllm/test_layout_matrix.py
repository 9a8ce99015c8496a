"""Models in all layouts that run on a CPU follow twenty updates where their weights are. Then all memory is that of a fresh load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import unpacked_experts
from emulated_kernels import nvfp4_on_cpu, requantise_on_cpu
from fake_layout import alone
from loaded_models import LoadedModel, import_vllm, load_model, read_checkpoint
from model_memory import addresses, difference, memory
from tiny_checkpoints import (
    FP8_PER_TENSOR,
    INT8_PER_CHANNEL,
    TinyMla,
    TinyModel,
    fp8_per_tensor,
    int8_per_channel,
    train,
    train_visibly,
)

import deltawire
from deltawire import Publisher
from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.dtypes import dtype_named
from deltawire.errors import EngineRefused
from deltawire.format.records.record_parts import FileEntry
from deltawire.format.records.version_records import Commit
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store, open_store
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable

if TYPE_CHECKING:
    from deltawire.engines.vllm.live.live_weights import LiveWeights

pytestmark = pytest.mark.slow

UPDATES = 20
CASES: dict[str, tuple[TinyModel, str | None]] = {
    "dense": (TinyModel("dense"), None),
    "tied": (TinyModel("tied", tied=True), None),
    "computing-loaders": (TinyModel("dense"), None),
    "experts-packed": (TinyModel("moe", experts=4, layers=1), None),
    "experts-split": (TinyModel("moe", experts=4, layers=1), None),
    "fp8-block": (TinyModel("quantised", scale=4, layers=1), "fp8-block"),
    "fp8-channel": (TinyModel("quantised", scale=4, layers=1), "fp8-channel"),
    "fp8-tensor": (TinyModel("quantised", scale=4, layers=1), None),
    "nvfp4": (TinyModel("quantised", scale=4, layers=1), "nvfp4"),
    "int4": (TinyModel("quantised", scale=4, layers=1), "int4"),
    "int8": (TinyModel("quantised", scale=4, layers=1), None),
    "mla": (TinyMla("mla", layers=2), None),
    "mla-fp8": (TinyMla("mla", scale=4, layers=1), "fp8-block"),
}
COMPUTED = {"mla-fp8": "recompute", "fp8-tensor": "reprocess", "nvfp4": "reprocess", "int8": "load_anew", "computing-loaders": "load_anew"}
"""Models with tensors that are computed from weights, and how they follow updates."""
CONVERTED: dict[str, tuple[Any, Any]] = {"fp8-tensor": (fp8_per_tensor, FP8_PER_TENSOR), "int8": (int8_per_channel, INT8_PER_CHANNEL)}
"""Models that are not quantised by a recipe of the publisher."""


@dataclass(frozen=True)
class Hop:
    """A hop whose files are in a store."""

    base: Commit
    target: Commit
    files: tuple[FileEntry, ...]


class Chain:
    """A model in training, and the chain that its weights are published to."""

    def __init__(self, folder: Path, model: TinyModel, recipe: str | None, converted: tuple[Any, Any] | None = None) -> None:
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


class Kept:
    """The tensors of a checkpoint on the host, for those that cannot be read from the model's memory."""

    def __init__(self, checkpoint: Path) -> None:
        self._tensors = {name: tensor.clone() for name, tensor in read_checkpoint(checkpoint).items()}
        self.held: set[str] = set()

    def hold(self, wanted: TensorTable) -> str | None:
        self.held = set(wanted)
        return None

    def writes(self, name: str) -> bool:
        return True

    def base(self, name: str) -> Any:
        assert name in self.held
        return self._tensors[name].clone()

    def settled(self, ref: Any, changes: Any) -> None:
        for name, patches in changes.items():
            for patch in patches:
                self._tensors[name].view(-1)[patch.indices] = patch.values


def table_of(checkpoint: Path) -> TensorTable:
    import json
    import struct

    found = {}
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        found |= {name: TensorSpec(dtype_named(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items() if name[0] != "_"}
    return dict(sorted(found.items()))


def live_weights(live: LoadedModel, source: Kept) -> LiveWeights:
    """Return the weights of a model as a worker holds them."""
    from deltawire.engines.vllm.live.live_weights import LiveWeights
    from deltawire.engines.vllm.worker_model import WorkerModel

    worker = WorkerModel(live.model, live.vllm_config)
    return LiveWeights(
        live.model,
        worker.learn_layout,
        source=source,
        recompute=worker.recompute,
        reprocess=worker.reprocess,
        load=worker.load_module,
        confirm="everything",
        threads=1,
    )


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


def products(loaded: LoadedModel) -> dict[str, bytes]:
    """Return what each int8 layer computes. Its weights are in an object that cannot be read."""
    import torch

    found = {}
    for name, module in loaded.model.named_modules():
        if hasattr(getattr(getattr(module, "scheme", None), "kernel", None), "dnnl_handler"):
            inputs = torch.linspace(-1, 1, 2 * module.input_size, dtype=torch.bfloat16).view(2, -1)
            with loaded.active(), torch.no_grad():
                found[name] = module.quant_method.apply(module, inputs, None).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("case", CASES)
def test_after_twenty_updates_all_memory_is_that_of_a_fresh_load(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_vllm()
    from deltawire.engines.vllm.live.update_types import LiveVersion

    model, recipe = CASES[case]
    if case == "experts-split":
        unpacked_experts.install(monkeypatch.setattr)
    if case == "fp8-tensor":
        requantise_on_cpu(monkeypatch)
    if case == "nvfp4":
        nvfp4_on_cpu(monkeypatch)
    if case == "computing-loaders":
        load_norms_with(monkeypatch, lambda param, loaded_weight: param.data.copy_(2 * loaded_weight))
    chain = Chain(tmp_path, model, recipe, CONVERTED.get(case))
    first = chain.publish()
    checkpoint = chain.checkpoint()
    live = load_model(checkpoint)
    before, places = memory(live.model), addresses(live.model)

    source = Kept(checkpoint)
    weights = live_weights(live, source)
    weights.learn(table_of(checkpoint))
    assert difference(memory(live.model), before) == [], "learning has changed the model"
    assert weights.why_not is None
    assert weights.layout is not None
    assert {rule.how for rule in weights.layout.modules.values()} == {COMPUTED[case] for _ in range(case in COMPUTED)}
    assert first.digest is not None
    weights.adopt(LiveVersion(ChainLog(chain.store).ref(first), first.digest))
    for number in range(UPDATES):
        target = chain.publish()
        hop = Hop(chain.commits[-2], target, target.files)
        if number == 1:  # another worker fails after this one has written, so it must write its old weights back
            held, multiplied, answers = memory(live.model), products(live), iter([[], [1], []])
            with live.active():
                outcome = weights.swap(weights.stage(hop, chain.read), lambda *_: next(answers))  # noqa: B023
            assert outcome.outcome == "refused"
            assert difference(memory(live.model), held) == []
            assert products(live) == multiplied
        with live.active():
            outcome = weights.swap(weights.stage(hop, chain.read), alone)
        assert outcome.outcome == "made", outcome.error
    chain.close()
    if COMPUTED.get(case) in (None, "recompute"):
        assert all(name.endswith("weight_shape") for name in source.held), "a tensor of the model cannot be read from its memory"
    fresh = load_model(chain.checkpoint())
    assert visible(difference(memory(live.model), memory(fresh.model))) == []
    assert difference(memory(live.model), before), "no update has changed anything"
    assert stays(addresses(live.model)) == stays(places)
    assert products(live) == products(fresh)
    assert weights.digest().owned == target.digest


def test_one_module_is_loaded_anew_while_the_others_are_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_vllm()
    from deltawire.engines.vllm import worker_model
    from deltawire.engines.vllm.live.live_updates import modules_of
    from deltawire.engines.vllm.live.update_types import LiveVersion

    requantise_on_cpu(monkeypatch)
    chain = Chain(tmp_path, TinyModel("quantised", scale=4, layers=1), None, CONVERTED["fp8-tensor"])
    first = chain.publish()
    checkpoint = chain.checkpoint()
    live = load_model(checkpoint)
    places = addresses(live.model)
    odd, process_again = "model.layers.0.self_attn.qkv_proj", worker_model.process_again

    def process_others(model: Any, vllm_config: Any, layout: Any, rule: Any, *read: Any) -> Any:
        if rule.name == odd:
            raise RuntimeError("no copies of this module")
        return process_again(model, vllm_config, layout, rule, *read)

    monkeypatch.setattr(worker_model, "process_again", process_others)
    weights = live_weights(live, Kept(checkpoint))
    weights.learn(table_of(checkpoint))
    assert modules_of(weights.layout) == {"counts": {"reprocess": 4}, "loaded_anew": {}, "whole_model": {}}
    assert first.digest is not None
    weights.adopt(LiveVersion(ChainLog(chain.store).ref(first), first.digest))

    def swap(target: Commit) -> Any:
        with live.active():
            return weights.swap(weights.stage(Hop(chain.commits[-2], target, target.files), chain.read), alone)

    made = swap(chain.publish())
    assert (made.outcome, made.times["modules_loaded_anew"]) == ("made", 1), made.error
    found = modules_of(weights.layout)
    assert found["counts"] == {"reprocess": 3, "load_anew": 1}
    assert list(found["loaded_anew"]) == [odd]
    assert "no copies of this module" in found["loaded_anew"][odd]

    target, held, load_weights = chain.publish(), memory(live.model), live.model.load_weights
    for most in (0, 3):  # the loader fails before the first tensor, and half-way

        def load_some(tensors: Any, most: int = most) -> Any:
            load_weights(tensor for tensor, _ in zip(tensors, range(most), strict=False))
            raise OSError("it stops here")

        with monkeypatch.context() as patch:
            patch.setattr(live.model, "load_weights", load_some)
            failed = swap(target)
        assert failed.outcome == "refused"
        assert "it stops here" in failed.error
        assert difference(memory(live.model), held) == []
    assert swap(target).outcome == "made"
    chain.close()
    fresh = load_model(chain.checkpoint())
    assert difference(memory(live.model), memory(fresh.model)) == []
    assert addresses(live.model) == places


def test_a_module_that_vllm_does_not_load_anew_correctly_is_never_left_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_vllm()
    from deltawire.engines.vllm.live.live_updates import modules_of
    from deltawire.engines.vllm.live.update_types import LiveVersion

    # vLLM 0.32 loads modules anew only if their loaders call the parameter `param`. Otherwise their memory is left undefined
    load_norms_with(monkeypatch, lambda parameter, loaded: parameter.data.copy_(2 * loaded))
    chain = Chain(tmp_path, TinyModel("dense", layers=1), None)
    first = chain.publish()
    checkpoint = chain.checkpoint()
    live = load_model(checkpoint)
    weights = live_weights(live, Kept(checkpoint))
    weights.learn(table_of(checkpoint))
    assert first.digest is not None
    weights.adopt(LiveVersion(ChainLog(chain.store).ref(first), first.digest))
    target, held = chain.publish(), memory(live.model)
    chain.close()
    hop = Hop(first, target, target.files)
    staged, norm = weights.stage(hop, chain.read), "model.layers.0.input_layernorm"
    with live.active():
        outcome = weights.swap(staged, alone)
    assert outcome.outcome == "refused"
    assert difference(memory(live.model), held) == []
    assert norm in modules_of(weights.layout)["whole_model"]
    with pytest.raises(EngineRefused, match=f"all weights must be loaded anew, because of tensor '{norm}.weight'"):
        weights.stage(hop, chain.read)
