"""The plan of a delta of version 1 or 2, which names the tensors that change."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..codec.base import Codec, Resolution, ResolveJob
from ..dtypes import DTYPES
from ..errors import CorruptDelta, DtypeMismatch, ShapeMismatch
from ..format.delta_file import ByteRange, NamedDelta
from ..format.digest import Digest, TensorKeys
from ..tensors.bits import State, TensorBits, keys_of, named_bits
from ..tensors.names import check_names
from ..tensors.state import Progress, batches
from .overlaps import are_separate, check_overlap
from .patch import check_writable
from .plan import AddedTensor, check_added, check_structure, cut_parts, size_of


class NamedPlan:
    """The jobs of one delta, with the numbers of `Plan`.

    Parameters
    ----------
    state
        The state that the delta was made from.
    file
        The delta. Construction raises a `DeltaError` or `StateError` if it does not fit the state.
    """

    def __init__(self, state: State, file: NamedDelta) -> None:
        self.file = file
        check_structure(state, file.structure, [*file.payloads, *(file.parts or ())])
        names = state if file.parts is None else file.parts
        check_names(names)
        tensors = [named_bits(name, state[name]) for name in sorted(names)]
        self.tensors: Sequence[TensorBits] = tensors if file.parts is None else cut_parts(tensors, file.parts)
        self.added: Sequence[AddedTensor] = [(name, dtype, shape) for name, (dtype, shape) in sorted(file.structure.added.items())]
        self.keys = keys_of(self.tensors).followed_by(TensorKeys.of(self.added))
        self._payloads: list[ByteRange | None] = []
        """The payload of each of `tensors`; None if it does not change."""
        self._removed = set(file.structure.removed)
        for tensor in self.tensors:
            payload = None if tensor.name in self._removed else file.payload(tensor.name)
            if payload is not None and payload[0] < payload[1] and file.data[payload[0]] != tensor.dtype.code:
                raise _wrong_type(tensor, file.data[payload[0]])
            self._payloads.append(payload)
        check_added(self.added, len(file.data))
        self.writes: NDArray[np.bool_] = np.zeros(len(tensors), np.bool_)
        self.changed: NDArray[np.int64] = np.zeros(len(tensors) + len(self.added), np.int64)
        self.numbers: NDArray[np.int64] = np.zeros_like(self.changed)
        self._first: set[int] = set()
        """Tensors that must be decoded before anything is written, because they share memory with tensors that are written."""

    def mark_writes(self, codec: Codec, threads: int, *, deferred: bool) -> None:
        """See `Plan`."""
        written: dict[object, ByteRange] = {}
        held = list(zip(self.tensors, self._payloads, strict=True))
        separate = are_separate(self.tensors)
        for index, (tensor, payload) in enumerate(held):
            if payload is None or not tensor.size:
                continue
            check_writable(tensor)
            if separate:
                self.writes[index] = True
            elif tensor.memory in written:
                self._first.add(index)
            else:
                written[tensor.memory] = payload
                self.writes[index] = True
        if separate:
            return
        # Tied tensors change together if their payloads are the same bytes, even if the delta was made from copies that were not tied.
        together = {tensor.name for tensor, payload in held if _is_same_change(self.file.data, payload, written.get(tensor.memory))}
        targets = [tensor for tensor, write in zip(self.tensors, self.writes, strict=True) if write]
        changing = {tensor.name for tensor, payload in held if payload is not None}
        check_overlap(targets, [tensor for tensor in self.tensors if tensor.name not in together], changing)

    def check_writes(self) -> None:
        """See `Plan`. Everything was checked before the delta was resolved."""

    def resolve(self, resolution: Resolution, codec: Codec, threads: int, progress: Progress | None) -> tuple[Digest, Digest]:
        """See `Plan`."""
        before, after = Digest(), Digest()
        held = len(self.tensors)
        stays = np.array([tensor.name not in self._removed for tensor in self.tensors] + [True] * len(self.added), np.bool_)
        rounds = [sorted(self._first), [index for index in range(held) if index not in self._first], range(held, len(self.changed))]
        done = 0
        for batch in (batch for numbers in rounds for batch in batches(numbers, self._nbytes, codec)):
            try:
                outcomes = resolution.add(self._jobs(batch), self.file.data)
            except (DtypeMismatch, ShapeMismatch) as error:
                if batch[0] < held:
                    raise
                raise CorruptDelta(f"a tensor that the delta adds has another type or size than the delta says: {error}") from None
            numbers = np.array(batch)
            self.changed[numbers] = outcomes.changed
            self.numbers[numbers] = np.arange(done, done + len(batch))
            done += len(batch)
            if batch[0] < held:
                before += self.keys.digest(outcomes.before, numbers)
            after += self.keys.digest(outcomes.after[stays[numbers]], numbers[stays[numbers]])
            if progress:
                progress(sum(map(self._nbytes, batch)))
        return before, after

    def _jobs(self, numbers: Sequence[int]) -> list[ResolveJob]:
        return [self._job(number, seed) for number, seed in zip(numbers, self.keys.seeds[numbers].tolist(), strict=True)]

    def _job(self, number: int, seed: int) -> ResolveJob:
        if number < len(self.tensors):
            tensor = self.tensors[number]
            return ResolveJob(tensor.bits, tensor.size, self._payloads[number], tensor.dtype, seed, bool(self.writes[number]))
        name, dtype, shape = self.added[number - len(self.tensors)]
        return ResolveJob(None, math.prod(shape), self.file.payloads[name], dtype, seed)

    def _nbytes(self, number: int) -> int:
        """Return the bytes of weights of a job."""
        if number < len(self.tensors):
            return self.tensors[number].nbytes
        _, dtype, shape = self.added[number - len(self.tensors)]
        return size_of(dtype, shape)


def _wrong_type(tensor: TensorBits, code: int) -> DtypeMismatch:
    theirs = DTYPES[code].name if code < len(DTYPES) else f"unknown ({code})"
    return DtypeMismatch(f"tensor {tensor.name!r} is {tensor.dtype.name}, its delta is for {theirs}.")


def _is_same_change(data: memoryview, one: ByteRange | None, other: ByteRange | None) -> bool:
    return one is not None and other is not None and (one == other or data[slice(*one)] == data[slice(*other)])
