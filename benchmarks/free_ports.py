"""Ports of loopback for servers that other processes start, so that no two processes take the same port. Tests use it, too."""

from __future__ import annotations

import random
import socket

_PORTS = range(16_000, 32_000)
"""Operating systems give connections ports from 32768 or 49152 on, so no connection takes one of these before the server listens."""
_reserved: list[socket.socket] = []
"""A UDP socket at each port that was returned. It keeps other processes that look here from the port until this process ends."""


def free_port() -> int:
    """Return a port on which no process listens, and which nobody else gets from this function while this process runs."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        reserving = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            reserving.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except OSError:
            reserving.close()
            continue
        _reserved.append(reserving)
        return port
    raise RuntimeError(f"all ports from {_PORTS.start} to {_PORTS.stop - 1} are in use")
