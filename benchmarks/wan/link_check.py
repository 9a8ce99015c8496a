"""Measures a link itself: the round-trip time, and the goodput of one TCP stream and of eight, next to the nominal values.

It is also the program that runs at both ends: `python link_check.py serve`, and `python link_check.py fetch HOST PORT STREAMS SECONDS`.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .network import Network, Region

PORT = 7000
_PIECE = 1 << 20
_PINGS = 5
_WARM_UP = 1.5
"""Seconds in which streams reach their speed. They are not counted."""


@dataclass(frozen=True, slots=True)
class LinkCheck:
    """The measured link: seconds of a round trip, and bits per second of one stream and of eight."""

    rtt: float
    one: float
    eight: float


def check(network: Network, region: Region, seconds: float, log: Path) -> LinkCheck:
    """Measure the link of a region."""
    from . import processes

    server = processes.start(network.trainer.command(sys.executable, __file__, "serve"), log)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        one, eight = (_fetch(region, streams, seconds) for streams in (1, 8))
    finally:
        processes.stop(server)
    return LinkCheck(one["rtt"], one["goodput"], eight["goodput"])


def _fetch(region: Region, streams: int, seconds: float) -> dict[str, float]:
    command = region.command(sys.executable, __file__, "fetch", region.origin, str(PORT), str(streams), str(seconds))
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 30)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _serve() -> None:
    """Answer each connection: a byte for a byte until "g" comes, and then as many bytes as the other side takes."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    data = bytes(_PIECE)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1) == b"p":
            connection.sendall(b"p")
        try:
            while True:
                connection.sendall(data)
        except OSError:
            return


def _measure(host: str, port: int, streams: int, seconds: float) -> dict[str, float]:
    connections = [socket.create_connection((host, port), timeout=30) for _ in range(streams)]
    first = connections[0]
    first.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        first.sendall(b"p")
        first.recv(1)
        trips.append(time.perf_counter() - start)
    counts = [0] * streams
    begin = time.monotonic() + _WARM_UP
    end = begin + seconds

    def receive(index: int) -> None:
        connection, buffer = connections[index], bytearray(_PIECE)
        connection.sendall(b"g")
        while (now := time.monotonic()) < end:
            size = connection.recv_into(buffer)
            if now >= begin:
                counts[index] += size

    threads = [threading.Thread(target=receive, args=(index,)) for index in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in connections:
        connection.close()
    return {"rtt": statistics.median(trips), "goodput": 8 * sum(counts) / seconds}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve()
    else:
        print(json.dumps(_measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))))
