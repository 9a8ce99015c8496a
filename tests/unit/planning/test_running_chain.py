"""Figures of a run that exists, from its commits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltawire.errors import UnusablePlan
from deltawire.format.records.record_parts import FileEntry, RecipeRecord
from deltawire.format.records.version_records import Commit
from deltawire.planning.running_chain import figures_of


def commit(seq: int, seconds: float, size: int, kind: str = "delta") -> Commit:
    file = FileEntry(key=f"{seq}", blake3="0" * 64, size=size, raw=size, first=0, count=1)
    return Commit(
        id="run", seq=seq, epoch=1, nonce="0", kind=kind, parent=None, links=(), base=None, state_seq=seq, updates=seq, digest=None,
        state_bytes=10_000, tensors=1, changed=1, step=seq, time=int(1000 * seconds), files=(file,),
    )  # fmt: skip


def test_sizes_are_means_of_deltas_and_times_are_medians() -> None:
    found = figures_of([commit(1, 0, 10_000, "anchor"), commit(2, 40, 100), commit(3, 80, 300), commit(4, 1000, 200)], steps=7)
    assert found.deltas == 3
    assert (found.workload.state_bytes, found.workload.delta_bytes, found.workload.steps) == (10_000, 200, 7)
    assert found.workload.xor_bytes == pytest.approx(200 * 3.19)
    assert found.step_seconds == 40


def test_the_recipe_chooses_the_density_and_an_unknown_one_counts_as_bf16() -> None:
    for name, ratio in (("nvfp4", 2.82), ("of another release", 3.19)):
        assert figures_of([replace(commit(1, 0, 100), recipe=RecipeRecord(name, 1))]).workload.xor_bytes == pytest.approx(100 * ratio)


@pytest.mark.parametrize("times", [(0, 0, 0), (9, 5, 1), (0, 1e9, 3e9)])
def test_impossible_times_are_not_used(times: tuple[float, float, float]) -> None:
    assert figures_of([commit(seq, time, 1) for seq, time in enumerate(times)]).step_seconds is None


def test_empty_deltas_and_sizes_beyond_all_bounds() -> None:
    assert figures_of([commit(1, 0, 0)]).workload.delta_bytes == 1
    with pytest.raises(UnusablePlan):
        figures_of([commit(1, 0, 1 << 62)])
    with pytest.raises(UnusablePlan):
        figures_of([commit(1, 0, 100, "anchor")])
    with pytest.raises(UnusablePlan):
        figures_of([])
