"""The answer of an engine takes limited memory, however much the server sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deltawire.engines import http_session as session_module
from deltawire.engines.http_session import NoAnswer, http_session

LIMIT = 1 << 20


class Endless(BaseHTTPRequestHandler):
    """Sends as many bytes as the path says, or bytes without end."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        left = int(self.path[1:] or 1 << 60)
        while left > 0:
            try:
                self.wfile.write(b"x" * min(left, 1 << 16))
            except OSError:  # the client closed the connection
                return
            left -= 1 << 16

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_answer_that_does_not_end_is_refused_at_the_limit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_MOST_BYTES", LIMIT)
    with http_session(url) as session:
        assert len(session.ask("GET", f"/{LIMIT}", timeout=300).content) == LIMIT
        for path in (f"/{LIMIT + 1}", "/"):
            with pytest.raises(NoAnswer, match="1,048,576 bytes"):
                session.ask("GET", path, timeout=300)
