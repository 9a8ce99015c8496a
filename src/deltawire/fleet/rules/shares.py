"""Dividing work in proportion to weights: the arithmetic of the scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fill(total: float, weights: Sequence[float], held: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Pour `total` into vessels that hold some already, so that they come level, height being content over weight.

    No vessel gets more than its room; what none has room for is not poured. Weights are positive. The result is exact water-filling: nobody
    gets any while somebody with room stands lower.
    """
    edges = sorted(
        [(h / w, w) for w, h, room in zip(weights, held, rooms, strict=True) if room > 0]
        + [((h + room) / w, -w) for w, h, room in zip(weights, held, rooms, strict=True) if room > 0]
    )
    level, width, left = 0.0, 0.0, float(total)
    for height, change in edges:
        poured = width * (height - level)
        if poured >= left and width > 0:
            break
        left -= poured
        level, width = height, width + change
    else:
        return [max(0.0, room) for room in rooms]
    level += left / width
    return [min(max(0.0, level * w - h), max(0.0, room)) for w, h, room in zip(weights, held, rooms, strict=True)]


def largest_remainders(total: int, wanted: Sequence[float]) -> list[int]:
    """Whole numbers that sum up to `total`, each within one of what is wanted (which sums up to about `total`). Ties go to the first."""
    counts = [math.floor(x + 1e-9) for x in wanted]
    order = sorted(range(len(wanted)), key=lambda index: counts[index] - wanted[index])
    missing = total - sum(counts)
    for index in order[:missing] if missing >= 0 else order[missing:]:
        counts[index] += 1 if missing > 0 else -1
    return counts
