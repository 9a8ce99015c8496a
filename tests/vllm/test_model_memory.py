"""The comparison of memory finds a changed bit in every place where a model may keep a tensor."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from loaded_models import load_model
from model_memory import addresses, difference, memory
from tiny_checkpoints import TinyMla

pytestmark = pytest.mark.slow


def test_a_changed_bit_is_found_wherever_the_tensor_is(tmp_path: Path) -> None:
    import torch

    model = TinyMla("mla", layers=1)
    checkpoint = model.save(tmp_path / "start", model.state())
    first, second = load_model(checkpoint).model, load_model(checkpoint).model
    assert difference(memory(first), memory(second)) == []

    attention = first.model.layers[0].self_attn
    derived = attention.mla_attn.mla_attn
    hidden = [torch.ones(4) for _ in range(5)]
    attention.o_proj.quant_method.some_scale = hidden[0]
    attention.o_proj.quant_method.kernels = [functools.partial(print, hidden[1])]
    attention.o_proj.register_buffer("some_buffer", hidden[2])
    derived.impl.state = {"rows": (hidden[3],)}
    attention.forward_with = lambda: hidden[4]
    for tensor in (first.lm_head.weight, derived.W_UV, derived._k_scale, attention.rotary_emb.cos_sin_cache, *hidden):
        before, places = memory(first), addresses(first)
        _flip(tensor)
        assert difference(memory(first), before), "the change was not found"
        assert addresses(first) == places
        _flip(tensor)
        assert difference(memory(first), before) == []


def test_a_view_that_became_a_copy_is_found(tmp_path: Path) -> None:
    model = TinyMla("mla", layers=1)
    loaded = load_model(model.save(tmp_path / "start", model.state())).model
    before, places = memory(loaded), addresses(loaded)
    derived: Any = loaded.model.layers[0].self_attn.mla_attn.mla_attn
    derived.W_UV = type(derived.W_UV)(derived.W_UV.data.clone(), requires_grad=False)
    assert difference(memory(loaded), before)
    assert addresses(loaded) != places


def _flip(tensor: Any) -> None:
    import torch

    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage[tensor.storage_offset() * tensor.element_size()] ^= 1
