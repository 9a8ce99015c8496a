"""Garbage collection in two phases: announce, wait, look again, delete (docs/protocol.md §6)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from ...errors import ObjectExists, OutcomeUnknown
from ...events import OnEvent, emit
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.collection_records import Mark
from ...format.records.run_records import check_same_run
from ...store import keys
from ...store.base import Store
from ..log import ChainLog
from ..records.pins import remove_dead_pins
from .survey import Survey, find_garbage, survey

_MARKS_LOOKED_AT = 16
"""Only this many of the newest marks are looked at. Older ones were carried out, or are pointless by now."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a collection.

    `outcome` is "collected", "waiting" (`wait` seconds of a mark's grace period are left), "held" (a mark is due, but a pin, a new epoch or
    a damaged anchor forbids it) or "nothing". `floor` is the floor that was or will be applied. `deleted` objects with `bytes` bytes were
    deleted, or would be in a dry run. `kept` data objects stay.
    """

    outcome: str
    mark: int | None = None
    floor: int | None = None
    deleted: int = 0
    bytes: int = 0
    kept: int = 0
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class _PlacedMark:
    mark: Mark
    modified: datetime


def collect(
    store: Store,
    *,
    grace: float,
    keep_anchors: int = 2,
    dry_run: bool = False,
    now: datetime | None = None,
    log: ChainLog | None = None,
    on_event: OnEvent | None = None,
) -> Collected:
    """Announce what can be deleted, and delete what was announced at least `grace` seconds ago and is still garbage. Call it regularly.

    On a signed chain only signed records count: signed by the keys that `log` trusts, or by the key of the chain's first commit. Call it
    from the publisher in force, or while no publisher runs.

    Parameters
    ----------
    store
        The store that holds the chain.
    grace
        Seconds between announcement and deletion. It must be longer than any reader takes from planning to its last read, and longer than
        any upload of an anchor.
    keep_anchors
        How many anchors stay.
    dry_run
        Whether to write nothing, and only report what would be deleted if the grace period had passed.
    now
        The time to use instead of the store's clock, which is otherwise found by writing an object.
    log
        The chain, if it is already open.
    on_event
        Called with each event.
    """
    if keep_anchors < 1:
        raise ValueError("at least one anchor must be kept")
    log = log or ChainLog(store)
    log.trust_first_key()  # otherwise forged shortcuts would count as checkpoints, and the real ones be deleted
    if now is None:
        now = datetime.now(timezone.utc) if dry_run else _store_time(store)
    found = survey(log, keep_anchors, now)
    floor = found.floor(keep_anchors)
    marks = list(_marks(log))
    if dry_run:
        return _dry_run(log, found, floor, marks)
    if floor is not None and _needs_mark(found, floor, marks, now, grace):
        created = _create_mark(log, found, floor, marks)
        if created is not None:
            marks.insert(0, created)
            now = max(now, created.modified)
    result = _carry_out(log, found, marks, now, grace, keep_anchors)
    remove_dead_pins(store, log.run, now)
    emit(on_event, "collected", outcome=result.outcome, floor=result.floor, deleted=result.deleted, bytes=result.bytes)
    return result


def _carry_out(log: ChainLog, found: Survey, marks: list[_PlacedMark], now: datetime, grace: float, keep_anchors: int) -> Collected:
    """Delete by the newest mark that is due and still correct."""
    allowed = found.floor(keep_anchors)
    waiting: Collected | None = None
    held: Collected | None = None
    for placed in marks:
        mark = placed.mark
        left = (placed.modified + timedelta(seconds=grace) - now).total_seconds()
        if left > 0:
            waiting = Collected("waiting", mark.mark, mark.floor, wait=left)
        elif mark.epoch != found.epoch or found.head.epoch != found.epoch or allowed is None or mark.floor > allowed:
            held = held or Collected("held", mark.mark, mark.floor)
        else:
            garbage = find_garbage(log, found, mark.floor)
            if not len(garbage):
                return waiting or Collected("nothing", mark.mark, mark.floor, kept=garbage.kept)
            log.store.delete(info.key for info in garbage.shortcuts)
            log.store.delete(info.key for info in garbage.data)
            return Collected("collected", mark.mark, mark.floor, len(garbage), garbage.bytes, garbage.kept)
    return waiting or held or Collected("nothing")


def _dry_run(log: ChainLog, found: Survey, floor: int | None, marks: list[_PlacedMark]) -> Collected:
    if floor is None:
        return Collected("nothing")
    garbage = find_garbage(log, found, floor)
    mark = marks[0].mark.mark if marks else None
    return Collected("collected" if len(garbage) else "nothing", mark, floor, len(garbage), garbage.bytes, garbage.kept)


def _needs_mark(found: Survey, floor: int, marks: list[_PlacedMark], now: datetime, grace: float) -> bool:
    if found.head.epoch != found.epoch:  # a writer has claimed an epoch, but has not written its fence yet
        return False
    # No correct collector writes a floor above the head. Such a mark may be forged, and must not stop collection forever.
    credible = [placed for placed in marks if placed.mark.floor <= found.head.seq]
    if not credible:
        return floor > 0
    newest = credible[0].mark
    # A mark so far ahead was made before the store's clock was set back. Waiting for its date could take years.
    is_from_the_future = credible[0].modified - now > timedelta(seconds=max(grace, 1.0))
    return floor > newest.floor or (floor == newest.floor and (found.epoch != newest.epoch or is_from_the_future))


def _create_mark(log: ChainLog, found: Survey, floor: int, marks: list[_PlacedMark]) -> _PlacedMark | None:
    """Create the next mark. Return None if another collector created one first; the next call will find it."""
    number = marks[0].mark.mark + 1 if marks else 0
    mark = Mark(log.run.id, number, found.epoch, floor, secrets.token_hex(16), time.time_ns() // 1_000_000)
    data, key = mark.to_bytes(), keys.mark_key(number)
    try:
        log.store.put_if_absent(key, data)
    except (ObjectExists, OutcomeUnknown):
        return None
    return _PlacedMark(mark, log.store.head(key).modified)


def _marks(log: ChainLog) -> Iterator[_PlacedMark]:
    """Return the newest marks, newest first."""
    infos = [info for info in log.store.list(keys.MARKS) if keys.parse_mark_key(info.key) is not None]
    for info in reversed(infos[-_MARKS_LOOKED_AT:]):
        mark = Mark.parse(log.store.get(info.key, limit=MAX_RECORD_BYTES))
        check_same_run(mark.id, log.run, info.key)
        yield _PlacedMark(mark, info.modified)


def _store_time(store: Store) -> datetime:
    """Return the time of the store's own clock: that of an object written now."""
    key = keys.probe_key(secrets.token_hex(16))
    store.put(key, b"now", durable=False)
    try:
        return store.head(key).modified
    finally:
        store.delete([key])
