"""Publishing from FSDP2, and from whatever else keeps weights as DTensors: every rank encodes and uploads its own shards.

At most 160 ranks publish together. Shards that are rows (`Shard(0)`, what `fully_shard` makes) and replicas stay where they are. Others
(`Shard(1)` of tensor parallelism, strided shards) are redistributed to rows first, tensor by tensor: traffic of that tensor's size between
the ranks that hold it.
"""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # what torch.distributed.checkpoint asks, too

from ..chain.version import Version
from ..codec.bits import in_host_memory
from ..dtypes import DType
from ..errors import PublishError, UnsupportedTensor
from ..events import OnEvent
from ..publish import PendingVersion, WriterOptions
from ..publish.advice import warn_if_wide
from ..publish.at_exit import EXIT_SECONDS, finish_at_exit, forget, warn_lost
from ..publish.attachments.model_files import files_of_model
from ..publish.attachments.read_files import Attachments
from ..publish.sharded import ShardedPublisher
from ..publish.sharded.ranks import together
from ..store import Store
from ..store.base import Buffer
from ..tensors.bits import TensorPart, tensor_bits
from ..tensors.casting import wire_dtype
from ..tensors.checkpoint_layout import CheckpointLayout
from ..tensors.torch_types import named_dtype


class FSDPPublisher:
    """Publishes a model that is sharded over the ranks of a process group; nobody ever gathers it.

    >>> with FSDPPublisher("s3://bucket/run-7", dtype=torch.bfloat16) as publisher:
    ...     for step in range(steps):
    ...         train(model)
    ...         publisher.publish(model, step=step)

    Every rank of `group` (None: all) opens it, calls `publish` in the same order, and closes it. Each uploads deltas of its own shards;
    rank 0 commits them as one version, which any reader follows. What fails at one rank is raised at all, and then nothing is published; a
    rank that dies is noticed by the others after `timeout`, or when its connections break (`PublishError`). A job that starts again, with
    as many ranks as it likes, goes on where the chain stands.

    `dtype` is what the fleet serves: floating-point weights are cast to it, shard by shard. Other options are those of `ShardedPublisher`
    (`signing_key`, `trusted_keys`, `resume_from`, `starts_full`, `attachments`, `tokenizer`, …). Each rank holds a copy of its shards
    in that type, on the CPU.

    With `background`, `publish` takes another copy of them and returns at once. What is still on its way at the next call is waited for,
    since ranks that chose for themselves what to leave out would not choose the same: no version is ever superseded.
    """

    def __init__(
        self,
        url: str | Path | Store,
        run: str | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        background: bool = False,
        timeout: datetime.timedelta | None = None,
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        refuse_nonfinite: bool = False,
        resume_from: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._served = None if dtype is None else wire_dtype(dtype)
        self._dtype = dtype
        self._in_background = background
        self._pending: PendingVersion | None = None
        self._thread: threading.Thread | None = None
        self.on_event = on_event
        self._ranks = TorchRanks(group, timeout)
        self._publisher = ShardedPublisher(
            self._ranks,
            url,
            run,
            attachments=attachments,
            tokenizer=tokenizer,
            refuse_nonfinite=refuse_nonfinite,
            resume_from=resume_from,
            starts_full=starts_full,
            options=options,
            on_event=on_event,
        )
        if background:
            finish_at_exit(self)

    @property
    def version(self) -> Version | None:
        """The newest version that is known to be in the chain; None before the first."""
        return self._publisher.version

    @property
    def epoch(self) -> int:
        """The number under which this job writes."""
        return self._publisher.epoch

    def publish(
        self, model: torch.nn.Module | Mapping[str, torch.Tensor], *, step: int | None = None, meta: Mapping[str, str] | None = None
    ) -> Version | PendingVersion:
        """Publish a module's parameters and persistent buffers, or a state dict, as they are now.

        The tensors of a transformers model are published as `save_pretrained` writes them, also where the live model has fused some.
        On return readers can see the version; in the background, training may go on, and what is returned tells later. Of a module, tied
        weights are published once, under their first name. Of tensors that are no DTensors rank 0's are published. Raises as
        `Publisher.publish` does, and what the last publication in the background failed with, unless somebody has seen that already.
        """
        self.flush()
        state = module_state(model) if isinstance(model, torch.nn.Module) else model
        if self._dtype is None and self._publisher.version is None and self._ranks.rank == 0:
            known = {name: _dtype_of(tensor) for name, tensor in state.items()}
            warn_if_wide(
                [(dtype, state[name].numel() * dtype.itemsize) for name, dtype in known.items() if dtype], self.on_event, may_raise=False
            )
        held: dict[str, TensorPart] = {}
        files: dict[str, bytes] = {}
        tokenizer_files: dict[str, bytes] = {}

        def hold() -> None:
            tokenizer_files.update(self._publisher.files_of_tokenizer())
            held.update(held_shards(state, self._ranks.rank, self._dtype, copy=self._in_background))
            if self._ranks.rank == 0 and isinstance(model, torch.nn.Module):
                files.update(files_of_model(model, self._served))

        def split() -> None:
            if isinstance(model, torch.nn.Module):
                parts = CheckpointLayout(model).split(held)
                held.clear()
                held.update(parts)

        together(self._ranks, hold)
        together(self._ranks, split)
        if not self._in_background:
            return self._publisher.publish(held, step=step, meta=meta, files=files, tokenizer_files=tokenizer_files)
        pending = self._pending = PendingVersion(lambda error: self._forget())

        def work() -> None:
            try:
                pending._resolve(self._publisher.publish(held, step=step, meta=meta, files=files, tokenizer_files=tokenizer_files))
            except BaseException as error:
                pending._resolve(error=error)

        # A daemon: it may be waiting for a rank that is gone, and that must not keep this process from ending.
        self._thread = threading.Thread(target=work, name="deltawire-fsdp", daemon=True)
        self._thread.start()
        return pending

    def flush(self, timeout: float | None = None) -> None:
        """Wait until what was published in the background is in the chain. TimeoutError, or what it failed with."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the publication is not done after {timeout} seconds")
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def unpublished(self) -> str:
        """Say what is being published in the background, for a person; an empty string if nothing is."""
        is_busy = self._thread is not None and self._thread.is_alive()
        return f"rank {self._ranks.rank}'s part of a version" if is_busy else ""

    def close(self) -> None:
        """Let go of everything, after what is on its way. To be called by all ranks; may be called twice."""
        try:
            self.flush()
        finally:
            forget(self)
            self._publisher.close()

    def __enter__(self) -> FSDPPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        waiting = self.unpublished()
        try:  # all ranks have begun this one, so that it can be finished; but some of them may be gone
            self.flush(EXIT_SECONDS)
        except Exception as lost:
            if lost is not error:
                warn_lost(waiting or "a version", str(lost), self.on_event, raised=error)
        finally:
            forget(self)
            self._publisher.__exit__(kind, error, traceback)

    def _forget(self) -> None:
        """Its error was raised: once is enough."""
        self._pending = None


def module_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, which FSDP2 gives as shards whatever the module is at, without the further names of tied parameters."""
    first: dict[int, str] = {}
    tied = {name for name, weight in module.named_parameters(remove_duplicate=False) if first.setdefault(id(weight), name) != name}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def held_shards(
    state: Mapping[str, torch.Tensor], rank: int, dtype: torch.dtype | None = None, *, copy: bool = False
) -> dict[str, TensorPart]:
    """What this rank holds of each tensor, on the CPU: rows, all of it, or nothing. A CPU tensor that is not cast is copied only on demand.

    To be called by all ranks, since some tensors have to be redistributed. Raises a `TensorError` for what cannot be published.
    """
    with torch.no_grad():
        return {name: _held(name, state[name].detach(), rank, dtype, copy) for name in sorted(state)}


def _held(name: str, tensor: torch.Tensor, rank: int, dtype: torch.dtype | None, copy: bool) -> TensorPart:
    shape = tuple(tensor.shape)
    start = 0
    if isinstance(tensor, DTensor):
        tensor = _in_rows(name, tensor)
        is_here = tensor.device_mesh.get_coordinate() is not None
        if is_here and shape:
            start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1][0] * math.prod(shape[1:])
        local = tensor.to_local()
        local = local.wait() if hasattr(local, "wait") else local  # a redistribution may still be on its way
    else:
        local, is_here = tensor, rank == 0
    if not is_here:
        local = local.new_empty(0)
    original = local
    if dtype is not None and local.is_floating_point():
        local = local.to(dtype)
    local = local.cpu().contiguous()
    if copy and local.data_ptr() == original.data_ptr():
        local = local.clone()
    bits = tensor_bits(name, local.view(-1))
    return TensorPart(in_host_memory(bits.bits).view(bits.dtype.numpy), shape, start)


