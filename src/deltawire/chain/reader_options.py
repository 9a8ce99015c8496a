"""Options that every reader of a chain takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..format.records.record_parts import Limits
from ..format.records.signing import public_keys
from ..store.base import Store, StoreOptions
from .log import ChainLog

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
    store
        How to reach the store. Ignored where an open store is given instead of a URL.
    """

    run: str | None = None
    trusted_keys: Collection[str] = ()
    max_silence: float | None = None
    reader: str | None = None
    pin: bool = True
    limits: Limits | None = None
    patience: float = PATIENCE
    store: StoreOptions | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "trusted_keys", public_keys(self.trusted_keys))

    def open_log(self, store: Store) -> ChainLog:
        """Open the chain in a store with these options. Reads nothing yet.

        Parameters
        ----------
        store
            The store that holds the chain.
        """
        return ChainLog(store, run=self.run, trusted_keys=self.trusted_keys, limits=self.limits)
