"""The reference as a `Codec`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import ShapeMismatch
from ..base import (
    Buffer,
    EncodedGroup,
    EncodeGroup,
    GroupOutcome,
    GroupSink,
    Lanes,
    Outcomes,
    Pace,
    ResolveGroup,
    ResolveJob,
    Sums,
    sums,
)
from ..bits import Bits, HostBits, Indices, in_host_memory
from .decoder import decode_coded
from .digest import word_sums
from .groups import decode_group, elements_of, encode_group, tensor_of
from .payload import CODED, RAW, read_chunks


class ReferenceCodec:
    """The codec that defines the format. It uses one thread, and memory in proportion to the tensors."""

    name = "reference"
    prefers_whole_state = False
    prepares = False

    def encode_groups(self, groups: Sequence[EncodeGroup], threads: int, encoded: GroupSink | None = None) -> Sequence[EncodedGroup]:
        each = [_encode_group(group) for group in groups]
        if encoded is not None:
            for number, group in enumerate(each):
                encoded(number, group)
        return each

    def resolution(self, threads: int, budget: int) -> ReferenceResolution:
        return ReferenceResolution()

    def deferred_resolution(self, threads: int, pace: Pace | None = None) -> ReferenceResolution:
        return ReferenceResolution()

    def join(self, pieces: Sequence[Buffer], threads: int) -> Buffer:
        return b"".join(pieces)

    def digest(self, tensors: Sequence[Bits], seeds: NDArray[np.uint64], threads: int) -> Sums:
        return sums([word_sums(in_host_memory(bits), seed) for bits, seed in zip(tensors, seeds.tolist(), strict=True)])

    def write_elements(self, bits: Bits, indices: Indices, values: Bits) -> None:
        array = in_host_memory(bits)
        if indices.size and not 0 <= indices.min() <= indices.max() < array.size:
            raise IndexError("index")
        array.flat[indices] = in_host_memory(values)


class ReferenceResolution:
    """A resolution that keeps all old and new elements of every tensor, and writes at the end."""

    def __init__(self) -> None:
        self.tensors: list[tuple[HostBits | None, HostBits, HostBits]] = []  # the array to write to, and its old and new elements, flat

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        resolved = [resolve_job(job, data) for job in jobs]
        targets = [in_host_memory(job.base) if job.write and job.base is not None else None for job in jobs]
        self.tensors += [(target, base, new) for target, (base, new) in zip(targets, resolved, strict=True)]
        before = sums([word_sums(base, job.seed) for job, (base, _) in zip(jobs, resolved, strict=True)])
        after = sums([word_sums(new, job.seed) for job, (_, new) in zip(jobs, resolved, strict=True)])
        return Outcomes(np.array([np.count_nonzero(new != base) for base, new in resolved], np.int64), before, after)

    def add_groups(self, groups: Sequence[ResolveGroup], data: Buffer) -> Sequence[GroupOutcome]:
        return [self._add_group(group, data) for group in groups]

    def _add_group(self, group: ResolveGroup, data: Buffer) -> GroupOutcome:
        dtype, counts = group.type.dtype, group.counts.tolist()
        old = [np.zeros(count, dtype.bits) if base is None else _flat(base) for base, count in zip(group.bases, counts, strict=True)]
        bases = [elements_of(base, group.type) for base in old]
        payload = b"" if group.payload is None else bytes(data[slice(*group.payload)])
        decoded = decode_group(payload, bases, group.type)
        changed = np.array([np.count_nonzero(base != new) for base, new in zip(bases, decoded, strict=True)], np.int64)
        news = [tensor_of(new, group.type) for new in decoded]
        writes = [group.writes] * len(old) if isinstance(group.writes, bool) else group.writes
        for base, write, was, new in zip(group.bases, writes, old, news, strict=True):
            self.tensors.append((in_host_memory(base) if write and base is not None else None, was, new))
        return GroupOutcome(changed, _total(old, group.seeds), _total(news, group.seeds))

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[NDArray[np.int64], HostBits]]:
        return [self._changes(*self.tensors[tensor][1:]) for tensor in tensors]

    def _changes(self, base: HostBits, new: HostBits) -> tuple[NDArray[np.int64], HostBits]:
        indices = np.flatnonzero(new != base).astype(np.int64)
        return indices, new[indices]

    def dense(self, tensors: Sequence[int]) -> Sequence[HostBits]:
        return [self.tensors[tensor][2] for tensor in tensors]

    def settle(self) -> None:
        for target, _, new in self.tensors:
            if target is not None:
                target[...] = new.reshape(target.shape)

    def revert(self) -> None:
        """Do nothing: nothing has been written yet."""

    def exchange(self, *, wait: bool = True) -> None:
        for index, (target, _, new) in enumerate(self.tensors):
            if target is not None:
                old = target.flatten()  # a copy, because `base` may be the target itself
                target[...] = new.reshape(target.shape)
                self.tensors[index] = target, new, old

    def compact(self) -> None:
        """Do nothing: all that it keeps is needed."""


def resolve_job(job: ResolveJob, data: Buffer) -> tuple[HostBits, HostBits]:
    """Return the old and the new elements of a tensor, flat."""
    chunks = []
    if job.payload is not None:
        payload = bytes(data[slice(*job.payload)])
        chunks = read_chunks(payload, job.dtype)
        covered = sum(elements for elements, _, _ in chunks)
        if covered != job.count:  # checked before memory of that size is allocated
            raise ShapeMismatch(f"the delta is for {covered} elements, the tensor has {job.count}.")
    base = np.zeros(job.count, job.dtype.bits) if job.base is None else _flat(job.base)
    new = base.copy()
    at = 0
    for elements, mode, body in chunks:
        part = slice(at, at + elements)
        at += elements
        if mode == CODED:
            new[part] = decode_coded(body, base[part], job.dtype)
        elif mode == RAW:
            new[part] = np.frombuffer(body, job.dtype.bits.newbyteorder("<"))
    return base, new


def _encode_group(group: EncodeGroup) -> EncodedGroup:
    news = [_flat(new) for new in group.news]
    bases = [np.zeros_like(new) if base is None else _flat(base) for base, new in zip(group.bases, news, strict=True)]
    old, now = [elements_of(base, group.type) for base in bases], [elements_of(new, group.type) for new in news]
    changed = np.array([np.count_nonzero(a != b) for a, b in zip(old, now, strict=True)], np.int64)
    payload = encode_group(old, now, group.type)
    return EncodedGroup([payload] if payload else [], changed, _total(bases, group.seeds), _total(news, group.seeds))


def _total(tensors: Sequence[HostBits], seeds: NDArray[np.uint64]) -> Lanes:
    """Return the word sums over several tensors."""
    rows = sums([word_sums(bits, seed) for bits, seed in zip(tensors, seeds.tolist(), strict=True)])
    a, b, c, d = rows.sum(axis=0, dtype=np.uint32).tolist()
    return a, b, c, d


def _flat(bits: Bits) -> HostBits:
    return np.ascontiguousarray(in_host_memory(bits)).reshape(-1)
