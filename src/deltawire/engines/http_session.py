"""Requests to the HTTP server of an engine: the one client for all of them.

Requests never go through a proxy, whatever `http_proxy` and its relatives say. Engines run on the same machine or beside it, a proxy knows
neither, and it would see the engines' keys. Redirects are not followed, for the same reason.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_CONNECTING = 10.0
"""Seconds that a server may take to accept a connection."""


class NoAnswer(Exception):
    """The server did not answer. `refused` says that it takes no connections at all; otherwise it may only be slow."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The beginning of the content, for error messages."""
        return self.content[:2000].decode(errors="replace")


class PendingAnswer:
    """A request that is being answered."""

    def __init__(self, future: concurrent.futures.Future[Answer]) -> None:
        self._future = future

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most so many seconds. Returns whether the request is over."""
        return bool(concurrent.futures.wait([self._future], seconds).done)

    def answer(self) -> Answer:
        """Wait for the answer. Raises `NoAnswer` if there is none."""
        try:
            return self._future.result()
        except concurrent.futures.CancelledError as error:
            raise NoAnswer("the request was given up") from error

    def cancel(self) -> None:
        """Hang up, if there is no answer yet. A server ends what it does for a client that is gone."""
        self._future.cancel()


class HttpSession:
    """Requests to the server at one address, any number of them at a time. Made by `http_session`."""

    def __init__(self, url: str, portal: Any, client: Any) -> None:
        self._url = url.rstrip("/")
        self._portal = portal
        self._client = client
        self._pending: list[PendingAnswer] = []

    def begin(
        self, method: str, route: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout: float
    ) -> PendingAnswer:
        """Send a request, with `body` as JSON unless it is None. It fails after `timeout` seconds in which nothing arrives."""
        sending = functools.partial(self._send, method, route, body, dict(headers or {}), timeout)
        pending = PendingAnswer(self._portal.start_task_soon(sending))
        self._pending.append(pending)
        return pending

    def ask(self, method: str, route: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout: float) -> Answer:
        """Send a request and wait for the answer. Raises `NoAnswer` if there is none."""
        return self.begin(method, route, body, headers=headers, timeout=timeout).answer()

    def cancel(self) -> None:
        """Give up all requests that are not answered."""
        for pending in self._pending:
            pending.cancel()

    async def _send(self, method: str, route: str, body: Any, headers: dict[str, str], timeout: float) -> Answer:
        import httpx

        try:
            patience = httpx.Timeout(timeout, connect=min(timeout, _CONNECTING))
            content: dict[str, Any] = {} if body is None else {"json": body}
            response = await self._client.request(method, self._url + route, headers=headers, timeout=patience, **content)
            return Answer(response.status_code, response.content)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise NoAnswer(f"{self._url}{route}: {reason}", refused=_is_refusal(error)) from error


@contextlib.contextmanager
def http_session(url: str) -> Iterator[HttpSession]:
    """Open a session with the server at `url`. Requests that are not answered when the context ends are given up."""
    import anyio.from_thread
    import httpx

    # Certificates are only looked for where there is TLS: that takes a while.
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
    """Whether a connection was refused. The clients wrap that error several times."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError) or any(_is_refusal(one) for one in getattr(error, "exceptions", ())):
            return True
        error = error.__cause__ or error.__context__
    return False
