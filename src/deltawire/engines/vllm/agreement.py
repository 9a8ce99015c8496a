"""All workers of a server do a thing, or none does."""

from __future__ import annotations

import torch


def failed_ranks(failed: bool) -> list[int]:
    """Tell the others whether this worker failed; returns the ranks of all that did. Every worker must call it, or all wait."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [0] if failed else []
    flags = torch.zeros(group.world_size, dtype=torch.int32)
    flags[group.rank_in_group] = int(failed)
    torch.distributed.all_reduce(flags, group=group.cpu_group)
    return [int(rank) for rank in flags.nonzero().flatten()]


def is_spokesman() -> bool:
    """Whether this worker is the one to raise an error that all have agreed on: the last.

    vLLM's executor reads the answers of its workers in their order and stops at the first that failed, leaving those after it to be taken
    for answers to the next call. If only the last one fails, none is left.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    return bool(group.rank_in_group == group.world_size - 1)
