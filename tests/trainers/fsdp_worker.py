"""One rank of a training job for test_fsdp.py, with real gloo and real `fully_shard`.

It trains a tiny model and publishes every step. Rank 0 also writes the full model, for comparison.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from deltawire.publish import PendingVersion
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions
from deltawire.trainers.fsdp import FSDPPublisher


class Tied(nn.Module):
    """A model whose embedding and head are one parameter. Its sizes are odd, so that shards are uneven and begin anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(151, 72)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(72, 131), nn.GELU(), nn.Linear(131, 72)) for _ in range(2)])
        self.norm = nn.LayerNorm(72)
        self.head = nn.Linear(72, 151, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def sharded(mesh_shape: list[int], wrapping: str) -> nn.Module:
    torch.manual_seed(0)
    model = Tied()
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    if wrapping == "blocks":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, step: int) -> None:
    """Train one step. Every rank sees the same tokens, so the result is the same for any number of ranks, except for rounding."""
    tokens = torch.from_numpy(np.random.default_rng(step).integers(0, 151, (2, 9)))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 1e-3 * weight.grad.sign()
            weight.grad = None
        model.steps += 1


def other_placements() -> dict[str, torch.Tensor]:
    """Return DTensors with every placement on a mesh of two dimensions, and plain tensors."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    random = torch.Generator().manual_seed(1)
    kinds = [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1)), (Replicate(), Shard(1)),
             (Replicate(), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate()), (Shard(2), Shard(0))]  # fmt: skip
    state: dict[str, torch.Tensor] = {}
    for index, kind in enumerate(kinds):
        whole = torch.randn(37, 11, 5, generator=random).to(torch.bfloat16 if index % 2 else torch.float32)
        state[f"t{index}"] = distribute_tensor(whole, mesh, kind)
    sub = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("c", "d"))["d"]
    state["one group each"] = distribute_tensor(torch.arange(900.0), sub, [Shard(0)])
    state["scalar"] = distribute_tensor(torch.tensor(2.5), mesh, [Replicate(), Replicate()])
    state["plain"] = torch.arange(700) + 1000 * dist.get_rank()
    return state


def full(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in sorted(state.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = np.array(whole.detach().float() if whole.dtype == torch.bfloat16 else whole.detach())
    return found


def scramble(state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)


def run(rank: int, size: int, port: int, task: dict[str, object]) -> None:
    """Run one process of the job. It writes an exception to a file, so that the test can read it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    faulthandler.enable()  # a rank that a signal kills prints its stacks
    try:
        _run(rank, task)
    except BaseException:
        Path(task["out"], f"error-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)


def _run(rank: int, task: dict[str, object]) -> None:
    dist.init_process_group("gloo")
    events: list[dict[str, object]] = []
    dtype = torch.bfloat16 if task.get("bf16") else None
    model = None if task["mesh"] == "all placements" else sharded(task["mesh"], task.get("wrapping", "blocks"))
    if task.get("load"):
        load(model, np.load(task["load"]))
    given = {name: task[name] for name in ("background", "quantise", "resume_from_seq") if name in task}
    policy = AnchorPolicy(min_versions=10**6, max_versions=None) if task.get("anchors") is False else AnchorPolicy()
    options = WriterOptions(threads=1, anchor_policy=policy)
    on_event = lambda event: events.append(event.to_json())  # noqa: E731
    with FSDPPublisher(task["url"], dtype=dtype, options=options, on_event=on_event, **given) as publisher:
        if task.get("die") == rank:
            kill_at(publisher, 2)
        for step in range(*task["steps"]):
            if model is not None:
                train(model, step)
                state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
            else:
                state = other_placements()
                for tensor in state.values():
                    tensor += step
            whole = full(state)
            version = publisher.publish(state if model is None else model, step=step)
            if isinstance(version, PendingVersion):
                scramble(state)  # later changes of the weights are not published
                version = version.result(120)
            if rank == 0:
                np.savez(Path(task["out"]) / f"{version.seq}.npz", **whole)
    Path(task["out"], f"events-{rank}.json").write_text(json.dumps(events))
    dist.destroy_process_group()


def load(model: nn.Module, whole: dict[str, np.ndarray]) -> None:
    """Load weights as from a trainer's own checkpoint. Here they are the weights that were published last."""
    state = {}
    for name, tensor in model.state_dict().items():
        new = torch.from_numpy(whole["embed.weight" if name == "head.weight" else name])
        state[name] = distribute_tensor(new, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else new
    model.load_state_dict(state)


def kill_at(publisher: FSDPPublisher, upload: int) -> None:
    """Kill this process in the middle of an upload, without a message to the other ranks."""
    store = publisher._publisher._store
    real, seen = store.put, 0

    def put(key: str, *arguments: object, **options: object) -> None:
        nonlocal seen
        seen += key.startswith("data/")
        if seen == upload:
            os.kill(os.getpid(), signal.SIGKILL)
        real(key, *arguments, **options)

    store.put = put


gc.freeze()  # the garbage collector of a forked rank need not look through what it inherits
