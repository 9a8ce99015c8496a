"""Messages between the workers of a server. Every worker must make each of these calls, because each waits for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from ...errors import BaseMismatch, ResultMismatch
from ...format.digest import Digest
from .live.update_types import Claim

_Value = TypeVar("_Value")


def failed_ranks(failed: bool) -> list[int]:
    """Tell the other workers whether this one failed. Returns the ranks of all workers that did."""
    return [rank for rank, (flag,) in enumerate(_gather([int(failed)])) if flag]


def agree(failed: bool, claim: Claim | None) -> Sequence[int]:
    """Tell the other workers whether this one failed, and to which state its update leads. It is an `update_types.Agree`.

    Raises `BaseMismatch` or `ResultMismatch`, in all workers, if their claims do not fit together.
    """
    after, *parts = (Digest(),) * 3 if claim is None else (claim.after, claim.before_parts, claim.after_parts)
    told = _gather([int(failed), *after.lanes, *(lane for part in parts for lane in part.lanes)])
    if found := [rank for rank, (flag, *_) in enumerate(told) if flag]:
        return found
    if any(numbers[1:5] != told[0][1:5] for numbers in told):
        raise ResultMismatch("the workers have decoded updates to different states.")
    wrong_before, wrong_after = (
        any(sum(lanes) % 2**32 for lanes in zip(*(row[at : at + 4] for row in told), strict=True)) for at in (5, 9)
    )
    if wrong_before:
        raise BaseMismatch("the weights of all workers together are not those that the update was made from.")
    if wrong_after:
        raise ResultMismatch("the updates of all workers together do not lead to the digest that the files promise.")
    return []


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
