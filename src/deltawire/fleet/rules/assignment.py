"""How open tasks are divided: how many each member gets, so that all are done early, and which."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that should be offered to a member.

    Parameters
    ----------
    task
        The number of the task in its round.
    offered_to
        The member that it is offered to already. The member keeps the offer if that is fair, so that it does not race with others.
    offered_at
        When that offer was first made.
    busy
        Members that still work on an earlier attempt. They are never offered the task again.
    failed
        Members whose attempts expired or were refused. They are offered the task only if no other member can take it.
    wanted
        The member that should get the task if it can take one; None if any member will do.
    """

    task: int
    offered_to: str | None = None
    offered_at: float = 0.0
    busy: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    wanted: str | None = None


def divide_work(total: float, weights: Sequence[float], held: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Divide work in proportion to weights, counting what each member holds already. This is exact water-filling.

    After that, work held divided by weight is the same for all members, except for those that hold too much already or have no room left.

    Parameters
    ----------
    total
        How much work there is. Work that no member has room for is not given out.
    weights
        The speed of each member, above 0.
    held
        How much each member holds already.
    rooms
        How much more each member may get at most.
    """
    edges = sorted(
        [(h / w, w) for w, h, room in zip(weights, held, rooms, strict=True) if room > 0]
        + [((h + room) / w, -w) for w, h, room in zip(weights, held, rooms, strict=True) if room > 0]
    )
    level, width, left = 0.0, 0.0, float(total)
    for height, change in edges:
        given = width * (height - level)
        if given >= left and width > 0:
            break
        left -= given
        level, width = height, width + change
    else:
        return [max(0.0, room) for room in rooms]
    level += left / width
    return [min(max(0.0, level * w - h), max(0.0, room)) for w, h, room in zip(weights, held, rooms, strict=True)]


def divide_tasks(total: int, weights: Sequence[float], held: Sequence[float], rooms: Sequence[float]) -> list[int]:
    """Divide whole tasks so that the last of them is done as early as possible: each goes to the member that would finish it first.

    A member finishes its n-th further task at (held + n) / weight. Ties go to the first member. Tasks that no member has room for are not
    given out.

    Parameters
    ----------
    total
        How many tasks there are.
    weights
        The speed of each member, above 0.
    held
        How much work each member has to do before.
    rooms
        How many more tasks each member may get at most.
    """
    # No member gets fewer whole tasks than the whole part of what it would get of tasks that can be cut.
    counts = [max(0, math.floor(share - 1e-9)) for share in divide_work(total, weights, held, rooms)]
    turns = [
        ((before + count + 1) / weight, index)
        for index, (weight, before, count, room) in enumerate(zip(weights, held, counts, rooms, strict=True))
        if count + 1 <= room
    ]
    heapq.heapify(turns)
    for _ in range(total - sum(counts)):
        if not turns:
            break
        _, index = turns[0]
        counts[index] += 1
        if counts[index] + 1 <= rooms[index]:
            heapq.heapreplace(turns, ((held[index] + counts[index] + 1) / weights[index], index))
        else:
            heapq.heappop(turns)
    return counts


def assign(tasks: Sequence[OpenTask], counts: Mapping[str, int], unresponsive: Collection[str]) -> dict[int, str]:
    """Give each member as many tasks as `counts` says. Return task → member.

    Wanted members come first, and members keep the offers that they have. No member gets a task that it still works on, and none gets a
    task that it failed at if another member can take it.
    """
    left = dict(counts)
    assigned: dict[int, str] = {}
    waiting: list[OpenTask] = []
    for task in tasks:
        if task.wanted is not None and task.wanted in counts:
            assigned[task.task] = task.wanted
            left[task.wanted] = max(0, left[task.wanted] - 1)
            continue
        name = task.offered_to
        if name is not None and name not in unresponsive and left.get(name, 0) > 0 and name not in task.busy and name not in task.failed:
            assigned[task.task] = name
            left[name] -= 1
        else:
            waiting.append(task)
    # Tasks that exclude some members come first, because any member can take the others.
    waiting.sort(key=lambda task: not (task.busy or task.failed))
    free = deque(name for name, count in left.items() for _ in range(count))
    for task in waiting:
        name = _take(free, task.busy | task.failed) or next((other for other in counts if other not in task.busy | task.failed), None)
        name = name or _take(free, task.busy) or next((other for other in counts if other not in task.busy), None)
        if name is not None:
            assigned[task.task] = name
    return assigned


def _take(free: deque[str], excluded: Collection[str]) -> str | None:
    """Remove and return the first free member that is not excluded. The others keep their turn."""
    for index, name in enumerate(free):
        if name not in excluded:
            del free[index]
            return name
    return None
