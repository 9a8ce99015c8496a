"""The client for engines: what it sends, what it refuses, and whether an engine may have got a request that has no answer."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import serving

from deltawire.gateway import engine_client
from deltawire.gateway.engine_client import EngineClient, NoAnswer
from deltawire.gateway.http.bodies import headers_of, read_body, send_start
from deltawire.gateway.http.http_server import listen

BODY = bytes(range(256)) * (3 << 12)


class Mirror:
    """Answers with the body of the request, compressed and in pieces, and keeps the headers."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.callers: list[Any] = []

    def serve(self, *, stop: threading.Event, on_ready: Callable[[str], Any]) -> None:
        asyncio.run(listen(self, "127.0.0.1", 0, stop, on_ready))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers.append(headers_of(scope))
        self.callers.append(scope["client"])
        data = gzip.compress(await read_body(receive, self.headers[-1], 1 << 30), mtime=0)
        if scope["path"] == "/moved":
            await send_start(send, 307, {"location": "/elsewhere", "set-cookie": "a=b"})
            await send({"type": "http.response.body", "body": b""})
            return
        await send_start(send, 200, {"content-type": "text/plain", "content-encoding": "gzip", "set-cookie": "a=b"})
        for start in range(0, len(data), 1000):
            await send({"type": "http.response.body", "body": data[start : start + 1000], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def body_of(client: EngineClient, url: str, body: bytes = b"x") -> bytes:
    response = await client.post(url, body, {"content-type": "text/plain"})
    try:
        return b"".join([chunk async for chunk in response.chunks()])
    finally:
        response.close()


def run(work: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def inside() -> Any:
        async with EngineClient() as client:
            return await work(client)

    return asyncio.run(inside())


def test_bodies_pass_as_they_are_and_nothing_else_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    mirror = Mirror()

    async def work(client: EngineClient) -> None:
        for body in (b"x", BODY):
            assert await body_of(client, url + "/a", body) == gzip.compress(body, mtime=0)
        response = await client.get(url + "/moved", {}, seconds=60)
        assert response.status == 307
        response.close()

    with serving(mirror.serve) as url:
        run(work)
    assert mirror.headers[0] == {
        "host": url.removeprefix("http://"),
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "text/plain",
        "content-length": "1",
    }
    assert len(mirror.headers) == 3
    assert not any("cookie" in headers for headers in mirror.headers)
    assert len(set(mirror.callers)) == 1  # one connection was enough


def test_only_so_many_connections_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "_MOST_IDLE", 3)
    mirror = Mirror()

    async def work(client: EngineClient) -> None:
        found = await asyncio.gather(*(body_of(client, url) for _ in range(9)))
        assert found == [gzip.compress(b"x", mtime=0)] * 9
        assert len({caller for caller, headers in zip(mirror.callers, mirror.headers, strict=True) if "connection" not in headers}) == 3
        await body_of(client, url)
        assert "connection" not in mirror.headers[-1]
        assert mirror.callers[-1] in mirror.callers[:-1]

    with serving(mirror.serve) as url:
        run(work)


@contextlib.asynccontextmanager
async def raw_engine(answer: bytes | None) -> AsyncIterator[str]:
    """Yield the address of a server that answers a request with these bytes and closes the connection. With None it never answers."""
    ended: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer or b"")
            await (writer.drain() if answer is not None else reader.read())
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await asyncio.gather(*filter(None, ended))


OK = b"HTTP/1.1 200 OK\r\n"
BROKEN = {
    "nothing": b"",
    "no HTTP": b"hello\r\n\r\n",
    "half a head": OK,
    "a body that breaks off": OK + b"content-length: 9\r\n\r\nfour",
    "a chunk that breaks off": OK + b"transfer-encoding: chunked\r\n\r\n9\r\nfour",
    "a chunk of no size": OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "a long header": OK + b"a: " + b"x" * (1 << 20) + b"\r\n\r\n",
    "many headers": OK + b"a: b\r\n" * 100_000 + b"\r\n",
    "a long reason": b"HTTP/1.1 200 " + b"x" * (1 << 20) + b"\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "an unknown status": b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
def test_an_engine_that_answers_badly_may_have_got_the_request(answer: bytes) -> None:
    async def work(client: EngineClient) -> None:
        async with raw_engine(answer) as address:
            await body_of(client, f"http://{address}")

    with pytest.raises(NoAnswer) as caught:
        run(work)
    assert caught.value.was_sent


def test_an_engine_that_cannot_be_reached_has_not_got_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(client: EngineClient) -> None:
        async with raw_engine(b"") as address:
            pass
        await body_of(client, f"http://{address}")

    async def no_tls(client: EngineClient) -> None:
        async with raw_engine(b"") as address:
            await body_of(client, f"https://{address}")

    with pytest.raises(NoAnswer) as caught:
        run(refused)
    assert not caught.value.was_sent
    assert "Cannot connect to host" in str(caught.value)
    assert "ssl" not in str(caught.value)
    monkeypatch.setattr(engine_client, "_CONNECT_SECONDS", 0.05)
    with pytest.raises(NoAnswer) as caught:
        run(no_tls)  # the server waits for a request, so the handshake does not end
    assert not caught.value.was_sent


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*own_certificate(tmp_path))

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            context.wrap_socket(connection, server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, listening)
        with pytest.raises(NoAnswer, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed") as caught:
            run(lambda client: body_of(client, f"https://127.0.0.1:{listening.getsockname()[1]}"))
        served.result()
    assert not caught.value.was_sent


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and return its files."""
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    certificate, secret = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return certificate, secret


def test_silence_ends_with_no_answer() -> None:
    async def work(client: EngineClient) -> None:
        async with raw_engine(None) as address:
            await client.get(f"http://{address}", {}, seconds=0.05)

    with pytest.raises(NoAnswer) as caught:
        run(work)
    assert caught.value.was_sent
