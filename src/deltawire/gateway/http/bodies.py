"""Reads the bodies of requests and writes answers, for plain ASGI applications. The memory that a request takes is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from ...errors import GatewayError, RequestMalformed, RequestSlow, RequestTooLarge
from .memory import MemoryBudget, Reservation, json_memory
from .stoppable import Stoppable

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = Mapping[str, str]


BODY_SECONDS = 120.0
"""A body must be complete after this time. Otherwise a few callers who send slowly could take all connections."""
DISCARDED_SECONDS, DISCARDED_BYTES = 5.0, 64 << 20
"""The time and the bytes for the rest of a refused body (`discard_body`)."""
_PIECE = 64 << 10
_MOST_VALUES = 2_000_000
"""The most values of a JSON body. An empty list has 3 bytes in a body and 64 in memory."""


class CallerGone(Exception):
    """The caller has closed its connection."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request by their names in lower case. If several have one name, the last counts."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(
    receive: Receive, headers: Headers, most: int, *, memory: Reservation | None = None, seconds: float = BODY_SECONDS
) -> bytes:
    """Return the body of a request. Its memory is reserved while it arrives, so that a caller who sends nothing takes none.

    Raises `RequestTooLarge` as soon as it is known to be too large, `GatewayFull`, `RequestSlow` if it takes too long, and `CallerGone`.
    """
    memory = memory or MemoryBudget().reservation()
    try:
        with Stoppable(seconds):
            return await _read_body(receive, headers, most, memory)
    except asyncio.TimeoutError:
        raise RequestSlow(f"the body was not complete after {seconds:g} s.") from None


async def discard_body(receive: Receive) -> None:
    """Read what is left of a body, and keep nothing of it.

    A server that closes a connection before it has read everything resets it. The caller may then never see the answer.
    """
    with contextlib.suppress(asyncio.TimeoutError), Stoppable(DISCARDED_SECONDS):
        await _discard_body(receive)


async def _discard_body(receive: Receive) -> None:
    left = DISCARDED_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body"):
            return


async def _read_body(receive: Receive, headers: Headers, most: int, memory: Reservation) -> bytes:
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit():
        if len(length) > 18 or int(length) > most:
            raise RequestTooLarge(f"the body has {length[:24]} bytes; {most:,} are allowed.")
        memory.check(2 * int(length))  # otherwise it would be refused when half of it has arrived
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise RequestTooLarge(f"the body has more than {most:,} bytes.")
        memory.add(2 * len(part))  # the part, and the whole body
        parts.append(part)
        if not message.get("more_body"):
            break
    body = b"".join(parts)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("gzip", "deflate"):
        return _inflated(body, most, memory)
    if encoding not in ("", "identity"):
        raise RequestMalformed(f"the body has the encoding {encoding[:40]!r}; gzip and deflate are known.")
    return body


def _inflated(body: bytes, most: int, memory: Reservation) -> bytes:
    stream = zlib.decompressobj(wbits=47)  # gzip or zlib
    parts, size = [], 0
    try:
        for start in range(0, len(body), _PIECE):
            left = body[start : start + _PIECE]
            while left and not stream.eof:
                parts.append(stream.decompress(left, _PIECE))
                left = stream.unconsumed_tail
                size += len(parts[-1])
                if size > most:
                    raise RequestTooLarge(f"the body expands to more than {most:,} bytes.")
                memory.add(2 * len(parts[-1]))
    except zlib.error as error:
        raise RequestMalformed(f"the body cannot be decompressed: {error}.") from None
    if not stream.eof:
        raise RequestMalformed("the compressed body ends early.")
    return b"".join(parts)


def parse_object(body: bytes, memory: Reservation | None = None) -> dict[str, Any]:
    """Return the JSON object in a body.

    Raises `RequestMalformed` for anything else, `RequestTooLarge` if it has too many values, and `GatewayFull` if it does not fit into the
    memory.
    """
    if memory is not None:
        memory.add(json_memory(body))
    if len(body) > _MOST_VALUES and body.count(b",") + body.count(b"[") + body.count(b"{") > _MOST_VALUES:
        raise RequestTooLarge(f"the body has more than {_MOST_VALUES:,} values.")
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestMalformed("the body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise RequestMalformed(f"the body is not JSON: its byte {error.start:,} is not UTF-8.") from None
    except (json.JSONDecodeError, _NoConstant) as error:
        raise RequestMalformed(f"the body is not JSON: {str(error)[:200]}.") from None
    except ValueError:  # Python reads no numbers with thousands of digits
        raise RequestMalformed("the body has a number with too many digits.") from None
    if not isinstance(found, dict):
        raise RequestMalformed(f"the body is a {type(found).__name__} instead of a JSON object.")
    return found


class _NoConstant(ValueError):
    """NaN and the like are no numbers of JSON."""


def _refuse_constant(name: str) -> Any:
    raise _NoConstant(f"{name} is not a number in JSON")


def dump(value: Any) -> bytes:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def error_body(error: GatewayError) -> dict[str, Any]:
    """Return an error as OpenAI's clients expect it."""
    return {"error": {"message": str(error), "type": type(error).__name__, "param": None, "code": error.status}}


async def send_json(send: Send, value: Any, *, status: int = 200, headers: Headers | None = None) -> None:
    """Send an answer in JSON."""
    await send_bytes(send, dump(value), "application/json", status=status, headers=headers)


async def send_bytes(send: Send, data: bytes, kind: str, *, status: int = 200, headers: Headers | None = None) -> None:
    """Send a whole answer."""
    listed = {"content-type": kind, "content-length": str(len(data)), **(headers or {})}
    await send_start(send, status, listed)
    await send({"type": "http.response.body", "body": data})


async def send_start(send: Send, status: int, headers: Headers) -> None:
    """Send the beginning of an answer."""
    pairs = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def until_gone(receive: Receive) -> None:
    """Return when the caller has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
