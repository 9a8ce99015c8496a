"""The server answers browsers of this machine, a bounded number at a time, and says that the page may load nothing from elsewhere."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from shown_run import ShownRun

from deltawire.dashboard import Observer
from deltawire.dashboard import server as server_module
from deltawire.dashboard.page_files import SCRIPTS, STYLE
from deltawire.dashboard.server import DashboardServer


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ShownRun]:
    shown = ShownRun(tmp_path / "run")
    yield shown
    shown.close()


@pytest.fixture
def served(run: ShownRun) -> Iterator[DashboardServer]:
    with Observer(run.store) as observer:
        observer.look()
        server = DashboardServer(observer, names=["gpu-box"])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.close()
        thread.join()


def ask(server: DashboardServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_every_file_of_the_page_is_served_with_a_strict_policy(served: DashboardServer) -> None:
    for path in ("/", *(f"/page/{name}" for name in (STYLE, *SCRIPTS)), "/api/sections"):
        status, headers, body = ask(served, path)
        assert (status, bool(body)) == (200, True)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


def test_the_page_names_every_script_once_and_no_other_host(served: DashboardServer) -> None:
    text = ask(served, "/")[2].decode()
    assert [text.count(f'src="page/{name}"') for name in SCRIPTS] == [1] * len(SCRIPTS)
    for path in ("/", *(f"/page/{name}" for name in (STYLE, *SCRIPTS))):
        assert "http" not in ask(served, path)[2].decode().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "a b", "[::1", "localhost.evil"])
def test_other_names_are_refused(served: DashboardServer, host: str) -> None:
    assert ask(served, "/api/sections", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1:80", "[::1]:8000", "192.168.0.7", "GPU-box:7700"])
def test_addresses_and_given_names_are_accepted(served: DashboardServer, host: str) -> None:
    assert ask(served, "/api/sections", Host=host)[0] == 200


def test_other_websites_cannot_start_requests(served: DashboardServer) -> None:
    assert ask(served, "/api/version?seq=1", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(served, "/", Sec_Fetch_Site="cross-site")[0] == 200, "a link to the page works"


@pytest.mark.parametrize(
    "path",
    [
        "//etc/passwd",
        "/page/..%2fserver.py",
        "/page/%00",
        "/page/../server.py",
        "/page/index.html",
        "/api",
        "/page/",
        "/%2e%2e/x",
        "/page/no.js",
    ],
)
def test_there_are_no_other_pages(served: DashboardServer, path: str) -> None:
    assert ask(served, path)[0] == 404


@pytest.mark.parametrize("path", ["version?seq", "commits?page", "find?version"])
@pytest.mark.parametrize("number", ["", "-1", "x", "1e5", "9" * 25, "１", "1&a&b&c&d&e"])
def test_what_is_asked_for_is_named_by_a_number(served: DashboardServer, path: str, number: str) -> None:
    assert ask(served, f"/api/{path}={quote(number, safe='&')}")[0] == 400
    assert ask(served, f"/api/{path}=9999999999999999999")[0] in (200, 400)


def test_older_commits_come_from_the_observer(served: DashboardServer) -> None:
    assert json.loads(ask(served, "/api/commits?page=0")[2]) == served.observer.commits(0)
    assert json.loads(ask(served, "/api/commits?page=77")[2])["entries"] == []
    assert json.loads(ask(served, "/api/find?version=1")[2]) == {"seq": 1}


def test_details_come_from_the_observer(served: DashboardServer, run: ShownRun) -> None:
    run.publish()
    status, _, body = ask(served, f"/api/version?seq={run.seqs[-1]}")
    assert status == 200
    assert json.loads(body) == served.observer.version(seq=run.seqs[-1])
    assert json.loads(ask(served, "/api/version?seq=99999")[2])["kind"] == "corrupt"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_get_is_answered(served: DashboardServer, method: str) -> None:
    assert ask(served, "/", method)[0] == 501


def events(stream: Any, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name = ""
    while len(found) < count:
        line = stream.readline().decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found[name] = json.loads(line.removeprefix("data: "))
    return found


def test_changes_are_sent_as_they_are_seen(served: DashboardServer, run: ShownRun) -> None:
    connection = HTTPConnection("127.0.0.1", served.server_address[1], timeout=30)
    connection.request("GET", "/api/live")
    stream = connection.getresponse()
    assert stream.headers["Content-Type"] == "text/event-stream"
    assert events(stream, 9)["chain"]["version"] == 1
    run.publish()
    served.observer.look()
    assert events(stream, 2)["chain"]["version"] == 2
    connection.close()


def test_connections_beyond_the_limit_are_refused_and_free_ones_are_used_again(run: ShownRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 2)
    with Observer(run.store) as observer:
        observer.look()
        server = DashboardServer(observer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            held = []
            for _ in range(2):
                one = socket.create_connection(server.server_address[:2], timeout=30)
                one.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert one.recv(8) == b"HTTP/1.1"
                held.append(one)
            assert ask(server, "/")[0] == 503
            server.close()  # ends the streams
            for one in held:
                while one.recv(1 << 16):
                    pass
                one.close()
        finally:
            server.close()
            thread.join()


def is_full(server: DashboardServer) -> bool:
    try:
        return ask(server, "/")[0] == 503
    except ConnectionError:
        return True


def test_a_client_that_does_not_read_holds_no_thread_for_ever(run: ShownRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.2)
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 1)
    with Observer(run.store) as observer:
        observer.look()
        big = {"chain": "x" * (1 << 22)}
        monkeypatch.setattr(observer, "changes", lambda after, timeout: (after + 1, big))
        server = DashboardServer(observer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with socket.create_connection(server.server_address[:2], timeout=30) as slow:
                slow.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert slow.recv(8) == b"HTTP/1.1"
                while is_full(server):  # until the server has given the slow client up
                    pass
        finally:
            server.close()
            thread.join()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 101,  # no byte more than the server reads, so that it need not reset the connection
        b"GET /" + b"a" * (65_537 - 5),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET /api/version?" + b"seq=1&" * 1000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x00\xff\r\n",
        b"GET //[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["headers", "path", "two-hosts", "no-host", "fields", "bytes", "address"],
)
def test_odd_requests_get_an_error_and_nothing_else(served: DashboardServer, request_bytes: bytes) -> None:
    with socket.create_connection(served.server_address[:2], timeout=30) as one:
        one.sendall(request_bytes)
        one.shutdown(socket.SHUT_WR)
        answer = b""
        while part := one.recv(1 << 16):
            answer += part
    assert b" 4" in answer.partition(b"\r\n")[0] or b"Error code: 4" in answer
    assert b"shown run" not in answer
    assert ask(served, "/")[0] == 200


def test_many_streams_see_the_same_state_and_a_reader_that_stops_delays_nobody(run: ShownRun) -> None:
    with Observer(run.store) as observer:
        observer.look()
        server = DashboardServer(observer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        held = [HTTPConnection("127.0.0.1", server.server_address[1], timeout=30) for _ in range(12)]
        try:
            streams = []
            for one in held:
                one.request("GET", "/api/live")
                streams.append(one.getresponse())
            for stream in streams[1:]:  # the first never reads
                assert events(stream, 9)["chain"]["version"] == 1
            run.publish()
            observer.look()
            for stream in streams[1:]:
                assert events(stream, 2)["chain"]["version"] == 2
        finally:
            server.close()
            thread.join()
            for one in held:
                one.close()
