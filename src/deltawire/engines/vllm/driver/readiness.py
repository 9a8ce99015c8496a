"""A route for load balancers: `GET /ready` says whether an engine serves a version of the chain.

The sidecar may hang in a store that does not answer, while its server dies or restarts. So each request for /ready asks the server, too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ....errors import EngineError
from .routes import VllmRoutes

ROUTE = "/ready"
Check = Callable[[], tuple[bool, Mapping[str, Any]]]
"""Returns whether the engine is ready, and what the answer says."""


_PROBE_SECONDS = 3.0
"""The time that a server has to say whether it generates."""
_PATIENCE, _PAUSE = 1.0, 0.02
"""An answer that disagrees with what the sidecar knows is repeated for this time: a swap may be in progress."""
_PAUSED = "the server is paused."


class ServerProbe:
    """Asks a server whether it generates with the version that its sidecar believes it has. Any thread may use it.

    Parameters
    ----------
    engine
        The URL of the server.
    check
        Returns what the sidecar knows: whether the server serves a version, and the answer of /ready. `seq` in it is the version.
    """

    def __init__(self, engine: str, check: Check) -> None:
        self._routes = VllmRoutes(engine, patience=_PROBE_SECONDS)  # the sidecar counts the requests of its own routes
        self._check = check

    def __call__(self) -> tuple[bool, Mapping[str, Any]]:
        """Return whether the server is ready, and the answer of /ready."""
        end = time.monotonic() + _PATIENCE
        while True:
            is_ready, told = self._check()
            problem = self._problem(told.get("seq")) if is_ready else None
            if problem is None:
                return is_ready, told
            if time.monotonic() > end:
                follows_chain = told.get("seq") is not None
                return False, {"reason": self._why_paused() if problem == _PAUSED and follows_chain else problem}
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Release the connection to the server."""
        self._routes.close()

    def _problem(self, seq: Any) -> str | None:
        try:
            label = self._routes.weight_version(_PROBE_SECONDS)
            if seq is not None and label != str(seq):
                return f"the server has the weights {label!r} instead of those of commit {seq}."
            if self._routes.is_paused(_PROBE_SECONDS):
                return _PAUSED
        except EngineError as error:
            return str(error)
        return None

    def _why_paused(self) -> str:
        """Ask whether a program has paused the server for an update that it has not ended."""
        try:
            workers = self._routes.status()
        except EngineError:
            workers = []
        reason = next((worker["unended_update"] for worker in workers if worker.get("unended_update")), None)
        return _PAUSED if reason is None else f"the server stays paused: {reason}."


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
