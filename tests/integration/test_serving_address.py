"""Servers that cannot listen say where. `deltawire serve` finds that out before it imports what takes long."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import deltawire
from deltawire.addresses import listening_socket
from deltawire.cli import app
from deltawire.cli.commands import serve as serve_command
from deltawire.cli.options import server as server_options
from deltawire.errors import AddressUnavailable, TelemetryUnavailable
from deltawire.gateway.http.http_server import listen
from deltawire.telemetry import PrometheusMetrics

IN_USE = "cannot be served on 127.0.0.1, port {}: Address already in use. Choose another port or address."


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def chain(tmp_path: Path) -> str:
    with deltawire.Publisher(tmp_path / "chain") as publisher:
        publisher.publish({"w": np.zeros(4, np.float32)}, step=0)
    return str(tmp_path / "chain")


@pytest.fixture
def without_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the packages of `serve` be there, and let the import of our modules that need them fail the test."""
    monkeypatch.setattr(server_options, "find_spec", lambda name: name)
    for name in ("deltawire.rl.member", "deltawire.rl.serving.openai_server"):
        monkeypatch.setitem(sys.modules, name, None)


def printed(*arguments: object, code: int = 1) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return str(result.output)


def test_a_dashboard_at_a_port_that_is_taken_says_which(chain: str, port: int) -> None:
    assert f"the dashboard {IN_USE.format(port)}" in printed("dashboard", "--from", chain, "--port", port)


@pytest.mark.usefixtures("without_imports")
def test_serve_tries_the_port_and_the_chain_before_it_imports_anything_large(chain: str, port: int, tmp_path: Path) -> None:
    assert f"the model {IN_USE.format(port)}" in printed("serve", "--from", chain, "--port", port)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "nothing is published" in printed("serve", "--from", empty, "--port", 0)
    with pytest.raises(ModuleNotFoundError, match=r"deltawire\.rl\.member"):  # a good chain and a free port lead to the import
        CliRunner().invoke(app, ["serve", "--from", chain, "--port", "0"], catch_exceptions=False)


@pytest.mark.usefixtures("without_imports")
def test_serve_waits_for_a_channel_that_does_not_exist_yet(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    notices = list[str]()
    assert CliRunner().invoke(app, ["promote", chain, "canary", "--version", "1"]).exit_code == 0

    def promote(notice: str) -> None:
        notices.append(notice)
        done = CliRunner().invoke(app, ["promote", chain, "stable", "--version", "1"])
        assert done.exit_code == 0, done.output

    monkeypatch.setattr(serve_command, "print_notice", promote)
    arguments = ["serve", "--from", chain, "--channel", "stable", "--port", "0", "--poll", "0.01"]
    with pytest.raises(ModuleNotFoundError, match=r"deltawire\.rl\.member"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    (notice,) = notices
    assert notice.startswith("will wait: ")
    assert "has no channel 'stable'. It has canary." in notice


@pytest.mark.usefixtures("without_imports")
def test_a_signal_ends_the_wait_for_a_channel(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_command, "print_notice", lambda notice: signal.raise_signal(signal.SIGTERM))
    assert printed("serve", "--from", chain, "--channel", "stable", "--port", 0, code=0) == ""


@pytest.mark.parametrize(("command", "gone"), [("serve", "transformers"), ("serve", "uvicorn"), ("gateway", "aiohttp")])
def test_a_command_names_the_packages_that_it_misses(command: str, gone: str, chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_options, "find_spec", lambda name: None if name == gone else name)
    engine = ("--engine", "http://127.0.0.1:1") if command == "gateway" else ()
    output = printed(command, "--from", chain, *engine)
    assert f" needs {gone}. Run `pip install " in output
    assert ".`." not in output
    assert ".." not in output


def test_a_gateway_at_a_port_that_is_taken_says_which(port: int) -> None:
    with pytest.raises(AddressUnavailable, match="^the gateway " + IN_USE.format(port)):
        asyncio.run(listen(None, "127.0.0.1", port, threading.Event(), print))


@pytest.mark.skipif(find_spec("uvicorn") is None, reason="uvicorn is not installed")
def test_of_two_servers_that_bound_the_same_address_one_listens() -> None:
    with listening_socket("the model", "127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        second = listening_socket("the model", "127.0.0.1", port)
        first.listen()
        with pytest.raises(AddressUnavailable, match="^the model " + IN_USE.format(port)):
            asyncio.run(listen(None, "127.0.0.1", port, threading.Event(), print, what="the model", listening=second))


@pytest.mark.parametrize("address", [("192.0.2.1", 0), ("127.0.0.1", 70_000)])
def test_other_reasons_are_told_too(address: tuple[str, int]) -> None:
    with pytest.raises(AddressUnavailable, match=f"the model cannot be served on {address[0]}, port {address[1]}: .* Choose another port"):
        listening_socket("the model", *address)


def test_metrics_keep_their_own_error(port: int) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with pytest.raises(TelemetryUnavailable, match="^metrics " + IN_USE.format(port)):
        PrometheusMetrics(port)


def test_the_error_is_json_too(chain: str, port: int) -> None:
    found: dict[str, Any] = json.loads(printed("dashboard", "--from", chain, "--port", port, "--json").splitlines()[-1])
    assert found["error"]["type"] == "AddressUnavailable"
