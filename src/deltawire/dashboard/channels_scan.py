"""Reads the channels of a chain for the page: where each points, and its newest moves."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ..chain.channels import ChannelReader
from ..chain.log import ChainLog
from ..errors import DeltawireError, StoreError
from ..format.records.channel_records import ChannelMove
from ..store import keys
from .chain_scan import ChainScan
from .plain_values import short

MOST_CHANNELS = 32
MOST_MOVES = 50
"""The newest moves of a channel that are read and shown."""
_LAST_MOVE = 10**10 - 1
_AGAIN_LOOKS = 15
"""A channel that cannot be read is tried again in every 15th look."""


class ChannelsScan:
    """Keeps the channels of a run. A look that finds nothing new takes one listing and one request for each channel, and one more listing.

    Parameters
    ----------
    log
        The chain.
    chain
        Knows the commits that moves name.
    """

    def __init__(self, log: ChainLog, chain: ChainScan) -> None:
        self._log = log
        self._chain = chain
        self._readers: dict[str, ChannelReader] = {}
        self._moves: dict[str, list[ChannelMove]] = {}
        self._problems: dict[str, str] = {}
        self._looks = 0

    def look(self) -> None:
        """Read what has changed. Raises errors of the store, after which it can be called again."""
        self._looks += 1
        self._readers = {name: self._readers.get(name) or ChannelReader(self._log, name) for name in self._names()}
        self._moves = {name: moves for name, moves in self._moves.items() if name in self._readers}
        self._problems = {name: why for name, why in self._problems.items() if name in self._readers}
        for name, reader in self._readers.items():
            if name not in self._problems or self._looks % _AGAIN_LOOKS == 0:
                self._read(reader)

    def promotions(self, name: str) -> list[ChannelMove]:
        """Return the newest promotions of a channel that were read, the newest first.

        Parameters
        ----------
        name
            The name of the channel.
        """
        return [move for move in self._moves.get(name, []) if move.kind == "promote"]

    def plain(self) -> list[dict[str, Any]]:
        """Return the channels as plain values, each with its moves, the newest first."""
        return [
            {
                "name": name,
                "problem": self._problem(name, self._moves.get(name, [])),
                "moves": [self._plain_move(move) for move in self._moves.get(name, [])],
            }
            for name in self._readers
        ]

    def _names(self) -> list[str]:
        """Return the names of channels, in order. Each listing begins after the last possible move of the channel before."""
        found: list[str] = []
        after = None
        for _ in range(2 * MOST_CHANNELS):  # other objects may lie there
            info = next(iter(self._log.store.list(keys.CHANNELS, after=after)), None)
            if info is None or len(found) == MOST_CHANNELS:
                break
            parsed = keys.parse_channel_key(info.key)
            if parsed is not None:
                found.append(parsed[0])
            after = info.key if parsed is None else keys.channel_key(parsed[0], _LAST_MOVE)
        return found

    def _read(self, reader: ChannelReader) -> None:
        """Read the newest moves if there are new ones. Those that were read before one that cannot be used are shown."""
        moves: list[ChannelMove] = []
        try:
            if reader.has_news() or reader.name in self._problems:
                for move in islice(reader.history(), MOST_MOVES):
                    moves.append(move)
            self._problems.pop(reader.name, None)
        except StoreError:
            raise
        except DeltawireError as error:
            self._problems[reader.name] = short(str(error), 300)
        if moves:
            self._moves[reader.name] = moves

    def _problem(self, name: str, moves: list[ChannelMove]) -> str | None:
        """Return what is wrong with a channel: it cannot be read, or its target is not a version that was read."""
        if name in self._problems or not moves:
            return self._problems.get(name)
        target = moves[0].target
        scanned = self._chain.in_memory().get(target.seq)
        if scanned is None or (scanned.commit is not None and scanned.commit.kind != "fence" and scanned.hash == target.commit):
            return None
        return f"its move {moves[0].move} names commit {target.seq}, which is another one or cannot be read."

    def _plain_move(self, move: ChannelMove) -> dict[str, Any]:
        return {
            "move": move.move,
            "kind": move.kind,
            "seq": move.target.seq,
            "version": self._chain.version_of(move.target.seq),
            "share": None if move.share is None else move.share / 1e6,
            "why": short(move.why, 200),
            "by": short(move.by, 80),
            "time": move.time / 1000,
        }
