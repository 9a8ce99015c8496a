"""Reads many small records at once, and skips those that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from ..errors import CorruptRecord, LimitExceeded, ObjectMissing, UnsupportedVersion
from ..format.records.canonical import MAX_RECORD_BYTES
from ..store.base import ObjectInfo, Store

_AT_ONCE = 32
_T = TypeVar("_T")


class RecordFetcher:
    """Reads records of a store on several threads.

    Parameters
    ----------
    store
        The store. The caller closes it.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deltawire-dashboard")

    def read(self, keys: Iterable[str], parse: Callable[[bytes], _T], *, limit: int = MAX_RECORD_BYTES) -> dict[str, _T]:
        """Return the parsed records by key, without those that are missing, too large or malformed. Raises errors of the store.

        Parameters
        ----------
        keys
            The keys of the records.
        parse
            Returns the record with these bytes.
        limit
            The largest size of a record, in bytes.
        """

        def one(key: str) -> tuple[str, _T | None]:
            try:
                return key, parse(self.store.get(key, limit=limit))
            except (ObjectMissing, LimitExceeded, CorruptRecord, UnsupportedVersion):
                return key, None

        return {key: record for key, record in self._pool.map(one, keys) if record is not None}

    def listed(self, prefix: str, most: int, *, after: str | None = None) -> list[ObjectInfo]:
        """Return the first objects of a folder, at most `most`."""
        return list(islice(self.store.list(prefix, after=after), most))

    def close(self) -> None:
        """Stop the threads. The store stays open."""
        self._pool.shutdown(cancel_futures=True)
