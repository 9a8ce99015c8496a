"""Knows which versions are on the channels, and which users belong to them. A thread reads the store; requests ask only memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..chain.channels import KEPT_TARGETS, ChannelReader, channel_of
from ..chain.log import ChainLog
from ..errors import DeltawireError
from ..events import OnEvent, emit
from ..format.records.channel_records import ChannelMove


@dataclass(frozen=True, slots=True)
class _Snapshot:
    moves: dict[str, ChannelMove] = field(default_factory=dict)
    seqs: dict[str, tuple[int, ...]] = field(default_factory=dict)


class ChannelWatch:
    """The channels of a chain, as they were at the last look.

    Parameters
    ----------
    log
        The chain. Only the thread of this object uses it.
    names
        The channels to read.
    main
        The channel of users who belong to no other.
    every
        Seconds between two looks.
    on_change
        Called after a look that found another move. It must return quickly.
    on_event
        Called with "channel-unreadable".
    """

    def __init__(
        self,
        log: ChainLog,
        names: Collection[str | None],
        main: str | None,
        *,
        every: float = 0.25,
        on_change: Callable[[], object] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._readers = {name: ChannelReader(log, name) for name in sorted(name for name in names if name is not None)}
        self._main = main
        self._every = every
        self._on_change = on_change or (lambda: None)
        self._on_event = on_event
        self._now = _Snapshot()
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look."""
        if self._readers:
            self._thread = threading.Thread(target=self._run, name="deltawire-channels", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def rank(self, channel: str | None, seq: int | None) -> int | None:
        """Return how good a version is for a channel: 0 for its present version, more for earlier ones, None if it was never there.

        Every version is good for an engine that follows no channel.
        """
        if channel is None:
            return 0
        known = self._now.seqs.get(channel, ())
        return known.index(seq) if seq in known else None

    def exists(self, channel: str | None) -> bool:
        """Return whether a channel had a version at the last look. None is the chain itself."""
        return channel is None or channel in self._now.seqs

    def channel_of(self, user: str) -> str | None:
        """Return the channel that a user belongs to."""
        others = [move for name, move in self._now.moves.items() if name != self._main]
        return channel_of(user, others) or self._main

    def look(self) -> None:
        """Read the newest moves of all channels. Errors are events, and the channels stay as they were."""
        moves, seqs, problem = dict(self._now.moves), dict(self._now.seqs), None
        for name, reader in self._readers.items():
            try:
                newest = reader.newest() if reader.has_news() else reader.seen
                if newest is None or newest == moves.get(name):
                    continue
                earlier = [move.target.seq for move, _ in zip(reader.targets(), range(KEPT_TARGETS), strict=False)]
                moves[name], seqs[name] = newest, tuple(dict.fromkeys([newest.target.seq, *earlier]))
            except DeltawireError as error:
                problem = f"--engine {name}=URL: {error}"
        if problem != self._problem:
            self._problem = problem
            if problem is not None:
                emit(self._on_event, "channel-unreadable", reason=problem)
        if moves != self._now.moves:
            self._now = _Snapshot(moves, seqs)
            self._on_change()

    def _run(self) -> None:
        while True:
            self.look()
            if self._stop.wait(self._every):
                return
