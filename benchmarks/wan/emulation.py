"""A running emulation: the network, the trainer with its S3 server, and a member in each region."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .network import Network, Region, Shape, Site, network
from .processes import Talker, start, stop
from .store_servers import StoreServer, store_server

POLL_SECONDS = 0.25
"""Seconds between two looks of a member for a new version."""

_HERE = Path(__file__).parent
_SECONDS = 300.0
"""The most seconds to wait for one answer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version in one region: when the region began to serve it, what crossed its link, and the phases of its sync."""

    region: Region
    served: float
    link_bytes: int
    swap_begin: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transfer:
    """An update on its way to all regions: when it began, when its commit was there, its bytes, and its arrivals."""

    begin: float
    published: float
    nbytes: int
    arrivals: list[Arrival]
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds until every region serves."""
        return max(arrival.served for arrival in self.arrivals) - self.begin


@dataclass
class Emulation:
    """The parts of a running emulation."""

    network: Network
    origin: StoreServer
    trainer: Talker
    members: list[Talker]
    folder: Path
    runs: int = 0
    copies: int = 0
    block: str = ""
    readers: int = 1
    trained: int = 0
    """The number of versions that are trained and not published yet. More than one only if they are encoded ahead."""

    def shape(self, rate: float, rtts: Sequence[float]) -> None:
        """Set the rate of all links, and the round-trip time of each."""
        for region, rtt in zip(self.network.regions, rtts, strict=True):
            region.shape(Shape(rate, rtt))

    def begin_run(self, copies: int, *, is_ahead: bool = False, writer: dict[str, Any] | None = None) -> None:
        """Begin a run with this many blocks of weights. Its first version is in every region already.

        Parameters
        ----------
        copies
            The number of blocks.
        is_ahead
            Whether `train` encodes the next version, so that `publish` only stores it.
        writer
            Options of the publisher.
        """
        self.end_following()
        self.runs += 1
        self.copies = copies
        self.trained = 0
        url = self.origin.url(f"run{self.runs}")
        self.block = self.trainer.ask(_SECONDS, do="open", url=url, copies=copies, is_ahead=is_ahead, writer=writer or {})["block"]

    def begin_following(
        self,
        *,
        decodes: bool = True,
        readers: int = 1,
        relays: Sequence[StoreServer] | None = None,
        store: dict[str, Any] | None = None,
        reader: dict[str, Any] | None = None,
    ) -> None:
        """Let readers in each region follow the run.

        Parameters
        ----------
        decodes
            Whether they decode what they fetch, and apply it.
        readers
            The number of readers in each region.
        relays
            A server for each region, to which a relay copies the run. None: readers read over the link.
        store, reader
            Options of the store, and of the readers.
        """
        self.readers = readers
        for number, member in enumerate(self.members):
            member.tell(
                do="follow",
                url=self.origin.url(f"run{self.runs}"),
                block=self.block,
                copies=self.copies,
                poll=POLL_SECONDS,
                decodes=decodes,
                readers=readers,
                relay=None if relays is None else f"http://127.0.0.1:{relays[number].port}",
                store=store or {},
                reader=reader or {},
            )
        for member in self.members:
            member.hear(_SECONDS)

    def end_following(self) -> None:
        """Stop following."""
        for member in self.members:
            member.ask(_SECONDS, do="leave")

    def train(self, versions: int = 1) -> None:
        """Make new weights, until so many versions are not published yet."""
        while self.trained < versions:
            self.trainer.ask(_SECONDS, do="train")
            self.trained += 1

    def publish(self) -> Transfer:
        """Publish the new weights, and wait until every region serves them."""
        before = self._received()
        self.trained -= 1
        published = self.trainer.ask(_SECONDS, do="publish")
        heard = [self._last_of(member) for member in self.members]
        arrivals = [
            Arrival(region, said["end"], now - then, said["begin"], {key: said[key] for key in said if key.endswith("_seconds")})
            for region, said, now, then in zip(self.network.regions, heard, self._received(), before, strict=True)
        ]
        phases = {key: published[key] for key in published if key.endswith("_seconds")}
        return Transfer(published["begin"], published["published"], published["bytes"], arrivals, phases)

    def check_bits(self) -> None:
        """Compare the weights of every region with those of the trainer, bit for bit."""
        for member in self.members:
            if not member.ask(_SECONDS, do="equals", block=self.block)["equal"]:
                raise RuntimeError(f"{member.name} has other weights than the trainer.")

    def codecs(self) -> dict[str, float]:
        """Return the seconds in which the trainer's cores encode and decode one block, by each method."""
        return self.trainer.ask(_SECONDS, do="codecs")

    def send(self, method: str, *, copies: int, size: int | None = None, decodes: bool = True, repeats: int = 1) -> list[Transfer]:
        """Send full weights ("full"), XOR deltas ("xor") or other objects ("objects") to all regions, and return each of the transfers.

        The trainer stores them first. That time, and the time of encoding, are phases of the transfers.

        Parameters
        ----------
        method
            What to send.
        copies
            The number of blocks, or of objects.
        size
            The bytes of each of the other objects.
        decodes
            Whether regions decode XOR deltas.
        repeats
            How often the same is sent, over the same connections.
        """
        made = self.trainer.ask(_SECONDS, do=method, **({"copies": copies} if size is None else {"size": size}))
        fetch = method if decodes else "objects"
        before = self._received()
        for member in self.members:
            url = self.origin.url("plain")
            member.tell(do=fetch, url=url, key=made["key"], size=made["size"], times=copies, repeats=repeats, store={})
        heard = [member.hear(_SECONDS) for member in self.members]
        received = [(now - then) / repeats for now, then in zip(self._received(), before, strict=True)]
        phases = {"encode_seconds": made.get("encode", 0.0), "upload_seconds": made.get("upload", 0.0)}
        return [
            Transfer(
                0.0,
                0.0,
                made["size"] * copies,
                [
                    Arrival(region, said["seconds"][repeat], round(link), phases={"decode_seconds": said["decode"]})
                    for region, said, link in zip(self.network.regions, heard, received, strict=True)
                ],
                phases,
            )
            for repeat in range(repeats)
        ]

    def _last_of(self, member: Talker) -> dict[str, Any]:
        """Wait for all readers of a region, and return the message of the last one."""
        return max((member.hear(_SECONDS) for _ in range(self.readers)), key=lambda said: float(said["end"]))

    def _received(self) -> list[int]:
        return [region.received() for region in self.network.regions]


