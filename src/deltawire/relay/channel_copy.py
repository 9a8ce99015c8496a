"""Copy the moves of channels to the region's store, each after the versions that followers then need (docs/protocol.md §12)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

from ..chain.channels import KEPT_TARGETS, ChannelReader, channel_names, target_of
from ..chain.log import ChainLog
from ..chain.newest_number import newest_number
from ..chain.uptime import uptime
from ..errors import ChainBroken, CorruptRecord, DataDamaged, DataMissing, RelayConflict, SignatureInvalid, UnsupportedVersion
from ..events import OnEvent, emit
from ..format.records.record_parts import MAX_EPOCH
from ..format.records.version_records import Commit
from ..store import keys
from ..store.base import Store
from .region_records import has_record, put_record, read_record

_LIST_EVERY = 30.0
"""Seconds between two looks for new channels. Moves of channels that are known are looked for each time."""


class ChannelCopy:
    """Copies moves. A channel with a move that readers would refuse stays at the move before it, and the others are copied.

    Before a channel moves, the region gets the version that it moves to, and those that the next rollbacks lead to: a copy that began with
    a later full checkpoint lacks them.

    Parameters
    ----------
    log
        The chain to copy from.
    target
        The region's store.
    copy_version
        Copies the data that lead to a version, as far as the region does not have them.
    on_event
        Called with the event `channel-refused`, once for each reason.
    """

    def __init__(self, log: ChainLog, target: Store, copy_version: Callable[[Commit], None], *, on_event: OnEvent | None = None) -> None:
        self._log = log
        self._target = target
        self._copy_version = copy_version
        self._on_event = on_event
        self._readers: dict[str, ChannelReader] = {}
        self._copied: dict[str, int] = {}
        """The newest move of each channel that the region's store has, or −1."""
        self._complete: set[str] = set()
        """The channels whose versions the region's store has."""
        self._list_again_at = 0.0
        self._refused: dict[str, str] = {}

    def copy(self, newest: Commit) -> int:
        """Copy the moves that are new, and return their number. Raises `RelayConflict` if the region's store has another move.

        Parameters
        ----------
        newest
            The newest commit that the region's store has. Moves to later versions are copied after these.
        """
        if uptime() >= self._list_again_at:
            for name in channel_names(self._log):
                self._readers.setdefault(name, ChannelReader(self._log, name))
            self._list_again_at = uptime() + _LIST_EVERY
        return sum(self._copy_channel(name, reader, newest) for name, reader in self._readers.items())

    def _copy_channel(self, name: str, reader: ChannelReader, newest: Commit) -> int:
        try:
            last = reader.newest()
            begun = self._begun(reader)
            waiting = list(itertools.takewhile(lambda move: move.move > begun, reader.history())) if last.move > begun else []
            if name not in self._complete or (waiting and waiting[-1].target.seq <= newest.seq):
                self._complete.discard(name)
                self._copy_targets(reader, newest)
                self._complete.add(name)
        except (CorruptRecord, ChainBroken, SignatureInvalid, UnsupportedVersion, DataMissing, DataDamaged) as error:
            if self._refused.get(name) != str(error):
                emit(self._on_event, "channel-refused", channel=name, reason=str(error))
            self._refused[name] = str(error)
            return 0
        self._refused.pop(name, None)
        copied = 0
        for move in reversed(waiting):
            if move.target.seq > newest.seq:
                break
            put_record(self._target, keys.channel_key(name, move.move), move.to_bytes())
            self._copied[name] = move.move
            copied += 1
        return copied

    def _copy_targets(self, reader: ChannelReader, newest: Commit) -> None:
        """Copy the versions that the channel names and that rollbacks lead to. Those that the region gets later are left out."""
        moves = (move for move in reader.targets() if move.target.seq <= newest.seq)
        for move in itertools.islice(moves, KEPT_TARGETS):
            with contextlib.suppress(ChainBroken):  # it names no version, so there is nothing to copy
                self._copy_version(self._log.state_commit(target_of(self._log, move, newest)))

    def _begun(self, reader: ChannelReader) -> int:
        """Return the newest move that the region's store has, or −1. At the first time, compare it with the source's."""
        if reader.name not in self._copied:

            def key(move: int) -> str:
                return keys.channel_key(reader.name, move)

            found = newest_number(-1, lambda move: move <= MAX_EPOCH and read_record(self._target, key(move)) is not None)
            if found >= 0 and not has_record(self._target, key(found), self._log.object(key(found))):
                raise RelayConflict(f"{key(found)} in {self._target.url} is not the one in {self._log.store.url}.")
            self._copied[reader.name] = found
        return self._copied[reader.name]
