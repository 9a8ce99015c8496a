"""Run an HTTP server that fails on purpose with S3's answers, to check what the client library does about failures."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = int | tuple[int, str] | str
"""A status, a status with the service's error code, or a fault: "hang", "drop" (the connection), "short" or "long" (a body)."""

LONG = 64 << 20
"""The number of bytes in a long body. The client may close the connection earlier."""


class FailingServer:
    """A server that gives `answers` in turn, repeats the last one, and records the methods, paths and headers of all requests."""

    def __init__(self, port: int, answers: list[Answer]) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.answers = answers
        self.requests: list[str] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.hung_up = threading.Event()
        self.released = threading.Event()
        self.arrived = threading.Condition()

    def wait_for_requests(self, count: int) -> None:
        """Return when the server has read this many requests. It may read them after the client has given them up."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.requests) >= count, 120), f"only these requests came: {self.requests}"


@contextlib.contextmanager
def failing_server(*answers: Answer) -> Iterator[FailingServer]:
    """Run a `FailingServer` with these answers within the context."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with state.arrived:
                state.requests.append(self.command)
                state.paths.append(self.path)
                state.headers.append({name.lower(): value for name, value in self.headers.items()})
                state.arrived.notify_all()
            answer = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            if answer == "hang":
                state.released.wait(120)
            if isinstance(answer, str) and answer not in {"short", "long"}:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, code = answer if isinstance(answer, tuple) else (206 if isinstance(answer, str) else answer, "Scripted")
            body = b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
            if isinstance(answer, str):
                body = b"abc" if answer == "short" else b""
                self.close_connection = True
            self.send_response(int(status))
            self.send_header("ETag", '"x"')
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            if isinstance(answer, str):
                self.send_header("Content-Range", "bytes 0-99/100")
            self.send_header("Content-Length", {"short": "100", "long": str(LONG)}.get(str(answer), str(len(body))))
            self.end_headers()
            self.wfile.write(body)
            if answer == "long":
                try:
                    for _ in range(LONG >> 20):
                        self.wfile.write(bytes(1 << 20))
                except OSError:
                    state.hung_up.set()

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = FailingServer(server.server_port, list(answers))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
