"""Network namespaces for a trainer and its regions, and an emulated link from the trainer to each region.

Everything is removed in the end, even after an error or Ctrl-C. The next run removes the namespaces of a killed one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from . import processes

_PREFIX = "deltawire-wan"
_MTU = 9000
_QUEUE_SECONDS = 0.25
_SOCKET_BYTES = 64 << 20
_SETTINGS = {
    "net.ipv4.tcp_rmem": f"4096 131072 {_SOCKET_BYTES}",
    "net.ipv4.tcp_wmem": f"4096 131072 {_SOCKET_BYTES}",
    "net.ipv4.tcp_no_metrics_save": "1",
}


class CannotEmulate(RuntimeError):
    """This machine cannot emulate a network."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The rate of a link in bits per second, and its round-trip time in seconds."""

    rate: float
    rtt: float

    def text(self) -> str:
        """Return the shape for a table."""
        return f"{self.rate / 1e9:g} Gbit/s, {1e3 * self.rtt:g} ms"

    def line(self) -> str:
        """Return the numbers that the link program takes."""
        return f"{self.rate:.0f} {self.rtt / 2 * 1e6:.0f} {_QUEUE_SECONDS * 1e6:.0f}"


@dataclass
class Site:
    """A namespace: the trainer's, or that of a region."""

    name: str
    space: str

    def command(self, *command: str) -> list[str]:
        """Return a command that runs in this namespace."""
        return ["ip", "netns", "exec", self.space, *command]


@dataclass
class Region(Site):
    """A region: its namespace, and its link to the trainer."""

    number: int
    link: subprocess.Popen[bytes] = field(repr=False, kw_only=True)

    @property
    def origin(self) -> str:
        """The address of the trainer, over the link."""
        return f"10.87.{self.number}.1"

    @property
    def address(self) -> str:
        """The address of the region, over the link."""
        return f"10.87.{self.number}.2"

    def shape(self, shape: Shape) -> None:
        """Set the rate and the delay of the link."""
        assert self.link.stdin is not None
        assert self.link.stdout is not None
        self.link.stdin.write(shape.line().encode() + b"\n")
        self.link.stdin.flush()
        if self.link.stdout.readline() != b"set\n":
            raise CannotEmulate(f"The link to {self.name} has ended.")

    def received(self) -> int:
        """Return the bytes that the region has received over its link."""
        return _counter(self.space, "wan", "rx")

    def sent(self) -> int:
        """Return the bytes that the region has sent over its link."""
        return _counter(self.space, "wan", "tx")


@dataclass
class Network:
    """The trainer, and the regions."""

    trainer: Site
    regions: list[Region]


def missing() -> str | None:
    """Return what this machine lacks, as a sentence, or None."""
    if os.geteuid() != 0:
        return "Network namespaces need root: run it with sudo, or as root in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN."
    for program, package in {"ip": "iproute2", "g++": "g++"}.items():
        if shutil.which(program) is None:
            return f"The program {program} is missing: apt-get install {package}."
    if not Path("/dev/net/tun").exists():
        return "The device /dev/net/tun is missing: load the kernel module tun."
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return f"Network namespaces cannot be made here: {made.stderr.strip()}" if made.returncode != 0 else None


@contextmanager
def network(folder: Path, shapes: Sequence[Shape]) -> Iterator[Network]:
    """Make a trainer and a region for each shape, and remove everything afterwards.

    Parameters
    ----------
    folder
        An existing folder for the link program and its logs.
    shapes
        The links of the regions.
    """
    if reason := missing():
        raise CannotEmulate(reason)
    remove_left_behind()
    program = _compile(folder)
    with ExitStack() as stack:
        trainer = Site("trainer", stack.enter_context(_namespace("trainer")))
        regions = []
        for number, shape in enumerate(shapes, 1):
            space = stack.enter_context(_namespace(f"region{number}"))
            link = stack.enter_context(_link(program, folder / f"link{number}.log", trainer.space, space, number, shape))
            regions.append(Region(f"region {number}", space, number, link=link))
        yield Network(trainer, regions)


def remove_left_behind() -> None:
    """Remove the namespaces of runs whose process is gone."""
    for line in _ip("netns", "list").splitlines():
        space = line.split()[0] if line.split() else ""
        parts = space.removeprefix(_PREFIX + "-").split("-")
        if space.startswith(_PREFIX + "-") and parts[0].isdigit() and not Path("/proc", parts[0]).exists():
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    space = f"{_PREFIX}-{os.getpid()}-{name}"
    _ip("netns", "add", space)
    try:
        _ip("-n", space, "link", "set", "lo", "up")
        for setting, value in _SETTINGS.items():
            _run("ip", "netns", "exec", space, "sysctl", "-q", "-w", f"{setting}={value}")
        yield space
    finally:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


@contextmanager
def _link(program: Path, log: Path, trainer: str, region: str, number: int, shape: Shape) -> Iterator[subprocess.Popen[bytes]]:
    process = processes.start([str(program), trainer, f"wan{number}", region, "wan", *shape.line().split()], log)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise CannotEmulate(f"The link program does not start here: {log.read_text(errors='replace')}")
        for space, device, host in [(trainer, f"wan{number}", 1), (region, "wan", 2)]:
            _ip("-n", space, "address", "add", f"10.87.{number}.{host}/30", "dev", device)
            _ip("-n", space, "link", "set", device, "mtu", str(_MTU), "txqueuelen", "10000", "up")
        yield process
    finally:
        processes.stop(process)


def _compile(folder: Path) -> Path:
    program = folder / "link"
    source = Path(__file__).with_name("link.cpp")
    _run("g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-pthread", str(source), "-o", str(program))
    return program


def _counter(space: str, device: str, way: str) -> int:
    [found] = json.loads(_ip("-n", space, "-s", "-j", "link", "show", "dev", device))
    return int(found["stats64"][way]["bytes"])


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotEmulate(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
