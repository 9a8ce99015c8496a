"""When another checkpoint is worth its upload: decided by what a joiner would otherwise have to fetch and replay. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """How often a whole checkpoint (an anchor) is added to the chain, beside those that its commits need anyway.

    An anchor is due when the cheapest way from the newest one to the head has more than `max_chain_ratio` times the bytes of a checkpoint,
    or would take longer to fetch and replay than a checkpoint takes to load, or than `max_replay_seconds`. Never within `min_versions`
    versions of the last, always after `max_versions`; with `max_versions` None only when the other reasons say so. Anchors are also what
    garbage collection moves up to: without them nothing is ever collected.
    """

    min_versions: int = 16
    max_versions: int | None = 2000
    max_chain_ratio: float = 1.0
    max_replay_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.min_versions < 1 or (self.max_versions is not None and self.max_versions < self.min_versions):
            raise ValueError("min_versions must be at least 1, and max_versions no less than it")
        if self.max_chain_ratio <= 0 or (self.max_replay_seconds is not None and self.max_replay_seconds <= 0):
            raise ValueError("max_chain_ratio and max_replay_seconds must be positive")


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured here, as a guess at a joiner's: bytes per second over the network, and through the codec. None while unknown."""

    network: float | None = None
    codec: float | None = None

    def observe(self, *, sent: int = 0, send_seconds: float = 0.0, scanned: int = 0, scan_seconds: float = 0.0) -> Speed:
        """With another measurement. The best seen counts: small transfers measure latency, and busy moments say nothing of readers."""
        return Speed(_best(self.network, sent, send_seconds), _best(self.codec, scanned, scan_seconds))


@dataclass(frozen=True, slots=True)
class Replay:
    """What the cheapest way from the newest anchor to a version takes: bytes to fetch, and how many deltas in a row."""

    bytes: int = 0
    hops: int = 0


@dataclass(slots=True)
class ChainCost:
    """The cheapest ways to each version since the newest anchor, as commits and skips are added.

    `versions` counts them. Only as many ways are kept as skips can still start from: one per version since the anchor.
    """

    versions: int = 0
    _ways: dict[int, Replay] = field(default_factory=lambda: {0: Replay()})

    @classmethod
    def resumed(cls, versions: int, way: Replay) -> ChainCost:
        """Where a chain is taken up again: so many versions after an anchor, on this way from it."""
        return cls(versions, {0: Replay(), versions: way} if versions else {0: Replay()})

    @property
    def way(self) -> Replay:
        """To the newest version. (Where a change was cut off by Ctrl-C, to the newest that is known; it is an estimate anyway.)"""
        return self._ways.get(self.versions) or self._ways[max(self._ways)]

    def add_update(self, size: int) -> None:
        """A version was committed as a delta of `size` bytes over the one before."""
        last = self.way
        self._ways[self.versions + 1] = Replay(last.bytes + size, last.hops + 1)
        self.versions += 1

    def add_skip(self, span: int, size: int) -> None:
        """A skip of `size` bytes leads to the newest version from `span` versions before it. Of no use to who starts at a newer anchor."""
        start = self._ways.get(self.versions - span)
        if start is not None and start.bytes + size <= self.way.bytes:
            self._ways[self.versions] = Replay(start.bytes + size, start.hops + 1)

    def anchored(self, behind: int = 0) -> None:
        """A checkpoint was made of the version that lies `behind` versions before the newest."""
        start = self.versions - behind
        base = self._ways.get(start, self.way)
        later = {v - start: Replay(w.bytes - base.bytes, w.hops - base.hops) for v, w in self._ways.items() if v >= start}
        # A way that skipped over the new anchor is no way from it: what such a skip saved is taken as saved half-way. It is an estimate.
        self._ways = {0: Replay()} | {v: Replay(max(w.bytes, 0), max(w.hops, 1)) for v, w in later.items() if v > 0}
        self.versions = behind


def anchor_due(policy: AnchorPolicy, cost: ChainCost, state_bytes: int, speed: Speed) -> bool:
    """Whether a checkpoint of the newest version should be made now."""
    if cost.versions < policy.min_versions:
        return False
    if policy.max_versions is not None and cost.versions >= policy.max_versions:
        return True
    if cost.way.bytes > policy.max_chain_ratio * state_bytes:
        return True
    if speed.network is None or speed.codec is None:
        return False
    # A hop is decoded in one pass over the whole state, since digests cover unchanged weights too.
    replay = cost.way.bytes / speed.network + cost.way.hops * state_bytes / speed.codec
    load = state_bytes / speed.network
    return replay > (load if policy.max_replay_seconds is None else min(load, policy.max_replay_seconds))


def _best(known: float | None, size: int, seconds: float) -> float | None:
    if size <= 0 or seconds <= 0:
        return known
    return max(known or 0.0, size / seconds)
