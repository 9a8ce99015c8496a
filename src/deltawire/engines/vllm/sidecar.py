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
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from ...chain.reader_options import ReaderOptions
from ...chain.reports import QUARANTINED, REFUSED, SERVING, put_report
from ...chain.version import Version
from ...errors import DeltawireError, EngineError, EngineQuarantined, EngineRefused, NoChain, StoreError
from ...events import OnEvent, emit
from ...store import Store, open_store
from ...subscribe import Subscriber
from ...subscribe.follow import pause as pace
from ...subscribe.pin_keeper import reader_name
from ..base import KvCache
from .routes import EngineUnreachable, PauseMode, RouteFailed, VllmRoutes

QUARANTINED_LABEL = "deltawire-quarantined"
"""What the server calls its weights while nobody knows what they are."""

_SLOWEST = 5
"""How many times in a row the time between two attempts is doubled after failures."""

_STAGING_LOOKS = (0.005, 0.25)
"""Seconds between two looks at whether the workers have staged a version: at first, and at most."""


class Sidecar:
    """Brings the versions of the chain at `url` into the vLLM server at `engine`, by way of the directory `mirror`.

    `pause` says what becomes of requests that are being answered during a swap, and `kv_cache` of the keys and values that the old weights
    made. `confirm` is what the workers read back after each update: "written" or "everything".
    """

    def __init__(
        self,
        engine: str,
        url: str | Path | Store,
        mirror: Path | str,
        *,
        pause: PauseMode = "keep",
        kv_cache: KvCache = KvCache.DROP,
        confirm: str = "written",
        options: ReaderOptions | None = None,
        threads: int | None = None,
        staging_patience: float = 600.0,
        on_event: OnEvent | None = None,
    ) -> None:
        options = options or ReaderOptions()
        self.reader = options.reader or reader_name()
        options = replace(options, reader=self.reader)
        self.routes = VllmRoutes(engine)
        self.served: Version | None = None
        """The version that the server has by this sidecar's doing; None if it is not known to have any."""
        self._pause: PauseMode = pause
        self._clear_cache = kv_cache is KvCache.DROP
        self._init_info: dict[str, Any] = {"mirror": str(Path(mirror).absolute()), "confirm": confirm, "threads": threads}
        self._staging_patience = staging_patience
        self._on_event = on_event
        self._owns_store = not isinstance(url, Store)
        self._store = open_store(url, options=options.store, on_event=on_event)
        self._log = options.open_log(self._store)
        self._subscriber = Subscriber(self._store, mirror, options=options, threads=threads, on_event=on_event)

    def run(self, *, poll: float = 0.5, stop: threading.Event | None = None) -> None:
        """Keep the server at the newest version until `stop` is set. Raises only what does not heal by itself."""
        stop = stop or threading.Event()
        failures = 0
        while not stop.is_set():
            try:
                self.step()
                failures = 0
            except NoChain:
                failures = 0  # reported; there will be one, and then nobody should wait
            except EngineUnreachable as error:
                if self.served is not None:
                    emit(self._on_event, "engine-lost", reason=str(error))
                self.served = None
                failures = 1
            except DeltawireError as error:
                if not (error.retryable or isinstance(error, EngineError)):
                    raise
                failures = min(failures + 1, _SLOWEST)
                emit(self._on_event, "swap-failed", error=type(error).__name__, reason=str(error))
            stop.wait(pace(poll, failures))

    def step(self) -> Version | None:
        """Look once, and swap if there is something to do. Returns the version that was swapped in, if any."""
        try:
            self._subscriber.sync()
        except DeltawireError as error:  # reported as an event; a server that is new can have the version at hand
            if not error.retryable or self._subscriber.version is None:
                raise
        version = self._subscriber.version
        assert version is not None
        if self.served is not None and self.routes.weight_version() != _label(self.served):
            self.served = None  # it was restarted, or somebody else has changed its weights
        if self.served == version:
            return None
        self._bring(version)
        return version

    def close(self) -> None:
        """Let go of mirror and store. The server goes on with what it has."""
        self._subscriber.close()
        if self._owns_store:
            self._store.close()

    # One swap

    def _bring(self, version: Version) -> None:
        is_new = self.served is None
        self.routes.initialise(self._init_info)
        workers = self.routes.status()
        if not (is_new and _have(workers, version) and self.routes.weight_version() == _label(version)):
            self._swap(version, workers)
        if is_new and self.routes.is_paused():  # by a sidecar before us that did not live to resume it
            self.routes.resume()
        self._tell_of_attachments(version)
        self.served = version
        self._report(SERVING, version.seq)

    def _tell_of_attachments(self, version: Version) -> None:
        """Report files that changed since the last swap: the server goes on with the config and tokenizer that it was started with."""
        before = {} if self.served is None else self.served.attachments
        if not before or before == version.attachments:
            return
        names = sorted(name for name in {*before, *version.attachments} if before.get(name) != version.attachments.get(name))
        emit(self._on_event, "attachments-changed", seq=version.seq, files=", ".join(names))

    def _swap(self, version: Version, workers: list[dict[str, Any]]) -> None:
        start = time.monotonic()
        anew = any(worker["quarantined"] for worker in workers)
        if not anew:
            self._stage(version)
        self.routes.settle()
        paused = time.monotonic()
        self.routes.pause(self._pause, clear_cache=self._clear_cache)
        try:
            self._update(version, anew=anew)
        except RouteFailed as failure:
            workers = self.routes.settle()
            if not any(worker["quarantined"] for worker in workers):  # nothing was changed: the old version serves on
                self.routes.resume()
                self._report(REFUSED, self.served.seq if self.served else None, str(failure))
                raise EngineRefused(f"the workers did not take {version.describe()}: {_errors(workers) or failure}") from failure
            self._repair(version, workers, failure)
            anew = True
        self.routes.resume()
        now = time.monotonic()
        emit(
            self._on_event,
            "swapped",
            seq=version.seq,
            updates=version.updates,
            step=version.step,
            stage_seconds=paused - start,
            pause_seconds=now - paused,
            behind_seconds=max(0.0, time.time() - version.time),
            loaded_anew=int(anew or any(worker["last"].get("loaded_anew") for worker in self.routes.status())),
        )

    def _stage(self, version: Version) -> None:
        """Return when all workers have the update at hand."""
        deadline = time.monotonic() + self._staging_patience
        workers = self.routes.prepare(version.seq)
        look, longest = _STAGING_LOOKS
        while not all(worker["staged"] == version.seq for worker in workers):
            if any(worker["staging_error"] for worker in workers) or time.monotonic() > deadline:
                reason = _errors(workers) or "time is up"
                self._report(REFUSED, self.served.seq if self.served else None, reason)
                raise EngineRefused(f"the workers cannot stage {version.describe()}: {reason}")
            time.sleep(look)
            look = min(look * 1.5, longest)
            workers = self.routes.status()

    def _update(self, version: Version, *, anew: bool) -> None:
        self.routes.start_update()
        self.routes.update(version.seq, anew=anew)
        self.routes.finish_update(_label(version))

    def _repair(self, version: Version, workers: list[dict[str, Any]], failure: RouteFailed) -> None:
        """Load everything anew. Until that has worked the server stays paused."""
        reason = _errors(workers) or str(failure)
        self.served = None
        self.routes.label(QUARANTINED_LABEL)
        emit(self._on_event, "engine-quarantined", seq=version.seq, updates=version.updates, reason=reason)
        self._report(QUARANTINED, None, reason)
        try:
            self._update(version, anew=True)
        except RouteFailed as again:
            self.routes.settle()
            raise EngineQuarantined(f"an update failed ({reason}), and so did loading {version.describe()} anew ({again}).") from again
        emit(self._on_event, "repaired", seq=version.seq, updates=version.updates)

    def _report(self, state: str, seq: int | None, error: str | None = None) -> None:
        try:
            put_report(self._store, self._log.run, self.reader, state, seq, error)
        except StoreError as failure:  # nothing depends on it
            emit(self._on_event, "report-failed", reason=str(failure))


def default_mirror(url: str) -> Path:
    """A directory of this user's for the mirror of the chain at a URL."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "deltawire" / "mirrors" / blake3(url.encode()).hexdigest()[:16]


def _label(version: Version) -> str:
    """What the server calls a version, and what its completions are attributed to."""
    return str(version.seq)


def _have(workers: list[dict[str, Any]], version: Version) -> bool:
    return all(worker["version"] == version.seq and not worker["quarantined"] for worker in workers)


def _errors(workers: list[dict[str, Any]]) -> str:
    found = [(rank, worker["error"] or worker["staging_error"]) for rank, worker in enumerate(workers)]
    return "; ".join(f"worker {rank}: {error}" for rank, error in found if error)
