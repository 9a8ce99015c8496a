"""Read channels: named pointers into a chain (docs/protocol.md §12). `deltawire.publish.channels` moves them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

from blake3 import blake3

from ..errors import ChainBroken, CorruptRecord, DataMissing, NoChannel, SignatureInvalid, StoreError, UnsupportedVersion
from ..events import Value
from ..format.records.channel_records import MILLION, ChannelMove
from ..format.records.record_parts import MAX_EPOCH, record_hash
from ..format.records.run_records import check_same_run
from ..format.records.signing import check_signature
from ..format.records.version_records import Commit
from ..store import keys
from .log import ChainLog
from .newest_number import newest_number

KEPT_TARGETS = 5
"""Collection keeps what leads to this many different versions of a channel: the present one, and those that rollbacks lead to."""

_MOST_NAMED = 16
"""A message about a channel that does not exist names at most this many others."""


class ChannelReader:
    """Reads one channel of a chain, and remembers the newest move that it has seen. Use it from one thread at a time.

    Parameters
    ----------
    log
        The chain.
    name
        The name of the channel.
    """

    def __init__(self, log: ChainLog, name: str) -> None:
        keys.channel_key(name, 0)  # raises ValueError for a name that channels cannot have
        self.log = log
        self.name = name
        self._seen: tuple[ChannelMove, str] | None = None
        """The newest move that was read, and the hash of its record."""
        self._seen_before: tuple[ChannelMove, str] | None = None
        self._absent: str | None = None
        """The message that the channel does not exist, which is made once: followers ask for it again and again."""

    @property
    def seen(self) -> ChannelMove | None:
        """The newest move that was read. None before the first. Asks the store for nothing."""
        return None if self._seen is None else self._seen[0]

    def newest(self) -> ChannelMove:
        """Return the newest move. Raises `NoChannel` if the channel does not exist, and `NoChain` if nothing is published.

        Every move from the newest that was seen before is read, and must name the hash of the one before (`ChainBroken`). At the first
        call only the newest two are read.
        """
        start = -1 if self._seen is None else self._seen[0].move
        number = newest_number(start, lambda move: move <= MAX_EPOCH and self._raw(move) is not None)
        if number < 0:
            assert self.log.run  # raises `NoChain` if nothing is published there
            raise NoChannel(self._absence())
        if number != start:
            self._seen_before, self._seen = self._seen, self._checked(number)
        assert self._seen is not None
        return self._seen[0]

    def refuse(self) -> None:
        """Forget the newest move, because it cannot be used, so that it is read again. The newest before it counts as seen."""
        self._seen = self._seen_before

    def has_news(self) -> bool:
        """Return whether the channel was moved since `newest` was last called. This takes one request."""
        return self._seen is None or (self._seen[0].move < MAX_EPOCH and self._raw(self._seen[0].move + 1) is not None)

    def history(self) -> Iterator[ChannelMove]:
        """Yield all moves, newest first. Each must have the hash that the move after it names (`ChainBroken`)."""
        move = self.newest()
        while True:
            yield move
            if move.move == 0:
                return
            move = self._before(move)[0]

    def sound_moves(self) -> Iterator[ChannelMove]:
        """Yield the moves that are sound by themselves, newest first. Whether they fit together is not checked."""
        listed = (keys.parse_channel_key(info.key) for info in self.log.store.list(keys.CHANNELS))
        for number in sorted((each[1] for each in listed if each is not None and each[0] == self.name), reverse=True):
            with contextlib.suppress(CorruptRecord, SignatureInvalid):
                yield self._read(number)[0]

    def targets(self) -> Iterator[ChannelMove]:
        """Yield the moves that a rollback would go back to, the newest first, after the current move.

        A rollback leads to where the channel stood before the move that promoted its present target. So two rollbacks in a row lead
        further back, and not forth and back.
        """
        standing = self._promotion(self.newest())
        while True:
            yield standing
            target = standing.target
            while standing.target == target:
                if standing.move == 0:
                    return
                standing = self._promotion(self._before(standing)[0])

    def _absence(self) -> str:
        """Return the message that the channel does not exist, with the channels that did when it was first missing."""
        if self._absent is None:
            self._absent = f"the chain at {self.log.store.url} has no channel {self.name!r}."
            with contextlib.suppress(StoreError):
                found = channel_names(self.log)[:_MOST_NAMED]
                self._absent += f" It has {', '.join(found)}." if found else " It has no channels."
        return self._absent

    def _promotion(self, move: ChannelMove) -> ChannelMove:
        """Return the move that brought the channel to where a move leaves it: for a rollback, the newest earlier promotion of its target.

        A rollback to a version that was never promoted is such a move itself.
        """
        while move.kind == "share":
            move = self._before(move)[0]
        earlier = move
        while move.kind == "rollback" and earlier.move > 0:
            earlier = self._before(earlier)[0]
            if earlier.kind == "promote" and earlier.target == move.target:
                return earlier
        return move

    def _checked(self, number: int) -> tuple[ChannelMove, str]:
        """Read a move, and check that it leads down to the newest that was seen before. Without one, to the move before it."""
        newest = found = self._read(number)
        down_to = max(number - 1, 0) if self._seen is None else self._seen[0].move
        while found[0].move > down_to:
            found = self._before(found[0])
        if self._seen is not None and found[1] != self._seen[1]:
            raise ChainBroken(f"move {down_to} of the channel {self.name} in {self.log.store.url} is not the one that was seen before.")
        return newest

    def _before(self, move: ChannelMove) -> tuple[ChannelMove, str]:
        found = self._read(move.move - 1)
        if found[1] != move.before:
            raise ChainBroken(f"{move.describe()} in {self.log.store.url} does not follow move {move.move - 1}: its hash is another.")
        if move.kind == "share" and move.target != found[0].target:
            raise ChainBroken(f"{move.describe()} in {self.log.store.url} changes the share only, but names another version.")
        return found

    def _read(self, number: int) -> tuple[ChannelMove, str]:
        key = keys.channel_key(self.name, number)
        data = self._raw(number)
        if data is None:
            raise DataMissing(f"{key} is not in {self.log.store.url}, although a later move is.")
        move = ChannelMove.parse(data)
        check_same_run(move.id, self.log.run, key)
        if (move.channel, move.move) != (self.name, number):
            raise CorruptRecord(f"{key} in {self.log.store.url} holds {move.describe()}.")
        check_signature(move, self.log.trusted_keys)
        return move, record_hash(data)

    def _raw(self, number: int) -> bytes | None:
        return self.log.object(keys.channel_key(self.name, number))


def target_of(log: ChainLog, move: ChannelMove, head: Commit) -> Commit:
    """Return the commit that a move names.

    Raises `DataMissing`, which is retryable, if the chain does not have it yet, and `ChainBroken` if the chain has another one.

    Parameters
    ----------
    log
        The chain.
    move
        The move.
    head
        The newest commit of the chain.
    """
    if move.target.seq > head.seq:
        raise DataMissing(f"{move.describe()} names commit {move.target.seq}, but the newest in {log.store.url} is {head.seq}.")
    commit = log.ancestor(head, move.target.seq)
    if commit.kind == "fence" or log.ref(commit) != move.target or log.is_void(commit):
        raise ChainBroken(f"{move.describe()} in {log.store.url} does not name a version of this chain.")
    return commit


def move_fields(move: ChannelMove) -> dict[str, Value]:
    """Return the fields of the event `channel-moved`, except the number of the version.

    Parameters
    ----------
    move
        The move.
    """
    return {
        "channel": move.channel,
        "move": move.move,
        "kind": move.kind,
        "seq": move.target.seq,
        "share": move.share,
        "why": move.why,
    }


def channel_names(log: ChainLog) -> list[str]:
    """Return the names of all channels, in order. Lists all moves, a thousand in one request.

    Parameters
    ----------
    log
        The chain.
    """
    found = (keys.parse_channel_key(info.key) for info in log.store.list(keys.CHANNELS))
    return sorted({each[0] for each in found if each is not None})


def channels_by_commit(log: ChainLog) -> dict[int, tuple[str, ...]]:
    """Return the names of the channels that stand at each commit. Channels whose newest move cannot be used are left out.

    Parameters
    ----------
    log
        The chain.
    """
    found: dict[int, tuple[str, ...]] = {}
    for name in channel_names(log):
        with contextlib.suppress(CorruptRecord, ChainBroken, SignatureInvalid, UnsupportedVersion, DataMissing, NoChannel):
            seq = ChannelReader(log, name).newest().target.seq
            found[seq] = (*found.get(seq, ()), name)
    return found


def kept_targets(log: ChainLog) -> frozenset[int]:
    """Return the commits of the versions that channels need, which collection keeps: the present ones, and those of rollbacks.

    Anybody who can write to the store may have put bad moves there. They hold nothing up: the sound moves of their channel count. Raises
    `UnsupportedVersion` if a later release has moved a channel, `DataMissing` if a move is missing, and the errors of the store.

    Parameters
    ----------
    log
        The chain.
    """
    kept: set[int] = set()
    for name in channel_names(log):
        reader = ChannelReader(log, name)
        try:
            kept.update(move.target.seq for move in itertools.islice(reader.targets(), KEPT_TARGETS))
        except (CorruptRecord, ChainBroken, SignatureInvalid):
            targets = dict.fromkeys(move.target.seq for move in reader.sound_moves())
            kept.update(itertools.islice(targets, KEPT_TARGETS))
    return frozenset(kept)


def channel_of(user: str, moves: Iterable[ChannelMove]) -> str | None:
    """Return the name of the channel that a user belongs to, or None for the channel that everybody else gets.

    A user stays in a channel while its share grows. If several channels have a share, they are asked in the given order.

    Parameters
    ----------
    user
        Identifies the user. The same text always gives the same answer.
    moves
        The newest moves of the channels. Those without a share are ignored.
    """
    for move in moves:
        if move.share is not None:
            point = blake3(f"{move.id}/{move.channel}/{user}".encode()).digest()[:8]  # neither id nor name holds a slash
            if int.from_bytes(point, "little") % MILLION < move.share:
                return move.channel
    return None
