"""Publish from FSDP2, or from any training that keeps weights as DTensors: every rank encodes and uploads its own shards.

Thousands of ranks can publish together. Shards that are rows (`Shard(0)`, which `fully_shard` makes) and replicas stay on their ranks.
Other shards (`Shard(1)` of tensor parallelism, strided shards) are redistributed to rows first, one tensor at a time. This causes traffic
of that tensor's size between the ranks that hold it.
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
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # torch.distributed.checkpoint uses it, too

from ..chain.version import Version
from ..codec.bits import in_host_memory, on_gpu
from ..dtypes import DType
from ..errors import PublishError, UnsupportedTensor
from ..events import OnEvent
from ..publish import PendingVersion, WriterOptions
from ..publish.at_exit import EXIT_SECONDS, finish_at_exit, forget, warn_lost
from ..publish.attachments.model_files import files_of_model
from ..publish.attachments.read_files import Attachments
from ..publish.publish_warnings import warn_if_wide
from ..publish.sharded import ShardedPublisher
from ..publish.sharded.ranks import together
from ..publish.snapshots import SnapshotDevice, copy_tensors, new_array
from ..publish.time_limit import TimeLimit
from ..quantise import Recipe
from ..store import Store
from ..store.base import Buffer
from ..tensors.bits import TensorPart, tensor_bits
from ..tensors.casting import wire_dtype
from ..tensors.checkpoint_layout import CheckpointLayout
from ..tensors.gpu_handover import GpuHandover
from ..tensors.torch_types import named_dtype


class FSDPPublisher:
    """Publishes a model that is sharded over the ranks of a process group. No rank ever gathers it.

    >>> with FSDPPublisher("s3://bucket/run-7", dtype=torch.bfloat16) as publisher:
    ...     for step in range(steps):
    ...         train(model)
    ...         publisher.publish(model, step=step)

    Every rank opens it, calls `publish` in the same order, and closes it. Each rank uploads deltas of its own shards, and rank 0 commits
    them as one version, which any reader can follow. An error at one rank is raised at all ranks, and then nothing is published. If a rank
    dies, the others raise `PublishError` after `timeout`, or when its connections break. A job that starts again continues the chain, with
    any number of ranks. Shards on a GPU are encoded there. Each rank keeps a copy of its shards in the published type.

    Parameters
    ----------
    url
        The location of the chain: a URL, a directory, or an open `Store`. It must be the same for all ranks.
    run
        The name of a new run, or the run that must be at `url` (else `RunMismatch`).
    group
        The ranks that publish together. None: all ranks.
    dtype
        The type that the engines serve. Floating-point weights are cast to it, shard by shard. None: nothing is cast. With `quantise`, the
        type of weights that are not quantised. None: bfloat16.
    quantise
        The recipe by which weights are quantised before they are published, such as "fp8-block", or a `Recipe`. Each rank
        quantises its own shards, and the published bytes are those of a `Publisher`. Shards may cut through the blocks of a recipe.
    background
        Copy the weights and continue at once; a thread encodes and uploads them. The next call waits for the version before. No
        version is superseded, because the ranks could not agree which one to leave out.
    snapshot
        Where copies of weights on a GPU are kept: "host", in pinned memory of the host, or "device", on the GPU itself.
    timeout
        How long a rank waits for the others. None: the default of `torch.distributed`.
    attachments
        Further files of each version: a directory, or names with bytes or paths. Only those of rank 0 count.
    tokenizer
        A tokenizer whose files are published with the model. Only that of rank 0 counts.
    refuse_nonfinite, resume_from_seq, starts_full, options, on_event
        As for `Publisher`.
    """

    def __init__(
        self,
        url: str | Path | Store,
        run: str | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        quantise: str | Recipe | None = None,
        background: bool = False,
        snapshot: SnapshotDevice = "host",
        timeout: datetime.timedelta | None = None,
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        refuse_nonfinite: bool = False,
        resume_from_seq: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._served = None if dtype is None else wire_dtype(dtype)
        self._dtype = None if quantise is not None else dtype  # master weights keep their type
        self._is_quantised = quantise is not None
        self._in_background = background
        self._device: SnapshotDevice = snapshot
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
            quantise=quantise,
            dtype=None if quantise is None else dtype,
            snapshot=snapshot,
            refuse_nonfinite=refuse_nonfinite,
            resume_from_seq=resume_from_seq,
            starts_full=starts_full,
            options=options,
            on_event=on_event,
        )
        if background:
            finish_at_exit(self)

    @property
    def version(self) -> Version | None:
        """The newest version that is known to be in the chain. None if nothing is published yet."""
        return self._publisher.version

    @property
    def epoch(self) -> int:
        """The number of this job's epoch."""
        return self._publisher.epoch

    def publish(
        self, model: torch.nn.Module | Mapping[str, torch.Tensor], *, step: int | None = None, meta: Mapping[str, str] | None = None
    ) -> Version | PendingVersion:
        """Publish a module's parameters and persistent buffers, or a state dict, as they are now.

        Without `background`, returns the `Version`, which readers can see by then. With it, returns a `PendingVersion`, and training may
        continue. Raises the same errors as `Publisher.publish`, and the error of the last background publication if it was not raised yet.

        Parameters
        ----------
        model
            The module, or names and tensors. The tensors of a transformers model are published as `save_pretrained` writes them, even if
            the live model has fused some. Tied weights of a module are published once, under their first name. Tensors that are not
            DTensors are published by rank 0.
        step
            The trainer's step. It is recorded with the version.
        meta
            Further strings that are recorded with the version.
        """
        self._wait_for_version()
        state = module_state(model) if isinstance(model, torch.nn.Module) else model
        if self._dtype is None and not self._is_quantised and self._publisher.version is None and self._ranks.rank == 0:
            known = {name: _dtype_of(tensor) for name, tensor in state.items()}
            warn_if_wide(
                [(dtype, state[name].numel() * dtype.itemsize) for name, dtype in known.items() if dtype], self.on_event, may_raise=False
            )
        held: dict[str, TensorPart] = {}
        files: dict[str, bytes] = {}
        tokenizer_files: dict[str, bytes] = {}

        def hold() -> None:
            tokenizer_files.update(self._publisher.files_of_tokenizer())
            held.update(held_shards(state, self._ranks.rank, self._dtype, device=self._device, copy=self._in_background))
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

        copied = GpuHandover(held)

        def work() -> None:
            try:
                with copied.on_side_stream():
                    pending._resolve(self._publisher.publish(held, step=step, meta=meta, files=files, tokenizer_files=tokenizer_files))
            except BaseException as error:
                pending._resolve(error=error)

        # A daemon, because it may wait for a rank that has died, and must not keep this process from ending then.
        self._thread = threading.Thread(target=work, name="deltawire-fsdp", daemon=True)
        self._thread.start()
        return pending

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the background publication is in the chain, and the skips and anchors that are due are made.

        Raises the error of the publication if it fails. Skips and anchors that fail are only reported.

        Parameters
        ----------
        timeout
            The longest time to wait, in seconds, before it raises TimeoutError. None or infinity: wait as long as it takes.
        """
        limit = TimeLimit(timeout)
        self._wait_for_version(limit)
        self._publisher.flush(limit.left)

    def _wait_for_version(self, limit: TimeLimit | None = None) -> None:
        if self._thread is not None:
            self._thread.join(None if limit is None else limit.left)
            if limit is not None and self._thread.is_alive():
                raise TimeoutError(f"the publication is not done after {limit.seconds} seconds")
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def unpublished(self) -> str:
        """Name what is being published in the background. Returns an empty string if nothing is."""
        is_busy = self._thread is not None and self._thread.is_alive()
        return f"rank {self._ranks.rank}'s part of a version" if is_busy else ""

    def close(self) -> None:
        """Finish the background publication, and release all resources. All ranks call it. It may be called twice.

        Raises `CloseTimeout` if the store does not finish this rank's part within `WriterOptions.close_timeout`.
        """
        closing = self._publisher.start_closing()
        if self._thread is not None:
            self._thread.join(closing.left)
        forget(self)
        if what := self.unpublished():  # its thread may be talking to the other ranks
            pending, self._thread, self._pending = self._pending, None, None
            self._publisher.abandon(closing)
            late = closing.timeout(what)
            if pending is not None:
                pending._give_up(late)
            raise late
        try:
            self._wait_for_version()
        finally:
            self._publisher.close_within(closing)

    def __enter__(self) -> FSDPPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        waiting, closing = self.unpublished(), self._publisher.start_closing()
        try:  # all ranks have begun this publication, so they can finish it; but some of them may have died
            self._wait_for_version(TimeLimit(EXIT_SECONDS if closing.left is None else min(EXIT_SECONDS, closing.left)))
        except Exception as lost:
            if lost is not error:
                warn_lost(waiting or "a version", str(lost), self.on_event, raised=error)
        finally:
            forget(self)
            if self._pending is not None:
                self._pending._give_up(closing.timeout(waiting))
            self._publisher.abandon(closing)

    def _forget(self) -> None:
        """Forget the publication after its error was raised, so that it is raised once."""
        self._pending = None


def module_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict without the further names of tied parameters. FSDP2 always gives its tensors as shards."""
    first: dict[int, str] = {}
    tied = {name for name, weight in module.named_parameters(remove_duplicate=False) if first.setdefault(id(weight), name) != name}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def held_shards(
    state: Mapping[str, torch.Tensor],
    rank: int,
    dtype: torch.dtype | None = None,
    *,
    device: SnapshotDevice = "host",
    copy: bool = False,
) -> dict[str, TensorPart]:
    """Return the part of each tensor that this rank holds: rows, the whole tensor, or nothing.

    All ranks call it, because some tensors have to be redistributed. Shards that are not cast are only copied if `copy` is set. Copies of
    shards on a GPU are made where `device` says. Raises a `TensorError` if a tensor cannot be published.
    """
    copied: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        held = {name: _held(name, state[name].detach(), rank, dtype, device, copy, copied) for name in sorted(state)}
    if device == "host":
        GpuHandover(copied).synchronize()
    return held


