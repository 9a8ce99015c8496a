"""Engines follow chains of quantised versions: the published tensors are dequantised into a live model, or held as they are."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import bits, step, torch, transformers

from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines import DiskEngine, HotSwap, ModuleEngine
from deltawire.engines.weights.dequantised import ModuleForm, holds_codes
from deltawire.engines.weights.host_copy import HostCopyWeights
from deltawire.engines.weights.in_place import InPlaceWeights
from deltawire.engines.weights.live_tensors import LiveTensors
from deltawire.errors import EngineDtypeDiffers, EngineQuarantined, EngineRefused, UnsupportedLayout
from deltawire.events import Event
from deltawire.format.records.record_parts import RecipeRecord
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.quantise import QuantisedLayout
from deltawire.rl.generation import build_model
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.model_files import read_model_files
from deltawire.tensors.checkpoint_layout import CheckpointLayout
from deltawire.tensors.torch_types import to_torch
from deltawire.trainers import WeightSource

pytest.importorskip("transformers.core_model_loading", reason="transformers 4 does not load all recipes on a CPU")

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

PROMPT = torch.arange(2, 18).reshape(2, 8)
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "eos_token_id": 0,
}
NOT_PINNED = ReaderOptions(pin=False)


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return enlarged(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)).eval())


def made_gpt_oss() -> Any:
    """Return a model whose experts have names of their own when they are quantised to mxfp4."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    return enlarged(transformers.GptOssForCausalLM(config).eval())


