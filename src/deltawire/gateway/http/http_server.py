"""Serves an ASGI application with uvicorn until an event is set. The head of a request has a limit, and bad ones fill no log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from ...addresses import listening_socket, naming_address

ENDING_SECONDS = 10.0
"""Answers that were begun have this long to end."""

_BACKLOG = 2048
_MOST_HEAD = 64 << 10
HEAD_SECONDS = 60.0
"""The head of a request must be complete this long after its first byte, and the first one this long after the connection was made."""


def _errors_only() -> logging.Logger:
    """Return a logger that passes errors on to uvicorn's, and no warnings."""
    logger = logging.Logger("uvicorn.error.deltawire", logging.ERROR)
    logger.parent = logging.getLogger("uvicorn.error")
    return logger


_ERRORS_ONLY = _errors_only()


def _quiet(protocol: Any, on_bad_head: Callable[[], object]) -> Any:
    """Return a protocol class of uvicorn that logs no warnings, because everybody who connects can cause them without end.

    Parameters
    ----------
    protocol
        The class.
    on_bad_head
        Called for each request that is refused because it is not HTTP, or because its head is too long.
    """

    class QuietHttp(protocol):  # type: ignore[misc,unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.logger = _ERRORS_ONLY

        def send_400_response(self, msg: str) -> None:
            on_bad_head()
            super().send_400_response(msg)

    return QuietHttp


def bounded_http(on_bad_head: Callable[[], object] = lambda: None) -> Any:
    """Return the protocol class for uvicorn, whose own class for httptools sets no limit. The one in Python, "h11", does.

    Parameters
    ----------
    on_bad_head
        Called for each request that is refused because it is not HTTP, or because its head is too long.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return _quiet(H11Protocol, on_bad_head)

    class BoundedHttp(_quiet(HttpToolsProtocol, on_bad_head)):  # type: ignore[misc,unused-ignore]
        """Closes a connection whose request line, headers or trailers are too long."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._head = 0
            self._timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(HEAD_SECONDS, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def data_received(self, data: bytes) -> None:
            self._head += len(data)
            if self._head > _MOST_HEAD + len(data):  # the head, or the trailers, went on for more than the limit before this piece
                self.send_400_response("The head of the request is too long.")
                return
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._head = 0
            self._stop_timer()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._head = 0  # after the last piece of a chunked body come more headers, the trailers
            super().on_body(body)

        def on_message_begin(self) -> None:
            self._head = 0
            if self._timer is None:
                self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
            super().on_message_begin()

    return BoundedHttp


async def listen(
    app: Any,
    host: str,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[str], Any],
    *,
    what: str = "the gateway",
    listening: socket.socket | None = None,
    on_bad_head: Callable[[], object] = lambda: None,
) -> None:
    """Serve until the event is set. Raises `AddressUnavailable`.

    Parameters
    ----------
    app
        The application.
    host
        The address to listen on.
    port
        The port; 0 takes a free one.
    stop
        Set this event to end serving.
    on_ready
        Called with the address of the server when it accepts requests.
    what
        The thing that is served, for the message of an error.
    listening
        A socket that has this address already, from `listening_socket`. It is closed at the end.
    on_bad_head
        Called for each request that is refused before the application gets it.
    """
    with listening_socket(what, host, port) if listening is None else listening as listening:
        with naming_address(what, host, port):
            listening.listen(_BACKLOG)  # here another server may have the address, if both were bound before one of them listened
        server = _server(app, on_bad_head)
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        ending = asyncio.ensure_future(_until_set(stop))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            on_ready(address)
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        ending.cancel()


def _server(app: Any, on_bad_head: Callable[[], object]) -> Any:
    """Return uvicorn's server, without its signal handlers: the program that runs it has its own."""
    import uvicorn

    class Server(uvicorn.Server):  # type: ignore[misc,unused-ignore]
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield

    config = uvicorn.Config(
        app,
        http=bounded_http(on_bad_head),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(ENDING_SECONDS),
    )
    return Server(config)


async def _until_set(stop: threading.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(0.05)
