"""Tensors of which a worker holds only parts, read from the memory of all workers of its host.

A delta codes positions within runs of many elements, so a worker needs whole tensors to decode it. At learning, the workers of a host tell
each other where they hold which elements. To stage an update, a worker then copies the elements that it lacks into a temporary tensor,
which is freed when the file is decoded. The host needs no copy of the model.

**Memory must not change while another worker reads it.** Workers read only while they stage. A swap waits for its own staging thread, then
all workers agree, and only then do they write. A worker leaves a swap only after all have agreed again, when no write is under way. Loading
a checkpoint waits in the same way (`LiveUpdates.wait`). If other code writes to the weights, the digests of the decoded files are wrong
and staging fails.

Tensors that peers do not have, such as inputs of arithmetic and parts on other hosts, come from another source (kept_bases.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray

from ....delta.patch import TensorPatch
from ....errors import DeltawireError
from ....format.records.record_parts import CommitRef
from ....subscribe.tensor_table import TensorSpec, TensorTable
from ....tensors.torch_types import torch_dtype
from ..layout.placements import coverage, gather, unit_count
from ..layout.types import Nest, Placement, TensorLayout
from ..ranks import share
from .interfaces import BaseSource, Layout
from .ownership import units_of
from .peer_memory import GpuReader, ProcessReader, Reader, RemoteMemory, SharedMemory, gpu_reason, host_identity

logger = logging.getLogger("vllm.deltawire")

OFF = "DELTAWIRE_PEERS"
"""If this variable is "0", workers do not read the memory of others."""

Share = Callable[[Any], tuple[list[Any], int]]
"""Tells all workers a value. Returns the values of all, by rank, and the rank of this one."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker, before it shares memory. `reason` says why it does not."""

    host: str
    device: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Offer:
    """The memory that a worker shares, and what it has there. Placements have the number of their memory instead of the memory itself."""

    memories: Mapping[int, Sequence[SharedMemory]] = field(default_factory=dict)
    """By the rank that may read them."""
    placements: Mapping[str, Sequence[tuple[int, Placement]]] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tensor: where it is, and the other worker's memory that it is in. None means the own memory."""

    placement: Placement
    remote: RemoteMemory | None

    def read(self) -> Placement:
        return self.placement if self.remote is None else self.remote.read(self.placement)


class PeerBases:
    """A `BaseSource` that reads the memory of other workers of this host, and has another source for the rest.

    Parameters
    ----------
    rest
        The source of the tensors that peers do not have.
    refusal
        Why memory cannot be shared, if the configuration of the server says so.
    share
        For tests.
    """

    def __init__(self, rest: BaseSource, *, refusal: str | None = None, share: Share = share) -> None:
        self._rest = rest
        self._refusal = refusal
        self._share = share
        self._parts: dict[str, tuple[TensorSpec, Sequence[_Part]]] = {}
        self._device = torch.device("cpu")
        self._kept = 0
        self.why_not: str | None = None
        """The reason why the memory of some workers cannot be read. None if all can be read, or there are no others."""

    def connect(self, layout: Layout) -> None:
        """Find the tensors that can be read from other workers' memory, together with all workers. Never raises.

        Every worker must call it after each learning, before `hold`.

        Parameters
        ----------
        layout
            How this worker holds the tensors of the chain.
        """
        self._parts, self.why_not = {}, None
        me, reader = self._introduce(layout)
        workers, rank = self._share(me)
        if len(workers) == 1:
            return
        others = [each for each, worker in enumerate(workers) if each != rank and worker.host == me.host]
        offers, _ = self._share(_offer(layout, reader, others) if reader is not None else _Offer(reason=me.reason))
        self.why_not = self._refusal or me.reason
        if reader is None:
            return
        if len(others) + 1 < len(workers):
            self.why_not = "some workers are on other hosts"
        opened = {other: found for other in others if (found := self._open(reader, workers[other], offers[other], rank)) is not None}
        for name, tensor in layout.tensors.items():
            if tensor.kind in ("partial", "absent") and 0 not in tensor.spec.shape:
                parts = _complete(tensor, [_remote_parts(offers[other], name, opened[other]) for other in sorted(opened)])
                if parts is not None:
                    self._parts[name] = (tensor.spec, parts)
        if self.why_not is not None:
            logger.info("deltawire: not all tensors are read from the memory of other workers: %s", self.why_not)

    def hold(self, wanted: TensorTable, absent: TensorTable | None = None, near: Collection[str] = ()) -> str | None:
        """Get hold of these tensors, see `BaseSource`."""
        rest, others = ({name: spec for name, spec in each.items() if name not in self._parts} for each in (wanted, absent or {}))
        self._kept = len(rest) + len(others.keys() & {*near})
        return self._rest.hold(rest, others, near)

    def writes(self, name: str) -> bool:
        """Return whether `settled` needs the changes of a tensor, see `BaseSource`."""
        return name not in self._parts and self._rest.writes(name)

    def base(self, name: str) -> torch.Tensor | NDArray[Any]:
        """Return a tensor of the live version, in new memory if it comes from other workers. Raises `PeerUnreadable`."""
        if name not in self._parts:
            return self._rest.base(name)
        spec, parts = self._parts[name]
        return gather(spec, [part.read() for part in parts], self._device)

    def settled(self, ref: CommitRef, changes: Mapping[str, Sequence[TensorPatch]]) -> None:
        """Note what a confirmed swap changed, see `BaseSource`."""
        self._rest.settled(ref, changes)

    def status(self) -> dict[str, Any]:
        """Return how many tensors come from where, in JSON's types."""
        return {"bases": {"peers": len(self._parts), "kept": self._kept}, "why_no_peers": self.why_not}

    def _introduce(self, layout: Layout) -> tuple[_Worker, Reader | None]:
        """Return what other workers need to know about this one, and a reader of their memory unless there is a reason against it."""
        try:
            reason = self._refusal or (f"{OFF} is 0" if os.environ.get(OFF) == "0" else None)
            memory = next((each.memory for tensor in layout.tensors.values() for each in _placements(tensor)), None)
            if memory is not None:
                self._device = memory.device
            reason = reason or (gpu_reason() if self._device.type == "cuda" else None)
            if reason is None:
                reader: Reader = GpuReader(self._device) if self._device.type == "cuda" else ProcessReader()
                return _Worker(host_identity(), reader.identity, None), reader
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        return _Worker("", "", reason), None

    def _open(self, reader: Reader, worker: _Worker, offer: _Offer, rank: int) -> Sequence[RemoteMemory] | None:
        """Prepare to read what another worker offers. Returns None, and notes the reason, if that is impossible."""
        reason = worker.reason or offer.reason or reader.why_not(worker.device)
        if reason is None:
            try:
                return [reader.open(shared) for shared in offer.memories[rank]]
            except DeltawireError as error:
                reason = str(error)
        self.why_not = reason
        return None


