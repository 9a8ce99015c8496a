"""Serves the page to browsers. Every answer says that the page may load nothing from elsewhere and may not be embedded.

The server answers GET only. It knows a fixed set of paths and reads no file by a name from a request. It refuses requests whose `Host` is a
name that it was not given: a hostile website could otherwise point its own name at this machine and read the page (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Collection
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..addresses import naming_address
from ..errors import DeltawireError
from .host_names import accepts_host
from .observer import Observer
from .page_files import DOCUMENT, SCRIPTS, STYLE, TYPES, page_file
from .plain_values import short

MOST_CONNECTIONS = 64
_IDLE_SECONDS = 30.0
"""A connection without progress for this long is closed."""
_KEEP_ALIVE_SECONDS = 10.0
_MOST_NUMBER = 10**19
_QUERIES: dict[str, tuple[str, Callable[[Observer, int], dict[str, Any]]]] = {
    "/api/version": ("seq", lambda observer, number: observer.version(seq=number)),
    "/api/commits": ("page", Observer.commits),
    "/api/find": ("version", lambda observer, number: {"seq": observer.commit_of(number)}),
}
"""The paths that take a number: the name of the number, and the function that answers."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class DashboardServer(ThreadingHTTPServer):
    """Serves one run. Call `serve_forever`, and `close` from another thread. Raises `AddressUnavailable`.

    Parameters
    ----------
    observer
        What to show. The caller calls its `look`.
    host
        The address to listen on. The default can be reached from this machine only.
    port
        The port; 0 takes a free one.
    names
        Names under which browsers may reach this server, in addition to localhost and addresses in numbers.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, observer: Observer, *, host: str = "127.0.0.1", port: int = 0, names: Collection[str] = ()) -> None:
        self.observer = observer
        self.names = {"localhost", *(name.lower() for name in names)}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.is_closing = False
        with naming_address("the dashboard", host, port):
            super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        host = str(self.server_address[0])
        if ipaddress.ip_address(host).is_unspecified:
            host = "localhost"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def close(self) -> None:
        """Stop serving, and close all connections."""
        self.is_closing = True
        self.shutdown()
        self.server_close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a new thread, or close the connection if there are too many."""
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        with self._lock:
            self._open.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error."""

    def _release(self, request: socket.socket) -> None:
        with self._lock:
            if request not in self._open:
                return
            self._open.discard(request)
        self._free.release()


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    server_version = "deltawire"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not accepts_host(hosts[0], self.server.names):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server does not have that name; see --name of `deltawire dashboard`")
        elif self.headers.get("Sec-Fetch-Site", "none") == "cross-site" and self.path != "/":
            self._refuse(HTTPStatus.FORBIDDEN, "other websites may not read this page")
        else:
            self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        name = parts.path.removeprefix("/page/")
        if parts.path == "/":
            self._send(page_file(DOCUMENT), TYPES[".html"])
        elif name in (STYLE, *SCRIPTS):
            self._send(page_file(name), TYPES[PurePosixPath(name).suffix])
        elif parts.path == "/api/sections":
            self._send(json.dumps(self.server.observer.sections(), allow_nan=False), "application/json")
        elif parts.path == "/api/live":
            self._stream()
        elif parts.path in _QUERIES:
            self._query(parts.path, parts.query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _query(self, path: str, query: str) -> None:
        name, answer = _QUERIES[path]
        try:
            text = parse_qs(query, max_num_fields=4).get(name, [""])[0]
        except ValueError:
            text = ""
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < _MOST_NUMBER):
            self._refuse(HTTPStatus.BAD_REQUEST, f"{name} must be a number")
            return
        try:
            found = answer(self.server.observer, int(text))
        except DeltawireError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, short(str(error), 400))
            return
        self._send(json.dumps(found, allow_nan=False), "application/json")

    def _stream(self) -> None:
        """Send sections as they change, until the browser goes away."""
        last = self.headers.get("Last-Event-ID", "")
        number = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else 0
        self._begin(HTTPStatus.OK, "text/event-stream", None)
        while not self.server.is_closing:
            number, sections = self.server.observer.changes(number, _KEEP_ALIVE_SECONDS)
            lines = [f"event: {name}\ndata: {text}\n\n" for name, text in sections.items()]
            self.wfile.write((f"id: {number}\n" + "".join(lines) if lines else ": nothing new\n\n").encode())
            self.wfile.flush()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(json.dumps({"error": why}), "application/json", status)

    def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        data = text.encode()
        self._begin(status, kind, len(data))
        self.wfile.write(data)

    def _begin(self, status: HTTPStatus, kind: str, size: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if size is None:
            self.close_connection = True
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(size))
        self.end_headers()
