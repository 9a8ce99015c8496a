"""The cheapest way from the state at hand to a version. Pure: it knows sizes, not stores."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import VersionGone

OBJECT_COST = 256 << 10
"""What a request is worth, in bytes: at 60 ms for the first byte, and many at a time over a line of some Gbit/s."""

HOP_COST = 4 << 20
"""What a hop is worth: hops are done one after the other, and each scans the whole state."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One way to a version: from version `base`, or from nothing if that is None.

    `source` says by what: "commit", "skip", "anchor" (files to fetch), "rewind", "fence" (the same state under another number), or "undo"
    (values that the reader itself has kept).
    """

    base: int | None
    target: int
    bytes: int
    objects: int
    source: str

    @property
    def cost(self) -> int:
        """Comparable between edges; free where there is nothing to fetch and nothing to change."""
        hop = 0 if self.source in ("rewind", "fence") else HOP_COST
        return self.bytes + OBJECT_COST * self.objects + hop


@dataclass(frozen=True, slots=True)
class Plan:
    """The hops in the order to take them, and what they cost in all."""

    hops: tuple[Edge, ...]
    cost: int

    @property
    def bytes(self) -> int:
        return sum(hop.bytes for hop in self.hops)


def plan(have: int | None, target: int, edges: Iterable[Edge]) -> Plan:
    """The cheapest way to `target` from version `have`, or from nothing, which is always at hand too. `VersionGone` if there is none.

    Among ways of equal cost the one with fewer hops is taken, so that the answer does not depend on the order of `edges`.
    """
    leaving: dict[int | None, list[Edge]] = defaultdict(list)
    for edge in edges:
        leaving[edge.base].append(edge)
    best: dict[int, tuple[int, int]] = {}
    arrival: dict[int, Edge] = {}
    queue: list[tuple[int, int, int, int]] = []

    def reach(edge: Edge, cost: int, hops: int) -> None:
        found = cost + edge.cost, hops + 1
        if edge.target not in best or found < best[edge.target]:
            best[edge.target] = found
            arrival[edge.target] = edge
            heapq.heappush(queue, (*found, -edge.target, edge.target))

    if have is not None:
        best[have] = 0, 0
        queue.append((0, 0, -have, have))
    for edge in leaving[None]:
        reach(edge, 0, 0)
    while queue:
        cost, hops, _, seq = heapq.heappop(queue)
        if seq == target:
            return Plan(tuple(_trace(arrival, target, have)), cost)
        if (cost, hops) == best[seq]:
            for edge in leaving.get(seq, ()):
                reach(edge, cost, hops)
    raise VersionGone(f"nothing that is left leads to commit {target}{'' if have is None else f' from commit {have}'}.")


def _trace(arrival: dict[int, Edge], target: int, have: int | None) -> list[Edge]:
    hops: list[Edge] = []
    seq: int | None = target
    while seq is not None and seq != have:
        hops.append(arrival[seq])
        seq = arrival[seq].base
    return hops[::-1]
