"""Retries are bounded and jittered, and only repeat calls that are safe to repeat."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from deltawire.cli.stores.opened import RetryNotices, opened
from deltawire.errors import ObjectMissing, OutcomeUnknown, StoreUnavailable
from deltawire.events import Event
from deltawire.store.remote import RemoteStore
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


def test_every_repetition_is_reported_before_its_pause() -> None:
    told: list[object] = []

    def attempt() -> None:
        raise StoreUnavailable("no answer.")

    with pytest.raises(StoreUnavailable):
        Retry(2, sleep=lambda _: told.append("pause"), on_event=lambda event: told.append((event.name, dict(event.fields)))).call(attempt)
    reason = str(StoreUnavailable("no answer."))
    expected = [("retrying", {"reason": reason, "attempt": number, "attempts": 3}) for number in (2, 3)]
    assert told == [expected[0], "pause", expected[1], "pause"]


def test_commands_say_that_a_store_does_not_answer_while_they_try_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound but not listening, so connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        seen: list[str] = []
        with opened("s3://bucket/run") as store:
            assert isinstance(store, RemoteStore)
            store._retry = replace(store._retry, retries=2, sleep=lambda _: seen.append(capsys.readouterr().err))
            with pytest.raises(StoreUnavailable):
                store.get("HEAD", limit=9)
    assert seen == [f"the store did not answer; trying again ({number} of 3)\n" for number in (2, 3)]


def test_requests_that_fail_side_by_side_are_reported_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    tell = RetryNotices(clock=lambda: now[0])
    for seconds, attempt in ((0, 2), (1, 2), (1, 3), (2, 2), (60, 2)):
        now[0] = seconds
        tell(Event("retrying", {"reason": "no answer.", "attempt": attempt, "attempts": 7}))
    assert [line.rpartition("(")[2] for line in capsys.readouterr().err.splitlines()] == ["2 of 7)", "3 of 7)", "2 of 7)"]
