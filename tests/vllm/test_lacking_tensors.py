"""A chain that lacks a tensor is told from one that only names it otherwise, and from one without a tensor that the model never takes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_models import LoadedModel, import_vllm, load_model
from model_memory import difference, memory
from tiny_checkpoints import TinyModel

from deltawire.dtypes import dtype_named
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable

pytestmark = pytest.mark.slow

DENSE = TinyModel("dense", layers=1)
LAYER = "model.layers.0."


def table_of(state: dict[str, Any], *lacks: str) -> TensorTable:
    kinds = {"bfloat16": "BF16", "float32": "F32", "int32": "I32", "int64": "I64"}
    names = sorted(state.keys() - set(lacks))
    return {name: TensorSpec(dtype_named(kinds[state[name].dtype.name]), state[name].shape) for name in names}


def lacking(loaded: LoadedModel, table: TensorTable, known: TensorTable) -> list[str]:
    from deltawire.engines.vllm.layout.lacking_tensors import find_lacking

    before = memory(loaded.model)
    found = find_lacking(loaded.model, loaded.vllm_config, table, known)
    assert not difference(memory(loaded.model), before)
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(DENSE.save(tmp_path_factory.mktemp("dense") / "start", DENSE.state()))


@pytest.mark.parametrize("name", ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_a_tensor_that_the_model_takes_is_lacking(name: str, dense: LoadedModel) -> None:
    name = f"{LAYER}{name}.weight"
    assert lacking(dense, table_of(DENSE.state(), name), table_of(DENSE.state())) == [name]


def test_tensors_that_a_chain_has_in_one_under_another_name_are_not_lacking(dense: LoadedModel) -> None:
    state = DENSE.state()
    parts = [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"]
    rows = [state[name] for name in parts]
    fused = f"{LAYER}self_attn.qkv_proj.weight"
    assert not lacking(dense, table_of({**state, fused: np.concatenate(rows)}, *parts), table_of(state))
    assert lacking(dense, table_of(state, *parts), table_of({**state, fused: np.concatenate(rows)})) == sorted([*parts, fused])


def test_a_tensor_that_the_model_skips_or_does_not_know_is_not_lacking(dense: LoadedModel) -> None:
    state = DENSE.state()
    others = {f"{LAYER}self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32), "of_another_model.weight": np.zeros(3, np.float32)}
    assert not lacking(dense, table_of(state), table_of({**state, **others}))


def test_a_tied_output_layer_is_not_lacking(tmp_path: Path) -> None:
    model = TinyModel("tied", tied=True, layers=1)
    state = model.state()
    both = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    loaded = load_model(model.save(tmp_path / "start", both))
    assert not lacking(loaded, table_of(state), table_of(both))
    assert lacking(loaded, table_of(state, "model.embed_tokens.weight"), table_of(state)) == ["model.embed_tokens.weight"]


def test_parameters_of_one_memory_need_one_tensor() -> None:
    assert not found_by("copy_", {"b": (8,)}, is_tied=True)
    assert found_by("copy_", {"b": (8,)}, is_tied=False) == ["a"]


@pytest.mark.parametrize(("how", "expected"), [("add_", ["a"]), ("copy_", ["a"]), ("raise", []), ("raise meta tensor", ["a"])])
def test_a_tensor_is_lacking_also_if_the_loader_computes_something_from_it(how: str, expected: list[str]) -> None:
    assert found_by(how, {"b": (8,)}, is_tied=False) == expected


def test_a_tensor_that_is_computed_from_one_with_another_name_is_not_lacking() -> None:
    assert not found_by("add_", {"b": (8,), "other.a": (8,)}, is_tied=False)
    assert found_by("add_", {"b": (8,), "other.b": (8,)}, is_tied=False) == ["a"]


def found_by(how: str, chain: dict[str, tuple[int, ...]], *, is_tied: bool) -> list[str]:
    """Return what such a chain lacks of the tensors `a` and `b`, for a model whose loader works in this way with all tensors."""
    import torch

    import_vllm()
    from vllm.config import VllmConfig

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("a", "b"):
                self.add_module(name, torch.nn.Module())
                self.get_submodule(name).register_parameter("weight", torch.nn.Parameter(torch.zeros(8), requires_grad=False))
            if is_tied:
                self.a.weight = self.b.weight

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
            for name, tensor in weights:
                target = self.get_submodule(name.split(".")[-1]).weight
                if how.startswith("raise") and name == "a":
                    raise ValueError(how)
                (target.add_ if how == "add_" else target.copy_)(tensor)

    model = Model()
    shapes: tuple[dict[str, tuple[int, ...]], ...] = (chain, {"a": (8,), "b": (8,)})
    table, known = [{name: TensorSpec(dtype_named("F32"), shape) for name, shape in sorted(each.items())} for each in shapes]
    return lacking(LoadedModel(model, VllmConfig()), table, known)
