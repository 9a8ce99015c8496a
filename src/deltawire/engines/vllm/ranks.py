"""Messages between the workers of a server. Every worker must make each of these calls, because each waits for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from ...format.digest import Digest

_Value = TypeVar("_Value")


def failed_ranks(failed: bool) -> list[int]:
    """Tell the other workers whether this one failed. Returns the ranks of all workers that did."""
    return [rank for rank, (flag,) in enumerate(_gather([int(failed)])) if flag]


def agree(failed: bool, digest: Digest | None) -> Sequence[int]:
    """Tell the other workers whether this one failed, and to which state its update leads. It is an `update_types.Agree`."""
    told = _gather([int(failed), *(digest or Digest()).lanes])
    if found := [rank for rank, (flag, *_) in enumerate(told) if flag]:
        return found
    return [] if all(lanes == told[0] for lanes in told) else range(len(told))


def sum_of(digest: Digest) -> Digest:
    """Return the sum of the digests of all workers."""
    total = Digest()
    for a, b, c, d in _gather(list(digest.lanes)):
        total += Digest((a, b, c, d))
    return total


def share(value: _Value) -> tuple[list[_Value], int]:
    """Tell the other workers a value. Returns the values of all workers, by rank, and the rank of this one."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    found: list[Any] = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found, int(group.rank_in_group)


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
