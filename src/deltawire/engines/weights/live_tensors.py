"""The tensors of a module by the names of the chain, and the version that they hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...format.digest import Digest
from ...format.records.chain_records import Commit
from ...subscribe.sync_context import SyncContext
from ...tensors.module_tensors import tied_names

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
    at
        The version that the module was loaded from, if it is known.
    """

    def __init__(self, naming: Naming, others: Sequence[Naming] = (), *, at: int | None = None) -> None:
        self._naming = naming
        self._namings = (naming, *others)
        self._at = at

    def now(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the module uses now."""
        return self._naming()

    def use_names_like(self, names: Collection[str]) -> None:
        """Use the naming that has most of these names."""
        self._naming = max(self._namings, key=lambda naming: len(naming().keys() & set(names)))

    def find_version(self, target: Commit, context: SyncContext, digest_of: DigestOf) -> tuple[Commit, dict[str, torch.Tensor]] | None:
        """Find out whether the module holds `target`, or the version that it was loaded from. Then no full checkpoint is needed.

        Returns the version and its tensors, or None if the module holds neither.
        """
        candidates = [target]
        if self._at is not None and self._at < target.seq:
            known = context.log.state_commit(context.log.ancestor(target, self._at))
            candidates += [] if known is None else [known]
        for naming in self._namings:
            for commit, tensors in _holding(naming(), candidates, digest_of):
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


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, because no operation on integers can change a NaN."""
    import torch

    return tensor.detach().view(getattr(torch, f"int{8 * tensor.element_size()}"))