def _offer(layout: Layout, reader: Reader, others: Sequence[int]) -> _Offer:
    """Share the memory of all tensors that this worker can read from it."""
    memories: dict[tuple[int, torch.dtype, int], tuple[int, torch.Tensor]] = {}
    placements: dict[str, list[tuple[int, Placement]]] = {}
    blank = torch.empty(0)
    try:
        for name, tensor in layout.tensors.items():
            for placement in _placements(tensor):
                memory = placement.memory
                key = memory.data_ptr(), memory.dtype, memory.numel()
                number, _ = memories.setdefault(key, (len(memories), memory))
                placements.setdefault(name, []).append((number, replace(placement, memory=blank)))
        return _Offer({other: [reader.offer(memory) for _, memory in memories.values()] for other in others}, placements)
    except Exception as error:  # such as memory of another allocator, which CUDA does not share
        return _Offer(reason=f"{type(error).__name__}: {error}")


def _placements(tensor: TensorLayout) -> Sequence[Placement]:
    """Return where the elements of a tensor can be read."""
    if tensor.kind in ("module", "absent") or 0 in tensor.spec.shape:
        return ()
    if tensor.direct is None or tensor.placements:
        return tensor.placements
    flat = tensor.direct.detach().reshape(-1).view(torch_dtype(tensor.spec.dtype, bits=True))
    return (Placement((Nest((flat.numel(),), (1,), (1,)),), flat, tensor.spec.dtype.width),)


def _remote_parts(offer: _Offer, name: str, memories: Sequence[RemoteMemory]) -> list[_Part]:
    found = ((memories[number], placement) for number, placement in offer.placements.get(name, ()))
    here = ((memory, memory.placement(placement)) for memory, placement in found)
    return [_Part(placement, memory) for memory, placement in here if placement is not None]


def _complete(tensor: TensorLayout, others: Sequence[Sequence[_Part]]) -> Sequence[_Part] | None:
    """Return parts that make up a whole tensor, each once, as many as possible from the own memory. None if some are missing."""
    chosen: dict[object, _Part] = {}
    for part in [*(_Part(placement, None) for placement in _placements(tensor)), *(part for parts in others for part in parts)]:
        chosen.setdefault(units_of(part.placement.nests), part)
    parts = list(chosen.values())
    totals = {unit_count(tensor.spec, part.placement) for part in parts}
    if len(totals) != 1:  # no parts, or workers that hold it in units of different sizes
        return None
    if all(len(part.placement.nests) == 1 for part in parts):
        # Parts that overlap without being equal count twice, so the sum is not that of the tensor.
        is_whole = sum(part.placement.nests[0].numel for part in parts) == totals.pop()
    else:
        is_whole = coverage(tensor.spec, [part.placement for part in parts]) == "whole"
    return parts if is_whole else None
