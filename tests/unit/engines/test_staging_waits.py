"""A sidecar asks workers seldom whether they have staged a version, and learns soon that they have. Time is virtual."""

from collections.abc import Callable

import pytest

from deltawire.engines.vllm.driver.staging_waits import StagingWaits

MB = 1_000_000


class Asking:
    """Stages versions with workers that take a known time, and asks them when `StagingWaits` says."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self._waits = StagingWaits()

    def stage(self, size: int) -> tuple[int, float]:
        """Return the number of questions about a version of this size, and how late the last one came, in seconds."""
        self._waits.begin(size)
        end, elapsed, asked = self._seconds(size), 0.0, 0
        while elapsed < end:
            elapsed += self._waits.next(elapsed)
            asked += 1
        self._waits.note(elapsed)
        return asked, elapsed - end


def of_a_gpu(size: int) -> float:
    """The seconds of a GPU, which decodes blocks of all weights at a fixed pace. An H200 takes this time for 8.2 billion weights."""
    return 0.957


def of_a_cpu(size: int) -> float:
    return 0.02 + 0.01 * size / MB


def mostly_fixed(size: int) -> float:
    return 0.8 + 0.002 * size / MB


@pytest.mark.parametrize("seconds", [0.02, 0.2, 0.957, 1.246, 2.0, 30.0])
def test_few_questions_are_enough_for_versions_that_take_equally_long(seconds: float) -> None:
    asking = Asking(lambda size: seconds)
    asking.stage(93 * MB)
    for _ in range(10):
        asked, late = asking.stage(93 * MB)
        assert late <= max(0.06 * seconds, 0.005)
    assert asked <= 4 + seconds
    assert late <= max(0.02 * seconds, 0.005)


@pytest.mark.parametrize("seconds", [of_a_gpu, of_a_cpu, mostly_fixed])
@pytest.mark.parametrize(("before", "after"), [(400 * MB, 4 * MB), (4 * MB, 400 * MB), (93 * MB, 9 * MB), (9 * MB, 93 * MB)])
def test_a_version_of_another_size_is_learnt_soon(seconds: Callable[[int], float], before: int, after: int) -> None:
    asking = Asking(seconds)
    for _ in range(3):
        asking.stage(before)
    asked, late = asking.stage(after)
    assert late <= 0.3 * seconds(after)
    assert asked <= 22 + seconds(after)
    for size in (before, after, before, after):  # now it is known how the time depends on the size
        asked, late = asking.stage(size)
        assert late <= max(0.15 * seconds(size), 0.005)
        assert asked <= 14 + seconds(size)


def test_an_answer_that_was_expected_much_later_is_learnt_within_a_second() -> None:
    times = iter([40.0, 0.957, 0.957])
    asking = Asking(lambda size: next(times))
    asking.stage(93 * MB)
    assert asking.stage(93 * MB)[1] <= 1.0
    assert asking.stage(93 * MB)[1] <= 0.3


def test_a_version_that_takes_longer_than_expected_is_asked_about_ever_more_seldom() -> None:
    times = iter([0.05, 60.0])
    asking = Asking(lambda size: next(times))
    asking.stage(MB)
    asked, late = asking.stage(MB)
    assert late <= 0.25
    assert asked <= 40 + 60 / 0.25


def test_the_first_version_is_not_waited_for_long() -> None:
    asked, late = Asking(of_a_gpu).stage(93 * MB)
    assert late <= 0.25
    assert asked <= 16


def test_a_version_that_needs_no_decoding_says_nothing_about_the_next_one() -> None:
    asking = Asking(lambda size: 0.957 if size else 0.004)
    for _ in range(3):
        asking.stage(93 * MB)
    assert asking.stage(0) == (1, pytest.approx(0.001))
    asked, late = asking.stage(93 * MB)
    assert asked <= 4
    assert late <= 0.02
