"""Looks at a run again and again, and keeps what the page shows as sections of plain values."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ..chain.reader_options import ReaderOptions
from ..errors import DeltawireError, NoChain, StoreError
from ..fleet.fleet_keyring import FleetKeyring
from ..store import keys, live_keys
from ..store.base import Store
from .chain_pages import ChainPages
from .chain_scan import WINDOW, ChainScan
from .channels_scan import ChannelsScan
from .faults import find_faults
from .fleet_scan import FleetScan
from .gates_scan import GatesScan
from .plain_values import short
from .read_only import ReadOnlyStore
from .readers_scan import ReadersScan
from .traffic_scan import TrafficScan
from .version_details import MOST_BYTES, VersionDetails

SECTIONS = ("status", "chain", "channels", "traffic", "gates", "members", "tasks", "readers", "faults")
"""The parts of the page that change by themselves."""
_KEPT_DETAILS = 32


@dataclass(frozen=True, slots=True)
class ObserverOptions:
    """Say how much of a run is read.

    Parameters
    ----------
    reading
        Which chain is accepted.
    window
        The number of newest commits that are all read and shown. Samples of older ones are read.
    detail_bytes
        The most bytes of files, and of weights, that are read to show the details of one version.
    """

    reading: ReaderOptions = field(default_factory=ReaderOptions)
    window: int = WINDOW
    detail_bytes: int = MOST_BYTES


class Observer:
    """Watches a run through its store alone, and never writes. May be used from several threads.

    Parameters
    ----------
    store
        The store that holds the run. The caller closes it.
    options
        How much is read.
    clock
        Returns seconds since 1970.
    """

    def __init__(self, store: Store, options: ObserverOptions | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._options = options or ObserverOptions()
        self._store = ReadOnlyStore(store)
        self._log = self._options.reading.open_log(self._store)
        self._clock = clock
        self._chain = ChainScan(self._log, window=self._options.window)
        self._pages = ChainPages(self._chain)
        self._channels = ChannelsScan(self._log, self._chain)
        self._fleet: FleetScan | None = None
        self._readers: ReadersScan | None = None
        self._traffic: TrafficScan | None = None
        self._gates = GatesScan(self._log, self._chain, self._channels)
        self._is_live = False
        self._details = VersionDetails(self._store, self._options.reading, most_bytes=self._options.detail_bytes)
        self._kept_details: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._looking, self._reading = threading.Lock(), threading.Lock()
        self._changed = threading.Condition()
        self._texts: dict[str, str] = {}
        self._versions: dict[str, int] = dict.fromkeys(SECTIONS, 0)
        self._number = 0
        self._problem: str | None = None
        self._looks = 0
        self._closed = False
        self._tell()

    def look(self, *, raising: bool = False) -> bool:
        """Read what is new in the store. Return whether that succeeded; if not, the page says why, and the next look tries again.

        Parameters
        ----------
        raising
            Raise the error instead.
        """
        with self._looking:
            try:
                self._look()
                self._problem = None
            except DeltawireError as error:
                if raising:
                    raise
                self._problem = short(str(error), 400)
            self._looks += 1
            self._tell()
            return self._problem is None

    def follow(self, stop: threading.Event, every: float = 2.0) -> None:
        """Look until `stop` is set.

        Parameters
        ----------
        stop
            Set it to end.
        every
            Seconds between two looks.
        """
        while not stop.is_set():
            self.look()
            stop.wait(every)

    def sections(self) -> dict[str, Any]:
        """Return everything that the page shows, except details of versions."""
        with self._changed:
            found = {name: json.loads(text) for name, text in self._texts.items()}
        with self._looking:
            commits = [scanned.commit for scanned in self._chain.window() if scanned.commit is not None and scanned.commit.kind != "fence"]
            published = [(commit.time / 1000, commit.seq) for commit in commits]
            return {**found, "history": {} if self._fleet is None else self._fleet.plain_history(published)}

    def changes(self, after: int, timeout: float) -> tuple[int, dict[str, str]]:
        """Wait for sections that changed after a number that an earlier call returned. Return the next number, and their JSON by name.

        Parameters
        ----------
        after
            The number; 0 for all sections.
        timeout
            The longest time to wait, in seconds. After it, no section is returned.
        """
        with self._changed:
            after = after if after <= self._number else 0  # the number may be of an earlier observer
            self._changed.wait_for(lambda: self._number > after or self._closed, timeout)
            changed = {name: self._texts[name] for name, number in self._versions.items() if number > after and name in self._texts}
            return self._number, changed

    def version(self, *, seq: int) -> dict[str, Any]:
        """Return the details of one commit as plain values. A version that cannot be used has a `problem`.

        Raises errors of the store.

        Parameters
        ----------
        seq
            The number of the commit.
        """
        with self._reading:
            if seq in self._kept_details:
                return self._kept_details[seq]
            scanned = self._chain.scanned(seq)
            if scanned.commit is None:
                return {"seq": seq, "kind": "corrupt", "problem": short(scanned.problem or "it cannot be read.", 400)}
            details = self._details.read(self._log, scanned.commit, collected=seq <= self._log.floor())
            if details["problem"] is not None:
                self._chain.note_damage(seq, details["problem"])
                return details  # a damaged object may be repaired
            self._kept_details[seq] = details
            while len(self._kept_details) > _KEPT_DETAILS:
                self._kept_details.popitem(last=False)
            return details

    def commits(self, page: int) -> dict[str, Any]:
        """Return one page of commits, of any age, as plain values. Raises errors of the store.

        Parameters
        ----------
        page
            The number of the page. Each has 128 commits; page 0 begins with commit 0.
        """
        return self._pages.page(page)

    def commit_of(self, number: int) -> int | None:
        """Return the number of the commit that made a version, or of the newest one if there is none yet. Raises errors of the store.

        Parameters
        ----------
        number
            The number of the version.
        """
        return self._pages.seq_of(number)

    @property
    def problem(self) -> str | None:
        """The reason why the last look failed. None if it succeeded."""
        return self._problem

    @property
    def newest_versions(self) -> list[int]:
        """The seqs of the commits in memory that made versions, the newest first."""
        newest_first = reversed(self._chain.window())
        return [scanned.seq for scanned in newest_first if scanned.commit is None or scanned.commit.kind != "fence"]

    @property
    def read_bytes(self) -> int:
        """Bytes that were read from the store."""
        return self._store.bytes

    @property
    def requests(self) -> int:
        """Requests that were sent to the store; the pages of a listing count as one."""
        return self._store.requests

    def close(self) -> None:
        """Stop the threads, and wake up everybody who waits for changes. The store stays open."""
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        with self._looking:
            for scan in (self._chain, self._fleet, self._readers, self._traffic):
                if scan is not None:
                    scan.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _look(self) -> None:
        if self._closed:
            raise StoreError("the observer is closed.")
        run = self._log.run
        if self._looks and self._log.object(keys.RUN) is None:  # for example a directory that is no longer mounted
            raise NoChain(f"the run is no longer at {self._store.url}.")
        if self._fleet is None or self._readers is None or self._traffic is None:
            self._fleet = FleetScan(self._store, run.id, FleetKeyring(trusted_keys=self._options.reading.trusted_keys))
            self._readers = ReadersScan(self._store, run)
            self._traffic = TrafficScan(self._store, run.id, self._chain)
        self._chain.look()
        if self._chain.head is None:
            raise NoChain(f"nothing is published at {self._store.url}.")
        self._channels.look()
        self._fleet.look()
        self._fleet.count_updates(self._chain.updates_between, self._chain.head)
        self._readers.look()
        self._is_live = self._is_live or next(iter(self._store.list(live_keys.LIVE)), None) is not None
        if self._is_live:
            self._traffic.look()
            self._gates.look()

    def _tell(self) -> None:
        """Keep the sections as JSON, and tell everybody who waits which of them changed."""
        plain = self._plain()
        texts = {name: json.dumps(value, separators=(",", ":"), allow_nan=False) for name, value in plain.items()}
        with self._changed:
            self._number += 1
            for name, text in texts.items():
                if self._texts.get(name) != text:
                    self._versions[name] = self._number
            self._texts = texts
            self._changed.notify_all()

    def _plain(self) -> dict[str, Any]:
        now = self._clock()
        status = {
            "run": None if self._looks == 0 or self._fleet is None else short(self._log.run.run, 200),
            "url": short(self._store.url, 300),
            "time": round(now, 3),
            "problem": self._problem,
            "looks": self._looks,
            "read_bytes": self._store.bytes,
            "requests": self._store.requests,
        }
        if self._fleet is None or self._readers is None or self._traffic is None:
            return {"status": status}
        channels, traffic, gates = self._channels.plain(), self._traffic.plain(), self._gates.plain()
        chain, members, readers = self._chain.plain(), self._fleet.plain_members(now), self._readers.plain()
        steps = {scanned.seq: scanned.commit.step for scanned in self._chain.window() if scanned.commit is not None}
        rejections = [
            {"step": one.step, "results": len(one.results), "why": short(one.why, 300), "time": one.time / 1000}
            for one in self._fleet.rejections
        ]
        board = self._fleet.board
        status |= {
            "step": None if board is None else board.step,
            "stopped": board is not None and board.stop,
            "board_time": self._fleet.board_modified,
        }
        return {
            "status": status,
            "chain": chain,
            "channels": channels,
            "traffic": traffic,
            "gates": gates,
            "members": members,
            "tasks": self._fleet.plain_tasks(steps),
            "readers": readers,
            "faults": find_faults(chain, channels, traffic, gates, members["shown"], readers, rejections),
        }
