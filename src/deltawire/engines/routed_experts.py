"""Routed experts in the answers of vLLM and SGLang. Everything in an answer is checked before memory is taken on its word.

vLLM (`--enable-return-routed-experts`) sends `choices[i].routed_experts`: base64 of a .npy file, [tokens − start, layers, top k]. SGLang
(`return_routed_experts`) sends `meta_info["routed_experts"]`: base64 of 32-bit integers without a shape. In both, `layers` are all decoder
layers, those without experts are zeros, and the last token has no row, because the model never processed it.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from ..format.routing import MISSING, RecordedExperts, RoutingLayout
from ..subscribe.model_files import ModelFiles

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1 << 10
_TYPES = ("|u1", "|i1", "<u2", "<i2", "<i4", "<i8")
_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts(?:\.|$)")


@dataclass(frozen=True, slots=True)
class ModelRouters:
    """The routers of a served model.

    Parameters
    ----------
    layout
        The layers that have experts.
    all_layers
        The number of all decoder layers.
    """

    layout: RoutingLayout
    all_layers: int


def routers_of_files(files: ModelFiles) -> ModelRouters | None:
    """Return the routers of a chain's model, from its config and the names of its tensors. None if it has none, or they are not known.

    Parameters
    ----------
    files
        The attachments of a version, and the types of its tensors.
    """
    try:
        config = json.loads(files.files["config.json"])
    except (KeyError, ValueError):
        return None
    return routers_of(config, files.dtypes) if isinstance(config, dict) else None


def routers_of(config: Mapping[str, Any], names: Iterable[str]) -> ModelRouters | None:
    """Return the routers of a model, or None if it has none, or they are not known.

    Parameters
    ----------
    config
        The content of config.json.
    names
        The names of the tensors of a checkpoint.
    """
    text = config.get("text_config")
    own = text if isinstance(text, dict) else config
    experts, top_k, layers = (
        next((own[name] for name in spellings if type(own.get(name)) is int), 0)
        for spellings in (
            ("num_experts", "n_routed_experts", "num_local_experts"),
            ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
            ("num_hidden_layers",),
        )
    )
    found = sorted({int(match[1]) for name in names if (match := _EXPERTS.search(name))})
    layout = RoutingLayout(experts, top_k, tuple(layer for layer in found if layer < layers))  # those after are for speculation
    return None if layout.why_unusable() is not None else ModelRouters(layout, layers)


def read_vllm_experts(text: Any, routers: ModelRouters, tokens: int, *, start: int = 0) -> RecordedExperts:
    """Return the experts of one choice of an answer of vLLM. Raises `EngineError` if they cannot be read, or do not fit.

    Parameters
    ----------
    text
        The field `routed_experts` of the choice.
    routers
        The routers of the model.
    tokens
        The number of tokens of the prompt and the completion together.
    start
        The `routed_experts_prompt_start` of the request: the first token that has a row.
    """
    wanted = (max(tokens - 1 - start, 0), routers.all_layers, routers.layout.top_k)
    data = _decoded(text, 8 * wanted[0] * wanted[1] * wanted[2] + _LONGEST_HEADER)
    if data[:6] != _MAGIC or data[6:8] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise EngineError("routed experts of the vLLM server are not a .npy file.")
    wide = 2 if data[6] == 1 else 4
    length = int.from_bytes(data[8 : 8 + wide], "little")
    header, body = data[8 + wide : 8 + wide + length], data[8 + wide + length :]
    if length > _LONGEST_HEADER or len(header) != length:
        raise EngineError("routed experts of the vLLM server have a header that is too long.")
    descr, shape = _npy_header(header)
    if shape not in (wanted, (wanted[0], len(routers.layout.layers), wanted[2])):
        raise EngineError(f"routed experts of the vLLM server have the shape {list(shape)} instead of {list(wanted)}.")
    if len(body) != np.dtype(descr).itemsize * shape[0] * shape[1] * shape[2]:
        raise EngineError("routed experts of the vLLM server have another size than their header says.")
    return _placed(np.frombuffer(body, descr).reshape(shape), routers, tokens, start)


def read_sglang_experts(text: Any, routers: ModelRouters, tokens: int, *, start: int = 0) -> RecordedExperts:
    """Return the experts of an answer of SGLang. Raises `EngineError` if they cannot be read, or do not fit.

    Parameters
    ----------
    text
        The field `meta_info["routed_experts"]` of the answer, or `sglext.routed_experts` of SGLang's OpenAI routes.
    routers
        The routers of the model.
    tokens
        The number of tokens of the prompt and the completion together.
    start
        The `routed_experts_start_len` of the request: the first token that has a row.
    """
    shape = (max(tokens - 1 - start, 0), routers.all_layers, routers.layout.top_k)
    size = 4 * shape[0] * shape[1] * shape[2]
    data = _decoded(text, size)
    if len(data) != size:
        raise EngineError(f"routed experts of the SGLang server have {len(data):,} bytes instead of {size:,}.")
    return _placed(np.frombuffer(data, "<i4").reshape(shape), routers, tokens, start)


def read_captured_experts(answer: Any, routers: ModelRouters, tokens: int) -> RecordedExperts:
    """Return the experts that a worker of vLLM's CPU build recorded (`vllm/expert_capture.py`). Raises `EngineError`.

    Parameters
    ----------
    answer
        The shape and the data of the worker's answer.
    routers
        The routers of the model.
    tokens
        The number of tokens of the prompt and the completion together.
    """
    if not isinstance(answer, dict) or answer.keys() != {"shape", "data"} or not isinstance(answer["shape"], list):
        raise EngineError("routed experts of the vLLM server cannot be read.")
    layers, top_k = len(routers.layout.layers), routers.layout.top_k
    shape = answer["shape"]
    if any(type(size) is not int for size in shape) or shape[1:] != [layers, top_k] or not 0 <= shape[0] <= tokens:
        raise EngineError(f"routed experts of the vLLM server have the shape {shape} instead of [{tokens}, {layers}, {top_k}] at most.")
    data = _decoded(answer["data"], 2 * shape[0] * layers * top_k)
    if len(data) != 2 * shape[0] * layers * top_k:
        raise EngineError("routed experts of the vLLM server have another size than their shape says.")
    return _placed(np.frombuffer(data, "<i2").reshape(shape), routers, tokens, 0)


def fill_prompts(recorded: Sequence[RecordedExperts | None], prompt: int, versions: Sequence[object]) -> None:
    """Give missing rows of a prompt to completions of one request, from completions that have them.

    A completion whose keys and values of the prompt come from the prefix cache has no rows for them. Another one computed them. Other
    weights may have computed them for a completion that began before a swap, so its rows are only given to those that also did.

    Parameters
    ----------
    recorded
        The experts of the completions of one request.
    prompt
        The number of tokens of the prompt.
    versions
        For each completion, the version that drew its first token.
    """
    known = [(each.experts, version) for each, version in zip(recorded, versions, strict=True) if each is not None]
    for experts, version in known:
        for other, its_version in known:
            if version == its_version:
                missing = (experts[:prompt] < 0).any(-1, keepdims=True)
                experts[:prompt] = np.where(missing, other[:prompt], experts[:prompt])


def _decoded(text: Any, most: int) -> bytes:
    if not isinstance(text, str) or len(text) > (most + 2) // 3 * 4:
        raise EngineError(f"routed experts of the server are not a text of at most {(most + 2) // 3 * 4:,} characters.")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise EngineError("routed experts of the server are not in base64.") from None


def _npy_header(header: bytes) -> tuple[str, tuple[int, int, int]]:
    """Return the type and the shape of an array of three dimensions in C order. Nothing in the header is executed."""
    try:
        found = ast.literal_eval(header.decode("ascii").strip())
        if found.keys() == {"descr", "fortran_order", "shape"} and found["fortran_order"] is False and found["descr"] in _TYPES:
            shape = found["shape"]
            if isinstance(shape, tuple) and len(shape) == 3 and all(type(size) is int and size >= 0 for size in shape):
                return found["descr"], shape
    except (ValueError, SyntaxError, AttributeError, TypeError, MemoryError, RecursionError):
        pass
    raise EngineError("routed experts of the vLLM server have a header that cannot be read.")


def _placed(rows: NDArray[Any], routers: ModelRouters, tokens: int, start: int) -> RecordedExperts:
    layout = routers.layout
    own = rows if rows.shape[1] == len(layout.layers) else rows[:, list(layout.layers)]
    if own.size and (int(own.min()) < MISSING or int(own.max()) >= layout.experts):
        raise EngineError(f"routed experts of the server name {own.min()} to {own.max()}, but a layer has {layout.experts:,} experts.")
    experts = np.full((tokens, *own.shape[1:]), MISSING, np.int16)
    experts[start : start + len(own)] = own
    return RecordedExperts(layout, experts)
