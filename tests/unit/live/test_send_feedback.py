"""`send_feedback`: which answers of a gateway are asked for again, and which errors it raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from deltawire.errors import FeedbackNotStored, GatewayError, InteractionExpired, InteractionUnknown, RequestMalformed
from deltawire.gateway.http.bodies import error_body
from deltawire.live import send_feedback

httpx = pytest.importorskip("httpx", reason="httpx is not installed")

URL = "http://127.0.0.1:7800"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let a gateway give these answers or errors, the last one again and again. Return the addresses that are asked."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def begin(*answers: Any) -> list[str]:
        left, addresses = list(answers), []

        def post(address: str, **_: Any) -> Any:
            addresses.append(address)
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(httpx, "post", post)
        return addresses

    return begin


def refused(error: GatewayError) -> Any:
    return httpx.Response(error.status, json=error_body(error))


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(404, json={"error": "there is no such route"}),
        httpx.Response(404, html="<p>nothing</p>"),
        httpx.Response(405, json={"detail": "Method Not Allowed"}),
    ],
)
def test_an_address_without_a_gateway_is_asked_once_and_told_about_v1(asked: Callable[..., list[str]], answer: Any) -> None:
    addresses = asked(answer)
    with pytest.raises(RequestMalformed, match=rf"no gateway answers at {URL}/v1: status 40[45]\. Give its address without /v1\.$"):
        send_feedback(f"{URL}/v1", "id", "thumbs", True)
    assert addresses == [f"{URL}/v1/feedback"]


def test_an_unknown_id_is_asked_again_and_then_raises_the_error_of_the_gateway(asked: Callable[..., list[str]]) -> None:
    unknown = refused(InteractionUnknown("there is no inference 7 on which this caller may give feedback."))
    addresses = asked(unknown)
    with pytest.raises(InteractionUnknown, match="there is no inference 7") as raised:
        send_feedback(URL, "7", "thumbs", True)
    assert len(addresses) == 4
    assert ".." not in str(raised.value)
    assert "Send it again" not in str(raised.value)

    asked(unknown, httpx.Response(200, json={}))
    assert send_feedback(URL, "7", "thumbs", True, feedback="one") == "one"


def test_other_refusals_are_final_and_have_their_names(asked: Callable[..., list[str]]) -> None:
    addresses = asked(refused(InteractionExpired("the window of 'thumbs' is over.")))
    with pytest.raises(InteractionExpired, match="the window of 'thumbs' is over") as raised:
        send_feedback(URL, "7", "thumbs", True)
    assert len(addresses) == 1
    assert ".." not in str(raised.value)


@pytest.mark.parametrize("name", ["StoreError", "ValueError", "annotations", "gone"])
def test_only_errors_of_gateways_are_raised_by_name(asked: Callable[..., list[str]], name: str) -> None:
    asked(httpx.Response(400, json={"error": {"type": name, "message": "no."}}))
    with pytest.raises(RequestMalformed, match=r"refuses the feedback: no\.$"):
        send_feedback(URL, "7", "thumbs", True)


def test_what_the_store_did_not_confirm_is_sent_again(asked: Callable[..., list[str]]) -> None:
    failure = refused(FeedbackNotStored("the store did not answer."))
    addresses = asked(failure)
    with pytest.raises(FeedbackNotStored, match="the store did not answer") as raised:
        send_feedback(URL, "7", "thumbs", True)
    assert len(addresses) == 4
    assert ".." not in str(raised.value)
    asked(httpx.ConnectError("refused"), failure, refused(InteractionUnknown("not yet.")), httpx.Response(200, json={}))
    assert send_feedback(URL, "7", "thumbs", True, feedback="one") == "one"


@pytest.mark.parametrize("url", ["127.0.0.1:7800", "localhost:7800", "ftp://127.0.0.1", "http://127.0.0.1:port"])
def test_an_address_that_no_gateway_can_have_is_refused_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_second_try(seconds: float) -> None:
        raise AssertionError("this was tried again")

    monkeypatch.setattr(time, "sleep", no_second_try)
    with pytest.raises(RequestMalformed, match=r"is not the address of a gateway: .* Write http://HOST:PORT.$"):
        send_feedback(url, "7", "thumbs", True)
