"""Regions: relays that copy the chain over a link, and members whose engines follow the relay of their region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from random import Random
from typing import Any

from ...fleet.rules.staleness import KnownVersion
from ...fleet.steps.member_state import MemberState
from ...fleet.steps.requests import Generate, Sync
from ...format.records.member_records import LinkReport
from ...store.requests import Sleep
from .chain_model import ChainModel
from .engine_model import EngineModel
from .kernel import Kernel, Process, VirtualThread
from .oracle import Violation
from .wan_link import PIECES, TRY_AGAIN, WanLink


class RelayModel:
    """A relay: it copies one version after the other over the link, each before its commit. Its objects survive its death.

    Parameters
    ----------
    kernel
        Virtual time.
    chain
        The chain at the origin.
    link
        The link to the origin.
    poll
        Seconds between two looks at the origin.
    """

    def __init__(self, kernel: Kernel, chain: ChainModel, link: WanLink, *, poll: float) -> None:
        self._kernel = kernel
        self._chain = chain
        self._link = link
        self._poll = poll
        self.held: Counter[int] = Counter()
        """How many pieces of each version the relay has."""
        self.shown = -1
        """The newest commit that readers see."""
        self.shown_old: int | None = None
        """If it is not None, the relay shows this old commit, whatever it has."""
        self.stays_old = False
        """Whether it continues to show an old commit when all other faults are over."""
        self.process: Process | None = None
        self.progress_at = 0.0
        """When the relay last copied something, or found that it had everything."""
        self.has_failed = False
        """Whether the relay ever died, was frozen, or showed an old commit."""

    @property
    def is_up(self) -> bool:
        """True while readers can read from it."""
        return self.process is not None and self.process.alive

    @property
    def head(self) -> int:
        """The newest commit that the relay shows to readers."""
        return self.shown if self.shown_old is None else min(self.shown, self.shown_old)

    def steps(self) -> Generator[Any, Any, None]:
        """Copy the chain until the process is killed."""
        while True:
            if self._link.is_cut:
                yield Sleep(TRY_AGAIN)
                continue
            yield Sleep(2 * self._link.delay)
            self.progress_at = self._kernel.now
            following = next((one.seq for one in self._chain.every() if one.seq > self.shown), None)
            if following is None:
                yield Sleep(self._poll)
            else:
                yield from self.copy_steps(following)

    def copy_steps(self, seq: int) -> Generator[Any, Any, None]:
        """Copy the data of a version, and show its commit after that."""
        for _ in self._link.fetch_steps(seq, self.held):
            self.progress_at = self._kernel.now
            yield _
        self.progress_at = self._kernel.now
        self.shown = seq


class Region:
    """A region: its link, its relay if it has one, and how its readers follow the chain.

    Parameters
    ----------
    name
        The name of the region.
    kernel
        Virtual time.
    random
        Draws when readers look.
    chain
        The chain at the origin.
    link
        The link to the origin.
    relay
        The relay; None if readers always use the origin.
    local_seconds
        How long a reader takes for a version that the relay has.
    patience
        After this many seconds without progress of the relay, readers use the origin.
    """

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        random: Random,
        chain: ChainModel,
        link: WanLink,
        relay: RelayModel | None,
        *,
        local_seconds: float,
        patience: float = 120.0,
    ) -> None:
        self.name = name
        self._kernel = kernel
        self._random = random
        self._chain = chain
        self.link = link
        self.relay = relay
        self._local_seconds = local_seconds
        self.patience = patience
        self._reader: KnownVersion | None = None

    def reader_got(self, version: KnownVersion) -> None:
        """Note what the reader of the region that only follows the chain has got."""
        self._reader = version

    def reader_has(self) -> int:
        """Return the commit of that reader; -1 for none."""
        return -1 if self._reader is None else self._reader.seq

    def join(self, process: Process, engine: EngineModel, state: MemberState) -> None:
        """Let the engine of a member follow the chain in the background, and let its heartbeats report the link."""
        assert isinstance(engine, RegionEngine)
        process.start(self.follow_steps(engine.arrived, engine.have), lambda value, error: _ended(error))
        state.measure = lambda: (LinkReport(round(self.link.rate), round(2000 * self.link.delay), 0), engine.behind_ms)

    def follow_steps(self, arrived: Callable[[KnownVersion], None], have: Callable[[], int]) -> Generator[Any, Any, None]:
        """Follow the chain as a reader of this region does, until its process is killed.

        Parameters
        ----------
        arrived
            Called with each version that the reader has got.
        have
            Returns the commit that the reader has; -1 for none.
        """
        own: Counter[int] = Counter()
        while True:
            yield Sleep(0.5 + self._random.random())
            if self.uses_relay():
                yield from self._from_relay(arrived, have)
            elif self.link.is_cut:
                yield Sleep(TRY_AGAIN)
            else:
                yield from self._from_origin(arrived, have, own)

    def uses_relay(self) -> bool:
        """Return whether readers fetch from the relay at this moment."""
        relay = self.relay
        if relay is None or not relay.is_up:
            return False
        newest = self._chain.head()
        is_behind = newest is not None and relay.head < newest.seq
        return not is_behind or self.link.is_cut or self._silence(relay) <= self.patience

    def relay_works(self) -> bool:
        """Return whether the relay does its work, as an observer sees it who knows everything."""
        relay = self.relay
        return relay is not None and relay.is_up and relay.shown_old is None and self._silence(relay) <= self.patience

    def _silence(self, relay: RelayModel) -> float:
        """Return for how long the relay has got nothing new although it could. A relay that shows old commits shows no progress either."""
        return self._kernel.now - max(relay.progress_at if relay.shown_old is None else 0.0, self.link.cut_until)

    def _from_relay(self, arrived: Callable[[KnownVersion], None], have: Callable[[], int]) -> Generator[Any, Any, None]:
        relay = self.relay
        assert relay is not None
        version = self._chain.at(relay.head)
        if version is None or version.seq <= have():
            return
        missing = [one.seq for one in self._chain.every() if have() < one.seq <= version.seq]
        for seq in missing:
            if relay.held[seq] < PIECES:
                raise Violation(f"the relay of {self.name} shows commit {version.seq}, but does not have the data of commit {seq}.")
        yield Sleep(self._local_seconds * min(len(missing), 4))
        if relay.is_up and version.seq > have():
            arrived(version)

    def _from_origin(
        self, arrived: Callable[[KnownVersion], None], have: Callable[[], int], own: Counter[int]
    ) -> Generator[Any, Any, None]:
        yield Sleep(2 * self.link.delay)
        version = self._chain.head()
        if version is None or version.seq <= have() or self.link.is_cut or self.uses_relay():  # the relay may be back by now
            return
        if self.relay_works():
            raise Violation(f"a reader of {self.name} fetches commit {version.seq} from the origin, although the relay works.")
        for seq in [one.seq for one in self._chain.every() if have() < one.seq <= version.seq][-4:]:
            while own[seq] < PIECES and not self.uses_relay():
                yield Sleep(self.link.piece_seconds)
                own[seq] += not self.link.is_cut
            if own[seq] < PIECES:
                return
            self.link.direct[seq] += 1
        if version.seq > have():
            arrived(version)


class RegionEngine(EngineModel):
    """An engine that gets its versions in the background. Generation never waits for a version unless it has none that is allowed.

    Parameters
    ----------
    kernel
        Virtual time.
    random
        Draws delays, lengths and tokens.
    chain
        The chain that the engine follows.
    published
        When each commit was published.
    rate
        Tokens per second.
    patience
        How long `Sync` waits for a version that the engine lacks.
    """

    def __init__(
        self, kernel: Kernel, random: Random, chain: ChainModel, published: dict[int, float], *, rate: float, patience: float = 1.0
    ) -> None:
        super().__init__(kernel, random, chain, rate=rate, sync_seconds=patience)
        self._published = published
        self._patience = patience
        self.behind_ms: int | None = None

    def have(self) -> int:
        """Return the commit of its version; -1 for none."""
        return -1 if self.version is None else self.version.seq

    def arrived(self, version: KnownVersion) -> None:
        """Swap a version in that has arrived."""
        if self.version is not None:
            self.behind_ms = round(1000 * (self._kernel.now - self._published[version.seq]))
        self.version = version

    def sync(self, thread: VirtualThread, request: Sync) -> None:
        """Return the version that the engine has, at once or after waiting for a newer one."""
        is_too_old = self.version is None or self.version.step < request.step
        self._kernel.later(self._patience if is_too_old else 0.0, self._tell, thread)

    def _tell(self, thread: VirtualThread) -> None:
        thread.resume(self.version)

    def _generated(self, thread: VirtualThread, request: Generate, lengths: list[int], first: KnownVersion | None) -> None:
        if thread.process.running(self._generated, thread, request, lengths, first):
            assert first is not None
            thread.resume(self._rollouts(request, lengths, [first, self.version or first]))


def _ended(error: Exception | None) -> None:
    if error is not None:
        raise error
