"""Follow a chain and bring every new version into a running vLLM server.

For each version the sidecar fetches the deltas, lets the workers decode them against their live weights, and lets the server swap. Sidecar
and server may be killed at any moment, alone or together. The sidecar keeps no state between runs: it asks the workers which version they
have, and asks the server for the label of its weights (`/weight_info`). A new sidecar therefore continues where the last one stopped.

A server whose update failed half-way stays paused until its weights have been loaded anew. If someone resumes it by hand
before that, its completions are attributed to `QUARANTINED_LABEL`. The sidecar writes a report to the store
(deltawire/chain/records/reports.py), so that the publisher can see the state of the engine. The routes that it uses ask for no key, so the
server belongs on loopback.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from ....chain.reader_options import ReaderOptions
from ....chain.records.reports import LOST, SERVING, delete_report, put_report
from ....chain.version import Version
from ....errors import DecodingDiffers, DeltawireError, EngineError, EngineModelDiffers, NoChain, NoChannel, StoreError
from ....events import Event, OnEvent, emit
from ....store import Store
from ....store.copies.locations import Location
from ....store.copies.sources import Sources
from ....subscribe import Subscriber
from ....subscribe.follow import pause as pace
from ....subscribe.pin_keeper import reader_name
from ....subscribe.spool.delta_spool import default_spool
from ...base import KvCache
from ...swap.swap_controller import SwapState
from .. import QUARANTINED_LABEL as QUARANTINED_LABEL
from .replica_settings import ReplicaSettings
from .routes import EngineUnreachable, PauseMode, VllmRoutes, WrongServer
from .server_canary import CanaryKind, ServerCanary
from .server_replica import ServerReplica
from .server_update import PausableServer, label

_UNDO_BYTES = 512 << 20
"""The memory for the last updates in each worker of a server that follows a channel, unless the user says otherwise."""
_MOST_DOUBLINGS = 5
"""After failures, the time between two attempts is doubled at most this many times."""


class Sidecar:
    """Brings the versions of a chain into a running vLLM server.

    Parameters
    ----------
    engine
        The URL of the server, such as http://127.0.0.1:8000, or a client of its routes.
    url
        The location of the chain, or an open store. Or a list of them: the origin, and copies that relays keep.
    mirror
        The directory of a mirror, from which the workers load full checkpoints: the first version, and repairs. They must be able to read
        it, and need no access to the store. With None, they load full checkpoints from the store, with their own credentials. A mirror in
        this user's cache is then made only if nothing else works, and used if it exists (`default_mirror`).
    pause
        What happens to requests that the server is answering during a swap: "keep" continues them afterwards, "wait" finishes them first,
        "abort" ends them.
    kv_cache
        What happens to keys and values that the old weights computed.
    confirm
        What the workers check. "everything" reads all weights back in the swap. "written" digests them after it. "auto" digests them in it
        if that is quick; a GPU does so while it writes, and does not read the values back.
    spool
        The directory from which the workers take deltas. None means a directory in memory (/dev/shm), or in this user's cache.
    canary
        What to check after each update, besides the weights: "self" lets the server generate a few tokens and compares their log-probs with
        those of prompts, "recorded" compares them with the version's record (`deltawire canary`), "off" checks nothing. A server that fails
        is quarantined, and gets the version anew once.
    one_call
        Whether to swap in one call if the server can (engine_core.py). False always uses vLLM's routes.
    options
        Which chain to accept, and how to read it.
    threads
        Number of threads for decoding and digests. None means one per core.
    staging_patience
        Seconds that the workers may take to stage a version.
    gpu_share
        The share of a GPU's time that staging may take while the server generates. None means 0.025: it costs
        generation little, and 8.2 billion weights take an H200 about 0.96 s instead of 0.2 s. 1 decodes as fast as possible.
    undo_bytes
        The most memory, in addition to the weights, that each worker may use to keep its last updates. The server then goes back to the
        versions before them at once, without the store. None means 512 MiB if it follows a channel, and otherwise 0.
    on_event
        Called with each event, on the thread where it happened.
    """

    def __init__(
        self,
        engine: str | VllmRoutes,
        url: Location,
        mirror: Path | str | None = None,
        *,
        pause: PauseMode = "keep",
        kv_cache: KvCache = KvCache.DROP,
        confirm: str = "auto",
        spool: Path | str | None = None,
        canary: CanaryKind = "off",
        one_call: bool = True,
        options: ReaderOptions | None = None,
        threads: int | None = None,
        staging_patience: float = 600.0,
        gpu_share: float | None = None,
        undo_bytes: int | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        options = options or ReaderOptions()
        self.reader = options.reader or reader_name()
        options = replace(options, reader=self.reader)
        self._owns_routes = isinstance(engine, str)
        self.routes = VllmRoutes(engine) if isinstance(engine, str) else engine
        self._on_event = on_event
        self._reported: Version | None = None
        """The version that the last report says the server serves."""
        self._last_served: Version | None = None
        self._problem: str | None = None
        """The reason why the server does not serve a version of the chain, as far as it is known."""
        self._told_waiting: str | None = None
        """The reason in the last event `waiting`. None once the server has answered."""
        self._owns_store = not isinstance(url, Store)
        self._store = options.open_store(url, on_event=on_event)
        self._log = options.open_log(self._store)
        settings = ReplicaSettings(
            url=url if isinstance(url, str) and "://" in url else self._store.url,  # workers have other working directories
            relays=self._store.copy_urls if isinstance(self._store, Sources) else (),
            spool=default_spool(self._store.url) if spool is None else Path(spool),
            mirror=default_mirror(self._store.url, options.channel) if mirror is None else Path(mirror),
            prefers_mirror=mirror is not None,
            run=options.run,
            confirm=confirm,
            threads=threads,
            trusted_keys=tuple(options.trusted_keys),
            staging_patience=staging_patience,
            gpu_share=gpu_share,
            channel=options.channel,
            undo_bytes=(_UNDO_BYTES if options.channel is not None else 0) if undo_bytes is None else undo_bytes,
        )
        self._canary = None if canary == "off" else ServerCanary(canary, self.routes, on_event)
        server = PausableServer(self.routes, pause, may_call_once=one_call)
        self._replica = ServerReplica(server, settings, kv_cache=kv_cache, report=self._report, on_event=on_event)
        self._subscriber = Subscriber(self._store, replica=self._replica, options=options, on_event=self._pass_on)

    @property
    def served(self) -> Version | None:
        """The version that the server has. None if it is unknown."""
        commit = self._replica.commit
        return None if commit is None else Version.of(commit)

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
                failures, self._problem, self._told_waiting = 0, None, None
            except (NoChain, NoChannel) as error:
                self._problem = str(error)
                failures = 0  # the subscriber has reported it; the first version should not wait longer than `poll`
            except EngineUnreachable as error:
                self._problem = str(error)
                if self.served is not None:
                    emit(self._on_event, "engine-lost", reason=str(error))
                    self._report(LOST, None, error.message)
                elif self._told_waiting != error.message:
                    emit(self._on_event, "waiting", reason=str(error))
                self._told_waiting = error.message
                self._forget()
                failures = 1
            except DeltawireError as error:
                self._problem = str(error)
                is_wrong = isinstance(error, EngineModelDiffers) or (isinstance(error, WrongServer) and self._last_served is None)
                if is_wrong or not (error.retryable or isinstance(error, EngineError)):
                    raise
                failures = min(failures + 1, _MOST_DOUBLINGS)
                if error is not self._replica.controller.last_error:  # the controller has reported its own errors
                    emit(self._on_event, "swap-failed", error=type(error).__name__, reason=str(error))
            stop.wait(pace(poll, failures))

    def step(self) -> Version | None:
        """Look for a new version once, and swap it in. Returns the version that was swapped in, or None if there is nothing to do."""
        served = self.served
        if served is not None and self.routes.weight_version() != label(served):
            self._forget()  # the server was restarted, or another process has changed its weights
        if self._canary is not None:
            self._canary.learn()
        try:
            self._subscriber.sync()
        except DeltawireError as error:  # the subscriber has reported it
            if isinstance(error, EngineError) or not error.retryable:
                raise
            if self.served is None and not self._replica.restore():  # a restarted server gets the version in the mirror
                raise
        self._replica.controller.ensure_running()
        self._replica.look_again()
        self._check_canary()
        served = self.served
        if served is None or served == self._reported:
            self._subscriber._look_ahead()
            self._subscriber._use_ahead()
            return None
        self._report_attachments(served)
        self._report(SERVING, served.seq)
        self._reported = self._last_served = served
        return served

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the server serves a version of the chain, and which one or why not. Any thread may call it.

        An older version counts too: the server continues with it while the next one cannot be fetched or loaded.
        """
        served = self.served
        if served is None or self._replica.controller.state in (SwapState.HALTED, SwapState.QUARANTINED):
            return False, {"reason": self._problem or "the server has no version of the chain yet."}
        if (why_paused := self._replica.why_paused) is not None:
            return False, {"reason": why_paused}
        return True, {"seq": served.seq, "updates": served.updates}

    def close(self) -> None:
        """Release the spool, the mirror and the store. The server keeps its weights.

        The report of a server that serves a version is deleted: nobody would correct it when newer versions come.
        """
        if self._reported is not None:
            with contextlib.suppress(StoreError):
                delete_report(self._store, self.reader)
        self._subscriber.close()
        if self._owns_routes:
            self.routes.close()
        if self._owns_store:
            self._store.close()

    def _pass_on(self, event: Event) -> None:
        """Hand on an event of the subscriber, unless it says that the engine failed: `run` reports that."""
        is_engines = event.name == "sync-failed" and isinstance(self._subscriber.last_error, EngineError)
        if self._on_event is not None and not is_engines:
            self._on_event(event)

    def _check_canary(self) -> None:
        """Check what the server computes. If that is wrong, quarantine it and raise. The next step loads the version anew, once."""
        commit = self._replica.commit
        if self._canary is None or commit is None:
            return
        try:
            self._canary.check(commit, self._log)
        except DecodingDiffers as error:
            for_good = self._canary.note_failure(commit)
            quarantined = self._replica.quarantine(error, for_good=for_good)
            if for_good:
                raise
            raise quarantined from error

    def _forget(self) -> None:
        self._replica.forget()
        if self._canary is not None:
            self._canary.forget()
        self._reported = None

    def _report_attachments(self, version: Version) -> None:
        """Emit an event if attachments changed since the last swap. The server keeps the config and tokenizer that it started with."""
        before = {} if self._last_served is None else self._last_served.attachments
        if not before or before == version.attachments:
            return
        names = sorted(name for name in {*before, *version.attachments} if before.get(name) != version.attachments.get(name))
        emit(self._on_event, "attachments-changed", seq=version.seq, files=", ".join(names))

    def _report(self, state: str, seq: int | None, error: str | None = None) -> None:
        self._reported = None
        try:
            put_report(self._store, self._log.run, self.reader, state, seq, error)
        except StoreError as failure:  # nothing depends on reports
            emit(self._on_event, "report-failed", reason=str(failure))


def default_mirror(url: str, channel: str | None = None) -> Path:
    """Return a directory in this user's cache for the mirror of the chain at a URL, or of a channel of it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "deltawire" / "mirrors" / blake3((url if channel is None else f"{url} {channel}").encode()).hexdigest()[:16]
