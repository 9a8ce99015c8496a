"""Follow a chain and bring every new version into a running vLLM server.

For each version the sidecar fetches it into the mirror, lets the workers stage what differs, pauses the server, lets the workers write and
confirm, and resumes the server. Sidecar and server may be killed at any moment, alone or together. The sidecar keeps no state between
runs: it looks at the mirror, asks the workers which version they have, and asks the server for the label of its weights (`/weight_info`).
A new sidecar therefore continues where the last one stopped.

A server whose update failed half-way stays paused until its weights have been loaded anew from the mirror. If someone resumes it by hand
before that, its completions are attributed to `QUARANTINED_LABEL`. The sidecar writes a report to the store (deltawire/chain/reports.py),
so that the publisher can see the state of the engine. The routes that it uses ask for no key, so the server belongs on loopback.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from ...chain.reader_options import ReaderOptions
from ...chain.reports import QUARANTINED, REFUSED, SERVING, put_report
from ...chain.version import Version
from ...errors import DeltawireError, EngineError, EngineQuarantined, EngineRefused, NoChain, StoreError
from ...events import OnEvent, Value, emit
from ...store import Store, open_store
from ...subscribe import Subscriber
from ...subscribe.follow import pause as pace
from ...subscribe.pin_keeper import reader_name
from ..base import KvCache
from ..swap.swap_controller import SwapController, SwapRecord, SwapState
from . import QUARANTINED_LABEL as QUARANTINED_LABEL
from .routes import EngineUnreachable, PauseMode, VllmRoutes, WorkerStatus
from .server_update import OneCallUpdate, PausableServer, RoutesUpdate, ServerUpdate, label, worker_errors

_MOST_DOUBLINGS = 5
"""After failures, the time between two attempts is doubled at most this many times."""

_FIRST_STAGING_POLL, _LONGEST_STAGING_POLL = 0.005, 0.25
"""Seconds between two questions whether the workers have staged a version."""


class Sidecar:
    """Brings the versions of a chain into a running vLLM server.

    Parameters
    ----------
    engine
        The URL of the server, such as http://127.0.0.1:8000, or a client of its routes.
    url
        The location of the chain, or an open store.
    mirror
        The directory that holds the newest version as a checkpoint. All workers of the server must be able to read it.
    pause
        What happens to requests that the server is answering during a swap: "keep" continues them afterwards, "wait" finishes them first,
        "abort" ends them.
    kv_cache
        What happens to keys and values that the old weights computed.
    confirm
        What the workers read back after each update: "written" or "everything".
    one_call
        Whether to swap in one call if the server can (engine_core.py). False always uses vLLM's routes.
    options
        Which chain to accept, and how to read it.
    threads
        Number of threads for decoding and comparing. None means one per core.
    staging_patience
        Seconds that the workers may take to stage a version.
    on_event
        Called with each event, on the thread where it happened.
    """

    def __init__(
        self,
        engine: str | VllmRoutes,
        url: str | Path | Store,
        mirror: Path | str,
        *,
        pause: PauseMode = "keep",
        kv_cache: KvCache = KvCache.DROP,
        confirm: str = "written",
        one_call: bool = True,
        options: ReaderOptions | None = None,
        threads: int | None = None,
        staging_patience: float = 600.0,
        on_event: OnEvent | None = None,
    ) -> None:
        options = options or ReaderOptions()
        self.reader = options.reader or reader_name()
        options = replace(options, reader=self.reader)
        self._owns_routes = isinstance(engine, str)
        self.routes = VllmRoutes(engine) if isinstance(engine, str) else engine
        self.served: Version | None = None
        """The version that this sidecar has brought into the server. None if the server's version is unknown."""
        self._server = PausableServer(self.routes, pause, may_call_once=one_call)
        self._controller = SwapController(self._server, kv_cache=kv_cache, details=self._swap_details, on_event=on_event)
        self._init_info: dict[str, Any] = {"mirror": str(Path(mirror).absolute()), "confirm": confirm, "threads": threads}
        self._staging_patience = staging_patience
        self._stage_seconds = 0.0
        self._last_update: ServerUpdate | None = None
        self._problem: str | None = None
        """Why the server does not serve a version of the chain, as far as it is known."""
        self._reported_hold: str | None = None
        self._on_event = on_event
        self._owns_store = not isinstance(url, Store)
        self._store = open_store(url, options=options.store, on_event=on_event)
        self._log = options.open_log(self._store)
        self._subscriber = Subscriber(self._store, mirror, options=options, threads=threads, on_event=on_event)

    def run(self, *, poll: float = 0.5, stop: threading.Event | None = None) -> None:
        """Keep the server at the newest version until `stop` is set. Raises only errors that retrying cannot solve.

        Parameters
        ----------
        poll
            Seconds between two looks for a new version. After failures it is longer.
        stop
            Set this event to end the loop.
        """
        stop = stop or threading.Event()
        failures = 0
        while not stop.is_set():
            try:
                self.step()
                failures, self._problem = 0, None
            except NoChain as error:
                self._problem = str(error)
                failures = 0  # the subscriber has reported it; the first version should not wait longer than `poll`
            except EngineUnreachable as error:
                self._problem = str(error)
                if self.served is not None:
                    emit(self._on_event, "engine-lost", reason=str(error))
                self.served = None
                failures = 1
            except DeltawireError as error:
                self._problem = str(error)
                if not (error.retryable or isinstance(error, EngineError)):
                    raise
                failures = min(failures + 1, _MOST_DOUBLINGS)
                if error is not self._controller.last_error:  # the controller has reported its own errors
                    emit(self._on_event, "swap-failed", error=type(error).__name__, reason=str(error))
            stop.wait(pace(poll, failures))

    def step(self) -> Version | None:
        """Look for a new version once, and swap it in. Returns the version that was swapped in, or None if there is nothing to do."""
        try:
            self._subscriber.sync()
        except DeltawireError as error:  # the subscriber has reported it; a restarted server can still get the version in the mirror
            if not error.retryable or self._subscriber.version is None:
                raise
        version = self._subscriber.version
        assert version is not None
        if self.served is not None and self.routes.weight_version() != label(self.served):
            self.served = None  # the server was restarted, or another process has changed its weights
        if self.served == version:
            return None
        self._bring(version)
        return version

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the server serves a version of the chain, and which one or why not. Any thread may call it.

        An older version counts too: the server goes on with it while the next one cannot be fetched or loaded.
        """
        served = self.served
        if served is None or self._controller.state in (SwapState.HALTED, SwapState.QUARANTINED):
            return False, {"reason": self._problem or "the server has no version of the chain yet."}
        return True, {"seq": served.seq, "updates": served.updates}

    def close(self) -> None:
        """Release the mirror and the store. The server keeps its weights."""
        self._subscriber.close()
        if self._owns_routes:
            self.routes.close()
        if self._owns_store:
            self._store.close()

    def _bring(self, version: Version) -> None:
        is_new = self.served is None
        self.routes.initialise(self._init_info)
        workers = self.routes.status()
        self._report_hold(workers)
        self._server.observe(workers)
        if any(worker["quarantined"] for worker in workers):
            self._controller.assume(SwapState.QUARANTINED)
        elif is_new:  # an earlier sidecar may have been killed during a swap
            self._controller.assume(SwapState.HALTED if self.routes.is_paused() else SwapState.SERVING)
        if not (is_new and _have(workers, version) and self.routes.weight_version() == label(version)):
            self._swap(version)
        self._controller.ensure_running()
        self._report_attachments(version)
        self.served = version
        self._report(SERVING, version.seq)

    def _report_hold(self, workers: Sequence[WorkerStatus]) -> None:
        """Emit an event if the server is held or asleep, once for each reason."""
        found = [worker.get("held") or ("it is asleep" if worker.get("asleep") else None) for worker in workers]
        reason = next(filter(None, found), None)
        if reason is not None and reason != self._reported_hold:
            emit(self._on_event, "engine-held", reason=str(reason))
        self._reported_hold = reason

    def _report_attachments(self, version: Version) -> None:
        """Emit an event if attachments changed since the last swap. The server keeps the config and tokenizer that it started with."""
        before = {} if self.served is None else self.served.attachments
        if not before or before == version.attachments:
            return
        names = sorted(name for name in {*before, *version.attachments} if before.get(name) != version.attachments.get(name))
        emit(self._on_event, "attachments-changed", seq=version.seq, files=", ".join(names))

    def _swap(self, version: Version) -> None:
        """Bring the server to a version. If workers fail while they write, load everything anew before the server is resumed."""
        anew = self._controller.state is SwapState.QUARANTINED
        start = time.monotonic()
        if not anew:
            self._stage(version)
        if not self._server.one_call:
            self.routes.settle()
        self._stage_seconds = time.monotonic() - start
        try:
            self._update(version, anew=anew)
        except EngineQuarantined:
            if anew:
                raise
            self._update(version, anew=True)

    def _update(self, version: Version, *, anew: bool) -> None:
        kind = OneCallUpdate if self._server.one_call else RoutesUpdate
        update = self._last_update = kind(self._server, version, anew=anew)
        try:
            self._controller.swap(update, version)
        except EngineRefused as error:
            self._report(REFUSED, self.served.seq if self.served else None, update.failure or str(error))
            raise
        except EngineQuarantined as error:
            if isinstance(error.__cause__, EngineUnreachable):  # the next step asks the server what it has
                raise error.__cause__ from None
            self.served = None
            self.routes.label(QUARANTINED_LABEL)
            self._report(QUARANTINED, None, update.failure or str(error))
            raise

    def _swap_details(self, record: SwapRecord) -> dict[str, Value]:
        update = self._last_update
        assert update is not None
        is_anew = any(worker["last"].get("loaded_anew") for worker in update.workers or self.routes.status())
        pause, preempted = record.wait_seconds + record.pause_seconds, None  # the call of /pause takes most of it
        if isinstance(update, OneCallUpdate) and update.answer is not None:  # requests are answered while the call is on its way
            pause, preempted = (update.answer.drain_ms + update.answer.swap_ms) / 1e3, update.answer.preempted
        return {
            "stage_seconds": self._stage_seconds,
            "pause_seconds": pause,
            "behind_seconds": max(0.0, time.time() - record.version.time),
            "http_calls": self._server.http_calls,
            "kv_cache": self._server.kv_cache.value,
            "preempted": preempted,
            "loaded_anew": int(is_anew),
        }

    def _stage(self, version: Version) -> None:
        """Return when all workers have staged the update."""
        deadline = time.monotonic() + self._staging_patience
        workers = self.routes.prepare(version.seq)
        wait = _FIRST_STAGING_POLL
        while not all(worker["staged"] == version.seq for worker in workers):
            if any(worker["staging_error"] for worker in workers) or time.monotonic() > deadline:
                reason = worker_errors(workers) or f"they took longer than {self._staging_patience:.0f} seconds"
                self._report(REFUSED, self.served.seq if self.served else None, reason)
                raise EngineRefused(f"the workers cannot stage {version.describe()}: {reason}")
            time.sleep(wait)
            wait = min(wait * 1.5, _LONGEST_STAGING_POLL)
            workers = self.routes.status()

    def _report(self, state: str, seq: int | None, error: str | None = None) -> None:
        try:
            put_report(self._store, self._log.run, self.reader, state, seq, error)
        except StoreError as failure:  # nothing depends on reports
            emit(self._on_event, "report-failed", reason=str(failure))


def default_mirror(url: str) -> Path:
    """Return a directory in this user's cache for the mirror of the chain at a URL."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "deltawire" / "mirrors" / blake3(url.encode()).hexdigest()[:16]


def _have(workers: Sequence[WorkerStatus], version: Version) -> bool:
    return all(worker["seq"] == version.seq and not worker["quarantined"] for worker in workers)
