"""A module in training is published: casts, names, filters, and training that continues during a publication."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_models import bits, moe, qwen, step, torch, transformers

from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.version import Version
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.publish import Publisher
from deltawire.publish.attachments.model_files import files_of_model
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber, reading_mirror
from deltawire.tensors.casting import wire_dtype
from deltawire.tensors.torch_types import to_torch
from deltawire.trainers import WeightSource


def test_master_weights_are_cast_as_torch_casts_them() -> None:
    model = qwen(0, dtype=torch.float32)
    snapshot = WeightSource(model, dtype=torch.bfloat16, tied=True).snapshot()
    assert bits(snapshot) == bits({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})


def test_buffers_are_used_again() -> None:
    model = qwen(0, dtype=torch.float32)
    source = WeightSource(model, dtype=torch.bfloat16)
    first = {name: tensor.data_ptr() for name, tensor in source.snapshot().items()}
    step(model, 1)
    assert {name: tensor.data_ptr() for name, tensor in source.snapshot().items()} == first
    assert bits(source.snapshot()) == bits({name: model.state_dict()[name].bfloat16() for name in first})


def test_tensors_that_need_no_cast_are_not_copied() -> None:
    model = qwen(0)
    weights = dict(model.named_parameters())
    assert all(tensor.data_ptr() == weights[name].data_ptr() for name, tensor in WeightSource(model).snapshot().items())


def test_only_floating_point_weights_are_cast_and_each_as_asked() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    source = WeightSource(module, dtype=lambda name, tensor: torch.float16 if name.startswith("0.") else None)
    types = {name: tensor.dtype for name, tensor in source.snapshot().items()}
    assert types["0.weight"] == types["0.bias"] == torch.float16
    assert types["1.running_mean"] == torch.float32
    assert types["1.num_batches_tracked"] == torch.int64


def test_names_are_mapped_and_filtered() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    source = WeightSource(module, names={"0.weight": "first"}, keep=lambda name: name != "1.bias", bundle="draft")
    assert source.snapshot().keys() == {"draft:first", "draft:0.bias", "draft:1.weight", "draft:1.bias"}
    source = WeightSource(module, names={"0.weight": "first"}, keep=lambda name: name != "1.bias")
    assert source.snapshot().keys() == {"first", "0.bias", "1.weight"}


def test_what_is_published_in_the_background_is_what_it_was_at_the_call() -> None:
    store = MemoryStore()
    model, served = qwen(0, dtype=torch.float32), qwen(1)
    source = WeightSource(model, dtype=torch.bfloat16)
    with Publisher(store, background=True) as publisher, HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False)) as swap:
        for number in range(4):
            pending: Any = source.publish(publisher, step=number)
            expected = bits({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
            step(model, number)  # training continues at once
            version = pending.result(60)
            swap.sync()
            assert version.step == number
            assert bits(served.state_dict()) == expected


@pytest.mark.parametrize("make", [qwen, moe])
def test_a_mirror_of_it_loads_with_from_pretrained(make: Any, tmp_path: Any) -> None:
    """This also holds if modules have other tensors than checkpoints, as mixtures of experts do. The module's own names work too."""
    store = MemoryStore()
    model = make(0)
    model.config.save_pretrained(tmp_path / "config")
    with Publisher(store, attachments=tmp_path / "config") as publisher:
        WeightSource(model).publish(publisher)
        step(model, 1)
        WeightSource(model).publish(publisher)
    with Subscriber(store, tmp_path / "mirror") as subscriber:
        subscriber.sync()
    with reading_mirror(tmp_path / "mirror") as checkpoint:
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert bits(loaded.state_dict()) == bits(model.state_dict())


def test_a_model_is_published_as_its_checkpoint_is(tmp_path: Path) -> None:
    """The trainer's float32 is published as the bfloat16 that the fleet serves, tied weights once, with the names of `save_pretrained`."""
    model = qwen(0, dtype=torch.float32, tied=True)
    with Publisher(tmp_path / "chain", dtype=torch.bfloat16) as publisher:
        for step in range(3):
            version = publisher.publish(model, step=step)
            with torch.no_grad():
                model.model.norm.weight.mul_(1.01)
        assert isinstance(version, Version)
        assert version.kind == "delta"
        publisher.publish(model, step=3)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    with Subscriber(tmp_path / "chain", options=ReaderOptions(pin=False)) as subscriber:
        assert subscriber.sync().step == 3
        found = bits({name: to_torch(array.copy()) for name, array in subscriber.state.items()})
    assert "lm_head.weight" not in found
    assert found == bits(load_file(tmp_path / "saved" / "model.safetensors"))


def test_the_files_of_a_model_say_what_is_published() -> None:
    model = qwen(0, dtype=torch.float32)
    config = json.loads(files_of_model(model, wire_dtype(torch.bfloat16))["config.json"])
    assert (config["torch_dtype"], config["architectures"]) == ("bfloat16", ["Qwen3ForCausalLM"])
    # `torch.compile` wraps a model like this.
    assert json.loads(files_of_model(SimpleNamespace(_orig_mod=model))["config.json"]) == config | {"torch_dtype": "float32"}
    assert files_of_model(model).keys() == {"config.json", "generation_config.json"}
    assert files_of_model(torch.nn.Linear(2, 2)) == {}
