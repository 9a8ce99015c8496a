"""Where the weights of a `MemoryReplica` are, and the changes that can be made to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..chain.memory_state import MemoryState, Update, UpdateStep
from ..delta.prepared import PreparedUpdate
from ..format.digest import Digest
from ..format.records.record_parts import FileEntry
from ..format.records.version_records import Commit
from .prepared_swap import PreparedSwap
from .sync_context import SyncContext


class ReplicaWeights(Protocol):
    """Weights that a `MemoryReplica` keeps up to date. `ArrayWeights` are plain arrays; engines bring their live weights."""

    @property
    def state(self) -> MemoryState:
        """The state that deltas are decoded against, and the commit that it is at. It is empty while the weights are unknown."""
        ...

    def inspect(self, target: Commit, context: SyncContext) -> bool:
        """Look at the weights before a move to `target`, because other code may have replaced them.

        Weights that hold a known version already may set `state` to it. Returns False if kept update steps no longer fit the weights.
        """
        ...

    def new_update(self) -> Update:
        """Return an empty update, which `MemoryState.resolve` fills."""
        ...

    def still_hold(self, digests: Mapping[FileEntry, Digest]) -> bool:
        """Return whether the tensors that some files cover still have these digests, if other code can write to them."""
        ...

    def check_written(self, update: Update) -> None:
        """Raise `ResultMismatch` unless the weights have the values that `update` has just written."""
        ...

    def check_all(self, commit: Commit) -> None:
        """Read every weight. Raises a `StateError` unless they are those of `commit`."""
        ...

    def replacement(self, state: MemoryState, target: Commit) -> PreparedSwap:
        """Return the change that puts `state`, a whole checkpoint of `target`, in place of the current weights.

        Raises `EngineRefused` if the weights cannot hold it.
        """
        ...

    def forget(self) -> None:
        """Empty `state`, because the weights are unknown. The next change must be a replacement."""
        ...


class ArrayWeights:
    """Arrays in this process's memory, which only the replica writes to.

    Parameters
    ----------
    threads
        Number of threads for decoding and digests. None means one per core.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self.state = MemoryState(threads=threads)

    def inspect(self, target: Commit, context: SyncContext) -> bool:
        return True

    def new_update(self) -> Update:
        return PreparedUpdate(threads=self._threads)

    def still_hold(self, digests: Mapping[FileEntry, Digest]) -> bool:
        return True

    def check_written(self, update: Update) -> None:
        """Do nothing: memory holds what was written to it."""

    def check_all(self, commit: Commit) -> None:
        self.state.check()

    def replacement(self, state: MemoryState, target: Commit) -> PreparedSwap:
        return _StateReplacement(self, state)

    def forget(self) -> None:
        self.state = MemoryState(threads=self._threads)


class _StateReplacement:
    """Puts other arrays in place of the current ones."""

    def __init__(self, weights: ArrayWeights, state: MemoryState) -> None:
        self._weights = weights
        self._new, self._old = state, weights.state

    def apply(self) -> None:
        self._weights.state = self._new

    def confirm(self, *, full: bool) -> None:
        if full:
            self._new.check()

    def revert(self) -> None:
        self._weights.state = self._old


class StepForward:
    """The change to the next version: one decoded update.

    Parameters
    ----------
    weights
        The weights to change.
    step
        The update and the commits that it leads from and to.
    """

    def __init__(self, weights: ReplicaWeights, step: UpdateStep) -> None:
        self._weights = weights
        self._step = step

    def apply(self) -> None:
        self._weights.state.redo(self._step)

    def confirm(self, *, full: bool) -> None:
        self._weights.check_written(self._step.update)
        if full:
            self._weights.check_all(self._step.after)

    def revert(self) -> None:
        if self._step.update.is_applied:
            self._weights.state.undo(self._step)
        else:  # it failed before everything was written
            self._step.update.revert()
        self._weights.check_all(self._step.before)


class StepsForward:
    """The change over several versions in one swap, so that nobody sees the versions between.

    The first step is decoded before, and each other one in `apply`, against the weights that the step before has written.

    Parameters
    ----------
    weights
        The weights to change.
    hops
        The commits on the way, in order, and a function for each that decodes the update to it. If its state is the same as before, the
        function notes the commit in `weights.state` and returns None.
    """

    def __init__(self, weights: ReplicaWeights, hops: Sequence[tuple[Commit, Callable[[], Update | None]]]) -> None:
        self._weights = weights
        self._hops = hops
        self._before = _labels(weights)
        self.steps: list[UpdateStep] = []
        """The steps that are made, in order."""

    def apply(self) -> None:
        state = self._weights.state
        try:
            for commit, decode in self._hops:
                update = decode()
                if update is not None:
                    self.steps.append(state.step(update, commit))
                    state.redo(self.steps[-1])
        except BaseException:  # also Ctrl-C: a subscriber without an engine must not stay at a version between, either
            self._undo()
            raise

    def confirm(self, *, full: bool) -> None:
        self._weights.check_all(self._hops[-1][0])  # later steps may have overwritten what earlier ones wrote

    def revert(self) -> None:
        self._undo()
        self._weights.check_all(self._before[-1])

    def _undo(self) -> None:
        state = self._weights.state
        while self.steps:
            step = self.steps[-1]
            if step.update.is_applied:
                state.relabel(step.after)
                state.undo(step)
            else:
                step.update.revert()
            self.steps.pop()
        for commit in self._before:
            state.relabel(commit)


class StepsBack:
    """The change to an earlier version: kept steps are undone, newest first.

    Parameters
    ----------
    weights
        The weights to change.
    steps
        The steps to undo, newest first.
    target
        The commit whose state they lead back to.
    """

    def __init__(self, weights: ReplicaWeights, steps: Sequence[UpdateStep], target: Commit) -> None:
        self._weights = weights
        self._steps = steps
        self._target = target
        self._before = _labels(weights)

    def apply(self) -> None:
        state = self._weights.state
        for step in self._steps:
            state.relabel(step.after)  # a fence or a rewind may have given this state another number
            state.undo(step)
        state.relabel(self._target)

    def confirm(self, *, full: bool) -> None:
        self._weights.check_written(self._steps[-1].update)
        if full:
            self._weights.check_all(self._target)

    def revert(self) -> None:
        state = self._weights.state
        for step in reversed(self._steps):
            state.redo(step)
        for commit in self._before:
            state.relabel(commit)
        self._weights.check_all(self._before[-1])


def _labels(weights: ReplicaWeights) -> list[Commit]:
    """Return the commits that say which version the weights are at: to be set again, in this order, after a change was undone."""
    return [commit for commit in (weights.state.version, weights.state.commit) if commit is not None]
