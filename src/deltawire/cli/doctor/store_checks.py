"""Checks of the store: access, create if absent, the clock, and the link."""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import ObjectMissing, StoreDenied, StoreError, StoreFull
from ...format.records.canonical import MAX_RECORD_BYTES
from ...store import keys
from ...store.base import Store
from ...store.local import LocalStore
from ...store.probe import probe
from ..output import figures
from .findings import Examination

_TRIES = 5
"""The number of requests that latency is measured with."""
_SLOW_ANSWER = 0.5
"""A store that takes longer than this many seconds to answer is far away, or overloaded."""
_NOTICEABLE, _REFUSED = 5.0, 600.0
"""Seconds of clock skew that are reported, and those after which services begin to refuse requests: S3 does so after 15 minutes."""
_CLOCK_REMEDY = "Let both machines set their clocks by NTP (`timedatectl set-ntp true`)."


@dataclass(frozen=True, slots=True)
class Access:
    """Says what the credentials allow, and how far the store's clock is ahead of this machine's, in seconds. None if it is unknown."""

    can_read: bool
    can_write: bool
    clock_offset: float | None = None


def check_store(found: Examination, store: Store, *, read_only: bool, test_bytes: int, clock: Callable[[], float]) -> Access:
    """Check what the credentials allow, and measure the clock and the link. Everything that is written is deleted.

    Parameters
    ----------
    found
        Gets the findings.
    store
        The store.
    read_only
        Whether to write nothing.
    test_bytes
        How many bytes to write and to read for the bandwidth. 0 leaves it out.
    clock
        Returns the time of this machine in seconds since 1970.
    """
    if not _can_read(found, store):
        return Access(can_read=False, can_write=False)
    is_absent = isinstance(store, LocalStore) and not store.root.is_dir()  # writing would make the directory
    if read_only or is_absent:
        found.add("access", "ok", f"reading and listing work; nothing was written{'' if read_only else ', because there is no directory'}")
        return Access(can_read=True, can_write=False)
    key = keys.probe_key(secrets.token_hex(16))
    offset = None
    try:
        offset = _try_to_write(found, store, key, clock)
        if offset is not None:
            _check_writable(found, store, key, offset, test_bytes)
    finally:  # even after Ctrl-C
        _delete(found, store, key, is_judged=offset is not None)
    return Access(can_read=True, can_write=offset is not None, clock_offset=offset)


def _check_writable(found: Examination, store: Store, key: str, offset: float, test_bytes: int) -> None:
    with found.checking("create if absent"):
        probe(store)
        found.add("create if absent", "ok", "the store creates a name once, reads ranges, and lists what was written")
    _judge_clock(found, offset)
    with found.checking("link"):
        _measure_latency(found, store, key)
        if test_bytes:
            _measure_transfers(found, store, key, test_bytes)


def measure_reading(found: Examination, store: Store, key: str, size: int) -> None:
    """Measure latency and bandwidth by reading the beginning of an existing object.

    Parameters
    ----------
    found
        Gets the findings.
    store
        The store.
    key
        The key of the object.
    size
        How many bytes to read. 0 measures only latency.
    """
    with found.checking("link"):
        _measure_latency(found, store, key)
        if size:
            found.measured["read_bytes_per_second"] = _timed_read(store, key, size)
            found.add("link", "ok", f"{_rate(found, 'read')} down, measured with {figures.size(size)}")


def _can_read(found: Examination, store: Store) -> bool:
    try:
        with contextlib.suppress(ObjectMissing):  # the checks of the chain report it
            store.get(keys.RUN, limit=MAX_RECORD_BYTES)
        next(iter(store.list(keys.COMMITS)), None)
    except StoreDenied as error:
        found.add("access", "wrong", f"reading is not allowed: {error.message}", error.hint)
    except StoreError as error:
        found.add("access", "wrong", error.message, error.hint or "Check the URL, AWS_ENDPOINT_URL or similar settings, and the network.")
    else:
        return True
    return False


