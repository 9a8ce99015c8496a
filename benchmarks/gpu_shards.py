"""Publish shards that are on a GPU with `FSDPPublisher`, and compare every version, bit for bit, with that of a `Publisher`.

    python benchmarks/gpu_shards.py                                  # two ranks share one NVIDIA GPU
    python benchmarks/gpu_shards.py --device cpu --elements 2e6      # without a GPU

Ranks hold rows of each weight, and by default the cuts go through blocks (`--rows`). They communicate by gloo. Times are those of the
slower rank for one call of `publish`, by the clock of the host: the first version, which is a full checkpoint, and the median of the
others. `peak` is the most memory of the GPU that a rank used in addition to its shards, as a share of their published bytes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from free_ports import free_port

CONFIG = {"config.json": b"{}"}
VERSIONS = 5
COLUMNS = 4096


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--elements", type=float, default=2e8, help="the number of weights")
    arguments.add_argument("--rows", type=int, default=4168, help="the rows of a weight; with 4096, two ranks do not cut through blocks")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--modes", default="bf16,fp8-block,nvfp4,int4", help="bf16, or recipes")
    arguments.add_argument("--snapshots", default="device,host")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    context = multiprocessing.get_context("spawn")
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if memory.is_dir() else None)
    try:
        port = free_port()
        workers = [context.Process(target=_rank, args=(rank, port, folder, given)) for rank in range(given.ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit(f"ranks ended with {[worker.exitcode for worker in workers]}")
        if given.json:
            shutil.copy(Path(folder, "rows.json"), given.json)
    finally:
        shutil.rmtree(folder)


def _rank(rank: int, port: int, folder: str, given: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(given.ranks))
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh(given.device, (given.ranks,))
    rows: list[dict[str, Any]] = []
    for mode in given.modes.split(","):
        whole = None
        for snapshot in given.snapshots.split(","):
            own = _publish(Path(folder, f"{mode}-{snapshot}"), mode, snapshot, given, mesh)
            seconds: list[Any] = [None] * given.ranks
            dist.all_gather_object(seconds, (own["seconds"], own["peak"]))
            if rank == 0:
                whole = whole or _publish(Path(folder, f"{mode}-whole"), mode, snapshot, given, None)
                slowest = [max(each) for each in zip(*(found for found, _ in seconds), strict=True)]
                row = {
                    "mode": mode,
                    "snapshot": snapshot,
                    "weights": own["weights"],
                    "same_digests": own["digests"] == whole["digests"],
                    "same_bits": own["bits"] == whole["bits"],
                    "versions": own["kinds"],
                    "delta_bytes": own["bytes"],
                    "first_s": round(slowest[0], 3),
                    "delta_s": round(statistics.median(slowest[1:]), 3),
                    "one_process_delta_s": round(statistics.median(whole["seconds"][1:]), 3),
                    "peak": round(max(peak for _, peak in seconds), 3),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
            dist.barrier()
    if rank == 0:
        Path(folder, "rows.json").write_text(
            json.dumps({"device": _name(given.device), "torch": torch.__version__, "rows": rows}, indent=1)
        )
    dist.destroy_process_group()
    if not all(row["same_digests"] and row["same_bits"] for row in rows):
        raise SystemExit(1)


def _publish(location: Path, mode: str, snapshot: Any, given: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    """Publish some versions, from all ranks, or without `mesh` from this process alone."""
    import numpy as np
    import torch

    from deltawire import Publisher, ReaderOptions, Subscriber
    from deltawire.trainers import FSDPPublisher

    state = _weights(given)
    random = torch.Generator(given.device).manual_seed(2)
    held = state if mesh is None else {name: _sharded(tensor, mesh) for name, tensor in state.items()}
    options: dict[str, Any] = {"dtype": torch.bfloat16} if mode == "bf16" else {"quantise": mode}
    found: dict[str, Any] = {"seconds": [], "digests": [], "kinds": [], "bytes": 0, "bits": "", "peak": 0.0}
    found["weights"] = sum(tensor.numel() for tensor in state.values())
    opened: Any = Publisher if mesh is None else FSDPPublisher
    with opened(location, attachments=CONFIG, snapshot=snapshot, **options) as publisher:
        for _ in range(VERSIONS):
            with _PeakMemory(given.device) as peak:
                start = time.perf_counter()
                version = publisher.publish(held)
                found["seconds"].append(time.perf_counter() - start)
            published = version.state_bytes / (1 if mesh is None else given.ranks)
            found["peak"] = max(found["peak"], peak() / published if len(found["digests"]) else 0.0)
            found["digests"].append(version.digest.hex())
            found["kinds"].append(version.kind)
            found["bytes"] = version.bytes
            for tensor in state.values():
                noise = torch.randn(tensor.shape, device=given.device, generator=random)
                tensor += (tensor * noise).mul_(2e-5)
    if mesh is None or mesh.get_rank() == 0:
        import hashlib

        with Subscriber(location, options=ReaderOptions(pin=False)) as reader:
            reader.sync()
            total = hashlib.blake2b()
            for name, array in sorted(reader.state.items()):
                total.update(name.encode())
                total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            found["bits"] = total.hexdigest()
    if mesh is None:
        shutil.rmtree(location)
    return found


def _weights(given: argparse.Namespace) -> dict[str, Any]:
    """Return float32 weights, the same at all ranks, in memory of their own."""
    import torch

    random = torch.Generator(given.device).manual_seed(1)
    columns = COLUMNS if given.elements >= 1e8 else 256
    layers = max(1, round(given.elements / (given.rows * columns)))
    shapes = {f"model.layers.{layer}.mlp.down_proj.weight": (given.rows, columns) for layer in range(layers)}
    shapes |= {"model.embed_tokens.weight": (1000, columns), "model.norm.weight": (columns,)}
    return {name: torch.randn(shape, device=given.device, generator=random).mul_(0.02) for name, shape in shapes.items()}


def _sharded(tensor: Any, mesh: Any) -> Any:
    """Return a DTensor whose shard is memory of `tensor`, so that training `tensor` trains it."""
    from torch.distributed.tensor import DTensor, Shard

    each = -(-len(tensor) // mesh.size())
    own = tensor[mesh.get_rank() * each : (mesh.get_rank() + 1) * each]
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


class _PeakMemory:
    """Gives a function that returns the most bytes of the GPU that were used within the context, in addition to those before it."""

    def __init__(self, device: str) -> None:
        self._is_gpu = device == "cuda"
        self._before = self._most = 0

    def __enter__(self) -> Any:
        if self._is_gpu:
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return lambda: self._most

    def __exit__(self, *error: object) -> None:
        if self._is_gpu:
            import torch

            torch.cuda.synchronize()
            self._most = torch.cuda.max_memory_allocated() - self._before


def _name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


if __name__ == "__main__":
    main()
