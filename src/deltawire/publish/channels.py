"""Move channels: named pointers into a chain (docs/protocol.md §12). Needs no baseline, and may run while a publisher works."""

from __future__ import annotations

import getpass
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..chain.channels import ChannelReader, kept_targets, move_fields
from ..chain.find import newest_version
from ..chain.log import ChainLog
from ..errors import ChannelMoved, NoChannel, VersionGone, VersionUnknown
from ..events import OnEvent, emit
from ..format.records.channel_records import MOST_BY, ChannelMove
from ..format.records.record_parts import CommitRef, record_hash
from ..format.records.signing import SigningKey, check_signature
from ..format.records.version_records import Commit
from ..store import keys
from ..store.create_rule import create_and_look
from .take_over import refuse_copy


@dataclass(frozen=True, slots=True)
class Reason:
    """The texts for people in the record of a move.

    Parameters
    ----------
    why
        Why the channel is moved: one line of at most 2,000 characters.
    by
        The name of the person or program that moves it. None means this user on this host.
    """

    why: str = ""
    by: str | None = None


class ChannelWriter:
    """Moves one channel of a chain. Each move is one record, created if absent: of two writers at once, one wins.

    Every method returns the record of the move. It raises `ChannelMoved` if somebody else moved the channel first, `SignatureInvalid` if
    readers of `log` would not trust the record, `OutcomeUnknown` if the store did not say whether the record was created, `RelayConflict`
    at a copy that relays write, and `CorruptRecord` if a text is too long or not printable.

    >>> writer = ChannelWriter(log, "stable")
    >>> writer.promote(find_version(log, 12), reason=Reason("better on all metrics"))
    >>> writer.rollback()

    Parameters
    ----------
    log
        The chain. If its readers trust keys, so must this log.
    name
        The name of the channel: letters, digits, '.', '_' and '-', at most 64, without a leading dot.
    key
        The key to sign moves with, if the chain is signed.
    on_event
        Called with the event `channel-moved`.
    clock
        Returns the time in seconds since 1970.
    """

    def __init__(
        self,
        log: ChainLog,
        name: str,
        *,
        key: SigningKey | None = None,
        on_event: OnEvent | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reader = ChannelReader(log, name)
        self._log = log
        self._key = key
        self._on_event = on_event
        self._clock = clock

    def promote(self, commit: Commit, *, share: int | None = None, reason: Reason | None = None, expect: int | None = None) -> ChannelMove:
        """Let the channel name a version from now on. The first move makes the channel.

        Parameters
        ----------
        commit
            The commit of the version, from this log.
        share
            How many of a million users belong to the channel from now on. None keeps the present share.
        reason
            The texts for people in the record.
        expect
            The number of the newest move that the caller knows, or −1 for a new channel. If there is a newer one, this raises
            `ChannelMoved`. None takes the newest, whatever it is.
        """
        return self._move("promote", lambda newest: self._ref(commit), share, reason, expect)

    def rollback(
        self, to: Commit | None = None, *, share: int | None = None, reason: Reason | None = None, expect: int | None = None
    ) -> ChannelMove:
        """Let the channel go back: to the version that it named before its present one was promoted, or to a given one.

        Raises `VersionUnknown` if the channel named no other version before, and `NoChannel` if it does not exist.

        Parameters
        ----------
        to
            The commit of the version, from this log. None means the version before.
        share, reason, expect
            As for `promote`.
        """
        return self._move("rollback", lambda newest: self._earlier() if to is None else self._ref(to), share, reason, expect)

    def set_share(self, share: int, *, reason: Reason | None = None, expect: int | None = None) -> ChannelMove:
        """Change only the share of users. Raises `NoChannel` if the channel does not exist.

        Parameters
        ----------
        share
            How many of a million users belong to the channel from now on.
        reason, expect
            As for `promote`.
        """

        def present(newest: ChannelMove | None) -> CommitRef:
            assert newest is not None
            return newest.target

        return self._move("share", present, share, reason, expect)

    def _move(
        self,
        kind: str,
        target: Callable[[ChannelMove | None], CommitRef],
        share: int | None,
        reason: Reason | None,
        expect: int | None,
    ) -> ChannelMove:
        refuse_copy(self._log.store)
        newest = self._newest(required=kind != "promote")
        number = -1 if newest is None else newest.move
        if newest is not None and expect is not None and expect > number:
            raise ChannelMoved(f"the newest move of the channel {newest.channel} in {self._log.store.url} is {number}, not {expect}.")
        if expect is not None and expect != number:
            raise self._moved(newest)
        reason = reason or Reason()
        move = ChannelMove(
            id=self._log.run.id,
            channel=self._reader.name,
            move=number + 1,
            kind=kind,
            target=target(newest),
            before=None if newest is None else record_hash(newest.to_bytes()),
            share=share if share is not None or newest is None else newest.share,
            why=reason.why,
            by=_who() if reason.by is None else reason.by,
            time=int(self._clock() * 1000),
            nonce=secrets.token_hex(16),
        )
        move = move if self._key is None else self._key.sign(move)
        check_signature(move, self._log.trusted_keys)
        data = move.to_bytes()
        if create_and_look(self._log.store, keys.channel_key(move.channel, move.move), data) != data:
            raise self._moved(self._reader.newest())
        emit(self._on_event, "channel-moved", **move_fields(move))
        return move

    def _newest(self, *, required: bool) -> ChannelMove | None:
        try:
            return self._reader.newest()
        except NoChannel:
            if required:
                raise
            return None

    def _ref(self, commit: Commit) -> CommitRef:
        """Return the reference to a version. Raises `VersionUnknown` unless the commit makes a version that is in force, and `VersionGone`
        unless collection keeps it.
        """
        head = newest_version(self._log)
        is_found = commit.seq <= head.seq and self._log.ancestor(head, commit.seq) == commit
        if not is_found or commit.kind == "fence" or self._log.is_void(commit):
            raise VersionUnknown(f"commit {commit.seq} in {self._log.store.url} makes no version of this chain.")
        if commit.seq <= self._log.floor() and commit.seq not in kept_targets(self._log):
            raise VersionGone(f"garbage collection has deleted data of {commit.describe()}, or will.")
        return self._log.ref(commit)

    def _earlier(self) -> CommitRef:
        moves = self._reader.targets()
        present = next(moves)
        earlier = next(moves, None)
        if earlier is None:
            raise VersionUnknown(
                f"the channel {present.channel} in {self._log.store.url} named no other version before.",
                hint="Name the version with `--to`. `deltawire log URL` lists them.",
            )
        return earlier.target

    def _moved(self, newest: ChannelMove | None) -> ChannelMoved:
        if newest is None:
            return ChannelMoved(f"the channel {self._reader.name} does not exist in {self._log.store.url}.")
        return ChannelMoved(
            f"{newest.describe()} ({newest.kind}, by {newest.by or 'an unnamed author'}) came first in {self._log.store.url}."
        )


def _who() -> str:
    """Return this user and host, as far as they are known."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    text = f"{user}@{socket.gethostname()}"
    return "".join(each for each in text if each.isprintable())[:MOST_BY]
