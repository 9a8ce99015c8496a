"""Options that every reader of a chain takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..events import OnEvent
from ..format.records.record_parts import Limits
from ..format.records.signing import public_keys
from ..store import keys
from ..store.base import Store, StoreOptions
from ..store.copies.locations import Location, open_sources
from ..store.copies.source_options import SourceOptions
from .channels import ChannelReader
from .log import ChainLog
from .records.published_relays import published_relays

PATIENCE = 30.0
"""Default for `ReaderOptions.patience`: replicated stores may deliver a commit this long before its data."""


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Say which chain a reader accepts, and how it reads it. The defaults suit a reader that trusts its store.

    >>> options = ReaderOptions(trusted_keys=[public_key], max_silence=3600)
    >>> subscriber = Subscriber("s3://bucket/run", options=options)

    Parameters
    ----------
    run
        The name that the run must have. A reader refuses a chain with another name (`RunMismatch`). One key may sign several runs, so a
        reader with `trusted_keys` but without `run` expects the last part of the URL as the name (`WrongRun`); a mirror that already
        follows a run keeps to that run.
    trusted_keys
        Public keys, as `deltawire keygen` prints them. The reader refuses every record that none of them signed (`SignatureInvalid`).
        Without keys it accepts unsigned chains.
    max_silence
        The largest age of the newest commit, in seconds. An older chain raises `ChainStale`. None accepts any age.
    reader
        The name of the pin that this reader keeps in the store. None makes a unique name from the host name.
    pin
        Whether to write a pin, which keeps the objects that this reader needs from garbage collection. Set it to False if the credentials
        allow only reading.
    limits
        The largest sizes that records may claim. None uses the defaults of `Limits`. The limits of the run apply too.
    patience
        Seconds to wait for data that arrive after their commit, as happens in replicated stores.
    ahead_bytes
        The most bytes that a reader which follows the chain fetches for the next version before its commit exists, if the publisher has
        announced them. They are kept in memory. None allows a quarter of the state's size, up to 1 GiB. 0 lets the reader wait for commits.
    store
        How to reach the store. Ignored where an open store is given instead of a URL.
    host_cache
        Where the readers of this host share data files, so that one of them fetches each file for all: a directory that belongs to this
        user, or "auto" for the usual directories, in memory and in the directory for temporary files. None shares nothing.
    relay_patience
        Only for a reader with several stores: seconds to wait for data that a relay's copy does not have yet. If the copy gets nothing new
        in this time, the reader reads them from the origin. It is never more than half of `patience`. A copy that has got nothing new
        since the reader began is waited for a fifth of this time.
    origin_poll
        Only for a reader with several stores: seconds between two requests to the origin for a commit that no copy has yet.
    find_relays
        Whether to read also from copies that relays have published in the run (`deltawire relay --publish-as`).
    channel
        The name of a channel, such as "stable". The reader then takes the version that the channel names, instead of the newest one, and
        never one that the channel did not name. The reader fetches nothing before the channel names a version. None follows the newest
        version.
    """

    run: str | None = None
    trusted_keys: Collection[str] = ()
    max_silence: float | None = None
    reader: str | None = None
    pin: bool = True
    limits: Limits | None = None
    patience: float = PATIENCE
    ahead_bytes: int | None = None
    store: StoreOptions | None = None
    host_cache: Path | str | None = None
    relay_patience: float = 15.0
    origin_poll: float = 5.0
    find_relays: bool = False
    channel: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "trusted_keys", public_keys(self.trusted_keys))
        if self.ahead_bytes is not None and self.ahead_bytes < 0:
            raise ValueError("ahead_bytes must be at least 0; None follows the size of the state")
        if self.channel is not None:
            keys.channel_key(self.channel, 0)  # raises ValueError for a name that channels cannot have

    def open_store(self, location: Location, *, on_event: OnEvent | None = None) -> Store:
        """Open the store at a location, or one that reads from several. Sends no request yet.

        Parameters
        ----------
        location
            A URL, a path or an open store, which is returned unchanged. Or a list of them: the origin, and copies that relays keep.
        on_event
            Called with events of the store.
        """
        patience = min(self.relay_patience, self.patience / 2)
        sources = SourceOptions(origin_poll=self.origin_poll, patience=patience, signed=bool(self.trusted_keys))
        find = published_relays if self.find_relays else None
        return open_sources(location, options=self.store, sources=sources, find=find, on_event=on_event)

    def open_log(self, store: Store) -> ChainLog:
        """Open the chain in a store with these options. Reads nothing yet.

        Parameters
        ----------
        store
            The store that holds the chain.
        """
        return ChainLog(store, run=self.run, trusted_keys=self.trusted_keys, limits=self.limits)

    def open_channel(self, log: ChainLog) -> ChannelReader | None:
        """Return the channel to follow, or None. Reads nothing yet.

        Parameters
        ----------
        log
            The chain.
        """
        return None if self.channel is None else ChannelReader(log, self.channel)
