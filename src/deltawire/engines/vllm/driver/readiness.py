"""A route for load balancers: `GET /ready` says whether an engine serves a version of the chain."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ....errors import EngineError

ROUTE = "/ready"
Check = Callable[[], tuple[bool, Mapping[str, Any]]]
"""Returns whether the engine is ready, and what the answer says."""


class ReadinessRoute:
    """Answers `GET /ready` with status 200 if an engine is ready, and with 503 otherwise. Use it as a context.

    Parameters
    ----------
    address
        Where to listen: "HOST:PORT". Port 0 means any free port, which `port` tells.
    check
        Called for each request, on a thread of its own.
    """

    def __init__(self, address: str, check: Check) -> None:
        host, separator, port = address.rpartition(":")
        if not (separator and host and port.isdecimal() and int(port) < 65536):
            raise ValueError(f"{address!r} is not of the form HOST:PORT")
        try:
            self._server = _Server((host.strip("[]"), int(port)), check)
        except OSError as error:
            raise EngineError(f"cannot listen on {address}: {error.strerror or error}.") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="deltawire-ready", daemon=True)

    def __enter__(self) -> ReadinessRoute:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], check: Check) -> None:
        self.check = check
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds that a client may take to send its request
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != ROUTE:
            self.send_error(404)
            return
        is_ready, told = self.server.check()
        content = json.dumps(dict(told)).encode()
        self.send_response(200 if is_ready else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass
