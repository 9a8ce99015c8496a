"""Engines update models that hold checkpoint tensors in another form, such as the experts that transformers fuses when it loads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ml_dtypes import bfloat16
from safetensors.torch import load_file
from threads_as_ranks import ThreadRank, run_ranks, shards_of
from tiny_models import SIZES, bits, qwen, step, torch, transformers

from deltawire.chain.reader_options import ReaderOptions
from deltawire.dtypes import dtype_named
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.engines.weights.host_copy import HostCopyWeights
from deltawire.errors import EngineRefused, UnsupportedLayout
from deltawire.publish import Publisher
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.rl.generation import build_model
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.model_files import ModelFiles, read_model_files
from deltawire.tensors.bits import tensor_bits
from deltawire.tensors.checkpoint_layout import CheckpointLayout
from deltawire.tensors.module_tensors import named_weights
from deltawire.tensors.torch_types import to_torch
from deltawire.trainers import WeightSource
from deltawire.trainers.trl import DeltaWireTransfer

pytest.importorskip("transformers.core_model_loading", reason="transformers 4 fuses nothing")

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ONE_LAYER = {**SIZES, "num_hidden_layers": 1}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**ONE_LAYER, "num_local_experts": 4},
    "qwen2_moe": {**ONE_LAYER, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**SIZES, **EXPERTS, "tie_word_embeddings": True},
    "deepseek_v3": {**SIZES, **DEEPSEEK},
    "gpt_oss": {**ONE_LAYER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "hrm_text": {**SIZES, "num_hidden_layers": 2, "num_layers_per_stack": 1},  # splits one checkpoint tensor into several parameters
    "granitemoe": {**ONE_LAYER, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def made(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind], pad_token_id=None, eos_token_id=0, bos_token_id=None)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def fresh(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def model_files(model: Any) -> ModelFiles:
    """Return the files that a chain of this model has."""
    types = {name: tensor_bits(name, tensor).dtype for name, tensor in WeightSource(model).snapshot().items()}
    return ModelFiles({"config.json": model.config.to_json_string().encode()}, types)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def publisher(store: MemoryStore) -> Iterator[Publisher]:
    with Publisher(store, options=WriterOptions(segment_bytes=4096)) as publisher:
        yield publisher


@pytest.mark.parametrize("kind", CONFIGS)
def test_live_models_are_what_from_pretrained_loads_after_every_sync(
    kind: str, store: MemoryStore, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(kind).save_pretrained(tmp_path / "first")
    trainer, on_a_device = fresh(tmp_path / "first"), fresh(tmp_path / "first")
    source = WeightSource(trainer)
    served, _ = build_model(model_files(trainer))
    swaps = [HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False))]
    with monkeypatch.context() as context:
        context.setattr("deltawire.engines.module.InPlaceWeights", HostCopyWeights)
        swaps.append(HotSwap(store, ModuleEngine(on_a_device), options=ReaderOptions(pin=False)))
    states = []
    for number in range(4):
        folder = tmp_path / str(number)
        trainer.save_pretrained(folder)
        assert bits(source.snapshot()) == bits(load_file(folder / "model.safetensors"))
        source.publish(publisher, step=number)
        expected = fresh(folder)
        states.append(bits(named_weights(expected)))
        for swap, model in zip(swaps, (served, on_a_device), strict=True):
            swap.sync()
            assert bits(named_weights(model)) == states[-1]
        step(trainer, number)
    assert len({str(state) for state in states}) == 4
    assert swaps[0].version is not None
    for swap, model in zip(swaps, (served, on_a_device), strict=True):
        swap.sync(seq=swaps[0].version.seq - 2 if swap is swaps[0] else None)
        assert bits(named_weights(model)) == states[1 if swap is swaps[0] else 3]
        swap.close()


def test_fused_experts_stay_the_same_parameters_and_nothing_is_copied(store: MemoryStore, publisher: Publisher) -> None:
    trainer, served = made("mixtral"), made("mixtral", seed=1)
    before = dict(served.named_parameters())
    engine = ModuleEngine(served)
    weights = engine.weights()
    (fused,) = [tensor for name, tensor in before.items() if name.endswith("experts.gate_up_proj")]
    experts = [name for name in weights if ".experts." in name]
    assert len(experts) == 3 * 4
    assert all(engine.weights()[name] is weights[name] for name in weights)  # so swaps see that nothing was replaced
    with HotSwap(store, engine, options=ReaderOptions(pin=False)) as swap:
        for number in range(2):
            WeightSource(trainer).publish(publisher, step=number)
            swap.sync()
            step(trainer, number)
    assert dict(served.named_parameters()).keys() == before.keys()
    assert all(after is before[name] for name, after in served.named_parameters())
    storage = fused.untyped_storage().data_ptr()
    assert sum(weights[name].untyped_storage().data_ptr() == storage for name in experts) == 2 * 4


def test_a_parameter_that_is_replaced_is_seen(store: MemoryStore, publisher: Publisher) -> None:
    trainer, served = made("mixtral"), made("mixtral", seed=1)
    with HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False)) as swap:
        for number in range(3):
            WeightSource(trainer).publish(publisher, step=number)
            swap.sync()
            assert bits(named_weights(served)) == bits(named_weights(trainer))
            for parameter in served.parameters():
                parameter.data = parameter.data.clone()
            step(trainer, number)


@pytest.mark.parametrize("at_start", ["other weights", "the same weights"])
def test_a_chain_of_the_modules_own_names_is_followed(at_start: str, store: MemoryStore, publisher: Publisher) -> None:
    trainer, served = made("qwen3_moe"), made("qwen3_moe", seed=int(at_start == "other weights"))
    with HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False)) as swap:
        for number in range(3):
            publisher.publish(trainer.state_dict(), step=number)
            swap.sync()
            assert bits(named_weights(served)) == bits(named_weights(trainer))
            step(trainer, number)


@pytest.mark.parametrize("own_names", [False, True])
def test_members_build_fused_models_of_the_chains_types(own_names: bool, store: MemoryStore, tmp_path: Path) -> None:
    made("deepseek_v3").save_pretrained(tmp_path)
    trainer = fresh(tmp_path)
    assert len({tensor.dtype for tensor in trainer.state_dict().values()}) == 2  # the routers' biases stay float32
    trainer.config.dtype = "float32"
    with Publisher(store, attachments={"config.json": trainer.config.to_json_string().encode()}) as publisher:
        publisher.publish(trainer.state_dict() if own_names else WeightSource(trainer).snapshot())
    member, _ = build_model(read_model_files(store))
    with HotSwap(store, ModuleEngine(member), options=ReaderOptions(pin=False)) as swap:
        swap.sync()
    assert bits(named_weights(member)) == bits(named_weights(trainer))


def test_experts_of_two_types_do_not_fit_into_one_tensor() -> None:
    files = model_files(made("mixtral"))
    odd = next(name for name in files.dtypes if ".experts." in name)
    with pytest.raises(EngineRefused, match="one tensor with others"):
        build_model(ModelFiles(files.files, {**files.dtypes, odd: dtype_named("F32")}))


def test_a_model_that_cannot_be_mapped_is_refused_at_once_and_published_as_it_is_saved(tmp_path: Path) -> None:
    core = pytest.importorskip("transformers.core_model_loading")
    model = qwen()
    mixing = [core.Interleave(dim=0), core.Chunk(dim=0)]
    model._weight_conversions = [core.WeightConverter("mlp.gate_up_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], mixing)]
    before = bits(named_weights(model))
    with pytest.raises(UnsupportedLayout, match="gate_up_proj"):
        ModuleEngine(model)
    assert bits(named_weights(model)) == before
    model.save_pretrained(tmp_path)
    assert bits(WeightSource(model).snapshot()) == bits(load_file(tmp_path / "model.safetensors"))


def split_mlp(model: Any) -> Any:
    """Change the model so that its checkpoints have one tensor where it has two."""
    core = pytest.importorskip("transformers.core_model_loading")
    names = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    model._weight_conversions = [core.WeightConverter("mlp.gate_up_proj.weight", names, [core.Chunk(dim=0)])]
    return model


def test_parameters_that_are_one_tensor_in_checkpoints_get_one_memory(store: MemoryStore, publisher: Publisher) -> None:
    trainer, served = split_mlp(qwen()), split_mlp(qwen(1))
    before, values = dict(served.named_parameters()), bits(named_weights(served))
    engine = ModuleEngine(served)
    assert bits(named_weights(served)) == values
    joined = engine.weights()["model.layers.0.mlp.gate_up_proj.weight"]
    assert joined is engine.weights()["model.layers.0.mlp.gate_up_proj.weight"]
    assert joined.data_ptr() == served.model.layers[0].mlp.gate_proj.weight.data_ptr()
    with HotSwap(store, engine, options=ReaderOptions(pin=False)) as swap:
        for number in range(3):
            WeightSource(trainer).publish(publisher, step=number)
            swap.sync()
            assert bits(named_weights(served)) == bits(named_weights(trainer))
            served.model.layers[0].mlp.up_proj.weight.data = served.model.layers[0].mlp.up_proj.weight.data.clone()
            step(trainer, number)
    assert all(parameter is before[name] for name, parameter in served.named_parameters())


def test_memory_that_others_use_is_not_moved() -> None:
    model = split_mlp(qwen())
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.data = mlp.gate_proj.weight.data  # two parameters share one memory, and moving one would separate them
    values = bits(named_weights(model))
    with pytest.raises(UnsupportedLayout, match="also used by others"):
        ModuleEngine(model)
    assert bits(named_weights(model)) == values
    shared = split_mlp(qwen())
    shared.share_memory()
    with pytest.raises(UnsupportedLayout, match="also used by others"):
        ModuleEngine(shared)


def test_a_name_with_two_meanings_means_the_tensor_of_the_checkpoint(store: MemoryStore, publisher: Publisher, tmp_path: Path) -> None:
    core = pytest.importorskip("transformers.core_model_loading")
    trainer, served = qwen(), qwen(1)
    for model in (trainer, served):
        model._weight_conversions = [core.WeightConverter("o_proj.weight", "o_proj.weight", [core.Transpose()])]
    assert not CheckpointLayout(served).accepts_own_names
    trainer.save_pretrained(tmp_path)
    with HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False)) as swap:
        for number in range(3):
            source = WeightSource(trainer)
            source.publish(publisher, step=number)
            swap.sync()
            assert bits(named_weights(served)) == bits(named_weights(trainer))
            step(trainer, number)


def test_conversions_that_fail_are_refused_by_name() -> None:
    core = pytest.importorskip("transformers.core_model_loading")
    model = qwen()

    class Broken(core.Transpose):  # type: ignore[misc]
        def convert(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no such luck")

        @property
        def reverse_op(self) -> Any:
            return Broken()

    model._weight_conversions = [core.WeightConverter("o_proj.weight", "o_proj.weight", [Broken()])]
    for use in (ModuleEngine, lambda each: WeightSource(each).snapshot()):
        with pytest.raises(UnsupportedLayout, match="no such luck"):
            use(model)


def test_ranks_that_hold_shards_of_fused_experts_publish_what_save_pretrained_writes(store: MemoryStore, tmp_path: Path) -> None:
    trainer = made("mixtral")
    layout = CheckpointLayout(trainer)

    def publish(ranks: ThreadRank) -> None:
        own = {name: tensor.detach().view(torch.int16).numpy().view(bfloat16) for name, tensor in layout.own_weights().items()}
        with ShardedPublisher(ranks, store, options=WriterOptions(threads=1)) as publisher:
            publisher.publish(layout.split(shards_of(own, ranks.rank, ranks.size)))

    assert run_ranks(3, publish) == [None] * 3  # two ranks have two experts each, one has none
    trainer.save_pretrained(tmp_path)
    with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync()
        published = {name: to_torch(array.copy()) for name, array in subscriber.state.items()}
    assert bits(published) == bits(load_file(tmp_path / "model.safetensors"))


def test_shards_of_a_transposed_tensor_are_refused() -> None:
    core = pytest.importorskip("transformers.core_model_loading")
    model = qwen()
    model._weight_conversions = [core.WeightConverter("o_proj.weight", "o_proj.weight", [core.Transpose()])]
    layout = CheckpointLayout(model)
    own = {name: tensor.detach().view(torch.int16).numpy() for name, tensor in layout.own_weights().items()}
    with pytest.raises(UnsupportedLayout, match="not one range"):
        layout.split(shards_of(own, 0, 2))


def test_fused_experts_from_trl_are_published_as_save_pretrained_writes_them(store: MemoryStore, tmp_path: Path) -> None:
    trainer = made("qwen3_moe").float()
    transfer = DeltaWireTransfer(store, engines=0, dtype=torch.bfloat16, model=trainer)
    transfer.init_weight_transfer()
    transfer.send_weights(iter(trainer.named_parameters()))  # TRL sends tensors under the live model's names
    transfer.destroy()
    trainer.bfloat16().save_pretrained(tmp_path)
    with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync()
        published = {name: to_torch(array.copy()) for name, array in subscriber.state.items()}
    assert bits(published) == bits(load_file(tmp_path / "model.safetensors"))


def test_a_published_model_is_a_checkpoint_that_loads(store: MemoryStore, tmp_path: Path) -> None:
    trainer = made("mixtral")
    files = {"config.json": trainer.config.to_json_string().encode()}
    with (
        Publisher(store, attachments=files) as publisher,
        Subscriber(store, tmp_path / "mirror", options=ReaderOptions(pin=False)) as subscriber,
    ):
        for number in range(2):
            publisher.publish(trainer, step=number)
            subscriber.sync()
            assert subscriber.path is not None
            assert bits(named_weights(fresh(subscriber.path))) == bits(named_weights(trainer))
            step(trainer, number)
