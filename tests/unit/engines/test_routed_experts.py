"""Routed experts of vLLM's and SGLang's answers are read exactly, and hostile ones are refused by name without memory."""

from __future__ import annotations

import base64
import io
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.dtypes import dtype_named
from deltawire.engines.routed_experts import ModelRouters, read_sglang_experts, read_vllm_experts, routers_of, routers_of_files
from deltawire.errors import EngineError
from deltawire.format.routing import RoutingLayout
from deltawire.subscribe.model_files import ModelFiles

ROUTERS = ModelRouters(RoutingLayout(128, 2, (1, 3)), 4)
ROWS = np.zeros((5, 4, 2), np.uint8)
ROWS[:, [1, 3]] = np.random.default_rng(0).permuted(np.tile(np.arange(128), (5, 2, 1)), axis=-1)[..., :2]


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64])
def test_rows_of_vllm_belong_to_the_first_tokens_and_the_last_has_none(dtype: Any) -> None:
    found = read_vllm_experts(npy(ROWS.astype(dtype)), ROUTERS, 6)
    assert found.layout == ROUTERS.layout
    assert found.experts.shape == (6, 2, 2)
    assert np.array_equal(found.experts[:5], ROWS[:, [1, 3]])
    assert (found.experts[5] == -1).all()


def test_rows_after_a_start_are_placed_there() -> None:
    for read, text in ((read_vllm_experts, npy(ROWS)), (read_sglang_experts, base64.b64encode(ROWS.astype("<i4").tobytes()).decode())):
        found = read(text, ROUTERS, 8, start=2)
        assert (found.experts[[0, 1, 7]] == -1).all()
        assert np.array_equal(found.experts[2:7], ROWS[:, [1, 3]])


def test_rows_of_the_layers_with_experts_alone_are_taken() -> None:
    assert np.array_equal(read_vllm_experts(npy(ROWS[:, [1, 3]]), ROUTERS, 6).experts[:5], ROWS[:, [1, 3]])


def test_a_completion_of_one_token_may_have_no_rows() -> None:
    assert (read_vllm_experts(npy(ROWS[:0]), ROUTERS, 1).experts == -1).all()


def header(text: str, body: bytes = b"", version: bytes = b"\1\0") -> str:
    raw = text.encode()
    return base64.b64encode(b"\x93NUMPY" + version + len(raw).to_bytes(2, "little") + raw + body).decode()


HOSTILE: dict[str, Any] = {
    "nothing": "",
    "a number": 5,
    "a list": [[1]],
    "no base64": "****",
    "base64 with spaces": npy(ROWS)[:8] + " " + npy(ROWS)[8:],
    "too much text": "A" * 10_000,
    "no file": base64.b64encode(b"hello").decode(),
    "a pickle": base64.b64encode(b"\x80\x04N.").decode(),
    "objects": header("{'descr': '|O', 'fortran_order': False, 'shape': (5, 4, 2)}", b"\x80\x04N."),
    "floats": npy(ROWS.astype(np.float32)),
    "booleans": npy(ROWS.astype(bool)),
    "big-endian numbers": npy(ROWS.astype(">i4")),
    "fortran order": npy(np.asfortranarray(ROWS)),
    "a token too many": npy(np.concatenate([ROWS, ROWS[:1]])),
    "a token too few": npy(ROWS[:4]),
    "a layer too few": npy(ROWS[:, :3]),
    "an expert too few": npy(ROWS[..., :1]),
    "two dimensions": npy(ROWS[0]),
    "an expert that is not there": npy(np.full_like(ROWS, 128)),
    "an expert below -1": npy(np.full(ROWS.shape, -2, np.int16)),
    "a header that is code": header("__import__('os').system('true')"),
    "a header of another shape": header("{'descr': '|u1', 'fortran_order': False, 'shape': (99999999, 99999, 9)}"),
    "a shape below 0": header("{'descr': '|u1', 'fortran_order': False, 'shape': (-5, 4, 2)}"),
    "a shape that is true": header("{'descr': '|u1', 'fortran_order': False, 'shape': (True, 4, 2)}"),
    "a key too many": header("{'descr': '|u1', 'fortran_order': False, 'shape': (5, 4, 2), 'x': 1}", bytes(40)),
    "deep brackets": header("(" * 900),
    "a body too short": header("{'descr': '|u1', 'fortran_order': False, 'shape': (5, 4, 2)}", bytes(39)),
    "a body too long": header("{'descr': '|u1', 'fortran_order': False, 'shape': (5, 4, 2)}", bytes(41)),
    "a header that is cut short": base64.b64encode(b"\x93NUMPY\1\0\xff\3{").decode(),
    "another version": header("{'descr': '|u1', 'fortran_order': False, 'shape': (5, 4, 2)}", bytes(40), b"\7\0"),
}


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    for read in (read_vllm_experts, read_sglang_experts):
        with pytest.raises(EngineError):
            read(base64.b64encode(data).decode(), ROUTERS, 6)


def raw(rows: Any) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


HOSTILE_SGLANG: dict[str, Any] = {
    "nothing": "",
    "a number": 5,
    "a list": [[1]],
    "no base64": "****",
    "too much text": "A" * 4_000_000,
    "a token too few": raw(ROWS[:4]),
    "a token too many": raw(np.concatenate([ROWS, ROWS[:1]])),
    "a layer too few": raw(ROWS[:, :3]),
    "an expert that is not there": raw(np.full_like(ROWS, 200)),
    "an expert below -1": raw(np.full(ROWS.shape, -9)),
    "an expert of 16 bits too many": raw(np.full(ROWS.shape, 1 << 16)),
    "half a number": raw(ROWS)[:-4],
}


@pytest.mark.parametrize(("engine", "name"), [*(("vllm", name) for name in HOSTILE), *(("sglang", name) for name in HOSTILE_SGLANG)])
def test_hostile_answers_are_refused(engine: str, name: str) -> None:
    read, hostile = (read_vllm_experts, HOSTILE) if engine == "vllm" else (read_sglang_experts, HOSTILE_SGLANG)
    tracemalloc.start()
    try:
        with pytest.raises(EngineError):
            read(hostile[name], ROUTERS, 6)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_routers_are_found_in_the_config_and_the_names_of_tensors() -> None:
    config = {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 3}
    names = [
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.2.mlp.experts.5.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ]
    names += ["model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"]
    assert routers_of(config, names) == ModelRouters(RoutingLayout(128, 8, (0, 2)), 3)
    assert routers_of({"text_config": config}, names) == ModelRouters(RoutingLayout(128, 8, (0, 2)), 3)
    assert routers_of({"n_routed_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}, names) is not None
    assert routers_of({"num_hidden_layers": 3}, names) is None
    assert routers_of(config, names[2:4]) is None
    assert routers_of({**config, "num_experts": 10**9}, names) is None
    dtypes = {name: dtype_named("BF16") for name in names}
    assert routers_of_files(ModelFiles({"config.json": json.dumps(config).encode()}, dtypes)) is not None
    for content in ({}, {"config.json": b"{"}, {"config.json": b"[]"}):
        assert routers_of_files(ModelFiles(content, dtypes)) is None
