"""Lets TRL's AsyncGRPO, which expects GPUs, run on a CPU: with an attention for CPUs, and without a peak of FLOPS."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def replace_what_needs_a_gpu() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention_of_packed_sequences)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12


def attention_of_packed_sequences(query, key, value, starts_q, starts_k, longest_q, longest_k, *, softmax_scale, causal, **_):
    """Compute causal attention within each of several concatenated sequences. Tensors have the shape (tokens, heads, size)."""
    outputs = []
    for index in range(len(starts_q) - 1):
        q = query[starts_q[index] : starts_q[index + 1]].transpose(0, 1)
        k, v = (part[starts_k[index] : starts_k[index + 1]].transpose(0, 1) for part in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        outputs.append(scores.transpose(0, 1))
    return torch.cat(outputs)
