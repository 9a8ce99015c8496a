"""`--metrics` serves metrics while a command runs."""

from __future__ import annotations

import re
import socket
import subprocess
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from forked_python import ForkedPopen, forked_run
from servers import free_port
from support import publisher_arguments

from deltawire import Publisher
from deltawire.cli.options.metrics import read_address

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")


@pytest.mark.parametrize("text", ["", ":", "a", ":9464", "host:", "host:65536", "127.0.0.1:-1", "123456", "٣", "host:9464:x"])
def test_text_that_is_no_address_is_wrong_usage(text: str) -> None:
    typer = pytest.importorskip("typer")
    with pytest.raises(typer.BadParameter, match="is not an address"):
        read_address(text)


@pytest.mark.parametrize("text", ["0", "9464", "0.0.0.0:9464", "[::1]:9464", "localhost:65535", None])
def test_addresses_are_accepted(text: str | None) -> None:
    assert read_address(text) == text


@pytest.mark.parametrize("command", ["follow", "relay"])
def test_a_command_that_runs_can_be_asked(tmp_path: Path, command: str) -> None:
    chain, port = tmp_path / "chain", free_port()
    with Publisher(chain, **publisher_arguments()) as publisher:
        publisher.publish({"w": np.arange(1000, dtype=np.float16)}, step=5)
    arguments = [command, chain, tmp_path / "target", "--metrics", f"127.0.0.1:{port}", "--poll", "0.05"]
    process = ForkedPopen("light", ["-m", "deltawire.cli", *arguments], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("version 1")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                text = answer.read().decode()
        finally:
            process.terminate()
    expected = {"follow": r'^deltawire_applied_version\{member=""\} 1\.0$', "relay": r"^deltawire_relayed_version 1\.0$"}
    assert re.search(expected[command], text, re.MULTILINE)
    assert process.returncode == 0


def test_a_port_that_is_taken_ends_the_command_with_a_named_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["follow", tmp_path / "chain", tmp_path / "target", "--metrics", taken.getsockname()[1], "--json"]
        done = forked_run("light", ["-m", "deltawire.cli", *arguments], stdout=subprocess.PIPE)
    assert '"type": "TelemetryUnavailable"' in done.stdout
    assert done.returncode == 1