def _held(
    name: str,
    tensor: torch.Tensor,
    rank: int,
    dtype: torch.dtype | None,
    device: SnapshotDevice,
    copy: bool,
    copied: dict[str, torch.Tensor],
) -> TensorPart:
    shape = tuple(tensor.shape)
    start = 0
    if isinstance(tensor, DTensor):
        tensor = _in_rows(name, tensor)
        is_here = tensor.device_mesh.get_coordinate() is not None
        if is_here and shape:
            start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1][0] * math.prod(shape[1:])
        local = tensor.to_local()
        local = local.wait() if hasattr(local, "wait") else local  # a redistribution may still be in progress
    else:
        local, is_here = tensor, rank == 0
    if not is_here:
        local = local.new_empty(0)
    local = local.contiguous().view(-1)
    bits = tensor_bits(name, local)
    to = bits.dtype if dtype is None or not local.is_floating_point() else wire_dtype(dtype)
    if on_gpu(bits.bits):
        elements: Any = local
        if copy or to != bits.dtype:
            elements = new_array(to, (bits.size,), bits.bits, device)
            copy_tensors({name: local}, {name: elements}, wait=False)
            copied[name] = local
    else:
        own = local if to == bits.dtype else local.to(dtype)
        own = own.clone() if copy and own is local else own
        elements = in_host_memory(tensor_bits(name, own).bits).view(to.numpy)
    return TensorPart(elements, shape, start)


