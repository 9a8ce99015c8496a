"""Processes that move channels or follow them: people who promote and roll back, gates, and engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ...chain.channels import ChannelReader
from ...chain.find import newest_version
from ...chain.log import ChainLog
from ...errors import ChainBroken, CorruptRecord, DeltawireError, NoChannel
from ...format.records.channel_records import ChannelMove
from ...format.records.version_records import Commit
from ...live.declared_metrics import declared_metrics
from ...live.gate import Gate
from ...live.gate_rules import GatePolicy
from ...publish.channels import ChannelWriter, Reason
from ...subscribe.chain_view import ChainView
from .blocking import VirtualStore, sleep
from .gateway_model import quiet
from .live_chain import LiveChain

_BROKEN = (ChainBroken, CorruptRecord)
"""Errors that a sound store never causes."""


@dataclass(slots=True)
class Follower:
    """An engine that follows a channel with the real `ChainView`. It has no weights.

    Parameters
    ----------
    name
        The name of the engine.
    channel
        The channel that it follows.
    serves
        Called with name, channel and number of the commit when it begins to serve a version.
    fetch_seconds
        How long it fetches a version.
    serving
        The number of the commit that it serves; None while it serves nothing.
    """

    name: str
    channel: str
    serves: Callable[[str, str, int], None]
    fetch_seconds: float
    serving: int | None = None

    def follow(self, ticks: Callable[[], float]) -> None:
        """Follow the channel for ever.

        Parameters
        ----------
        ticks
            Returns seconds that never run backwards.
        """
        log = ChainLog(VirtualStore(), clock=ticks)
        view = ChainView(log, channel=ChannelReader(log, self.channel), clock=ticks)

        def attempt(commit: Commit) -> None:
            if commit.seq != self.serving:
                sleep(self.fetch_seconds)
                view.check_wanted()
                self.serves(self.name, self.channel, commit.seq)
                self.serving = commit.seq

        is_due = True
        while True:
            try:
                if is_due or view.has_news():
                    is_due = True  # until the version is reached, as in `follow_chain`
                    view.reach(None, attempt)
                    is_due = False
            except _BROKEN:
                raise
            except DeltawireError:
                pass
            sleep(4.0)


def watch_canary(policy: GatePolicy, clock: Callable[[], float], ticks: Callable[[], float]) -> None:
    """Run a gate for ever.

    Parameters
    ----------
    policy
        The proofs that a canary has to give.
    clock
        Returns the time of its machine.
    ticks
        Returns seconds that never run backwards.
    """
    log = ChainLog(VirtualStore(), clock=ticks)
    gate = Gate(log, policy, lambda: declared_metrics(log), clock=clock, ticks=ticks, sleep=sleep, on_event=quiet)
    while True:
        try:
            gate.look()
        except _BROKEN:
            raise
        except DeltawireError:
            pass
        sleep(25.0)


@dataclass(slots=True)
class Promoter:
    """A person or a script that lets channels name new versions. Several of them work at the same time, without knowledge of each other.

    Parameters
    ----------
    random
        Draws what it does.
    chain
        The chain, to see whether a version was abandoned.
    tried
        The digests of versions that were a canary before.
    pause
        Seconds between two looks.
    is_calm
        Returns whether it only does what must be done.
    """

    random: Random
    chain: LiveChain
    tried: set[str]
    pause: float
    is_calm: Callable[[], bool]

    def work(self, clock: Callable[[], float], ticks: Callable[[], float]) -> None:
        """Look at the channels and move them, for ever.

        Parameters
        ----------
        clock
            Returns the time of its machine.
        ticks
            Returns seconds that never run backwards.
        """
        log = ChainLog(VirtualStore(), clock=ticks)
        readers = {name: ChannelReader(log, name) for name in ("stable", "canary")}
        writers = {name: ChannelWriter(log, name, clock=clock, on_event=quiet) for name in readers}
        while True:
            sleep(self.pause * (0.5 + self.random.random()))
            try:
                self._look(log, readers, writers)
            except _BROKEN:
                raise
            except DeltawireError:
                pass

    def _look(self, log: ChainLog, readers: dict[str, ChannelReader], writers: dict[str, ChannelWriter]) -> None:
        newest = log.state_commit(newest_version(log))
        stable, canary = (_newest(readers[name]) for name in ("stable", "canary"))
        reason = Reason("by hand", "somebody")
        if stable is None:
            writers["stable"].promote(newest, reason=reason, expect=-1)
            self.tried.add(str(newest.digest))
            return
        known = self.chain.find(stable.target.seq)
        if known is not None and not known.live:
            writers["stable"].promote(newest, reason=reason, expect=stable.move)
            return
        draw = self.random.random()
        if not self.is_calm() and draw < 0.06 and canary is not None:
            writers["canary"].set_share(self.random.randrange(300_000, 700_000), reason=reason)
        elif not self.is_calm() and draw < 0.1:
            writers["stable"].rollback(reason=reason)
        elif not self.is_calm() and draw < 0.13 and canary is not None:
            writers["canary"].rollback(log.ancestor(newest, stable.target.seq), reason=reason)
        elif self._is_free(canary, stable) and str(newest.digest) not in self.tried:
            move = writers["canary"].promote(newest, share=500_000, reason=reason, expect=-1 if canary is None else canary.move)
            self.tried.add(str(move.target.digest))

    def _is_free(self, canary: ChannelMove | None, stable: ChannelMove) -> bool:
        return canary is None or canary.target == stable.target or canary.kind == "rollback" or self.random.random() < 0.1


def _newest(reader: ChannelReader) -> ChannelMove | None:
    try:
        return reader.newest()
    except NoChannel:
        return None
