"""The emulated links of `make bench-wan`: real namespaces, real TCP, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from wan import link_check, network
from wan.network import Network, Shape

RTT = 0.05
SIZE = 3_000_000

FETCH = textwrap.dedent("""
    import hashlib, socket, sys
    with socket.create_connection((sys.argv[1], 7001), timeout=60) as connection:
        found = hashlib.sha256()
        while piece := connection.recv(1 << 16):
            found.update(piece)
    print(found.hexdigest())
""")
SERVE = textwrap.dedent("""
    import hashlib, random, socket, sys
    data = random.Random(7).randbytes(int(sys.argv[1]))
    with socket.create_server(("0.0.0.0", 7001)) as server:
        print(hashlib.sha256(data).hexdigest(), flush=True)
        connection, _ = server.accept()
        with connection:
            connection.sendall(data)
""")


def spaces() -> list[str]:
    """Return the namespaces of this process."""
    return [line for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines() if f"-{os.getpid()}-" in line]


@pytest.fixture(scope="module", autouse=True)
def needs() -> None:
    """Skip all tests where namespaces cannot be made."""
    if reason := network.missing():
        pytest.skip(reason)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network.network(tmp_path, [Shape(1e8, RTT)]) as made:
        yield made


def test_bytes_cross_a_link_unchanged_and_are_counted(net: Network) -> None:
    [region] = net.regions
    before = region.received()
    with subprocess.Popen(net.trainer.command(sys.executable, "-c", SERVE, str(SIZE)), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        sent = server.stdout.readline()
        found = subprocess.check_output(region.command(sys.executable, "-c", FETCH, region.origin), text=True, timeout=120)
        assert found == sent
    assert region.received() - before >= SIZE


def test_a_round_trip_takes_at_least_the_time_of_the_link(net: Network, tmp_path: Path) -> None:
    [region] = net.regions
    region.shape(Shape(1e9, 2 * RTT))
    assert link_check.check(net, region, 0.1, tmp_path / "log").rtt >= 2 * RTT


def test_everything_is_removed_after_a_failure(tmp_path: Path) -> None:
    made: list[Network] = []

    def fail() -> None:
        with network.network(tmp_path, [Shape(1e8, RTT), Shape(1e8, RTT)]) as one:
            made.append(one)
            assert len(spaces()) == 3
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert spaces() == []
    assert [region.link.returncode is not None for region in made[0].regions] == [True, True]


def test_namespaces_of_a_killed_run_are_removed_by_the_next_one() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    left = f"deltawire-wan-{gone.pid}-trainer"
    subprocess.run(["ip", "netns", "add", left], check=True)
    network.remove_left_behind()
    assert left not in subprocess.check_output(["ip", "netns", "list"], text=True)
