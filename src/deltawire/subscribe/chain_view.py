"""The chain as one reader sees it: its head, as far as the reader may trust it, and the versions below it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..chain.channels import ChannelReader, target_of
from ..chain.log import ChainLog
from ..errors import ChainBroken, ChainError, ChainStale, DataMissing, DeltaError, NoChain, VersionGone, VersionUnknown
from ..events import Stopwatch
from ..format.records.channel_records import ChannelMove
from ..format.records.version_records import Commit
from .seen import SeenFile

_ATTEMPTS = 8
"""If a collection deletes the newest version, or a channel leaves it, this many times during one sync, the sync fails."""

_Result = TypeVar("_Result")


class TargetLeft(Exception):
    """The channel was moved while a sync prepared to reach its target. `ChainView.reach` continues with the new target."""


class ChainView:
    """A chain as one reader sees it.

    Parameters
    ----------
    log
        The chain.
    seen
        Remembers the newest commit across processes, before anything is done with it.
    max_silence
        The largest age of the newest commit, in seconds.
    channel
        The channel to follow. None follows the newest version.
    clock
        Returns the time in seconds since 1970.
    """

    def __init__(
        self,
        log: ChainLog,
        *,
        seen: SeenFile | None = None,
        max_silence: float | None = None,
        channel: ChannelReader | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.log = log
        self._seen = seen
        self._max_silence = max_silence
        self._channel = channel
        self._clock = clock
        self._head: Commit | None = None
        self._target: Commit | None = None

    def head(self) -> Commit:
        """Return the newest commit that is not void. Raises `NoChain` if nothing is published, `RollbackDetected` or `ChainBroken`."""
        if self._seen is not None:
            remembered = self._seen.read()
            if remembered is not None and (self.log.known is None or self.log.known.seq < remembered.seq):
                self.log.known = remembered
        newest = self.log.head()
        if newest is None:
            raise NoChain(f"nothing is published at {self.log.store.url}.")
        head = self.log.in_force(newest)
        self.remember()
        if head.state_seq is None:
            raise NoChain(f"no version is published at {self.log.store.url} yet.")
        self._head = head
        return head

    def remember(self) -> None:
        """Note the newest commit in the mirror, if there is one."""
        if self._seen is not None and self.log.known is not None:
            self._seen.remember(self.log.known)

    def version_at(self, head: Commit, seq: int | None) -> Commit:
        """Return the commit that made version `seq` of the chain that ends in `head`, or the version in force at its end. Raises
        `VersionUnknown`.
        """
        if seq is None:
            return self.log.state_commit(head)
        commit = self.log.ancestor(head, seq)
        if commit.state_seq is None or self.log.is_void(commit):
            raise VersionUnknown(f"the chain at {self.log.store.url} has no version in commit {seq}.")
        return self.log.state_commit(commit)

    def target(self) -> Commit:
        """Return the commit of the version that the reader should have: the one that its channel names, or otherwise the newest.

        Raises the errors of `head`, `NoChannel`, and those of `target_of` for a channel that names no version of this chain.
        """
        if self._channel is None:
            self._target = self.log.state_commit(self.head())
            return self._target
        before, move = self._channel.seen, self._channel.newest()  # before the head, so that the head is not older
        if self._target is None or move != before or self._max_silence is not None:
            self._target = None
            try:
                self._target = target_of(self.log, move, self.head())
            except ChainBroken:
                self._channel.refuse()  # a bit may have flipped in transit
                raise
        else:
            self.log.check_known()
        return self._target

    @property
    def move(self) -> ChannelMove | None:
        """The newest move of the channel that was read. None without a channel."""
        return None if self._channel is None else self._channel.seen

    def is_left(self) -> bool:
        """Return whether the channel was moved since its target was last read. This takes one request; without a channel, none."""
        return self._channel is not None and self._channel.has_news()

    def check_wanted(self) -> None:
        """Raise `TargetLeft` if the channel was moved since its target was last read."""
        if self.is_left():
            raise TargetLeft

    def reach(self, seq: int | None, attempt: Callable[[Commit], _Result], *, watch: Stopwatch | None = None) -> _Result:
        """Call `attempt` with the commit that made version `seq`, or that of `target` if `seq` is None. Return its result.

        While the attempt runs, the chain may grow and a collection may delete the data (`VersionGone`). Then the attempt is repeated with
        the version that is newest by then. Raises `DataMissing`, which is retryable, if no route leads to the newest version. `watch`
        counts the time for finding the version as "find". If a copy of the chain may be the reason of an error, the origin is asked.

        An attempt that raises `TargetLeft` is repeated with the version that the channel names by then.
        """
        return self._or_from_origin(lambda: self._reach(seq, attempt, watch or Stopwatch()))

    def _or_from_origin(self, action: Callable[[], _Result]) -> _Result:
        """Return the result of an action. If it fails because of what the chain says, repeat it once without copies of the chain."""
        try:
            return action()
        except (ChainError, DeltaError) as error:
            may_come = isinstance(error, DataMissing)
            if isinstance(error, (ChainStale, NoChain)) or not self.log.store.distrust(str(error), may_come=may_come):
                raise
            self.log.forget()
            with self.log.store.origin_alone():
                return action()

    def _reach(self, seq: int | None, attempt: Callable[[Commit], _Result], watch: Stopwatch) -> _Result:
        passed: Commit | None = None
        for _ in range(_ATTEMPTS):
            with watch.phase("find"):
                commit = self.target() if seq is None else self.version_at(self.head(), seq)
            if passed is not None and (commit == passed if self._channel is not None else commit.seq <= passed.seq):
                raise DataMissing(f"no remaining route in {self.log.store.url} leads to version {commit.updates} (commit {commit.seq}).")
            try:
                return attempt(commit)
            except TargetLeft:
                continue
            except VersionGone as error:
                if seq is not None:
                    raise VersionGone(f"version {commit.updates} was deleted by garbage collection: {error.message}") from error
                passed = commit
        raise DataMissing(
            f"{self.log.store.url} is collected, or its channel is moved, faster than this reader fetches: {_ATTEMPTS} versions were gone "
            "or left in turn."
        )

    def updates_known(self) -> int:
        """Return how many versions there were, up to the one that the reader should have, when that was last read."""
        known = self._head if self._channel is None else self._target
        return 0 if known is None else known.updates

    def has_news(self) -> bool:
        """Return whether commits were added since the head was last read, or the channel was moved. This takes one request.

        From time to time it takes one more, to check whether the store was set back to an earlier state (`RollbackDetected`).
        """
        return self._or_from_origin(self._has_news)

    def _has_news(self) -> bool:
        if self.log.known is None:
            return True
        if self._channel is not None:
            if self._channel.has_news():
                return True
            if self._max_silence is not None:
                self.head()
        elif self.log.read(self.log.known.seq + 1) is not None:
            return True
        self.log.check_known()
        return False

    def newest(self) -> tuple[Commit, Commit] | None:
        """Return the head that was last read and the version that it leaves in force. None before the first look."""
        return None if self._head is None else (self._head, self.log.state_commit(self._head))

    def check_silence(self) -> None:
        """Raise `ChainStale` if the head that was last read is older than allowed."""
        if self._max_silence is None or self._head is None:
            return
        silence = self._clock() - self._head.time / 1000
        if silence > self._max_silence:
            raise ChainStale(f"the newest commit in {self.log.store.url}, {self._head.seq}, is {silence:,.0f} seconds old.")
