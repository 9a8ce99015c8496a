"""Compute the cheapest route from a state to a version. This module knows sizes only and asks no store."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import VersionGone

OBJECT_COST = 256 << 10
"""The cost of one request, in bytes: at 60 ms for the first byte, with many requests in parallel at some Gbit/s."""

HOP_COST = 4 << 20
"""The cost of one hop, in bytes. Hops are taken one after the other, and each scans the whole state."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One possible hop: from version `base`, or from nothing if it is None, to `target`.

    `source` is "commit", "skip" or "anchor" if there are files to fetch, "rewind" or "fence" if both versions have the same state, and
    "undo" if the reader has kept the old values.
    """

    base: int | None
    target: int
    bytes: int
    objects: int
    source: str

    @property
    def cost(self) -> int:
        """The cost of the hop in bytes, for comparisons. A hop that fetches and changes nothing is free."""
        hop = 0 if self.source in ("rewind", "fence") else HOP_COST
        return self.bytes + OBJECT_COST * self.objects + hop


@dataclass(frozen=True, slots=True)
class Plan:
    """The hops in the order in which to take them, and their total cost."""

    hops: tuple[Edge, ...]
    cost: int

    @property
    def bytes(self) -> int:
        return sum(hop.bytes for hop in self.hops)


def plan(have: int | None, target: int, edges: Iterable[Edge]) -> Plan:
    """Return the cheapest route to `target`, from version `have` or from nothing. Raises `VersionGone` if there is none.

    If several routes cost the same, the one with the fewest hops is taken, so that the result does not depend on the order of `edges`.
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
    raise VersionGone(f"no remaining route leads to commit {target}{'' if have is None else f' from commit {have}'}.")


def _trace(arrival: dict[int, Edge], target: int, have: int | None) -> list[Edge]:
    hops: list[Edge] = []
    seq: int | None = target
    while seq is not None and seq != have:
        hops.append(arrival[seq])
        seq = arrival[seq].base
    return hops[::-1]
