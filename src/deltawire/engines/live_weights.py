"""The live weights of a module as a replica: what a subscriber keeps up to date is what the engine computes with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..chain.memory_state import MemoryState, NewUpdate, Undo, Update
from ..delta.prepared import PreparedUpdate
from ..errors import BaseMismatch, EngineDtypeDiffers, EngineQuarantined, EngineRefused, ResultMismatch
from ..format.delta_file import DeltaBytes
from ..format.digest import Digest
from ..format.records.chain_records import Commit
from ..subscribe.memory_replica import MemoryReplica
from ..subscribe.sync_context import SyncContext
from ..tensors.bits import tensor_bits, to_torch
from ..tensors.gpu_handover import Handover
from ..tensors.module_tensors import tied_names
from ..tensors.state import codec_for, state_digest
from .base import PreparedSwap, Swap

if TYPE_CHECKING:
    import torch

Tensors = dict[str, Any]
LiveTensors = Callable[[], "dict[str, torch.Tensor]"]
"""The module's tensors by wire name, as they are now: parameters can be replaced behind an engine's back."""


class LiveReplica(MemoryReplica):
    """A module's weights on the CPU or on one GPU, changed in place. They are themselves the state that deltas are decoded against, where
    they are: there is no copy.

    Decoding reads every weight of the parts that a delta changes and compares them with their digest. So a weight there that something else
    has changed is noticed before anything is written, and mended from a whole checkpoint; elsewhere it is noticed when a swap is confirmed
    in full, which then fails, can not be taken back either, and quarantines the engine until the next sync has mended it.

    `at` is the version that the module was loaded from, if that is known. Tensors of the chain that the module has not are kept beside it
    with `keep_others`, and refused without. `otherwise_named` gives the same weights under other names that the chain may use.
    """

    def __init__(
        self,
        tensors: LiveTensors,
        swap: Swap,
        *,
        at: int | None = None,
        keep_others: bool = False,
        threads: int | None = None,
        undo_bytes: int | None = None,
        new_update: NewUpdate | None = None,
        otherwise_named: Sequence[LiveTensors] = (),
    ) -> None:
        super().__init__(threads=threads, undo_bytes=undo_bytes, new_update=new_update or (lambda: LiveUpdate(self._tensors(), threads)))
        self._tensors = tensors
        self._namings = (tensors, *otherwise_named)
        self._swap = swap
        self._at = at
        self._keep_others = keep_others
        self._is_unknown = False
        """Whether a swap failed and could not be taken back."""

    def move(self, target: Commit, context: SyncContext) -> None:
        if self._commit is None and not self._is_unknown:
            self._recognise(target, context)
        self._look_again()
        super().move(target, context)

    def change(self, update: Update, target: Commit) -> Undo:
        assert self._state.commit is not None
        self._make(Change(self, update.apply, update.revert, self._state.commit, target), target)
        return super().change(update, target)  # it is written already: this only notes where we are

    def take_back(self, steps: Sequence[Undo], target: Commit) -> None:
        assert self._state.commit is not None

        def back() -> None:
            for step in steps:
                step.update.revert()

        def forth() -> None:
            for step in reversed(steps):
                step.update.apply()

        self._make(Change(self, back, forth, self._state.commit, target), target)
        super().take_back(steps, target)

    def replace(self, state: MemoryState, target: Commit) -> None:
        arrays = dict(state.writable)
        self._tensors = max(self._namings, key=lambda naming: len(naming().keys() & arrays.keys()))
        live = self._tensors()
        check_fits(live, arrays, keep_others=self._keep_others)
        self._make(self._replacement(live, arrays, target), target)
        self._take_on(live, arrays, target)

    def live(self) -> Tensors:
        """All tensors of the state as they are now: the module's own, and those kept beside it."""
        live: Mapping[str, Any] = self._tensors()
        return {name: live.get(name, array) for name, array in self._state.writable.items()}

    def check_written(self) -> None:
        """Raise unless what was written is what the module still uses."""
        for name, tensor in self.live().items():
            if tensor_bits(name, tensor).memory != tensor_bits(name, self._state.writable[name]).memory:
                raise ResultMismatch(f"tensor {name!r} of the module was replaced while it was being changed.")

    def digest(self, tensors: Mapping[str, Any]) -> Digest:
        """The digest of live tensors; found beside what the engine's streams do, like updates."""
        with Handover(tensors).taken():
            return state_digest(tensors, threads=self._threads)

    def _replacement(self, live: Mapping[str, torch.Tensor], arrays: Tensors, target: Commit) -> PreparedSwap:
        covered = {name: live[name] for name in arrays if name in live}
        tied = tied_names(covered)
        pairs = [(tensor_bits(name, covered[name]).bits, tensor_bits(name, arrays[name]).bits) for name in covered if name not in tied]
        return Exchange(self, pairs, covered, {name: array for name, array in arrays.items() if name not in live}, target)

    def _take_on(self, live: Mapping[str, torch.Tensor], arrays: Tensors, commit: Commit) -> None:
        """The live tensors are the state from now on, with what the module has not."""
        state = self._nothing()
        state.adopt({name: live.get(name, array) for name, array in arrays.items()}, commit)
        self._state = state
        self._is_unknown = False

    def _look_again(self) -> None:
        """Parameters may have been replaced by others since the last update. What they hold is checked when it is changed."""
        arrays = self._state.writable
        live = {name: tensor for name, tensor in self._tensors().items() if name in arrays}
        if self._state.commit is not None and any(live[name] is not arrays[name] for name in live):
            check_fits(live, {name: _array(name, arrays[name]) for name in live}, keep_others=False)
            self._take_on(live, dict(arrays), self._state.commit)
            self._undo.clear()

    def _recognise(self, target: Commit, context: SyncContext) -> None:
        """Find out whether the module is at the target, or where it is said to be: then nothing whole needs to be fetched."""
        candidates = [target]
        if self._at is not None and self._at != target.seq:
            known = context.log.state_commit(context.log.ancestor(target, self._at)) if self._at < target.seq else None
            candidates += [known] if known is not None else []
        for naming in self._namings:
            if self._recognise_named(naming, candidates):
                return

    def _recognise_named(self, naming: LiveTensors, candidates: Sequence[Commit]) -> bool:
        live = naming()
        tied = tied_names(live)
        counts = {len(live): live, len(live) - len(tied): {name: tensor for name, tensor in live.items() if name not in tied}}
        digests: dict[int, Digest] = {}
        for commit in candidates:
            named = counts.get(commit.tensors)
            if named is None or sum(tensor.numel() * tensor.element_size() for tensor in named.values()) != commit.state_bytes:
                continue
            if commit.tensors not in digests:
                digests[commit.tensors] = self.digest(named)
            if digests[commit.tensors] == commit.digest:
                self._tensors = naming
                self._recognised(named, commit)
                self._commit = commit
                return True
        return False

    def _recognised(self, named: Mapping[str, torch.Tensor], commit: Commit) -> None:
        self._take_on(named, dict(named), commit)

    def _make(self, change: PreparedSwap, target: Commit) -> None:
        try:
            self._swap(change, target)
        except EngineQuarantined:
            self._state = self._nothing()
            self._undo.clear()
            self._commit = None
            self._is_unknown = True
            raise


