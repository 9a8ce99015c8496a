"""Messages between the workers of a server. Every worker must make each of these calls, because each waits for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...format.digest import Digest
from .update_types import Agree, Digests


def failed_ranks(failed: bool) -> list[int]:
    """Tell the other workers whether this one failed. Returns the ranks of all workers that did."""
    return [rank for rank, (flag,) in enumerate(_gather([int(failed)])) if flag]


def agreement(expected: Digest | None) -> Agree:
    """Return a function that tells all workers whether this one failed (`update_types.Agree`).

    Parameters
    ----------
    expected
        The digest of the whole state that the digests of all workers must add up to. None if it is not compared.
    """

    def agree(failed: bool, digests: Digests | None) -> Sequence[int]:
        lanes = (0, 0, 0, 0) if digests is None else digests.owned.lanes
        told = _gather([int(failed), int(digests is not None), *lanes])
        found = [rank for rank, (flag, *_) in enumerate(told) if flag]
        if found or expected is None or not all(has_digests for _, has_digests, *_ in told):
            return found
        total = Digest()
        for _, _, a, b, c, d in told:
            total += Digest((a, b, c, d))
        return [] if total == expected else list(range(len(told)))

    return agree


def sum_of(digest: Digest) -> Digest:
    """Return the sum of the digests of all workers."""
    total = Digest()
    for a, b, c, d in _gather(list(digest.lanes)):
        total += Digest((a, b, c, d))
    return total


def world_size() -> int:
    """Return the number of workers."""
    from vllm.distributed.parallel_state import get_world_group

    return int(get_world_group().world_size)


def raises_for_all() -> bool:
    """Return whether this worker raises an error that all workers have agreed on. It is the last worker.

    vLLM's executor reads the answers of its workers in order and stops at the first failure. It would take the answers that it left unread
    for answers to the next call. If only the last worker fails, no answer is left.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    return bool(group.rank_in_group == group.world_size - 1)


def _gather(numbers: list[int]) -> list[list[int]]:
    """Return the numbers of all workers, by rank."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [numbers]
    table = torch.zeros(group.world_size, len(numbers), dtype=torch.int64)
    table[group.rank_in_group] = torch.tensor(numbers)
    torch.distributed.all_reduce(table, group=group.cpu_group)
    found: list[list[int]] = table.tolist()
    return found
