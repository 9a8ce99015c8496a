"""Serves a gateway: opens the chain, the journal and the engines, and runs the HTTP server until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..chain.reader_options import ReaderOptions
from ..engines.routed_experts import ModelRouters, routers_of_files
from ..errors import RequestMalformed, TelemetryUnavailable
from ..events import OnEvent, emit, tell_all
from ..format.live_parts import new_session
from ..store.base import Store
from ..store.copies.locations import Location
from ..subscribe.model_files import read_model_files
from .app import GatewayApp
from .channel_watch import ChannelWatch
from .engine_client import EngineClient
from .engine_pool import EnginePool
from .feedback import FeedbackIntake
from .http.api_keys import ApiKeys
from .http.http_server import ENDING_SECONDS, listen
from .http.memory import MemoryBudget
from .metric_names import MetricNames
from .metrics_watch import MetricsWatch
from .options import GatewayOptions
from .proxy import Proxy
from .recording.id_log import IdLog
from .recording.journal import Journal, ended_sessions, sessions_in_use
from .recording.known_ids import KnownIds
from .recording.recorder import Recorder
from .recording.uploads import Uploads

_MOST_WARNINGS = 20


def serve_gateway(
    url: Location,
    options: GatewayOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    reading: ReaderOptions | None = None,
    stop: threading.Event | None = None,
    on_ready: Callable[[str], Any] | None = None,
    on_event: OnEvent | None = None,
) -> None:
    """Serve until `stop` is set. Answers that were begun are finished first. Raises `UnusableKeys` before anything starts.

    Parameters
    ----------
    url
        The location of the chain, or an open store.
    options
        How to serve and record.
    host
        The address to listen on. The default can be reached from this machine only.
    port
        The port; 0 takes a free one.
    reading
        Which chain to accept, and how to read it.
    stop
        Set this event to end serving.
    on_ready
        Called with the address of the gateway when it accepts requests.
    on_event
        Called with each event, on the thread where it happened.
    """
    keys = ApiKeys() if options.keys is None else ApiKeys.read(options.keys)  # before anything starts
    reading = reading or ReaderOptions(pin=False)
    store = reading.open_store(url, on_event=on_event)
    try:
        asyncio.run(_Gateway(store, options, keys, reading, on_event).serve(host, port, stop or threading.Event(), on_ready))
    finally:
        if store is not url:
            store.close()


class _Gateway:
    """All parts of a gateway, for the time that it serves."""

    def __init__(self, store: Store, options: GatewayOptions, keys: ApiKeys, reading: ReaderOptions, on_event: OnEvent | None) -> None:
        self._store, self._options, self._keys, self._reading = store, options, keys, reading
        self._prometheus = _prometheus()
        self._on_event = tell_all(on_event, self._prometheus)

    async def serve(self, host: str, port: int, stop: threading.Event, on_ready: Callable[[str], Any] | None) -> None:
        """Serve until the event is set."""
        options = self._options
        run = (await asyncio.to_thread(lambda: self._reading.open_log(self._store).run)).id
        session = new_session(options.name)
        _make_folder(options.journal)
        secret = options.user_key or _own_secret(options.journal)
        async with contextlib.AsyncExitStack() as open_parts:
            ended = list(ended_sessions(options.journal, run=run))
            shared = sessions_in_use(options.journal, options.name, ended, run=run)
            journal = Journal(options.journal, session, run=run)
            client = await open_parts.enter_async_context(EngineClient())
            names = {address.channel for address in options.engines}
            loop = asyncio.get_running_loop()
            channels = ChannelWatch(
                self._reading.open_log(self._store),
                names,
                options.engines[0].channel,
                every=options.probe,
                on_change=lambda: loop.call_soon_threadsafe(pool.wake),
                on_event=self._on_event,
            )
            pool = EnginePool(
                options.engines,
                channels,
                client,
                key=options.engine_key,
                probe=options.probe,
                patience=options.patience,
                on_event=self._on_event,
            )
            metrics = MetricsWatch(self._reading.open_log(self._store))
            log = IdLog(options.journal, session, most=options.known_ids)
            open_parts.callback(log.close)
            known = KnownIds(
                self._store,
                run,
                session,
                most=options.known_ids,
                log=log,
                longest=lambda: max((metric.window for metric in metrics().values()), default=0.0),
                on_event=self._on_event,
            )
            uploads = Uploads(self._reading.open_log(self._store), [journal, *ended], flush=options.flush, on_event=self._on_event)
            memory = MemoryBudget(options.memory_bytes)
            recorder = Recorder(
                pool,
                journal,
                ended,
                uploads,
                known,
                options,
                memory=memory,
                user_hash=lambda user: blake3(user.encode(errors="replace"), key=blake3(secret).digest()).hexdigest(),
                routers=functools.cache(self._routers),
                on_event=self._on_event,
            )
            feedback = FeedbackIntake(self._store, run, session, known, metrics, seconds=options.store_seconds, on_event=self._on_event)
            proxy = Proxy(pool, channels, recorder, options=options, on_event=self._on_event)
            app = GatewayApp(
                options,
                session,
                pool,
                proxy,
                feedback,
                MetricNames(metrics, is_strict=options.strict_metrics, on_event=self._on_event),
                self._keys,
                memory=memory,
                metrics=_text_of(self._prometheus),
                on_event=self._on_event,
            ).build()
            await asyncio.to_thread(metrics.start)
            open_parts.callback(metrics.close)
            channels.start()
            open_parts.callback(channels.close)
            pool.start()
            open_parts.push_async_callback(pool.close)
            uploads.start()
            open_parts.push_async_callback(self._end_recording, recorder, uploads, journal, ended)
            recorder.start()
            feedback.start()
            open_parts.push_async_callback(feedback.close)

            def tell(address: str) -> None:
                emit(self._on_event, "gateway-serving", url=address, session=session)
                for other in shared[:_MOST_WARNINGS]:
                    emit(self._on_event, "gateway-name-used", session=other)
                for name in self._keys.can_rate_nothing[:_MOST_WARNINGS]:
                    emit(self._on_event, "caller-without-answers", caller=name)
                if on_ready is not None:
                    on_ready(address)

            def count() -> None:
                emit(self._on_event, "request-refused", route="-", status=400, error=RequestMalformed.__name__)

            await listen(app, host, port, stop, tell, on_bad_head=count)

    async def _end_recording(self, recorder: Recorder, uploads: Uploads, journal: Journal, ended: list[Journal]) -> None:
        await recorder.close(ENDING_SECONDS)
        uploads.close(ENDING_SECONDS)  # nothing else runs, and threads of asyncio cannot start when the interpreter ends
        journal.close(remove=journal.is_empty())
        for other in ended:
            if not other.is_closed:
                other.close()

    def _routers(self) -> ModelRouters | None:
        return routers_of_files(read_model_files(self._store, options=self._reading))


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        raise NotADirectoryError(f"the journal {path} is not a directory; name one with --journal") from None


def _own_secret(folder: Path) -> bytes:
    """Return the secret for hashes of users, which the first gateway with this journal draws."""
    path = folder / "user.key"
    with contextlib.suppress(FileExistsError):
        temporary = folder / f"user.key.{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, secrets.token_bytes(32))
        os.close(descriptor)
        try:
            os.link(temporary, path)
        finally:
            temporary.unlink()
    return path.read_bytes()


def _prometheus() -> Any:
    from ..telemetry import PrometheusMetrics

    try:
        return PrometheusMetrics()
    except TelemetryUnavailable:
        return None


def _text_of(prometheus: Any) -> Callable[[], bytes] | None:
    if prometheus is None:
        return None
    import prometheus_client

    return lambda: bytes(prometheus_client.generate_latest(prometheus.registry))
