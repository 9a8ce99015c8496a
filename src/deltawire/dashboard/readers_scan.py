"""Reads what readers and relays leave in the store: pins, reports and published relays."""

from __future__ import annotations

from typing import Any

from ..chain.records.pins import StoredPin
from ..chain.records.published_relays import MOST as MOST_RELAYS
from ..chain.records.reports import Report, parse_report
from ..format.records.collection_records import Pin
from ..format.records.relay_records import PublishedRelay
from ..format.records.run_records import Run
from ..store import keys
from ..store.base import Store
from .fetch_many import RecordFetcher
from .plain_values import short

MOST_READERS = 1024
_RECORDS_A_LOOK = 96


class ReadersScan:
    """Keeps the pins, reports and relays of a run. A look reads only those that have changed.

    Parameters
    ----------
    store
        The store. The caller closes it.
    run
        The run.
    """

    def __init__(self, store: Store, run: Run) -> None:
        self._fetch = RecordFetcher(store)
        self._run = run
        self._modified: dict[str, float] = {}
        self.pins: dict[str, StoredPin] = {}
        self.reports: dict[str, Report] = {}
        self.relays: dict[str, PublishedRelay] = {}

    def look(self) -> None:
        """Read what has changed. Raises errors of the store, after which it can be called again."""
        self._read_pins()
        self._read_reports()
        self._read_relays()

    def close(self) -> None:
        """Stop the threads."""
        self._fetch.close()

    def plain(self) -> dict[str, Any]:
        """Return pins, reports and relays as plain values."""
        return {
            "pins": [
                {"reader": name, "seq": placed.pin.seq, "until": round(placed.modified.timestamp() + min(placed.pin.ttl, 10**9))}
                for name, placed in sorted(self.pins.items())
            ],
            "reports": [
                {
                    "reader": name,
                    "state": "quarantined" if report.state == "fenced" else report.state,
                    "seq": report.seq,
                    "error": None if report.error is None else short(report.error, 300),
                    "time": report.time,
                }
                for name, report in sorted(self.reports.items())
            ],
            "relays": [{"name": name, "url": short(relay.url, 200)} for name, relay in sorted(self.relays.items())],
        }

    def _read_pins(self) -> None:
        listed = {info.key: info for info in self._fetch.listed(keys.PINS, MOST_READERS)}
        for key, pin in self._fetch.read(self._changed(listed), Pin.parse).items():
            if pin.id == self._run.id and keys.parse_pin_key(key) == pin.reader:
                self.pins[pin.reader] = StoredPin(pin, listed[key].modified)
        there = set(map(keys.parse_pin_key, listed))
        self.pins = {name: placed for name, placed in self.pins.items() if name in there}

    def _read_reports(self) -> None:
        listed = {info.key: info for info in self._fetch.listed(keys.REPORTS, MOST_READERS)}
        found = self._fetch.read(self._changed(listed), lambda data: parse_report(data, self._run))
        for key, report in found.items():
            if keys.parse_report_key(key) == report.reader:
                self.reports[report.reader] = report
        there = set(map(keys.parse_report_key, listed))
        self.reports = {name: report for name, report in self.reports.items() if name in there}

    def _read_relays(self) -> None:
        listed = {info.key: info for info in self._fetch.listed(keys.RELAYS, MOST_RELAYS)}
        for key, relay in self._fetch.read(self._changed(listed), PublishedRelay.parse).items():
            if relay.id == self._run.id and keys.parse_relay_key(key) == relay.name:
                self.relays[relay.name] = relay
        there = set(map(keys.parse_relay_key, listed))
        self.relays = {name: relay for name, relay in self.relays.items() if name in there}

    def _changed(self, listed: dict[str, Any]) -> list[str]:
        """Return the keys of records that changed since they were read; in one look not all of many."""
        changed = [key for key, info in listed.items() if self._modified.get(key) != info.modified.timestamp()]
        most = MOST_READERS if not self._modified else _RECORDS_A_LOOK
        for key in changed[:most]:
            self._modified[key] = listed[key].modified.timestamp()
        if len(self._modified) > 4 * MOST_READERS:
            self._modified.clear()
        return changed[:most]
