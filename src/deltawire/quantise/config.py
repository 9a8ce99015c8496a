"""The `quantization_config` that tells engines how the tensors of a checkpoint are quantised."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .recipe import Recipe


def quantization_config(recipe: Recipe, kept: Sequence[str], quantised: Collection[str], is_gpt_oss: bool) -> dict[str, Any]:
    """Return the `quantization_config` for config.json.

    Parameters
    ----------
    recipe
        The recipe.
    kept
        The modules that have a weight which is not quantised.
    quantised
        The modules whose weights are quantised.
    is_gpt_oss
        Whether the tensors have the names of gpt-oss.
    """
    if is_gpt_oss:
        return {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        }
    ignore = list(dict.fromkeys(kept))
    if "lm_head" not in ignore and "lm_head" not in quantised:
        ignore.append("lm_head")  # a head that is tied to the embeddings is not in the checkpoint, but engines have the layer
    if recipe.name == "fp8-block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            **({"scale_fmt": "ue8m0"} if recipe.scale == "ue8m0" else {}),
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ignore,
        }
    formats = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "int4": "pack-quantized"}
    form = formats.get(recipe.name, "float-quantized")
    scheme = {
        "targets": ["Linear"],
        "weights": _weights(recipe),
        "input_activations": _activations(recipe),
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(recipe: Recipe) -> dict[str, Any]:
    strategies = {"fp8-channel": "channel", "fp8-tensor": "tensor", "nvfp4": "tensor_group"}
    found: dict[str, Any] = {
        "num_bits": 8 if recipe.element == "e4m3" else 4,
        "type": "int" if recipe.element == "int4" else "float",
        "strategy": strategies.get(recipe.name, "group"),
        "symmetric": True,
        "dynamic": False,
    }
    if recipe.group_size is not None:
        found["group_size"] = recipe.group_size
    scale_dtypes = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}
    if recipe.name in scale_dtypes:
        found["scale_dtype"] = scale_dtypes[recipe.name]
    return found


def _activations(recipe: Recipe) -> dict[str, Any] | None:
    """Return how engines quantise activations: per token for fp8; the recipes with 4 bits do not quantise them."""
    if recipe.element != "e4m3":
        return None
    return {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