def enlarged(model: Any) -> Any:
    """Make the weights of a model so large that its logits show every wrong scale."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def module_of(state: Mapping[str, Any]) -> Any:
    """Return a module with these tensors as its parameters."""
    root = torch.nn.Module()
    for name, array in state.items():
        *parents, last = name.split(".")
        owner = root
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, torch.nn.Module())
            owner = getattr(owner, parent)
        owner.register_parameter(last, torch.nn.Parameter(to_torch(array.copy()), requires_grad=False))
    return root


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


class Run:
    """A trainer that publishes quantised versions, and can be restarted."""

    def __init__(self, recipe: str, model: Any) -> None:
        self.store = MemoryStore()
        self.model = model
        self.recipe = recipe
        self.steps = 0
        self.publisher = self.start()

    def start(self) -> Publisher:
        attachments = {"config.json": self.model.config.to_json_string().encode()}
        options = WriterOptions(segment_bytes=1 << 16)  # so that a weight's codes and scales are in different files
        return Publisher(self.store, quantise=self.recipe, attachments=attachments, options=options)

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            step(self.model, self.steps, rate=2e-3)
            self.publisher.publish(WeightSource(self.model).snapshot(), step=self.steps)
            self.steps += 1

    def restart(self) -> None:
        self.publisher.close()
        self.publisher = self.start()

    def follow(self, model: Any, **options: Any) -> HotSwap:
        return HotSwap(self.store, ModuleEngine(model), options=NOT_PINNED, **options)

    def load_fresh(self, folder: Path) -> Any:
        with Subscriber(self.store, mirror=folder, options=NOT_PINNED) as subscriber:
            subscriber.sync()
            return loaded(subscriber.path)

    def member(self) -> Any:
        model, _ = build_model(read_model_files(self.store))
        return model


@pytest.fixture(autouse=True)
def _not_compiled() -> Iterator[None]:
    """compressed-tensors would compile small functions, which takes seconds and gives the same results."""
    import torch._dynamo

    with torch._dynamo.config.patch(disable=True):
        yield


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(recipe: str, model: Any = None) -> Run:
        runs.append(Run(recipe, made() if model is None else model))
        return runs[-1]

    yield begin
    for run in runs:
        run.publisher.close()


@pytest.mark.parametrize("recipe", ["fp8-block", "int4"])
def test_logits_are_those_of_a_fresh_load_after_twenty_updates_a_restart_a_skip_and_a_late_join(
    recipe: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(recipe)
    run.publish()
    live, behind = run.member(), run.member()
    syncs: list[Event] = []
    with run.follow(live) as policy, run.follow(behind, on_event=syncs.append) as slow:
        policy.sync()
        slow.sync()
        versions, seen = [policy.version], [logits(live)]
        for number in range(20):
            if number == 10:
                run.restart()
            run.publish()
            versions.append(policy.sync())
            seen.append(logits(live))
        slow.sync()
        joined = run.member()
        with run.follow(joined) as joiner:
            joiner.sync()
        fresh = run.load_fresh(tmp_path / "mirror")
        found = {"followed": live, "skipped": behind, "joined": joined}
        assert {name for name, model in found.items() if not torch.equal(logits(model), logits(fresh))} == set()
        weights = {name: tensor for name, tensor in fresh.state_dict().items() if name in joined.state_dict()}  # without scales
        assert {name for name, model in found.items() if bits(model.state_dict()) != bits(weights)} == set()
        assert [event.fields["hops"] for event in syncs if event.name == "synced"][-1] < 20  # it took skips
        assert all(not torch.equal(*pair) for pair in itertools.pairwise(seen))
        assert versions[-2] is not None
        policy.sync(seq=versions[-2].seq)  # back, by the kept steps
        assert torch.equal(logits(live), seen[-2])


@pytest.mark.parametrize("recipe", ["fp8-channel", "fp8-tensor", "nvfp4", "mxfp4", "int4-128"])
def test_models_that_transformers_loaded_from_codes_follow_before_and_after_it_decompresses_them(
    recipe: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    """compressed-tensors decompresses a model at its first forward pass, and then quantises activations, or weights once more."""
    run = start(recipe, made().bfloat16())  # with weights in float32, some scales would have another type than in the module
    run.publish()
    live = run.load_fresh(tmp_path / "mirror")
    syncs: list[Event] = []
    with run.follow(live, on_event=syncs.append) as policy:
        for number in range(4):  # the first two find codes, and the others find weights
            run.publish()
            policy.sync()
            assert holds_codes(live.state_dict()) == (number < 2)
            if number:
                assert torch.equal(logits(live), logits(run.load_fresh(tmp_path / "mirror")))
    fetched = [event.fields["bytes"] for event in syncs if event.name == "synced"]
    assert fetched[3] < policy.version.state_bytes < fetched[2]  # a full checkpoint is needed once, when the module has changed


def test_fused_experts_are_dequantised_in_place(start: Callable[..., Run], tmp_path: Path) -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
    run = start("fp8-block", enlarged(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **experts)).eval()))
    run.publish()
    live, loaded_once = run.member(), run.load_fresh(tmp_path / "mirror")
    with run.follow(live) as policy, run.follow(loaded_once) as other:
        policy.sync()
        run.publish()
        policy.sync()
        other.sync()
    fresh = run.load_fresh(tmp_path / "mirror")
    assert torch.equal(logits(live), logits(fresh))
    assert bits(loaded_once.state_dict()) == bits(fresh.state_dict())


@pytest.mark.parametrize(("recipe", "make"), [("fp8-block", made), ("fp8-block-ue8m0", made), ("mxfp4", made_gpt_oss)])
def test_a_model_that_transformers_dequantised_when_it_loaded_it_follows(
    recipe: str, make: Callable[[], Any], start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(recipe, make())
    run.publish()
    live = run.load_fresh(tmp_path / "mirror")
    before = bits(live.state_dict())
    assert not holds_codes(live.state_dict())
    with run.follow(live) as policy:
        policy.sync()
        assert bits(live.state_dict()) == before
        run.publish()
        policy.sync()
    fresh = run.load_fresh(tmp_path / "mirror")
    assert bits(live.state_dict()) == bits(fresh.state_dict()) != before
    assert torch.equal(logits(live), logits(fresh))


def test_no_shards_are_published_of_a_model_that_transformers_quantises_again(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("fp8-block")
    run.publish()
    with pytest.raises(UnsupportedLayout, match="was loaded from a quantised checkpoint"):
        CheckpointLayout(run.load_fresh(tmp_path / "mirror")).check_in_place()


def test_scales_of_float32_masters_are_refused_until_the_module_holds_weights(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("fp8-channel")
    run.publish()
    live = run.load_fresh(tmp_path / "mirror")
    with run.follow(live) as policy, pytest.raises(EngineDtypeDiffers, match="one forward pass"):
        policy.sync()
    logits(live)  # compressed-tensors decompresses the weights
    with run.follow(live) as policy:
        run.publish()
        policy.sync()
    assert torch.equal(logits(live), logits(run.load_fresh(tmp_path / "mirror")))


def test_an_engine_that_loads_from_disk_serves_each_version(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("fp8-channel")
    served: list[Any] = []
    engine = DiskEngine(tmp_path / "engine", lambda path, version: served.append(loaded(path)))
    with HotSwap(run.store, engine, options=NOT_PINNED) as policy:
        for number in range(3):
            run.publish()
            policy.sync()
            assert len(served) == number + 1
    assert torch.equal(logits(served[-1]), logits(run.load_fresh(tmp_path / "mirror")))
    assert not torch.equal(logits(served[-1]), logits(served[0]))


def test_a_module_that_holds_codes_is_changed_in_place(start: Callable[..., Run]) -> None:
    """transformers keeps the codes of fp8-block on a GPU. No layer computes with them here, so only their bits are compared."""
    run = start("fp8-block")
    run.publish()
    with Subscriber(run.store, options=NOT_PINNED) as subscriber:
        subscriber.sync()
        module = module_of(subscriber.state)
        before = dict(module.named_parameters())
        with run.follow(module) as policy:
            for _ in range(3):
                run.publish()
                subscriber.sync()
                policy.sync()
                published = {name: to_torch(array.copy()) for name, array in subscriber.state.items()}
                assert bits(module.state_dict()) == bits(published)
        assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_a_chain_that_is_quantised_from_some_version_on_is_followed(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("fp8-block")
    run.publisher.close()
    live = made(1)
    for parameter in live.parameters():
        parameter.data = parameter.data.bfloat16()
    with run.follow(live) as policy:
        with Publisher(run.store, dtype="bfloat16") as plain:
            plain.publish(WeightSource(run.model).snapshot(), step=0)
        policy.sync()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            run.restart()
            run.publish(2)
        policy.sync()
        assert torch.equal(logits(live), logits(run.load_fresh(tmp_path / "mirror")))
        run.publish()
        policy.sync()
    assert torch.equal(logits(live), logits(run.load_fresh(tmp_path / "mirror")))


def test_a_live_weight_that_other_code_changes_is_found_and_repaired(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("int4")
    run.publish()
    live = run.member()
    with run.follow(live) as policy:
        policy.sync()
        with torch.no_grad():
            live.model.layers[0].mlp.up_proj.weight[3, 5] += 1.0
        run.publisher.publish({**WeightSource(run.model).snapshot(), "model.norm.weight": torch.zeros(256)}, step=99)  # changes only this
        with pytest.raises(EngineQuarantined):
            policy.sync()
        policy.sync()
    assert torch.equal(logits(live), logits(run.load_fresh(tmp_path / "mirror")))


def test_codes_whose_recipe_is_not_known_are_refused(start: Callable[..., Run]) -> None:
    """A chain of a quantised checkpoint that was published as it is does not name a recipe."""
    run = start("fp8-block")
    state = WeightSource(run.model).snapshot()
    layout = QuantisedLayout.of_state("fp8-block", state)
    store = MemoryStore()
    with Publisher(store) as publisher:
        publisher.publish(layout.quantise(layout.outputs, state))
    live = made(1).bfloat16()
    before = bits(live.state_dict())
    with HotSwap(store, ModuleEngine(live), options=NOT_PINNED) as policy, pytest.raises(EngineRefused):
        policy.sync()
    assert bits(live.state_dict()) == before


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (RecipeRecord("fp9-block", 1), "does not know"),
        (RecipeRecord("fp8-block", 1, {"scale": "ternary"}), "does not know"),
        (RecipeRecord("fp8-block", 1, {"scale": ["ue8m0"]}), "does not know"),
        (RecipeRecord("int4", 1, {"group_size": 32}), "the chain does not have"),
        (RecipeRecord("fp8-channel", 1), "the chain does not have"),
    ],
)
def test_a_record_that_does_not_describe_the_tensors_is_refused(record: RecipeRecord, why: str) -> None:
    model = made()
    state = WeightSource(model).snapshot()
    layout = QuantisedLayout.of_state("fp8-block", state)
    arrays = layout.quantise(layout.outputs, state)
    with pytest.raises(EngineRefused, match=why):
        ModuleForm(LiveTensors(model.state_dict), record, arrays)


def test_tensors_of_other_shapes_and_types_are_refused() -> None:
    model = made()
    state = WeightSource(model).snapshot()
    layout = QuantisedLayout.of_state("fp8-block", state)
    arrays = layout.quantise(layout.outputs, state)
    record = RecipeRecord("fp8-block", 1)
    ModuleForm(LiveTensors(model.state_dict), record, arrays)
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    norm = "model.norm.weight"
    for wrong in (
        {scale: arrays[scale][:1]},
        {scale: arrays[scale].astype(np.int32)},
        {scale.removesuffix("_scale_inv"): arrays[scale.removesuffix("_scale_inv")].view(np.int8)},
        {norm: arrays[norm][:1]},
        {"other": np.zeros(3, np.float32)},
    ):
        with pytest.raises(EngineRefused):
            ModuleForm(LiveTensors(model.state_dict), record, {**arrays, **wrong})


@pytest.mark.parametrize("weights", [InPlaceWeights, HostCopyWeights])
def test_a_module_that_loses_a_tensor_is_refused(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise new values would be written to a tensor that the module does not use."""
    monkeypatch.setattr("deltawire.engines.module.InPlaceWeights", weights)
    store, module = MemoryStore(), torch.nn.Linear(4, 4)
    values = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    with Publisher(store) as publisher, HotSwap(store, ModuleEngine(module), options=NOT_PINNED) as policy:
        for number in range(2):
            publisher.publish({name: tensor + number for name, tensor in values.items()})
            policy.sync()
        module.decompressed = module.weight
        del module.weight
        publisher.publish({name: tensor + 2 for name, tensor in values.items()})
        for _ in range(2):
            with pytest.raises(EngineRefused, match="no longer has"):
                policy.sync()
    assert torch.equal(module.bias, values["bias"] + 1)
