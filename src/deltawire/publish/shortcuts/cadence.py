"""When another anchor is worth its upload. That depends on what a new reader would have to fetch and replay without it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """Says how often a full checkpoint (an anchor) is added to the chain, in addition to those that commits need.

    An anchor is due when new readers would fetch or replay too much to reach the newest version from the last anchor. It is also due when
    that would take longer than loading a full checkpoint. Garbage collection deletes data before the last anchors, so without anchors it
    deletes nothing.

    Parameters
    ----------
    min_versions
        The smallest number of versions between two anchors.
    max_versions
        Add an anchor after this many versions in any case. None: only for the other reasons.
    max_chain_ratio
        Add an anchor when readers would fetch more than this many times the bytes of a full checkpoint.
    max_replay_seconds
        Add an anchor when fetching and replaying would take longer than this. None: longer than loading a full checkpoint.
    """

    min_versions: int = 16
    max_versions: int | None = 2000
    max_chain_ratio: float = 1.0
    max_replay_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.min_versions < 1 or (self.max_versions is not None and self.max_versions < self.min_versions):
            raise ValueError("min_versions must be at least 1, and max_versions at least min_versions")
        if self.max_chain_ratio <= 0 or (self.max_replay_seconds is not None and self.max_replay_seconds <= 0):
            raise ValueError("max_chain_ratio and max_replay_seconds must be positive")


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured bytes per second, over the network and through the codec. They estimate the speed of readers. None: not known yet."""

    network: float | None = None
    codec: float | None = None

    def observe(self, *, sent: int = 0, send_seconds: float = 0.0, scanned: int = 0, scan_seconds: float = 0.0) -> Speed:
        """Return the speed with another measurement. The best one counts: small transfers measure latency, and the machine may be busy."""
        return Speed(_best(self.network, sent, send_seconds), _best(self.codec, scanned, scan_seconds))


@dataclass(frozen=True, slots=True)
class Replay:
    """The cost of the cheapest route from the newest anchor to a version: bytes to fetch, and the number of deltas."""

    bytes: int = 0
    hops: int = 0


@dataclass(slots=True)
class ChainCost:
    """Tracks the cheapest route to each version since the newest anchor, while commits and skips are added.

    `versions` is the number of versions since that anchor.
    """

    versions: int = 0
    _routes: dict[int, Replay] = field(default_factory=lambda: {0: Replay()})

    @classmethod
    def resumed(cls, versions: int, replay: Replay) -> ChainCost:
        """Return the cost of a chain that a writer continues, this many versions after an anchor."""
        return cls(versions, {0: Replay(), versions: replay} if versions else {0: Replay()})

    @property
    def replay(self) -> Replay:
        """The cost of the newest version. It is an estimate: after Ctrl-C in the middle of a change, it is that of an earlier version."""
        return self._routes.get(self.versions) or self._routes[max(self._routes)]

    def add_update(self, size: int) -> None:
        """Note that a version was committed as a delta of `size` bytes over the one before."""
        last = self.replay
        self._routes[self.versions + 1] = Replay(last.bytes + size, last.hops + 1)
        self.versions += 1

    def add_skip(self, versions: int, size: int, behind: int = 0) -> None:
        """Note a skip of `size` bytes over `versions` versions, to the version that is `behind` versions before the newest.

        It does not help readers that start at a newer anchor.
        """
        target = self.versions - behind
        start, old = self._routes.get(target - versions), self._routes.get(target)
        if start is None or old is None or start.bytes + size > old.bytes:
            return
        saved = Replay(old.bytes - start.bytes - size, old.hops - start.hops - 1)
        for version, route in self._routes.items():
            if version >= target:  # the routes to newer versions lead over this one
                self._routes[version] = Replay(route.bytes - saved.bytes, route.hops - saved.hops)

    def anchored(self, behind: int = 0) -> None:
        """Note that an anchor was made of the version that is `behind` versions before the newest."""
        start = self.versions - behind
        base = self._routes.get(start, self.replay)
        later = {v - start: Replay(r.bytes - base.bytes, r.hops - base.hops) for v, r in self._routes.items() if v >= start}
        # A skip over the new anchor does not start from it. The difference of costs is only an estimate then.
        self._routes = {0: Replay()} | {v: Replay(max(r.bytes, 0), max(r.hops, 1)) for v, r in later.items() if v > 0}
        self.versions = behind


def anchor_due(policy: AnchorPolicy, cost: ChainCost, state_bytes: int, speed: Speed) -> bool:
    """Return whether an anchor of the newest version should be made now."""
    if cost.versions < policy.min_versions:
        return False
    if policy.max_versions is not None and cost.versions >= policy.max_versions:
        return True
    if cost.replay.bytes > policy.max_chain_ratio * state_bytes:
        return True
    if speed.network is None or speed.codec is None:
        return False
    # Decoding a hop takes one pass over the whole state, because digests cover unchanged weights, too.
    seconds = cost.replay.bytes / speed.network + cost.replay.hops * state_bytes / speed.codec
    load = state_bytes / speed.network
    return seconds > (load if policy.max_replay_seconds is None else min(load, policy.max_replay_seconds))


def _best(known: float | None, size: int, seconds: float) -> float | None:
    if size <= 0 or seconds <= 0:
        return known
    return max(known or 0.0, size / seconds)
