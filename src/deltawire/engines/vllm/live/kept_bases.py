"""Tensors of the chain that workers cannot read from their own memory, as one copy on the host that all workers of a server share.

A delta codes positions within runs of many elements, so a worker needs whole tensors to decode it, although tensor and expert parallelism
give it only parts of them. It reads tensors that it does not hold here:

    FOLDER/NAME.bin    one tensor, mapped into memory by every worker that needs it; NAME is a hash of its name, type and shape
    FOLDER/NAME.claim  made by the worker that writes this tensor: the first one that needed it
    FOLDER/alive       `flock` file; a folder that no process holds was left behind by a server that was killed

Each tensor begins with the number of its *generation*: how many times the weights have changed since the server started. After a confirmed
swap its writer makes the same changes here, in the background. Other workers wait for that generation before they use the tensor again. A
worker that is killed ends its server, so a tensor that is changed half-way is never read: a new server makes a new folder.

The worker that writes a tensor decodes all of its changes, because it needs new values of it. A tensor of which a worker holds nothing is
not shared: the worker keeps those of them that it needs by itself (own_bases.py).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from ....delta.patch import TensorPatch
from ....errors import DeltawireError, SpoolError
from ....format.bundle_names import MAIN, split_name
from ....format.checkpoints.checkpoint import Checkpoint
from ....format.records.record_parts import CommitRef
from ....subscribe.cache.private_folder import hold_folder, remove_abandoned, retryable_error, spool_errors
from ....subscribe.mirror.locks import FileLock
from ....subscribe.tensor_table import TensorSpec, TensorTable
from .own_bases import OwnBases

_HEADER = struct.Struct("<8sQ")
_MAGIC = b"dwkept01"
_DATA_START = mmap.PAGESIZE
_CHANGING = 0
"""The generation of a tensor that is being changed."""
_PAUSE = 0.002

_Changes: TypeAlias = Mapping[str, Sequence[TensorPatch]]


class KeptBases:
    """A `BaseSource` that the workers of one server share. One process of each host makes and changes each tensor.

    Parameters
    ----------
    folder
        A directory of this server, in the spool. All workers of a host have the same one, and no other server has it.
    checkpoint
        Opens the checkpoint that the weights were loaded from.
    most_bytes
        The most memory that the tensors of one worker may have. None means any.
    patience
        Seconds to wait for the worker that writes a tensor.
    sleep, clock
        For tests.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Callable[[], Checkpoint],
        *,
        most_bytes: int | None = None,
        patience: float = 120.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._most_bytes = most_bytes
        self._patience = patience
        self._sleep = sleep
        self._clock = clock
        self._wanted: TensorTable = {}
        self._files: dict[str, _KeptTensor] = {}
        self._claimed: set[str] = set()
        """The tensors that this worker writes."""
        self._claims: set[Path] = set()
        """The files that this worker has claimed. It writes them whenever they are wanted again."""
        self._own = OwnBases()
        self._generation = _CHANGING
        self._alive: list[FileLock] = []
        """The lock that shows that the folder is in use, as soon as there is a folder."""
        weakref.finalize(self, _end, self._alive, folder.parent)
        self._thread = ThreadPoolExecutor(1, "deltawire-kept")
        self._writing: Future[None] | None = None

    @property
    def nbytes(self) -> int:
        """The size of the tensors that this worker writes. The sum over all workers of a host is the memory that the copies take there."""
        return sum(_nbytes(self._wanted[name]) for name in self._claimed) + self._own.nbytes

    def hold(self, wanted: TensorTable, absent: TensorTable | None = None, near: Collection[str] = ()) -> str | None:
        """Make these tensors available, from the checkpoint that the weights were loaded from. Returns why that is impossible, or None.

        Tensors of other bundles than the main one, such as adapters, are not in such a checkpoint. They are zero until a version is loaded
        in full, so the weights have the digest of no version before that.

        All workers of a server call it the same number of times, each with the tensors that it needs.

        Parameters
        ----------
        wanted
            The tensors that the worker needs new values of, and cannot read from its memory.
        absent
            The tensors of which it holds nothing.
        near
            Those of them that can share a block with a tensor that the worker decodes.
        """
        try:
            self._finish()
            self._wanted, self._claimed = wanted, set()
            self._files.clear()  # a tensor of the same name may have another shape now
            own = self._own.choose(absent or {}, near)
            both = {**wanted, **own}
            needed = sum(map(_nbytes, both.values()))
            if self._most_bytes is not None and needed > self._most_bytes:
                return f"{len(both)} tensors, such as {min(both)!r}, have {needed:,} bytes that cannot be read from the model"
            weights = self._checkpoint() if both else None
            if weights is not None and (reason := _lacks(weights, both)) is not None:
                return reason
            if weights is not None:
                for name, spec in own.items():
                    self._own.put(name, _read(weights, name, spec))
            if weights is not None and wanted:
                with spool_errors(self._folder):
                    self._open_folder()
                    self._claimed = {name for name in wanted if self._claim(name)}
                self._fill(weights)
            return None
        except (DeltawireError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        finally:  # even after a failure, so that all workers count alike
            self._generation += 1

    def watch(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors of a checkpoint that is loaded into the model, and keep those that are needed when they are taken.

        Parameters
        ----------
        tensors
            All tensors of the checkpoint. All workers load the same one.
        """
        self._generation += 1  # at once: all workers count alike, even if one of them fails before the first tensor
        self._finish()
        return self._kept(tensors)

    def _kept(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name in self._claimed:
                self._write_whole(name, _bits(tensor, self._wanted[name]), self._generation)
            elif self._own.takes(name):
                self._own.put(name, _bits(tensor, self._own.spec(name)))
            yield name, tensor

    def writes(self, name: str) -> bool:
        """Return whether this worker makes the changes of a tensor.

        Parameters
        ----------
        name
            The name of the tensor.
        """
        return name in self._claimed or self._own.writes(name)

    def base(self, name: str) -> NDArray[Any]:
        """Return a tensor of the live version. Waits until the worker that writes it has made the changes of the last swap.

        Do not write to the array: it is the memory that all workers share. Raises `SpoolError`, and `EngineRefused` if the tensor was left
        out because no update should need it.

        Parameters
        ----------
        name
            The name of the tensor.
        """
        if self._own.knows(name):
            self._finish()
            return self._own.base(name)
        if self._writing is not None and self._writing.done():
            self._finish()
        with spool_errors(self._folder):
            tensor = self._opened(name)
            deadline = self._clock() + self._patience
            while tensor.generation != self._generation:
                self._wait(name, deadline)
            return tensor.array(self._wanted[name])

    def settled(self, ref: CommitRef, changes: Mapping[str, Sequence[TensorPatch]]) -> None:
        """Make the changes of a confirmed swap, in the background. Returns at once.

        Parameters
        ----------
        ref
            The commit that the weights now have.
        changes
            The changes of the tensors that this worker needs. A tensor may change in several files.
        """
        before, self._generation = self._generation, self._generation + 1
        mine = {name: changes.get(name, ()) for name in self._claimed}
        own = {name: patches for name, patches in changes.items() if self._own.writes(name)}
        previous, generation = self._writing, self._generation
        if mine or own:  # otherwise no thread is woken, because it could take the interpreter from the swap that calls this
            self._writing = self._thread.submit(self._make, mine, own, before, generation, previous)

    def close(self) -> None:
        """Forget the tensors. The last worker of a host deletes the folder."""
        with contextlib.suppress(Exception):
            self._finish()
        self._thread.shutdown()
        self._files.clear()
        self._own.choose({}, ())
        _end(self._alive, self._folder.parent)

    def _make(self, changes: _Changes, own: _Changes, before: int, generation: int, previous: Future[None] | None) -> None:
        if previous is not None:
            previous.result()
        for name, patches in own.items():
            for patch in patches:
                _write(self._own.flat(name), patch, self._own.spec(name))
        with spool_errors(self._folder):
            for name, patches in changes.items():
                tensor, spec = self._opened(name), self._wanted[name]
                if tensor.generation != before:
                    raise SpoolError(f"{self._folder}: tensor {name!r} is not the one that the update was made from.")
                flat = tensor.array(spec).reshape(-1).view(spec.dtype.bits)
                if patches:
                    tensor.generation = _CHANGING
                for patch in patches:
                    _write(flat, patch, spec)
                tensor.generation = generation

    def _fill(self, weights: Checkpoint) -> None:
        for name in sorted(self._claimed):
            self._write_whole(name, _read(weights, name, self._wanted[name]), self._generation + 1)

    def _write_whole(self, name: str, flat: NDArray[Any], generation: int) -> None:
        """Write all elements of a tensor. Its file is made if it does not exist, and is complete as soon as it has its name."""
        with spool_errors(self._folder):
            path = self._path(name)
            if name not in self._files and not path.exists():
                arriving = path.with_suffix(".part")
                with arriving.open("wb") as file:
                    file.write(_HEADER.pack(_MAGIC, generation).ljust(_DATA_START, b"\0"))
                    file.write(flat.data)
                os.replace(arriving, path)
                return
            tensor = self._opened(name)
            tensor.generation = _CHANGING
            tensor.array(self._wanted[name]).reshape(-1).view(flat.dtype)[:] = flat
            tensor.generation = generation

    def _finish(self) -> None:
        """Wait for the changes of the last swap. Raises what failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _opened(self, name: str) -> _KeptTensor:
        if name not in self._files:
            deadline = self._clock() + self._patience
            while not self._path(name).exists():
                self._wait(name, deadline)
            self._files[name] = _KeptTensor(self._path(name), _DATA_START + _nbytes(self._wanted[name]))
        return self._files[name]

    def _wait(self, name: str, deadline: float) -> None:
        if self._writing is not None and self._writing.done():
            self._finish()  # raises what failed
        if self._clock() > deadline:
            raise retryable_error(f"{self._folder}: the worker that writes tensor {name!r} has not done so for {self._patience:.0f} s.")
        self._sleep(_PAUSE)

    def _claim(self, name: str) -> bool:
        """Return whether this worker is the first one that needed a tensor. It then writes the tensor."""
        path = self._path(name).with_suffix(".claim")
        if path not in self._claims:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                return False
            self._claims.add(path)
        return True

    def _open_folder(self) -> None:
        if not self._alive:
            remove_abandoned(self._folder.parent)  # a server that was killed may have left copies of a whole model
            self._alive.append(hold_folder(self._folder, self._sleep))

    def _path(self, name: str) -> Path:
        spec = self._wanted[name]
        key = f"{name}\0{spec.dtype.name}\0{spec.shape}"
        return self._folder / f"{blake3(key.encode()).hexdigest()[:32]}.bin"


class _KeptTensor:
    """The file of one tensor, mapped into memory that all workers share."""

    def __init__(self, path: Path, size: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE)
        if len(self._memory) != size or self._memory[: len(_MAGIC)] != _MAGIC:
            raise SpoolError(f"{path} is not a tensor of this size.")

    @property
    def generation(self) -> int:
        return int(_HEADER.unpack_from(self._memory)[1])

    @generation.setter
    def generation(self, value: int) -> None:
        _HEADER.pack_into(self._memory, 0, _MAGIC, value)

    def array(self, spec: TensorSpec) -> NDArray[Any]:
        return np.ndarray(spec.shape, spec.dtype.numpy, self._memory, _DATA_START)


def _end(held: list[FileLock], parent: Path) -> None:
    """Let go of a folder, and delete it if no other worker holds it. Python calls it at its end, too."""
    while held:
        held.pop().release()
    with contextlib.suppress(DeltawireError):
        remove_abandoned(parent)


def _lacks(weights: Checkpoint, wanted: TensorTable) -> str | None:
    for name, spec in wanted.items():
        if name not in weights and split_name(name)[0] != MAIN:
            continue
        if name not in weights or (weights.entry(name).dtype, weights.entry(name).shape) != (spec.dtype, spec.shape):
            return f"tensor {name!r} is not in the checkpoint that the weights were loaded from"
    return None


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _read(weights: Checkpoint, name: str, spec: TensorSpec) -> NDArray[Any]:
    """Return a tensor of a checkpoint as unsigned integers, flat. It is zero if the checkpoint does not have it."""
    array = weights[name] if name in weights else np.zeros(spec.shape, spec.dtype.numpy)
    return np.ascontiguousarray(array).reshape(-1).view(spec.dtype.bits)


def _write(flat: NDArray[Any], patch: TensorPatch, spec: TensorSpec) -> None:
    flat[torch.as_tensor(patch.indices).cpu().numpy()] = _bits(patch.values, spec)


def _bits(values: Any, spec: TensorSpec) -> NDArray[Any]:
    """Return elements as unsigned integers in host memory, flat."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).reshape(-1).view(spec.dtype.bits)
    tensor = values.detach().contiguous().reshape(-1)
    signed = tensor.view(getattr(torch, f"int{spec.dtype.width}")).cpu().numpy()
    found: NDArray[Any] = signed.view(spec.dtype.bits)
    return found