@contextmanager
def relay_servers(emulation: Emulation) -> Iterator[list[StoreServer]]:
    """Run an S3 server in each region."""
    with ExitStack() as stack:
        servers = []
        for region in emulation.network.regions:
            folder = emulation.folder / f"relay{region.number}"
            folder.mkdir()
            servers.append(stack.enter_context(store_server(region, folder)))
        yield servers


@contextmanager
def emulation(folder: Path, shapes: Sequence[Shape]) -> Iterator[Emulation]:
    """Start everything, and stop and remove it afterwards.

    Parameters
    ----------
    folder
        An empty folder for data and logs.
    shapes
        The link of each region.
    """
    with ExitStack() as stack:
        net = stack.enter_context(network(folder, shapes))
        (folder / "origin").mkdir()
        origin = stack.enter_context(store_server(net.trainer, folder / "origin"))

        def child(site: Site, program: str, address: str) -> Talker:
            log = folder / f"{site.name}.log".replace(" ", "")
            environment = {**origin.environment(address), "WAN_PLAIN_URL": origin.url("plain")}
            process = start(site.command(sys.executable, str(_HERE / program)), log, environment=environment)
            stack.callback(stop, process)
            return Talker(process, site.name, log)

        trainer = child(net.trainer, "trainer.py", "127.0.0.1")
        members = [child(region, "member.py", region.origin) for region in net.regions]
        for each in [trainer, *members]:
            each.hear(_SECONDS)
        yield Emulation(net, origin, trainer, members, folder)
