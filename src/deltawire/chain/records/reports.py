"""Reports: records in which engines say which version they serve, for the publisher's side.

    report/{reader}.json   {"deltawire":"report","version":1,"id":…,"reader":name,"state":…,"seq":n or null,"error":text or null,"time":ms}

Each reader overwrites its own report. Nothing depends on it: it is for people, and for trainers that wait until a version is served.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ...errors import CorruptRecord, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...format.records.canonical import MAX_RECORD_BYTES, Fields, dump
from ...format.records.run_records import Run
from ...store import keys
from ...store.base import Store

SERVING, REFUSED, QUARANTINED, LOST = "serving", "refused", "fenced", "lost"
"""States: serves version `seq`; still serves it because a newer one was refused; serves nothing because an update failed half-way; does not
answer. Readers of releases before the last state ignore reports with it."""

_MOST_TEXT = 4000


@dataclass(frozen=True, slots=True)
class Report:
    """The report of an engine about itself at `time` (seconds since 1970, by the reader's clock)."""

    reader: str
    state: str
    seq: int | None
    error: str | None
    time: float


def put_report(store: Store, run: Run, reader: str, state: str, seq: int | None, error: str | None = None) -> None:
    """Write a reader's report. Replaces its previous report."""
    record: dict[str, Any] = {"deltawire": "report", "version": 1, "id": run.id, "reader": reader}
    record |= {"state": state, "seq": seq, "error": error and error[:_MOST_TEXT], "time": int(time.time() * 1000)}
    store.put(keys.report_key(reader), dump(record), durable=False)


def delete_report(store: Store, reader: str) -> None:
    """Delete a reader's report, because the reader ends."""
    store.delete([keys.report_key(reader)])


def read_reports(store: Store, run: Run) -> list[Report]:
    """Return the newest report of every engine, by reader.

    Other objects in that folder are ignored, because any writer may put them there.
    """
    found = []
    for info in store.list(keys.REPORTS):
        reader = keys.parse_report_key(info.key)
        if reader is None:
            continue
        try:
            report = parse_report(store.get(info.key, limit=MAX_RECORD_BYTES), run)
        except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
            continue
        if report.reader == reader:
            found.append(report)
    return found


def parse_report(data: bytes, run: Run) -> Report:
    """Return the report with these bytes. Raises `CorruptRecord` for any other."""
    fields = Fields.parse(data, "report")
    if fields.text("id") != run.id:
        fields.refuse("it is of another run")
    report = Report(
        fields.text("reader"),
        fields.text("state"),
        fields.nullable("seq", fields.integer),
        fields.nullable("error", fields.text),
        fields.integer("time") / 1000,
    )
    fields.done()
    if report.state not in (SERVING, REFUSED, QUARANTINED, LOST):
        fields.refuse(f"it has the unknown state {report.state!r}")
    return report
