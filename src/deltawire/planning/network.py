"""Regions, and how long a version takes from the trainer to their members. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import UnusablePlan
from .link_model import CALIBRATED, MOST_STREAMS, Link, LinkModel, transfer_seconds
from .quantities import checked

MOST_MEMBERS = 1_000_000
MOST_REGIONS = 1_000


@dataclass(frozen=True, slots=True)
class Region:
    """Members that share a network.

    Parameters
    ----------
    name
        The name of the region.
    link
        The link from the origin, which is the store that the trainer writes to.
    members
        The number of members in the region.
    """

    name: str
    link: Link
    members: int

    def __post_init__(self) -> None:
        checked(self.members, f"The number of members of {self.name}", most=MOST_MEMBERS, least=1)


@dataclass(frozen=True, slots=True)
class Network:
    """The regions, and how versions travel to them.

    Parameters
    ----------
    regions
        The regions.
    local
        The link within a region: from the trainer to the origin, and from a region's own store to each member.
    relays
        One copy of each version crosses each link, to a store in the region, and members fetch from that store. Otherwise each member
        fetches over the link.
    streams
        How many transfers each reader runs at the same time. None: as many as are best for the link.
    cut_through
        Readers and relays fetch the files of a version while the trainer still encodes others. Otherwise they wait for the commit.
    poll_seconds
        Seconds between two looks of a reader for a new version.
    model
        The constants of the link model.
    """

    regions: Sequence[Region]
    local: Link = field(default_factory=lambda: Link(10e9, 0.001))
    relays: bool = True
    streams: int | None = None
    cut_through: bool = True
    poll_seconds: float = 1.0
    model: LinkModel = CALIBRATED

    def __post_init__(self) -> None:
        checked(len(self.regions), "The number of regions", most=MOST_REGIONS, least=1)
        checked(self.members, "The number of members", most=MOST_MEMBERS, least=1)
        checked(self.poll_seconds, "The seconds between two looks for a version", most=3600)
        if self.streams is not None:
            checked(self.streams, "The number of streams", most=MOST_STREAMS, least=1)
        if len({region.name for region in self.regions}) != len(self.regions):
            raise UnusablePlan("Two regions have the same name.")

    @property
    def members(self) -> int:
        """The number of members in all regions."""
        return sum(region.members for region in self.regions)


@dataclass(frozen=True, slots=True)
class Shipment:
    """One version on its way.

    Parameters
    ----------
    objects
        The number of its files.
    nbytes
        Their bytes together.
    encode_seconds
        Seconds in which the trainer makes them.
    decode_seconds
        Seconds in which a member decodes them.
    """

    objects: int
    nbytes: float
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a version in one region.

    Parameters
    ----------
    region
        The region.
    behind
        Seconds from the end of training until its members have the version.
    link_seconds
        Seconds for which the version occupies the link.
    link_bytes
        Bytes that cross the link.
    """

    region: Region
    behind: float
    link_seconds: float
    link_bytes: float

    def share_fetched(self, period: float) -> float:
        """Return the share of all versions that cross the link, if one is published every `period` seconds. Readers skip the others."""
        return min(1.0, period / self.link_seconds)


def arrivals(network: Network, shipment: Shipment) -> list[Arrival]:
    """Return how a version arrives in each region. No region waits for another.

    Parameters
    ----------
    network
        The regions and links.
    shipment
        The version.
    """
    return [_arrival(network, region, shipment) for region in network.regions]


def _arrival(network: Network, region: Region, shipment: Shipment) -> Arrival:
    copies = 1 if network.relays else region.members
    streams = None if network.streams is None else min(MOST_STREAMS, network.streams * copies)
    upload = transfer_seconds(shipment.objects, shipment.nbytes, network.local, streams=network.streams, model=network.model)
    crossing = transfer_seconds(shipment.objects * copies, shipment.nbytes * copies, region.link, streams=streams, model=network.model)
    local = upload if network.relays else 0.0
    look = network.poll_seconds / 2
    if network.cut_through:
        stages = [shipment.encode_seconds, upload, crossing, local, shipment.decode_seconds]
        longest = max(stages)
        # The last file passes the other stages after the longest one. Each reader on the way notices files and commits by looking.
        behind = longest + (sum(stages) - longest) / shipment.objects + look * (2 if network.relays else 1) + region.link.rtt
    else:
        # Files are uploaded while others are encoded, and decoded while others are fetched.
        behind = max(shipment.encode_seconds, upload) + look
        behind += crossing + look + max(local, shipment.decode_seconds) if network.relays else max(crossing, shipment.decode_seconds)
    return Arrival(region, behind, crossing, shipment.nbytes * copies)
