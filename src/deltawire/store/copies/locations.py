"""Open the store of a chain, or several of them: the origin, and copies of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from ...errors import BadUrl, DeltawireError
from ...events import OnEvent, emit
from ..base import Store, StoreOptions
from ..urls import open_store
from .copy_choice import LOOK_EVERY
from .source_options import SourceOptions
from .sources import Sources

Location: TypeAlias = str | Path | Store | Sequence[str | Path | Store]
"""Where a chain is: a URL, a path or an open store; or a list of them, the origin first, and then copies that relays keep."""

_COPY_TIMEOUT, _COPY_RETRIES = 10.0, 1
"""A copy that does not answer is not waited for as long as the origin."""


FindCopies: TypeAlias = Callable[[Store], Iterable[str]]
"""Returns the locations of copies that are published at an origin."""


def open_sources(
    location: Location,
    *,
    options: StoreOptions | None = None,
    sources: SourceOptions | None = None,
    find: FindCopies | None = None,
    on_event: OnEvent | None = None,
) -> Store:
    """Open the store at a location, or one that reads from several. Sends no request yet.

    Parameters
    ----------
    location
        A URL, a path or an open store, which is returned unchanged; or a list or tuple of them, the origin first.
    options
        How to reach remote stores. Copies get less time to answer.
    sources
        How to use copies.
    find
        Finds more copies, when the store is read for the first time and now and then afterwards.
    on_event
        Called with events of the stores.
    """
    if isinstance(location, Store):
        return location
    is_several = isinstance(location, Sequence) and not isinstance(location, str)
    urls = list(dict.fromkeys(cast("Sequence[str | Path | Store]", location))) if is_several else [cast("str | Path", location)]
    if not urls:
        raise BadUrl("an empty list names no store.")
    options = options or StoreOptions()
    if options.max_rate is not None:
        sources = sources or SourceOptions()
        sources = dataclasses.replace(sources, slowest=min(sources.slowest, options.max_rate / 2))
    hasty = dataclasses.replace(options, timeout=min(options.timeout, _COPY_TIMEOUT), retries=min(options.retries, _COPY_RETRIES))
    stores = [open_store(url, options=hasty if number else options, on_event=on_event) for number, url in enumerate(urls)]
    owned = [store for store, url in zip(stores, urls, strict=True) if store is not url]
    if len(stores) == 1 and owned and find is None:
        return stores[0]

    def more(origin: Store) -> Iterator[Store]:
        for url in () if find is None else find(origin):
            try:
                yield open_store(url, options=hasty, on_event=on_event)
            except DeltawireError as error:  # for example, no credentials for its provider
                emit(on_event, "relay-avoided", relay=url, reason=str(error), seconds=LOOK_EVERY)

    return Sources(stores[0], stores[1:], options=sources, owned=owned, more=None if find is None else more, on_event=on_event)
