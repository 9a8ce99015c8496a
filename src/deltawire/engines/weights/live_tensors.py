"""The tensors of a module by the names of the chain, and the version that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ...chain.memory_state import MemoryState
from ...errors import EngineRefused, ResultMismatch
from ...format.digest import Digest
from ...format.records.version_records import Commit
from ...subscribe.sync_context import SyncContext
from ...tensors.module_tensors import tied_names
from .fit import check_fits, check_memory

if TYPE_CHECKING:
    import torch

Naming = Callable[[], "dict[str, torch.Tensor]"]
"""Returns the module's tensors by name, as they are now. Other code may replace parameters at any time."""
DigestOf = Callable[[Mapping[str, Any]], Digest]


class LiveTensors:
    """The tensors of a module, by the names that the chain uses.

    Parameters
    ----------
    naming
        Returns the tensors by the names of the module's checkpoints.
    others
        Return the same tensors by other names, which a chain may use instead.
    loaded_seq
        The seq of the version that the module was loaded from, if it is known.
    keep_others
        True to keep tensors of the chain that the module does not have in memory. If False, a chain with such tensors is refused.
    """

    def __init__(self, naming: Naming, others: Sequence[Naming] = (), *, loaded_seq: int | None = None, keep_others: bool = False) -> None:
        self._naming = naming
        self._namings = (naming, *others)
        self._loaded_seq = loaded_seq
        self.keeps_others = keep_others
        """Whether tensors of the chain that the module does not have are kept in memory."""

    def now(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the module uses now."""
        return self._naming()

    def complete(self, state: MemoryState) -> dict[str, Any]:
        """Return all tensors of a state as they are now: those of the module, and the arrays that it does not have."""
        live: Mapping[str, Any] = self.now()
        return {name: live.get(name, array) for name, array in state.writable.items()}

    def choose_names(self, names: Set[str]) -> None:
        """Use the names of the module's tensors that fit these names best."""
        self._naming = max(self._namings, key=lambda naming: len(naming().keys() & names))

    def for_checkpoint(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Return the module's tensors by the names of a checkpoint. Raises `EngineRefused` if the module cannot hold its weights."""
        self.choose_names(arrays.keys())
        live = self.now()
        check_fits(live, arrays, keep_others=self.keeps_others)
        return live

    def find_version(self, target: Commit, context: SyncContext, digest_of: DigestOf) -> tuple[Commit, dict[str, torch.Tensor]] | None:
        """Find out whether the module holds `target`, or the version that it was loaded from. Then no full checkpoint is needed.

        Returns the version and its tensors, or None if the module holds neither. Raises `EngineRefused` if it could not hold others.
        """
        candidates = [target]
        if self._loaded_seq is not None and self._loaded_seq < target.seq:
            known = context.log.state_commit(context.log.ancestor(target, self._loaded_seq))
            candidates += [] if known is None else [known]
        for naming in self._namings:
            for commit, tensors in _holding(naming(), candidates, digest_of):
                check_memory(tensors)
                self._naming = naming
                return commit, tensors
        return None


def _holding(
    live: dict[str, torch.Tensor], candidates: Sequence[Commit], digest_of: DigestOf
) -> Iterator[tuple[Commit, dict[str, torch.Tensor]]]:
    """Yield the candidates whose weights these tensors hold. A chain may have tied tensors once, or under each of their names."""
    tied = tied_names(live)
    by_count = {len(live): live, len(live) - len(tied): {name: tensor for name, tensor in live.items() if name not in tied}}
    digests: dict[int, Digest] = {}
    for commit in candidates:
        tensors = by_count.get(commit.tensors)
        if tensors is None or sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) != commit.state_bytes:
            continue
        if commit.tensors not in digests:
            digests[commit.tensors] = digest_of(tensors)
        if digests[commit.tensors] == commit.digest:
            yield commit, tensors


def check_none_removed(names: Iterable[str], live: Mapping[str, Any]) -> None:
    """Raise `EngineRefused` if the module has lost one of these tensors: writing to the lost one would have no effect."""
    for name in names:
        if name not in live:
            raise EngineRefused(f"the module no longer has a tensor {name!r}, which it had at the last update. Make a new engine for it.")


def check_digest(found: Digest, commit: Commit) -> None:
    """Raise `ResultMismatch` unless this digest of live weights is that of the commit."""
    if found != commit.digest:
        raise ResultMismatch(f"the live weights have digest {found}, commit {commit.seq} has {commit.digest}.")


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, because no operation on integers can change a NaN."""
    import torch

    return tensor.detach().view(getattr(torch, f"int{8 * tensor.element_size()}"))
