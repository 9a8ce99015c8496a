"""A re-implementation, without GPUs, of TRL's method of sending weights to vLLM: it broadcasts all tensors into a paused server.

On GPUs TRL does this over NCCL with vLLM's backend "nccl". The steps are the same here: a process group of trainer and workers, /pause,
packed buffers of up to 1 GiB, the model's own loaders within vLLM's layerwise reload, /resume. NCCL needs GPUs, so here the process group
uses gloo over loopback, and the trainer reaches the workers through /collective_rpc.
"""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_BUFFER = 1 << 30
_TIMEOUT = datetime.timedelta(seconds=300)
_METADATA = "Metadata-Version: 2.1\nName: deltawire-bench-broadcast\nVersion: 0\n"


def plugin_path(folder: Path) -> str:
    """Return directories for PYTHONPATH in which vLLM finds the receiving side."""
    metadata = folder / "deltawire_bench_broadcast-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nbench_broadcast = weight_broadcast:register\n")
    return f"{folder}:{Path(__file__).parent}"


def register() -> None:
    """Add the receiving side to vLLM's workers. vLLM calls this in every process."""
    from vllm.v1.worker.gpu_worker import Worker

    Worker.bench_join = _join
    Worker.bench_receive = _receive


class Broadcast:
    """The trainer's side, rank 0 of the group; the server has one worker."""

    def __init__(self, routes: Any, port: int, state: dict[str, np.ndarray[Any, Any]]) -> None:
        self._routes = routes
        shapes = [list(array.shape) for array in state.values()]
        self._told = [list(state), [array.dtype.name for array in state.values()], shapes]
        with _in_parallel(lambda: self._open(port)):
            routes.call_workers("bench_join", port)

    def _open(self, port: int) -> None:
        self._group = _group(port, 0)

    def send(self, state: dict[str, np.ndarray[Any, Any]]) -> int:
        """Send all weights into the paused server, wait until they are loaded, and return the number of bytes."""
        import torch

        arrays = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in state.values()]

        def broadcast() -> None:
            for chunk in _chunks([array.numel() for array in arrays]):
                self._group.broadcast(torch.cat([arrays[index] for index in chunk]), 0).wait()

        with _in_parallel(broadcast):
            self._routes.call_workers("bench_receive", *self._told)
        return sum(array.numel() for array in arrays)


def _join(worker: Any, port: int) -> None:
    worker.bench_group = _group(port, 1 + worker.rank)


def _receive(worker: Any, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    backend = worker.weight_transfer_engine
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(backend.model)
        for chunk in _chunks(sizes):
            packed = torch.empty(sum(sizes[index] for index in chunk), dtype=torch.uint8)
            worker.bench_group.broadcast(packed, 0).wait()
            pieces = packed.split([sizes[index] for index in chunk])
            backend.model.load_weights(
                (names[index], piece.view(kinds[index]).view(shapes[index])) for index, piece in zip(chunk, pieces, strict=True)
            )
        finalize_layerwise_reload(backend.model, backend.model_config)


def _group(port: int, rank: int) -> Any:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, _TIMEOUT)
    return dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)


def _chunks(sizes: Iterable[int]) -> Iterator[list[int]]:
    chunk: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        chunk.append(index)
        total += size
        if total > _BUFFER:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


class _in_parallel:
    """Runs a function on another thread during the block, because each side of a broadcast waits for the other."""

    def __init__(self, work: Any) -> None:
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def _run(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # the other side has failed, so this side would wait for ever
            return
        self._thread.join()
        if self._errors:
            raise self._errors[0]
