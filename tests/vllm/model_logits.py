"""The logits of a model that vLLM has loaded without a server: it reads a prompt and then one more token, as in a server."""

from __future__ import annotations

from typing import Any

from loaded_models import LoadedModel

PROMPT = (5, 200, 17, 3, 90, 41, 250)
NEXT = (128,)


def logits(loaded: LoadedModel) -> bytes:
    """Return the bits of the logits of all tokens. All ranks must call it together. The model has the same memory as before.

    The last token is decoded by itself: MLA multiplies prompts and single tokens by different tensors.

    Parameters
    ----------
    loaded
        The model.
    """
    import torch
    from vllm.config import get_layers_from_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    config, found = loaded.vllm_config, []
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    assert layers
    before = {name: layer.kv_cache for name, layer in layers.items()}
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.bind_kv_cache(_cache(specs[name]))
    with loaded.active(), torch.inference_mode():
        for tokens, start in ((PROMPT, 0), (NEXT, len(PROMPT))):
            positions = torch.arange(start, start + len(tokens))
            metadata = {name: _metadata(layer, name, specs[name], config, positions) for name, layer in layers.items()}
            slots = dict.fromkeys(layers, _slots(positions))
            with set_forward_context(metadata, config, num_tokens=len(tokens), slot_mapping=slots):
                found.append(loaded.model.compute_logits(loaded.model(torch.tensor(tokens), positions)))
    for name, layer in layers.items():
        layer.kv_cache = before[name]
    if found[0] is None:  # only the first rank has the logits
        return b""
    everything = torch.cat(found).float()
    assert torch.isfinite(everything).all()
    return bytes(everything.numpy().tobytes())


def _cache(spec: Any) -> Any:
    """Return an empty cache of two blocks. The first block is never used, as in a server."""
    import torch

    width = spec.page_size_bytes // (spec.num_kv_heads * spec.block_size * spec.dtype.itemsize)
    return torch.zeros(2, spec.num_kv_heads, spec.block_size, width, dtype=spec.dtype)


def _slots(positions: Any) -> Any:
    return positions + 16


def _metadata(layer: Any, name: str, spec: Any, config: Any, positions: Any) -> Any:
    """Return what attention needs to know about one request with new tokens at these positions."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    count, length = len(positions), int(positions[-1]) + 1
    starts, lengths = torch.tensor([0, count], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    builder = layer.get_attn_backend().get_builder_cls()(spec, [name], config, torch.device("cpu"))
    return builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=length,
            block_table_tensor=torch.tensor([[1, 0, 0, 0]], dtype=torch.int32),
            slot_mapping=_slots(positions),
            positions=positions,
        ),
    )
