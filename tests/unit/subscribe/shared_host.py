"""Readers of a chain that share the host cache of one host."""

from __future__ import annotations

import os
from pathlib import Path

from host_reader import LoggedStore, reads
from support import bits_of
from toy_chain import ToyChain

from deltawire.chain.reader_options import ReaderOptions
from deltawire.events import Event
from deltawire.subscribe.subscriber import Subscriber


def bytes_read(log: Path) -> dict[str, int]:
    """Return how many bytes of each data object were read from the store, by all processes together."""
    found: dict[str, int] = {}
    for _, key, _, size in reads(log):
        found[key] = found.get(key, 0) + size
    return found


class Host:
    """Readers of a chain in this process that share a cache, and what they did."""

    def __init__(self, tmp_path: Path, chain: ToyChain, number: int = 0) -> None:
        self.chain = chain
        self.folder = tmp_path / f"cache-{number}"
        self.events: list[Event] = []
        self._store = tmp_path / "store"
        self._logs = (tmp_path / f"log-{number}-{count}-of-{os.getpid()}" for count in range(100))

    def sync(self) -> int:
        """Let a new reader reach the newest version. Return how many bytes of data it has read from the store."""
        log = next(self._logs)
        options = ReaderOptions(pin=False, host_cache=self.folder)
        with Subscriber(LoggedStore(self._store, log), options=options, on_event=self.events.append) as reader:
            reader.sync()
            assert bits_of(dict(reader.state)) == bits_of(self.chain.state)
        return sum(bytes_read(log).values())

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir())

    def reasons(self) -> list[object]:
        return [event.fields["reason"] for event in self.events if event.name == "not-shared"]
