"""The workload of a run that exists already, from the commits of its chain. Pure.

Other processes wrote the commits, so all their numbers are bounded before they are used.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UnusablePlan
from ..format.records.version_records import Commit
from .workload import DENSITIES, Workload

READ_COMMITS = 64
"""The number of the newest versions that a plan is made from."""


@dataclass(frozen=True, slots=True)
class ChainFigures:
    """The figures of a run, from the newest versions of its chain.

    Parameters
    ----------
    workload
        The full size of the newest version, and the mean size of the deltas.
    deltas
        The number of deltas that the mean is over.
    step_seconds
        The median of the seconds from one version to the next, by the trainer's clock. None if there is no usable one.
    """

    workload: Workload
    deltas: int
    step_seconds: float | None


def figures_of(commits: Sequence[Commit], *, full_every: int | None = None, steps: int = 1000) -> ChainFigures:
    """Return the figures of the newest versions of a chain.

    Parameters
    ----------
    commits
        The versions, oldest first, without abandoned ones.
    full_every, steps
        As for `Workload`.
    """
    deltas = [commit for commit in commits if commit.kind == "delta"]
    if not deltas:
        raise UnusablePlan(
            "None of the newest versions of this chain is a delta, so the size of a step is not known.",
            hint="Publish another version, or give --params instead of --from.",
        )
    size = max(1.0, statistics.fmean(commit.stored_bytes for commit in deltas))
    full = max(1.0, float(deltas[-1].state_bytes))
    recipe = deltas[-1].recipe
    density = DENSITIES.get("bf16" if recipe is None else recipe.name, DENSITIES["bf16"])
    work = Workload(full, size, min(size * density.xor_ratio, max(full, size)), full_every, steps)
    gaps = [(after.time - before.time) / 1000 for before, after in itertools.pairwise(commits)]
    usable = [gap for gap in gaps if 1e-3 <= gap <= 1e7]
    return ChainFigures(work, len(deltas), statistics.median(usable) if usable else None)
