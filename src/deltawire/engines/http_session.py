"""Requests to the HTTP server of an engine. All adapters use this client.

Requests never go through a proxy, even if `http_proxy` or a similar variable is set. Engines run on the same machine or in the same
network, which a proxy may not reach, and a proxy would see the engines' keys. Redirects are not followed, for the same reason.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_CONNECT_SECONDS = 10.0
"""A server must accept a connection within this time."""
_MOST_BYTES = 1 << 30
"""The most bytes of an answer. Sixteen completions of 32,000 tokens with the routed experts of 48 layers take half of it."""


class NoAnswer(Exception):
    """The server did not answer.

    Parameters
    ----------
    reason
        What failed.
    refused
        True if the server accepts no connections. Otherwise it may only be slow.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server."""

    status: int
    content: bytes
    content_type: str = ""

    @property
    def is_page(self) -> bool:
        """True if the content is a page for browsers, which no engine sends."""
        return self.content_type.startswith(("text/html", "application/xhtml"))

    @property
    def text(self) -> str:
        """The beginning of the content, for error messages. For a page, only its type."""
        if self.is_page:
            return f"the answer is a page ({self.content_type[:80]})"
        return self.content[:2000].decode(errors="replace")


class PendingAnswer:
    """A request that the server is answering."""

    def __init__(self, future: concurrent.futures.Future[Answer]) -> None:
        self._future = future

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for at most this many seconds, or without limit. Returns whether the request has ended."""
        return bool(concurrent.futures.wait([self._future], seconds).done)

    def answer(self) -> Answer:
        """Wait for the answer. Raises `NoAnswer` if there is none."""
        try:
            return self._future.result()
        except concurrent.futures.CancelledError as error:
            raise NoAnswer("the request was cancelled") from error

    def cancel(self) -> None:
        """Close the connection if there is no answer yet. The server then stops its work for this request."""
        self._future.cancel()


def check_server_url(url: str) -> str:
    """Return the address of a server, without a slash at its end. Raises `ValueError` if it is not one.

    Parameters
    ----------
    url
        The address, such as http://127.0.0.1:8000.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        is_address = False
    if not is_address:
        raise ValueError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
    return url.rstrip("/")


class HttpSession:
    """Sends any number of requests at a time to the server at one address. `http_session` creates it."""

    def __init__(self, url: str, portal: Any, client: Any) -> None:
        self._url = url.rstrip("/")
        self._portal = portal
        self._client = client
        self._pending: set[PendingAnswer] = set()

    def begin(
        self, method: str, route: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout: float
    ) -> PendingAnswer:
        """Send a request, with `body` as JSON unless it is None. It fails if nothing arrives for `timeout` seconds."""
        sending = functools.partial(self._send, method, route, body, dict(headers or {}), timeout)
        future = self._portal.start_task_soon(sending)
        pending = PendingAnswer(future)
        self._pending.add(pending)
        future.add_done_callback(lambda _: self._pending.discard(pending))  # a session may last as long as its process
        return pending

    def ask(self, method: str, route: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout: float) -> Answer:
        """Send a request and wait for the answer. Raises `NoAnswer` if there is none."""
        return self.begin(method, route, body, headers=headers, timeout=timeout).answer()

    def cancel(self) -> None:
        """Cancel all requests that have no answer."""
        for pending in tuple(self._pending):
            pending.cancel()

    async def _send(self, method: str, route: str, body: Any, headers: dict[str, str], timeout: float) -> Answer:
        import httpx

        try:
            patience = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
            content: dict[str, Any] = {} if body is None else {"json": body}
            async with self._client.stream(method, self._url + route, headers=headers, timeout=patience, **content) as response:
                parts, size = [], 0
                async for part in response.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > _MOST_BYTES:
                        raise NoAnswer(f"{self._url}{route}: the answer has more than {_MOST_BYTES:,} bytes")
                return Answer(response.status_code, b"".join(parts), response.headers.get("content-type", ""))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise NoAnswer(f"{self._url}{route}: {reason}", refused=_is_refusal(error)) from error


@contextlib.contextmanager
def http_session(url: str) -> Iterator[HttpSession]:
    """Open a session with the server at `url`. When the context ends, requests without an answer are cancelled."""
    import anyio.from_thread
    import httpx

    # Certificates are loaded only for TLS, because that is slow.
    verify: ssl.SSLContext | bool = ssl.create_default_context() if url.lower().startswith("https:") else False
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(httpx.AsyncClient(trust_env=False, verify=verify, limits=limits)) as client,
    ):
        session = HttpSession(url, portal, client)
        try:
            yield session
        finally:
            session.cancel()


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether a connection was refused. The HTTP libraries wrap that error several times."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError) or any(_is_refusal(one) for one in getattr(error, "exceptions", ())):
            return True
        error = error.__cause__ or error.__context__
    return False
