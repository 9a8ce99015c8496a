"""Models in all layouts that run on a CPU follow twenty updates where their weights are. Then all memory is that of a fresh load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import unpacked_experts
from emulated_kernels import nvfp4_on_cpu, requantise_on_cpu
from fake_layout import alone
from loaded_models import import_vllm, load_model, read_checkpoint
from model_memory import addresses, difference, memory
from tiny_checkpoints import FP8_PER_TENSOR, TinyMla, TinyModel, fp8_per_tensor, train, train_visibly

import deltawire
from deltawire import Publisher
from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.dtypes import dtype_named
from deltawire.format.records.record_parts import FileEntry
from deltawire.format.records.version_records import Commit
from deltawire.publish.writer_options import WriterOptions
from deltawire.store import Store, open_store
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable

pytestmark = pytest.mark.slow

UPDATES = 20
CASES: dict[str, tuple[TinyModel, str | None]] = {
    "dense": (TinyModel("dense"), None),
    "tied": (TinyModel("tied", tied=True), None),
    "experts-packed": (TinyModel("moe", experts=4, layers=1), None),
    "experts-split": (TinyModel("moe", experts=4, layers=1), None),
    "fp8-block": (TinyModel("quantised", scale=4, layers=1), "fp8-block"),
    "fp8-channel": (TinyModel("quantised", scale=4, layers=1), "fp8-channel"),
    "fp8-tensor": (TinyModel("quantised", scale=4, layers=1), None),
    "nvfp4": (TinyModel("quantised", scale=4, layers=1), "nvfp4"),
    "int4": (TinyModel("quantised", scale=4, layers=1), "int4"),
    "mla": (TinyMla("mla", layers=2), None),
    "mla-fp8": (TinyMla("mla", scale=4, layers=1), "fp8-block"),
}
COMPUTED = {"mla-fp8": "recompute", "fp8-tensor": "reprocess", "nvfp4": "reprocess"}
"""Models with tensors that are computed from weights, and how they follow updates."""


@dataclass(frozen=True)
class Hop:
    """A hop whose files are in a store."""

    base: Commit
    target: Commit
    files: tuple[FileEntry, ...]


class Chain:
    """A model in training, and the chain that its weights are published to."""

    def __init__(self, folder: Path, model: TinyModel, recipe: str | None, *, per_tensor: bool = False) -> None:
        self._folder = folder
        self._visibly = recipe is not None or per_tensor
        self._convert = fp8_per_tensor if per_tensor else dict
        self._state = model.state()
        self._rng = np.random.default_rng(7)
        start = model.save(folder / "start", self._state, FP8_PER_TENSOR if per_tensor else None)
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


@pytest.mark.parametrize("case", CASES)
def test_after_twenty_updates_all_memory_is_that_of_a_fresh_load(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_vllm()
    from deltawire.engines.vllm.layout.model_layout import learn_layout
    from deltawire.engines.vllm.live.live_weights import LiveWeights
    from deltawire.engines.vllm.live.update_types import LiveVersion
    from deltawire.engines.vllm.modules.recompute import process_again, recompute

    model, recipe = CASES[case]
    if case == "experts-split":
        unpacked_experts.install(monkeypatch.setattr)
    if case == "fp8-tensor":
        requantise_on_cpu(monkeypatch)
    if case == "nvfp4":
        nvfp4_on_cpu(monkeypatch)
    chain = Chain(tmp_path, model, recipe, per_tensor=case == "fp8-tensor")
    first = chain.publish()
    checkpoint = chain.checkpoint()
    live = load_model(checkpoint)
    before, places = memory(live.model), addresses(live.model)

    source = Kept(checkpoint)

    def recompute_all(rules: Any) -> None:
        with live.active():
            recompute(live.model, live.vllm_config.model_config, rules)

    def reprocess(rule: Any, read: Any) -> Any:
        return process_again(live.model, live.vllm_config, weights.layout, rule, read)

    weights = LiveWeights(
        live.model,
        lambda table: learn_layout(live.model, live.vllm_config, table),
        source=source,
        recompute=recompute_all,
        reprocess=reprocess,
        confirm="everything",
        threads=1,
    )
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
            held, answers = memory(live.model), iter([[], [1], []])
            outcome = weights.swap(weights.stage(hop, chain.read), lambda *_: next(answers))  # noqa: B023
            assert outcome.outcome == "refused"
            assert difference(memory(live.model), held) == []
        outcome = weights.swap(weights.stage(hop, chain.read), alone)
        assert outcome.outcome == "made", outcome.error
    chain.close()
    if COMPUTED.get(case) != "reprocess":
        assert all(name.endswith("weight_shape") for name in source.held), "a tensor of the model cannot be read from its memory"
    fresh = load_model(chain.checkpoint())
    assert difference(memory(live.model), memory(fresh.model)) == []
    assert difference(memory(live.model), before), "no update has changed anything"
    assert addresses(live.model) == places
    assert weights.digest().owned == target.digest