def _dtype_of(tensor: torch.Tensor) -> DType | None:
    return named_dtype(str(tensor.dtype).removeprefix("torch."))


def _in_rows(name: str, tensor: DTensor) -> DTensor:
    """The same tensor, with every mesh dimension holding rows or replicas of it."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedTensor(f"tensor {name!r} is a sum that is not done yet: {tensor.placements}.")
    wanted = tuple(Replicate() if placement.is_replicate() else Shard(0) for placement in tensor.placements)
    rows = all(placement.is_replicate() or (type(placement) is Shard and placement.dim == 0) for placement in tensor.placements)
    return tensor if rows else tensor.redistribute(placements=wanted)


class TorchRanks:
    """`Ranks` over a process group of its own, on the CPU (gloo), beside whatever the training uses."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None) -> None:
        if not dist.is_initialized():
            raise PublishError("torch.distributed is not initialised. Call init_process_group first, or use Publisher.")
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(members, backend="gloo", timeout=timeout, use_local_synchronization=True)
        self.rank: int = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)

    def exchange(self, message: bytes) -> list[bytes]:
        with _talking():
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
            room = max(int(size) for size in sizes)
            own = torch.frombuffer(bytearray(message.ljust(room)), dtype=torch.uint8)
            found = [torch.empty(room, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(found, own, group=self._group)
        return [answer[: int(size)].numpy().tobytes() for answer, size in zip(found, sizes, strict=True)]

    def deliver(self, pieces: Sequence[Buffer]) -> list[memoryview]:
        arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
        own = [array.size for array in arrays]
        with _talking():
            sizes = torch.empty(self.size, dtype=torch.int64)
            dist.all_to_all_single(sizes, torch.tensor(own), group=self._group)
            theirs: list[int] = sizes.tolist()
            arrived = torch.empty(sum(theirs), dtype=torch.uint8)
            dist.all_to_all_single(arrived, torch.from_numpy(np.concatenate(arrays)), theirs, own, group=self._group)
        return [piece.numpy().data for piece in arrived.split(theirs)]


@contextmanager
def _talking() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PublishError(f"the other ranks cannot be reached any more: {error}") from error
