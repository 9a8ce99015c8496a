"""All checks of the doctor, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...chain.reader_options import ReaderOptions
from ...store.base import Store
from ..output import figures
from .chain_checks import ChainState, check_chain
from .engine_checks import check_member_engines, check_packages, check_server
from .findings import Examination
from .fleet_checks import check_fleet
from .reader_checks import check_readers, check_relays
from .store_checks import Access, check_store, measure_reading

_LONG = 1.0
"""Seconds that a delta may take in any case."""


def examine(
    store: Store,
    url: str,
    *,
    options: ReaderOptions | None = None,
    read_only: bool = False,
    test_bytes: int = 8 << 20,
    relays: bool = False,
    engine: str | None = None,
    clock: Callable[[], float] = time.time,
) -> Examination:
    """Check everything, and return what was found. Errors become findings.

    Parameters
    ----------
    store
        The store.
    url
        The chain's location as the user wrote it, for advice.
    options
        Which chain to accept.
    read_only
        Whether to write nothing.
    test_bytes
        How many bytes to move in each direction for the bandwidth. 0 leaves it out.
    relays
        Whether to open the stores of relays that are published in the run.
    engine
        The address of a vLLM server to ask.
    clock
        Returns the time of this machine in seconds since 1970.
    """
    found = Examination()
    check_packages(found)
    access = check_store(found, store, read_only=read_only, test_bytes=test_bytes, clock=clock)
    chain = _examine_chain(found, store, url, options or ReaderOptions(), access, test_bytes, relays, clock) if access.can_read else None
    if engine is not None:
        check_server(found, engine, chain)
    return found


def _examine_chain(
    found: Examination,
    store: Store,
    url: str,
    options: ReaderOptions,
    access: Access,
    test_bytes: int,
    relays: bool,
    clock: Callable[[], float],
) -> ChainState | None:
    log = options.open_log(store)
    now = clock() + (access.clock_offset or 0.0)
    chain = check_chain(found, log, url, now=now)
    if chain is None:
        return None
    if not access.can_write:
        largest = max((entry for hop in chain.route for entry in hop.files), key=lambda entry: entry.size, default=None)
        if largest is not None:
            measure_reading(found, store, largest.key, min(test_bytes, largest.size))
    _judge_rate(found, chain)
    fleet = check_fleet(found, log, chain, now=now)
    if fleet is not None:
        check_member_engines(found, fleet)
    check_readers(found, log, chain, now=now)
    check_relays(found, log, chain, asks=relays)
    return chain


def _judge_rate(found: Examination, chain: ChainState) -> None:
    """Report a link that is too slow for the run."""
    rate, size, interval = found.measured.get("read_bytes_per_second"), chain.update_bytes, chain.interval
    if not rate or size is None or interval is None:
        return
    seconds = size / rate
    if seconds > max(interval, _LONG):
        what = f"a delta takes {figures.duration(seconds)} at this rate, but a version comes every {figures.duration(interval)}"
        found.add("link", "warning", what, "A reader here skips versions. Use a relay in this region, or publish less often.")
