"""Checks of readers: their pins, the reports of engines, and relays."""

from __future__ import annotations

from datetime import datetime, timezone

from ...chain.log import ChainLog
from ...chain.reader_options import ReaderOptions
from ...chain.records.pins import StoredPin, read_pins
from ...chain.records.published_relays import published_relays
from ...chain.records.reports import LOST, QUARANTINED, REFUSED, Report, read_reports
from ...errors import DeltawireError
from ...store.base import StoreOptions
from ..output import figures
from .chain_checks import ChainState
from .findings import Examination, count_of, names_of
from .fleet_checks import HIGH_LAG

_MOST_READ = 256
"""The most pins and reports whose versions are looked up."""
_MOST_RELAYS = 8
_RELAY = StoreOptions(retries=1, timeout=15.0)
"""A relay's store that does not answer soon is reported, not waited for."""


def check_readers(found: Examination, log: ChainLog, chain: ChainState, *, now: float) -> None:
    """Check pins and reports.

    Parameters
    ----------
    found
        Gets the findings.
    log
        The chain.
    chain
        What is known of the chain.
    now
        The time of the store, in seconds since 1970.
    """
    with found.checking("readers"):
        pins = read_pins(log.store, log.run)
        _judge_pins(found, log, chain, pins, datetime.fromtimestamp(now, timezone.utc))
    with found.checking("engines"):
        for report in read_reports(log.store, log.run)[:_MOST_READ]:
            _judge_report(found, log, chain, report)


def check_relays(found: Examination, log: ChainLog, chain: ChainState, *, asks: bool) -> None:
    """Check the copies that relays have published in the run.

    Parameters
    ----------
    found
        Gets the findings.
    log
        The chain.
    chain
        What is known of the chain.
    asks
        Whether to open the stores of the copies. Everybody who can write to the origin can publish one.
    """
    with found.checking("relays"):
        urls = published_relays(log.store)
        if urls and not asks:
            found.add("relays", "note", f"{count_of(len(urls), 'relay')} not asked", "Pass --relays to ask the stores of their copies.")
            return
        for url in urls[:_MOST_RELAYS]:
            _check_relay(found, log, chain, url)


def _judge_pins(found: Examination, log: ChainLog, chain: ChainState, pins: list[StoredPin], now: datetime) -> None:
    held = [placed for placed in pins if placed.holds(now)]
    silent = [placed for placed in pins if not placed.holds(now) and not placed.is_dead(now)]
    late = {placed.pin.reader: behind for placed in held[:_MOST_READ] if (behind := _behind(log, chain, placed.pin.seq)) >= HIGH_LAG}
    if silent:
        found.add(
            "readers",
            "warning",
            f"{count_of(len(silent), 'pin')} expired, so these readers ended or hang: {names_of([one.pin.reader for one in silent])}",
            "Check whether they still run. Collection may delete what they need; a reader that starts again fetches a full checkpoint.",
        )
    if late:
        found.add(
            "readers",
            "warning",
            f"{count_of(len(late), 'reader')} up to {max(late.values()):,} versions behind: {names_of(sorted(late))}",
            "Check their links and logs. Collection keeps everything that leads from their versions on.",
        )
    if held and not (silent or late):
        found.add("readers", "ok", f"{count_of(len(held), 'reader')} with a pin: none is silent, and none lags")


def _judge_report(found: Examination, log: ChainLog, chain: ChainState, report: Report) -> None:
    why = "" if report.error is None else f": {figures.printable(report.error[:300])}"
    if report.state == QUARANTINED:
        remedy = "Its next sync loads a full checkpoint. If that fails, too, read the engine's log, and restart it."
        found.add("engines", "wrong", f"{report.reader} serves nothing, because an update failed half-way{why}", remedy)
    elif report.state == LOST:
        remedy = "Start its server again. The sidecar then brings it to the newest version."
        found.add("engines", "wrong", f"{report.reader} serves nothing, because its server does not answer{why}", remedy)
    elif report.state == REFUSED:
        what = f"{report.reader} could not take a newer version, and serves its old one{why}"
        found.add("engines", "warning", what, "Correct the cause that the message names. The sidecar tries again by itself.")
    elif report.seq is not None and (behind := _behind(log, chain, report.seq)) >= HIGH_LAG:
        what = f"{report.reader} serves a version that is {behind:,} versions old"
        found.add("engines", "warning", what, "Check that its sidecar runs, and read the sidecar's log.")


def _check_relay(found: Examination, log: ChainLog, chain: ChainState, url: str) -> None:
    name = figures.printable(url)
    try:
        with ReaderOptions(store=_RELAY).open_store(url) as store:
            copy = ChainLog(store, run=log.run.run, trusted_keys=log.trusted_keys)
            head = copy.head()
            if head is None or copy.run.id != log.run.id:
                found.add(
                    "relays", "warning", f"{name} does not hold this run", "Start its relay again, or delete its record under relay/."
                )
                return
            behind = chain.newest.updates - copy.in_force(head).updates
    except DeltawireError as error:
        found.add("relays", "warning", f"{name}: {error.message}", "Readers read from the origin instead. Check the relay's log.")
        return
    if behind >= HIGH_LAG:
        found.add("relays", "warning", f"{name} is {behind:,} versions behind", "Check that its relay runs, and its link.")
    else:
        found.add("relays", "ok", f"{name} is {'up to date' if behind <= 0 else count_of(behind, 'version') + ' behind'}")


def _behind(log: ChainLog, chain: ChainState, seq: int) -> int:
    """Return how many versions lie between a commit and the newest version. Returns 0 for a commit that the chain does not have."""
    newest = chain.newest
    return newest.updates - log.ancestor(newest, seq).updates if 0 <= seq <= newest.seq else 0
