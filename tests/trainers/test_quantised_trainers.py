"""Every way to publish from a trainer can quantise: a weight source, the Hugging Face callback, and TRL's transfer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import bits_of
from test_callback import TRAINER_WARNS, train
from tiny_models import qwen, torch

from deltawire import Publisher, Subscriber
from deltawire.chain.reader_options import ReaderOptions
from deltawire.quantise.quantise import quantise_state
from deltawire.store import Store
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.model_files import read_model_files
from deltawire.tensors.module_tensors import tied_names
from deltawire.trainers import DeltaWireCallback, WeightSource
from deltawire.trainers.trl import DeltaWireTransfer

CONFIG = {"config.json": b"{}"}


def newest(store: Store) -> Any:
    with Subscriber(store, options=ReaderOptions(pin=False)) as reader:
        assert reader.sync().recipe is not None
        return {name: array.copy() for name, array in reader.state.items()}


def own(model: Any) -> dict[str, Any]:
    """Return the float32 weights of a model as its checkpoint has them."""
    state = dict(model.named_parameters())
    return {name: tensor for name, tensor in state.items() if name not in tied_names(state)}


@TRAINER_WARNS
def test_the_callback_quantises_and_says_so_in_the_configuration(tmp_path: Path) -> None:
    store = MemoryStore()
    model = train(tmp_path / "out", DeltaWireCallback(store, quantise="fp8-block"), steps=2)
    found = newest(store)
    assert bits_of(found) == bits_of(quantise_state(own(model), "fp8-block", found))
    config = json.loads(read_model_files(store).files["config.json"])
    assert config["quantization_config"]["quant_method"] == "fp8"
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_trl_and_a_weight_source_publish_the_same_from_float32(dtype: torch.dtype | None) -> None:
    by_trl, by_source = MemoryStore(), MemoryStore()
    model = qwen(0, dtype=torch.float32)
    transfer = DeltaWireTransfer(by_trl, engines=0, quantise="nvfp4", dtype=dtype, attachments=CONFIG)
    transfer.init_weight_transfer()
    with Publisher(by_source, quantise="nvfp4", dtype=dtype, attachments=CONFIG) as publisher:
        for step in range(2):
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.01 * torch.rand_like(weight)
            transfer.send_weights(iter(own(model).items()))
            WeightSource(model).publish(publisher, step=step)
    transfer.destroy()
    assert bits_of(newest(by_trl)) == bits_of(newest(by_source))
    kept = newest(by_trl)["model.norm.weight"]
    assert kept.dtype.name == ("bfloat16" if dtype is None else "float16")
