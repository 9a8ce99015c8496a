"""Say in config.json how the published weights are quantised, so that engines load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...dtypes import DType
from ...errors import CheckpointError
from ...tensors.torch_types import torch_name
from .model_files import set_dtype, to_bytes

CONFIG = "config.json"
_KEY = "quantization_config"


def with_quantization(config: bytes, quantization: Mapping[str, Any], dtype: DType | None) -> bytes:
    """Return config.json with the `quantization_config` of a recipe. Raises `CheckpointError` if it is not a configuration.

    `dtype` is the type of all weights that are not quantised; None if there is no such type.
    """
    found = _parsed(config)
    found[_KEY] = dict(quantization)
    if dtype is not None:
        set_dtype(found, torch_name(dtype))
    return to_bytes(found)


def without_quantization(config: bytes) -> bytes:
    """Return config.json without `quantization_config`, for weights that are no longer quantised."""
    found = _parsed(config)
    return config if found.pop(_KEY, None) is None else to_bytes(found)


def _parsed(config: bytes) -> dict[str, Any]:
    try:
        found = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{CONFIG} cannot be read: {error}. It must be the configuration of the model.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{CONFIG} holds a {type(found).__name__}. It must be the configuration of the model, a JSON object.")
    return found
