"""Put the records of a chain into the region's store, byte for byte. A record that exists there with other bytes is a conflict."""

from __future__ import annotations

import contextlib
import secrets
import time

from ..errors import CorruptRecord, LimitExceeded, ObjectMissing, RelayConflict, UnsupportedVersion
from ..format.records.canonical import MAX_RECORD_BYTES
from ..format.records.collection_records import Mark
from ..format.records.run_records import Run
from ..store import keys
from ..store.base import Store
from ..store.create_rule import create_and_look


def read_record(store: Store, key: str) -> bytes | None:
    """Return the bytes of a record, or None if there is none. Raises `RelayConflict` if the object is too large to be a record."""
    try:
        return store.get(key, limit=MAX_RECORD_BYTES)
    except ObjectMissing:
        return None
    except LimitExceeded:
        raise RelayConflict(f"{key} in {store.url} is larger than a record may be.") from None


def has_record(store: Store, key: str, data: bytes | None) -> bool:
    """Tell whether a store has a record with these bytes. Other bytes are read once more: a bit may have flipped in transit."""
    return read_record(store, key) == data or read_record(store, key) == data


def put_record(store: Store, key: str, data: bytes) -> None:
    """Create a record. A record with the same bytes is fine: this relay or another one wrote it. Raises `RelayConflict` for other bytes."""
    if create_and_look(store, key, data) != data and not has_record(store, key, data):
        raise RelayConflict(f"{key} in {store.url} is not the record that the chain has there.")


def region_floor(store: Store, run: Run) -> int:
    """Return the floor of the newest mark in the region's store that can be read, or −1."""
    for number in reversed(_marks(store)):
        data = read_record(store, keys.mark_key(number))
        if data is not None and (floor := _floor_of(data, run)) >= 0:
            return floor
    return -1


def _floor_of(data: bytes, run: Run) -> int:
    """Return the floor that a mark of this run says, or −1."""
    with contextlib.suppress(CorruptRecord, UnsupportedVersion):
        mark = Mark.parse(data)
        return mark.floor if mark.id == run.id else -1
    return -1


def raise_floor(store: Store, run: Run, floor: int, *, epoch: int) -> None:
    """Announce that data of versions up to `floor` are not in the region's store, except for full checkpoints.

    Readers and collectors of the store then treat these data as collected. Nothing happens if the newest mark says so already.
    """
    if region_floor(store, run) >= floor:
        return
    number = max(_marks(store), default=-1) + 1
    while True:
        mark = Mark(run.id, number, epoch, floor, secrets.token_hex(16), time.time_ns() // 1_000_000).to_bytes()
        found = create_and_look(store, keys.mark_key(number), mark)
        if found == mark or _floor_of(found, run) >= floor:
            return
        number += 1  # another process was faster, or the listing has left this mark out


def _marks(store: Store) -> list[int]:
    return [number for info in store.list(keys.MARKS) if (number := keys.parse_mark_key(info.key)) is not None]
