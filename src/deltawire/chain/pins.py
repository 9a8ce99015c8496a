"""Pins: what readers still need. A pin holds only for as long as its reader renews it, by the store's clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from ..errors import CorruptRecord, LimitExceeded, ObjectMissing, UnsupportedVersion
from ..format.records.chain_records import MAX_RECORD_BYTES, Pin, Run
from ..store import keys
from ..store.base import Store

DEFAULT_TTL = 3600
"""Seconds. Readers renew at a third of it, so that one failed renewal costs nothing."""


@dataclass(frozen=True, slots=True)
class PlacedPin:
    """A pin and when the store says that it was written."""

    pin: Pin
    modified: datetime

    def holds(self, now: datetime) -> bool:
        """Returns whether the pin is in force at this time of the store's.

        A pin that is dated more than its own life ahead is not: the store's clock was set back, or somebody chose the date. A reader that
        lives renews its pin with a right date long before the grace of a collection has passed.
        """
        return abs(now - self.modified) < timedelta(seconds=min(self.pin.ttl, 10**9))

    def is_dead(self, now: datetime) -> bool:
        """Returns whether the pin is dated more than three of its lives ago, or ahead, so that nobody will renew it."""
        return abs(now - self.modified) > 3 * timedelta(seconds=min(self.pin.ttl, 10**9))


def put_pin(store: Store, run: Run, reader: str, seq: int, ttl: int = DEFAULT_TTL) -> None:
    """Ask that what leads from version `seq` on be kept, for `ttl` seconds from now. Replaces the reader's pin before."""
    store.put(keys.pin_key(reader), Pin(run.id, reader, seq, ttl).to_bytes(), durable=False)


def remove_pin(store: Store, reader: str) -> None:
    """Take a reader's pin back; that there is none is fine."""
    store.delete([keys.pin_key(reader)])


def read_pins(store: Store, run: Run) -> list[PlacedPin]:
    """All pins of this run, in force or not. Objects that are not pins are passed over: anybody may write there."""
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
            found.append(PlacedPin(pin, info.modified))
    return found


def remove_dead_pins(store: Store, run: Run, now: datetime) -> None:
    """Delete the pins of readers that are gone."""
    store.delete([keys.pin_key(placed.pin.reader) for placed in read_pins(store, run) if placed.is_dead(now)])


def lowest_pin(store: Store, run: Run, now: datetime) -> int | None:
    """The oldest version that a reader still needs; None if no pin is in force."""
    return min((placed.pin.seq for placed in read_pins(store, run) if placed.holds(now)), default=None)
