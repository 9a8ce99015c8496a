"""Several sets of weights, including LoRA adapters, are published as one version."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import bits, qwen, step, torch

from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.format.bundle_names import BundleView, bundle_names, join_name, split_name
from deltawire.publish import Publisher
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.trainers import WeightSource, adapter_weights, join_bundles
from deltawire.trainers.bundles import adapter_files


def test_names_are_put_together_and_taken_apart() -> None:
    for bundle, tensor in [("", "a.weight"), ("draft", "a.weight"), ("draft", "odd:name")]:
        assert split_name(join_name(bundle, tensor)) == (bundle, tensor)
    for bundle, tensor in [("", "odd:name"), ("a:b", "weight")]:
        with pytest.raises(ValueError, match=":"):
            join_name(bundle, tensor)


def test_a_reader_sees_each_bundle_under_its_own_names() -> None:
    store = MemoryStore()
    policy, scales = torch.nn.Linear(3, 3), {"weight": torch.ones(3)}
    with Publisher(store) as publisher:
        publisher.publish(join_bundles(policy.state_dict(), scales=scales))
    with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync()
        assert bundle_names(subscriber.state) == ["", "scales"]
        assert set(BundleView(subscriber.state)) == {"weight", "bias"}
        assert dict(BundleView(subscriber.state, "scales").items())["weight"].tolist() == [1, 1, 1]
        assert not BundleView(subscriber.state, "draft")


def test_an_adapter_is_published_by_itself_and_followed() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer, served = (peft.get_peft_model(qwen(0), config) for _ in range(2))
    store = MemoryStore()
    names = {name for name, parameter in trainer.named_parameters() if parameter.requires_grad}

    def wire(name: str) -> str | None:
        return name.replace(".default.", ".") if name in names else None

    assert {wire(name) for name in names} == set(adapter_weights(trainer))
    engine = ModuleEngine(served, names=wire, bundle="adapter")
    with Publisher(store) as publisher, HotSwap(store, engine, options=ReaderOptions(pin=False)) as swap:
        for number in range(3):
            publisher.publish(join_bundles(adapter=adapter_weights(trainer)), step=number)
            version = swap.sync()
            assert bits(adapter_weights(served)) == bits(adapter_weights(trainer))
            step(trainer, number, rate=0.01)
    assert version.state_bytes == sum(tensor.nbytes for tensor in adapter_weights(trainer).values())
    saved: dict[str, Any] = json.loads(adapter_files(trainer)["adapter_config.json"])
    assert saved["r"] == 4
    assert saved["target_modules"] == ["q_proj", "v_proj"]


def test_policy_and_draft_model_are_one_version() -> None:
    store = MemoryStore()
    policy, draft = qwen(0), qwen(1, tied=False)
    sources = {"policy": WeightSource(policy), "draft": WeightSource(draft)}
    with Publisher(store) as publisher, Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        for number in range(3):
            publisher.publish(join_bundles(sources["policy"].snapshot(), draft=sources["draft"].snapshot()), step=number)
            assert subscriber.sync().step == number
            assert BundleView(subscriber.state)["model.norm.weight"].tobytes() == _bytes(policy.model.norm.weight)
            assert BundleView(subscriber.state, "draft")["lm_head.weight"].tobytes() == _bytes(draft.lm_head.weight)
            step(policy, number)
            step(draft, number)


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.detach().view(torch.uint8).numpy().tobytes())