def _try_to_write(found: Examination, store: Store, key: str, clock: Callable[[], float]) -> float | None:
    """Write a small object. Return how far the store's clock is ahead, or None if nothing could be written."""
    try:
        before = clock()
        store.put(key, b"doctor", durable=False)
        after = clock()
        modified = store.head(key).modified.timestamp()
    except StoreDenied:
        found.add(
            "access",
            "warning",
            "reading and listing work, but these credentials may not write",
            "Readers then need `--no-pin`. Publishers, members, engines that report and relays need the right to write and to delete.",
        )
        return None
    except StoreFull as error:
        found.add("access", "wrong", error.message, error.hint)
        return None
    except StoreError as error:
        found.add("access", "wrong", f"writing fails: {error.message}", error.hint)
        return None
    # Many stores tell whole seconds, so that their time is anything from `modified` to a second later.
    latest = modified + (1.0 if modified.is_integer() else 0.0)
    return modified - after if modified > after else latest - before if latest < before else 0.0


def _delete(found: Examination, store: Store, key: str, *, is_judged: bool) -> None:
    """Delete the object, and report whether this works unless writing has failed already."""
    if not is_judged:
        with contextlib.suppress(StoreError):  # it may have been written nevertheless
            store.delete([key])
        return
    try:
        store.delete([key])
        _refuse_existing(store, key)
    except StoreError:
        found.add(
            "access",
            "warning",
            "reading, listing and writing work, but deleting does not",
            f"`deltawire gc`, and readers and publishers that end, need it. Delete {key}, which this command could not.",
        )
    else:
        found.add("access", "ok", "reading, listing, writing and deleting work")


def _refuse_existing(store: Store, key: str) -> None:
    """Raise `StoreError` if an object that was deleted is still there."""
    try:
        store.head(key)
    except ObjectMissing:
        return
    raise StoreError(f"{key!r} is still there.")


def _judge_clock(found: Examination, offset: float) -> None:
    found.measured["clock_offset_seconds"] = round(offset, 3)
    which = "ahead of" if offset > 0 else "behind"
    if abs(offset) < _NOTICEABLE:
        found.add("clock", "ok", f"this machine's clock and the store's differ by less than {_NOTICEABLE:.0f} s")
    else:
        what = f"the store's clock is {figures.duration(abs(offset))} {which} this machine's"
        harm = (
            ". Services refuse requests that are 15 minutes off" if abs(offset) >= _REFUSED else ", so ages that commands print are wrong"
        )
        found.add("clock", "wrong" if abs(offset) >= _REFUSED else "warning", what + harm, _CLOCK_REMEDY)


def _measure_latency(found: Examination, store: Store, key: str) -> None:
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        store.head(key)
        times.append(time.perf_counter() - began)
    latency = statistics.median(times)
    found.measured["latency_seconds"] = round(latency, 6)
    if latency < _SLOW_ANSWER:
        found.add("link", "ok", f"the store answers a small request in {1000 * latency:.2g} ms")
    else:
        found.add(
            "link",
            "warning",
            f"the store takes {latency:.1f} s to answer a small request",
            "Use a store that is nearer, or a relay in this region (`deltawire relay`). Check whether the service limits requests.",
        )


def _measure_transfers(found: Examination, store: Store, key: str, size: int) -> None:
    data = os.urandom(size)  # so that nobody on the way can compress it
    began = time.perf_counter()
    store.put(key, data)
    found.measured["write_bytes_per_second"] = round(size / (time.perf_counter() - began))
    found.measured["read_bytes_per_second"] = _timed_read(store, key, size)
    found.add("link", "ok", f"{_rate(found, 'read')} down and {_rate(found, 'write')} up, measured with {figures.size(size)}")


def _timed_read(store: Store, key: str, size: int) -> int:
    buffer = memoryview(bytearray(size))
    began = time.perf_counter()
    store.read_into(key, buffer)
    return round(size / (time.perf_counter() - began))


def _rate(found: Examination, which: str) -> str:
    return f"{figures.size(found.measured[f'{which}_bytes_per_second'])}/s"
