"""One rank of a job for test_replay_fsdp.py, with real gloo and real `fully_shard`. It trains with and without replay, and compares."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from moe_models import another_routing, bits, moe_model, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deltawire.rl.routing.router_replay import RouterReplay


def run(rank: int, size: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (size,))
        for name in ("qwen3_moe", "deepseek_v3"):
            for checkpointing in (False, True):
                _compare(name, mesh, rank, checkpointing=checkpointing)
        dist.destroy_process_group()
    except BaseException:
        Path(out, f"error-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)


def _compare(name: str, mesh: Any, rank: int, *, checkpointing: bool) -> None:
    whole = moe_model(name)
    model = moe_model(name)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = [tokens(2, 5, seed) for seed in (10 + rank, 20 + rank)]  # each rank has its own tokens
    plain = _train(model, parts, None)
    with RouterReplay(model) as replay, torch.no_grad():
        own = []
        for part in parts:
            with replay.record() as recording:
                model(input_ids=part, use_cache=False)
            own.append(recording.take())
        shape = (10, len(replay.layers), replay.top_k)
        other = [another_routing(shape, replay.experts, seed + rank).numpy() for seed in (1, 2)]
    assert _train(model, parts, own) == plain
    # A rank computes with its sharded model what one process computes with the whole model.
    logits = [_logits(model, part, rows) for part, rows in zip(parts, other, strict=True)]
    assert logits == [_logits(whole, part, rows) for part, rows in zip(parts, other, strict=True)]
    assert logits != [_logits(model, part, None) for part in parts]
    assert _train(model, parts, other) != plain


def _train(model: Any, parts: list[torch.Tensor], experts: list[np.ndarray[Any, Any]] | None) -> list[bytes]:
    """Return the bits of this rank's shards of the gradients."""
    with RouterReplay(model) as replay:
        for number, part in enumerate(parts):
            if experts is not None:
                replay.set(experts[number])
            model(input_ids=part, use_cache=False).logits.square().sum().backward()
        counts = replay.take_counts()
        assert counts.replayed == (0 if experts is None else 20 * len(replay.layers))
    found = [bits(weight.grad.to_local()) for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return found


def _logits(model: Any, part: torch.Tensor, experts: np.ndarray[Any, Any] | None) -> bytes:
    with RouterReplay(model) as replay, torch.no_grad():
        if experts is not None:
            replay.set(experts)
        return bits(model(input_ids=part, use_cache=False).logits)
