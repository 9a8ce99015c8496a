"""Ports that tests give to servers: no two processes get the same one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import free_ports  # noqa: E402
from free_ports import free_port  # noqa: E402


def test_a_port_is_given_once_even_before_its_server_listens(monkeypatch):
    port = free_port()
    monkeypatch.setattr(free_ports, "_PORTS", range(port, port + 1))
    with pytest.raises(RuntimeError, match="in use"):
        free_port()
    script = f"import free_ports; free_ports._PORTS = range({port}, {port + 1}); free_ports.free_port()"
    child = subprocess.run([sys.executable, "-c", script], cwd=BENCHMARKS, capture_output=True, text=True)
    assert "in use" in child.stderr


def test_a_port_on_which_a_server_listens_is_not_free(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        monkeypatch.setattr(free_ports, "_PORTS", range(port, port + 1))
        with pytest.raises(RuntimeError, match="in use"):
            free_port()


def test_a_server_can_listen_on_its_port():
    with socket.create_server(("127.0.0.1", free_port())):
        pass
