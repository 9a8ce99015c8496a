"""Pins: records that say which version a reader still needs. A pin expires, by the store's clock, unless its reader renews it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from ...errors import CorruptRecord, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.collection_records import Pin
from ...format.records.run_records import Run
from ...store import keys
from ...store.base import Store

DEFAULT_TTL = 3600
"""Seconds until a pin expires. Readers renew it after a third of this time, so that one failed renewal does no harm."""


@dataclass(frozen=True, slots=True)
class StoredPin:
    """A pin, and the time at which it was written by the store's clock."""

    pin: Pin
    modified: datetime

    def holds(self, now: datetime) -> bool:
        """Return whether the pin is in force at this time of the store's clock.

        A pin that is dated more than its own life ahead is not in force: the store's clock was set back, or someone chose the date. A
        running reader renews its pin with a correct date long before the grace period of a collection has passed.
        """
        return abs(now - self.modified) < timedelta(seconds=min(self.pin.ttl, 10**9))

    def is_dead(self, now: datetime) -> bool:
        """Return whether the pin is dated more than three of its lives in the past or future, so that no reader will renew it."""
        return abs(now - self.modified) > 3 * timedelta(seconds=min(self.pin.ttl, 10**9))


def put_pin(store: Store, run: Run, reader: str, seq: int, ttl: int = DEFAULT_TTL) -> None:
    """Write a reader's pin: keep the objects that lead from version `seq` on, for `ttl` seconds. Replaces the reader's previous pin."""
    store.put(keys.pin_key(reader), Pin(run.id, reader, seq, ttl).to_bytes(), durable=False)


def remove_pin(store: Store, reader: str) -> None:
    """Remove a reader's pin, if it has one."""
    store.delete([keys.pin_key(reader)])


def read_pins(store: Store, run: Run) -> list[StoredPin]:
    """Return all pins of this run, also expired ones. Other objects in that folder are ignored, because any writer may put them there."""
    found = []
    for info in store.list(keys.PINS):
        reader = keys.parse_pin_key(info.key)
        if reader is None:
            continue
        try:
            pin = Pin.parse(store.get(info.key, limit=MAX_RECORD_BYTES))
        except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
            continue
        if pin.id == run.id and pin.reader == reader:
            found.append(StoredPin(pin, info.modified))
    return found


def remove_dead_pins(store: Store, run: Run, now: datetime) -> None:
    """Delete the pins of readers that no longer run."""
    store.delete([keys.pin_key(placed.pin.reader) for placed in read_pins(store, run) if placed.is_dead(now)])


def lowest_pin(store: Store, run: Run, now: datetime) -> int | None:
    """Return the oldest version that a reader still needs, or None if no pin is in force."""
    return min((placed.pin.seq for placed in read_pins(store, run) if placed.holds(now)), default=None)
