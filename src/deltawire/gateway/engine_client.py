"""Sends HTTP requests to engines with aiohttp, and says of a request without an answer whether the engine may have got it.

The client uses no proxy, follows no redirect, keeps no cookies, verifies certificates, and passes bodies on as they arrive.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

from .http.stoppable import Stoppable

_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 3600.0
"""A request may wait this long for the next bytes of its answer: an engine that swaps or is paused keeps its requests."""
_MOST_IDLE = 256
"""The most connections to an engine that stay open between requests."""
_IDLE_SECONDS = 30.0
_LARGE = 1 << 20
_MOST_LINE, _MOST_HEADERS = 16 << 10, 128
"""The limits of the head of an answer: the bytes of a line, and the lines."""


class NoAnswer(Exception):
    """The engine did not answer, or not to the end.

    Parameters
    ----------
    reason
        What happened.
    was_sent
        Whether the engine may have got the request.
    short
        What happened, for callers of the gateway: it names no host and no program. By default it is the reason.
    """

    def __init__(self, reason: str, *, was_sent: bool, short: str | None = None) -> None:
        super().__init__(reason)
        self.was_sent = was_sent
        self.short = short or reason


class EngineResponse:
    """The status and the body of an answer. `close` it in any case.

    Parameters
    ----------
    response
        The response of aiohttp.
    client
        The client that counts it.
    """

    def __init__(self, response: Any, client: EngineClient) -> None:
        self._response, self._client = response, client
        self.status = int(response.status)
        self.kind: str = response.headers.get("content-type", "application/json")
        """The content type."""

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises `NoAnswer` if it breaks off."""
        import aiohttp

        content = self._response.content
        while True:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                raise _no_answer(error, was_sent=True, begun=True) from None
            if chunk:
                yield chunk
            elif content.at_eof():
                return

    def close(self) -> None:
        """Let another request use the connection, or close it if the body was not read to its end."""
        self._response.close()
        self._client.ended()


class EngineClient:
    """Sends requests to engines. Use it as a context, on one event loop."""

    def __init__(self) -> None:
        self._session: Any = None
        self._busy = 0

    async def __aenter__(self) -> EngineClient:
        import aiohttp

        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(), limit=0, keepalive_timeout=_IDLE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept-encoding"),
            auto_decompress=False,
            trust_env=False,
            max_line_size=_MOST_LINE,
            max_field_size=_MOST_LINE,
            max_headers=_MOST_HEADERS,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, url: str, headers: Mapping[str, str], *, seconds: float) -> EngineResponse:
        """Send a GET. Raises `NoAnswer` if the head of the answer does not arrive within `seconds`.

        Parameters
        ----------
        url
            The address.
        headers
            The headers.
        seconds
            Seconds that the engine has for the head of its answer, and then for each next piece of it.
        """
        return await self._begin("GET", url, None, headers, seconds)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> EngineResponse:
        """Send a POST. Raises `NoAnswer` if there is no head of an answer.

        Parameters
        ----------
        url
            The address.
        body
            The body.
        headers
            The headers.
        """
        data = body if len(body) < _LARGE else io.BytesIO(body)  # aiohttp sends bytes at once, and a file in pieces
        return await self._begin("POST", url, data, headers, _SILENT_SECONDS)

    def ended(self) -> None:
        """Count a response that was closed."""
        self._busy -= 1

    async def _begin(
        self, method: str, url: str, body: bytes | io.BytesIO | None, headers: Mapping[str, str], seconds: float
    ) -> EngineResponse:
        import aiohttp

        own = {**headers, "accept-encoding": "identity"}
        if self._busy >= _MOST_IDLE:
            own["connection"] = "close"  # aiohttp has no limit of its own for connections that stay open
        patience = aiohttp.ClientTimeout(total=None, connect=min(seconds, _CONNECT_SECONDS), sock_read=seconds)
        self._busy += 1
        try:
            with Stoppable(seconds + _CONNECT_SECONDS):  # an engine may also stop to read the request
                found = await self._session.request(method, url, data=body, headers=own, allow_redirects=False, timeout=patience)
        except BaseException as error:
            self._busy -= 1
            if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
                raise _no_answer(error, was_sent=False) from None
            if isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, OSError)):
                raise _no_answer(error, was_sent=True) from None
            raise
        response = EngineResponse(found, self)
        if not 200 <= response.status < 600:  # aiohttp does not check it, and the server of the gateway can send no others
            response.close()
            raise NoAnswer(f"it answered with status {response.status}", was_sent=True)
        return response


def _no_answer(error: BaseException, *, was_sent: bool, begun: bool = False) -> NoAnswer:
    """Return what an error of aiohttp means.

    Parameters
    ----------
    error
        The error.
    was_sent
        Whether the engine may have got the request.
    begun
        Whether the head of the answer was there.
    """
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        short = "its certificate is not trusted"
    elif not was_sent:
        short = "it accepts no connection"
    elif isinstance(error, asyncio.TimeoutError):
        short = "it was silent for too long"
    elif begun:
        short = "it ended its answer early"
    elif isinstance(error, (aiohttp.ServerDisconnectedError, OSError)):
        short = "it closed the connection without an answer"
    else:
        short = "its answer is not HTTP"
    told = str(error).replace(" ssl:default", "")  # aiohttp says this of addresses without TLS, too
    return NoAnswer(f"{short} ({type(error).__name__}: {told[:200]})", was_sent=was_sent, short=short)