def _dtype_of(tensor: torch.Tensor) -> DType | None:
    return named_dtype(str(tensor.dtype).removeprefix("torch."))


def _in_rows(name: str, tensor: DTensor) -> DTensor:
    """Return the same tensor, redistributed so that every mesh dimension holds rows or replicas of it."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedTensor(f"tensor {name!r} is a partial sum: {tensor.placements}. Reduce it before you publish it.")
    wanted = tuple(Replicate() if placement.is_replicate() else Shard(0) for placement in tensor.placements)
    rows = all(placement.is_replicate() or (type(placement) is Shard and placement.dim == 0) for placement in tensor.placements)
    return tensor if rows else tensor.redistribute(placements=wanted)


class TorchRanks:
    """Implements `Ranks` by a separate process group on the CPU (gloo), so that it does not disturb the groups of the training."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None) -> None:
        if not dist.is_initialized():
            raise PublishError("torch.distributed is not initialised. Call init_process_group first, or use Publisher.")
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._timeout = timeout
        self._group = dist.new_group(self._members, backend="gloo", timeout=timeout, use_local_synchronization=True)
        self.rank: int = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        self._first = dist.get_global_rank(self._group, 0)

    def another_channel(self) -> TorchRanks:
        with _talking():
            return TorchRanks(self._group, self._timeout)

    def exchange(self, message: bytes) -> list[bytes]:
        with _talking():
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
            room = max(int(size) for size in sizes)
            own = torch.from_numpy(np.frombuffer(message.ljust(room), np.uint8).copy())
            found = [torch.empty(room, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(found, own, group=self._group)
        return [answer[: int(size)].numpy().tobytes() for answer, size in zip(found, sizes, strict=True)]

    def broadcast(self, message: bytes) -> bytes:
        with _talking():
            size = torch.tensor([len(message)])
            dist.broadcast(size, self._first, group=self._group)
            found = torch.from_numpy(np.frombuffer(message.ljust(int(size))[: int(size)], np.uint8).copy())
            dist.broadcast(found, self._first, group=self._group)
        data: bytes = found.numpy().tobytes()
        return data

    def maximum(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        found = values.copy()
        with _talking():
            dist.all_reduce(torch.from_numpy(found), dist.ReduceOp.MAX, group=self._group)
        return found

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
        raise PublishError(f"the other ranks cannot be reached: {error}") from error
