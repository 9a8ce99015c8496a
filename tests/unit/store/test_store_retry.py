"""Repetition is bounded, jittered, and only for what may be repeated."""

from __future__ import annotations

import pytest

from deltawire.errors import ObjectMissing, OutcomeUnknown, StoreUnavailable
from deltawire.store.retry import Retry


def test_it_repeats_until_success_with_growing_pauses() -> None:
    pauses: list[float] = []
    failures = [StoreUnavailable("once"), StoreUnavailable("twice"), StoreUnavailable("thrice")]

    def attempt() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert Retry(5, first=1.0, longest=3.0, sleep=pauses.append, draw=lambda: 0.0).call(attempt) == "done"
    assert pauses == [0.5, 1.0, 1.5]


def test_it_gives_up_with_the_last_error() -> None:
    pauses: list[float] = []
    count = 0

    def attempt() -> None:
        nonlocal count
        count += 1
        raise StoreUnavailable(f"attempt {count}")

    with pytest.raises(StoreUnavailable, match="attempt 4"):
        Retry(3, sleep=pauses.append).call(attempt)
    assert len(pauses) == 3


@pytest.mark.parametrize("error", [OutcomeUnknown("x"), ObjectMissing("x"), KeyError("x")])
def test_it_repeats_nothing_else(error: Exception) -> None:
    count = 0

    def attempt() -> None:
        nonlocal count
        count += 1
        raise error

    with pytest.raises(type(error)):
        Retry(3, sleep=lambda _: None).call(attempt)
    assert count == 1


def test_pauses_are_drawn_from_the_upper_half() -> None:
    for draw in (0.0, 0.5, 0.999):
        pauses: list[float] = []

        def attempt() -> None:
            raise StoreUnavailable("x")

        with pytest.raises(StoreUnavailable):
            Retry(1, first=2.0, sleep=pauses.append, draw=lambda draw=draw: draw).call(attempt)  # type: ignore[misc]
        assert 1.0 <= pauses[0] <= 2.0