class LiveUpdate(PreparedUpdate):
    """An update that is decoded beside what the engine's streams do: on a GPU they would else wait for it, in the middle of generating.

    Parts of it may be about tensors only that the module has not, which are on the host: it is the module's that say which codec works.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], threads: int | None) -> None:
        super().__init__(threads=threads)
        first = [tensor_bits(name, tensor) for name, tensor in itertools.islice(live.items(), 1)]  # all are on one device
        self._resolution = codec_for(first).deferred_resolution(self._threads)

    def add(self, state: Any, delta: DeltaBytes) -> tuple[Digest, Digest]:
        with Handover(state).taken():
            return super().add(state, delta)


class Change:
    """An update of live weights, forwards or backwards."""

    def __init__(self, replica: LiveReplica, forth: Callable[[], None], back: Callable[[], None], before: Commit, after: Commit) -> None:
        self._replica = replica
        self._forth, self._back = forth, back
        self._before, self._after = before, after

    def apply(self) -> None:
        self._forth()

    def confirm(self, *, full: bool) -> None:
        self._replica.check_written()
        if full and (found := self._replica.digest(self._replica.live())) != self._after.digest:
            raise ResultMismatch(f"the live weights have digest {found}, commit {self._after.seq} has {self._after.digest}.")

    def revert(self) -> None:
        self._back()
        if (found := self._replica.digest(self._replica.live())) != self._before.digest:
            raise BaseMismatch(f"the live weights have digest {found}, commit {self._before.seq} has {self._before.digest}.")


class Exchange:
    """A whole checkpoint changes places with live weights, tensor by tensor, so that what was there is not lost before all is confirmed."""

    def __init__(
        self,
        replica: LiveReplica,
        pairs: list[tuple[Any, NDArray[Any]]],
        live: Mapping[str, torch.Tensor],
        others: Tensors,
        target: Commit,
    ) -> None:
        self._replica = replica
        self._pairs = pairs
        self._live = live
        self._others = others
        self._target = target
        self._done = 0
        self._before = replica.digest(live)

    def apply(self) -> None:
        for live, new in self._pairs:
            self._done += 1
            _exchange(live, new)

    def confirm(self, *, full: bool) -> None:
        """Always in full: there is no cheaper way to see that a module which was at nothing is at something."""
        found = self._replica.digest({**self._live, **self._others})
        if found != self._target.digest:
            raise ResultMismatch(f"the live weights have digest {found}, commit {self._target.seq} has {self._target.digest}.")

    def revert(self) -> None:
        for live, old in self._pairs[: self._done]:
            _exchange(live, old)
        self._done = 0
        if self._replica.digest(self._live) != self._before:
            raise BaseMismatch("the live weights are not what they were.")


def _exchange(live: Any, new: NDArray[Any]) -> None:
    """Bits of a tensor, here or on a GPU, and of an array change places."""
    if isinstance(live, np.ndarray):
        kept = live.copy()
        np.copyto(live, new)
    else:
        import torch

        kept = live.tensor.to("cpu", copy=True).numpy().view(new.dtype)
        live.tensor.copy_(torch.from_numpy(np.asarray(new, order="C").view(f"i{new.itemsize}")))
    np.copyto(new, kept)


def check_fits(live: Mapping[str, torch.Tensor], arrays: Mapping[str, NDArray[Any]], *, keep_others: bool) -> None:
    """`EngineRefused` unless a module can hold these weights and nothing of it would stay as it was."""
    tied = tied_names(live)
    for name, tensor in live.items():
        owner = tied.get(name, name)
        if name not in arrays and not ({owner, *(other for other in tied if tied[other] == owner)} & arrays.keys()):
            raise EngineRefused(f"the chain has no tensor {name!r}, which the module has.")
        if name in tied and name in arrays and owner in arrays and not _same_bits(arrays[name], arrays[owner]):
            raise EngineRefused(f"{name!r} and {owner!r} are tied in the module, but differ in the chain.")
        if name not in arrays:
            continue
        dtype = to_torch(np.empty(0, arrays[name].dtype)).dtype
        if tuple(tensor.shape) != arrays[name].shape:
            shapes = f"{list(tensor.shape)} in the module, {list(arrays[name].shape)} in the chain"
            raise EngineRefused(f"the shapes of {name!r} differ: {shapes}.")
        if tensor.dtype != dtype:
            raise EngineDtypeDiffers(
                f"{name!r} is {_plain(tensor.dtype)} in the module, {_plain(dtype)} in the chain. "
                f"Load the model with dtype={_plain(dtype)!r}, or cast it before the engine is made: model.to({dtype})."
            )
    strangers = arrays.keys() - live.keys()
    if strangers and not keep_others:
        raise EngineRefused(f"the module has no tensor {min(strangers)!r}, which the chain has ({len(strangers)} in all).")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _array(name: str, tensor: Any) -> NDArray[Any]:
    """A tensor as an array; of one on a GPU, only its type and shape."""
    found = tensor_bits(name, tensor)
    return found.bits.view(found.dtype.numpy) if found.on_host else np.broadcast_to(np.zeros((), found.dtype.numpy), found.shape)


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(tensor_bits("a", a).bits, tensor_bits("b", b).bits)
