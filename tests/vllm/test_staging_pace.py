"""Staging waits between files, so that a GPU spends only a share of its time on it."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

from deltawire.engines.vllm.live.live_staging import LiveStaging  # noqa: E402
from deltawire.engines.vllm.live.staging_pace import StagingPace, memory_bandwidth  # noqa: E402


class Clock:
    """A clock that only sleeping and working move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def paced(clock: Clock, share: float, bandwidth: float | None = 14e9) -> StagingPace:
    return StagingPace(share, bandwidth, clock=lambda: clock.now, sleep=clock.sleep)


def test_files_are_spread_over_time() -> None:
    clock = Clock()
    pace = paced(clock, 0.05)
    pace.begin()
    for _ in range(10):
        clock.now += 0.001
        pace.after(1_000_000)  # the GPU needs 1 ms for it
    assert clock.now == pytest.approx(100 + 10 * 0.001 / 0.05)


def test_a_staging_that_is_slower_than_its_pace_does_not_wait_and_time_before_it_does_not_count() -> None:
    clock = Clock()
    pace = paced(clock, 0.5)
    pace.begin()
    clock.now += 5
    pace.after(1_000_000)
    assert not clock.slept
    clock.now += 60
    pace.begin()
    pace.after(1_000_000)
    assert clock.slept == [pytest.approx(0.002)]


@pytest.mark.parametrize(("share", "bandwidth"), [(1, 14e9), (0.03, None)])
def test_a_whole_gpu_and_a_cpu_never_wait(share: float, bandwidth: float | None) -> None:
    clock = Clock()
    pace = paced(clock, share, bandwidth)
    pace.begin()
    pace.after(1 << 40)
    assert not pace.waits
    assert not clock.slept


def test_a_cpu_has_no_bandwidth_of_a_gpu() -> None:
    assert memory_bandwidth(torch.device("cpu")) is None


def test_threads_get_the_interpreter_soon_while_an_update_is_staged() -> None:
    usual = sys.getswitchinterval()
    seen: list[float] = []

    class Weights:
        @property
        def version(self) -> None:
            seen.append(sys.getswitchinterval())

    staging = LiveStaging(Weights(), None)  # type: ignore[arg-type]
    staging.prepare(1)
    staging.wait()
    assert seen == [pytest.approx(1e-4, rel=0.1)]
    assert staging.error is not None
    assert sys.getswitchinterval() == usual
    staging.close()
