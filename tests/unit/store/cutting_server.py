"""Run an HTTP server that answers S3's requests for one object, and cuts connections at chosen bytes."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class CuttingServer:
    """Serves `data` under every key. The answer to request n, counted from 0, is cut after `cuts[n]` bytes of its body.

    `asked` has the range of each request, and `sent` the number of bytes that were sent for it.
    """

    def __init__(self, port: int, data: bytes, cuts: Sequence[int | None]) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.data = data
        self.cuts = list(cuts)
        self.asked: list[tuple[int, int]] = []
        self.sent: list[int] = []
        self.puts: list[bytes] = []
        self.lock = threading.Lock()


@contextlib.contextmanager
def cutting_server(data: bytes, cuts: Sequence[int | None], *, pause: tuple[int, threading.Event] | None = None) -> Iterator[CuttingServer]:
    """Run a `CuttingServer` within the context. Requests after the last cut are answered in full.

    With `pause`, the server sends this many bytes of an answer, and waits for the event before it sends the rest.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            found = _RANGE.fullmatch(self.headers["Range"])
            assert found is not None
            start, stop = int(found[1]), min(int(found[2]) + 1, len(state.data))
            with state.lock:
                cut = state.cuts.pop(0) if state.cuts else None
                send = stop - start if cut is None else min(cut, stop - start)
                state.asked.append((start, stop))
                state.sent.append(send)
            self.send_response(206)
            self.send_header("ETag", '"x"')
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(state.data)}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            if pause is not None:
                self.wfile.write(state.data[start : start + pause[0]])
                pause[1].wait()
                start, send = start + pause[0], send - pause[0]
            self.wfile.write(state.data[start : start + send])
            if cut is not None:
                self._hang_up()

        def do_PUT(self) -> None:
            size = int(self.headers["Content-Length"])
            with state.lock:
                cut = state.cuts.pop(0) if state.cuts else None
            body = self.rfile.read(size if cut is None else min(cut, size))
            if cut is not None:
                self._hang_up()
                return
            with state.lock:
                state.puts.append(body)
            self.send_response(200)
            self.send_header("ETag", '"x"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _hang_up(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = CuttingServer(server.server_port, data, cuts)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
