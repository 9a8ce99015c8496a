"""`--metrics` serves metrics while a command runs."""

from __future__ import annotations

import re
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_python import ForkedPopen, forked_run
from safetensors.numpy import save_file
from servers import free_port
from support import publisher_arguments
from typer.testing import CliRunner

from deltawire import Publisher
from deltawire.cli import app
from deltawire.cli.options.metrics import read_address
from deltawire.events import Event

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")


@pytest.mark.parametrize("text", ["", ":", "a", ":9464", "host:", "host:65536", "127.0.0.1:-1", "123456", "٣", "host:9464:x"])
def test_text_that_is_no_address_is_wrong_usage(text: str) -> None:
    typer = pytest.importorskip("typer")
    with pytest.raises(typer.BadParameter, match="is not an address"):
        read_address(text)


@pytest.mark.parametrize("text", ["0", "9464", "0.0.0.0:9464", "[::1]:9464", "localhost:65535", None])
def test_addresses_are_accepted(text: str | None) -> None:
    assert read_address(text) == text


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text: str = answer.read().decode()
    return text


def scraped_after(line: str, port: int, arguments: list[Any]) -> str:
    """Run a command until it has printed a line that matches, and return its metrics then."""
    process = ForkedPopen("light", arguments, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert any(re.search(line, printed) for printed in process.stdout)
            text = scraped(port)
        finally:
            process.terminate()
    assert process.returncode == 0
    return text


@pytest.mark.parametrize(
    ("command", "line", "expected"),
    [
        ("follow {chain} {target}", "^version 1", 'deltawire_applied_version{member=""} 1.0'),
        ("relay {chain} {target}", "^version 1", "deltawire_relayed_version 1.0"),
        ("events --from {chain} --follow", "commit .*step 5", "deltawire_published_version 1.0"),
    ],
)
def test_a_command_that_runs_can_be_asked(tmp_path: Path, command: str, line: str, expected: str) -> None:
    chain, port = tmp_path / "chain", free_port()
    with Publisher(chain, **publisher_arguments()) as publisher:
        publisher.publish({"w": np.arange(1000, dtype=np.float16)}, step=5)
    arguments = command.format(chain=chain, target=tmp_path / "target").split()
    text = scraped_after(line, port, ["-m", "deltawire.cli", *arguments, "--metrics", f"127.0.0.1:{port}", "--poll", "0.05"])
    assert expected in text.splitlines()


FAKE_MEMBER = """#!/bin/sh
printf '{"event": "synced", "lag": 2, "updates": 7, "bytes": 5, "member": "%s"}\\n' "$NAME"
printf '{"event": "swapped", "step": 6, "updates": 7, "pause_seconds": 0.25, "member": "%s"}\\n' "$NAME"
exec cat > /dev/null  # until the process that started it has ended
"""
WITH_FAKE_MEMBERS = "import sys; sys.executable = sys.argv.pop(1)\nfrom deltawire.cli import main\nmain()\n"


def test_one_page_has_the_metrics_of_all_members_of_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are scripts that print the events of a member, so that the test needs no model."""
    script, port = tmp_path / "member.sh", free_port()
    script.write_text(FAKE_MEMBER.replace("$NAME", "local-0"))
    script.chmod(0o755)
    arguments = ["fleet", "1", "--from", tmp_path / "store", "--env", "m:f", "--name", "local", "--metrics", port]
    text = scraped_after("local-0 .*version 7 .step 6.  paused 250 ms", port, ["-c", WITH_FAKE_MEMBERS, script, *arguments])
    expected = {'deltawire_applied_version{member="local-0"} 7.0', 'deltawire_version_lag{member="local-0"} 2.0'}
    assert expected < set(text.splitlines())


def test_a_publication_can_be_asked_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, port = [], free_port()
    save_file({"w": np.arange(1000, dtype=np.float16)}, tmp_path / "model.safetensors")

    def ask_when_published(event: Event, verbose: bool) -> None:
        if event.name == "published":
            pages.append(scraped(port))

    monkeypatch.setattr("deltawire.cli.commands.publish.print_if_verbose", ask_when_published)
    done = CliRunner().invoke(app, ["publish", str(tmp_path / "model.safetensors"), str(tmp_path / "chain"), "--metrics", str(port)])
    assert done.exit_code == 0, done.output
    (page,) = pages
    assert "deltawire_published_version 1.0" in page.splitlines()


def test_a_port_that_is_taken_ends_the_command_with_a_named_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["follow", tmp_path / "chain", tmp_path / "target", "--metrics", taken.getsockname()[1], "--json"]
        done = forked_run("light", ["-m", "deltawire.cli", *arguments], stdout=subprocess.PIPE)
    assert '"type": "TelemetryUnavailable"' in done.stdout
    assert done.returncode == 1
