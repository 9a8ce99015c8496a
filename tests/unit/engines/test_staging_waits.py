"""A sidecar asks workers seldom whether they have staged a version, and learns soon that they have."""

import pytest

from deltawire.engines.vllm.driver.server_replica import wait_before_asking


def asked_until(seconds: float, last: float) -> tuple[int, float]:
    """Return the number of questions until a staging of this many seconds has ended, and when the last question was asked."""
    elapsed, asked = 0.0, 0
    while elapsed < seconds:
        elapsed += wait_before_asking(elapsed, last)
        asked += 1
    return asked, elapsed


@pytest.mark.parametrize("seconds", [0.05, 0.2, 1.0, 2.0])
def test_two_or_three_questions_are_enough_for_versions_that_take_equally_long(seconds: float) -> None:
    last = 0.0
    for number in range(10):
        asked, found = asked_until(seconds, last)
        assert found <= 1.5 * seconds
        assert asked <= (4 if number else 20)
        last = found


@pytest.mark.parametrize(("seconds", "last"), [(0.001, 0.0), (0.001, 0.1), (0.3, 0.001), (60.0, 0.1), (0.05, 60.0)])
def test_a_version_that_takes_longer_or_shorter_is_not_waited_for_long(seconds: float, last: float) -> None:
    asked, found = asked_until(seconds, last)
    assert found <= max(1.2 * seconds, 0.8 * last, 0.01) or found <= 2.1
    assert asked <= 20 + 4 * 60
