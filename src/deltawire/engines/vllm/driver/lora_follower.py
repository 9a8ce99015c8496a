"""Follow the chain of a LoRA adapter, and load each of its versions into a running vLLM server (lora.py).

The chain holds nothing but the adapter, under its names in `adapter_model.safetensors`, and `adapter_config.json` as an attachment. If it
also holds other bundles, the adapter is the bundle of that name.

Sidecar and server may be killed at any moment. A new sidecar asks the server which adapters it has, and a new server gets the newest one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3
from numpy.typing import NDArray

from ....chain.reader_options import ReaderOptions
from ....chain.version import Version
from ....errors import DeltawireError, EngineAsleep, EngineRefused, NoChain, NoChannel
from ....events import OnEvent, emit
from ....format.bundle_names import MAIN, BundleView, bundle_names, join_name
from ....store import Store
from ....store.copies.locations import Location
from ....subscribe import Subscriber
from ....subscribe.follow import pause as pace
from ....subscribe.model_files import read_model_files
from ....subscribe.pin_keeper import reader_name
from ....subscribe.spool.delta_spool import default_spool
from .lora import LoraAdapters, LoraServer, adapter_name
from .routes import VllmRoutes

_MOST_DOUBLINGS = 5
"""After failures, the time between two attempts is doubled at most this many times."""


class AdapterServer(LoraServer, Protocol):
    """The routes of a server that a follower needs. `VllmRoutes` has them."""

    @property
    def url(self) -> str: ...

    def is_asleep(self) -> bool: ...

    def close(self) -> None: ...


class LoraFollower:
    """Keeps a vLLM server at the newest version of one LoRA adapter.

    Version N of the adapter NAME is loaded as `NAME-vN`. A version that is loaded never changes. The two newest stay loaded, and older ones
    until no request uses them.

    Parameters
    ----------
    engine
        The URL of the server, such as http://127.0.0.1:8000, or a client of its routes, which stays open.
    name
        The name of the adapter. Raises `EngineRefused` if it cannot name one.
    url
        The location of the adapter's chain, or an open store. Or a list of them: the origin, and copies that relays keep.
    folder
        The directory that adapters are written to. The server must be able to read it, and no other server may use it. None means one in
        memory (/dev/shm), or in this user's cache.
    max_staleness
        How many versions old an adapter may be that requests still name.
    options
        Which chain to accept, and how to read it.
    on_event
        Called with each event, on the thread where it happened.
    """

    def __init__(
        self,
        engine: str | AdapterServer,
        name: str,
        url: Location,
        folder: Path | str | None = None,
        *,
        max_staleness: int = 0,
        options: ReaderOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        adapter_name(name, 1)
        self.name = name
        self.current: str | None = None
        """The adapter that new requests should name, such as "math-v7". None before the first."""
        self.problem: str | None = None
        """The reason why the newest version is not loaded. None if it is, as far as is known."""
        self._on_event = on_event
        self._owned: list[VllmRoutes] = []
        if isinstance(engine, str):
            self._owned.append(VllmRoutes(engine))
        self._server: AdapterServer = self._owned[0] if isinstance(engine, str) else engine
        self._options = options or ReaderOptions()
        self._options = replace(self._options, reader=self._options.reader or reader_name())
        self._owns_store = not isinstance(url, Store)
        self._store = self._options.open_store(url, on_event=on_event)
        adapters_folder = adapter_folder(default_spool(self._store.url), self._server.url) if folder is None else Path(folder)
        self._adapters = LoraAdapters(self._server, adapters_folder, max_staleness=max_staleness, on_event=on_event)
        self._subscriber = Subscriber(self._store, options=self._options, undo_bytes=0, on_event=on_event)
        self._files: tuple[Mapping[str, str], Mapping[str, bytes]] = ({}, {})
        """The attachments that were read last: their hashes, and their contents."""

    def step(self) -> str | None:
        """Look for a new version once, and load it. Returns the name of the adapter that was loaded, or None if there is nothing to do.

        A server that was restarted gets the last version, even if the store cannot be reached.

        Raises the errors of `Subscriber.sync` and of `LoraAdapters.load`, `EngineUnreachable`, and `EngineAsleep` if the server is asleep.
        Adapters that are loaded then stay.
        """
        failure: DeltawireError | None = None
        try:
            self._subscriber.sync()
        except DeltawireError as error:
            if not error.retryable or self._subscriber.version is None:
                raise
            failure = error
        version = self._subscriber.version
        assert version is not None
        wanted = adapter_name(self.name, version.updates)
        loaded = None
        if wanted != self.current or wanted not in self._server.adapters():
            if self._server.is_asleep():
                raise EngineAsleep("the server is asleep, so no LoRA adapter can be loaded into it.")
            if self.current is None:
                self._adapters.check()
            self._adapters.load(version.updates, self._weights(), self._read_files(version))
            self.current = loaded = wanted
        else:
            self._adapters.tidy([self.name], version.updates)
        if failure is not None:
            raise failure
        return loaded

    def run(self, *, poll: float = 0.5, stop: threading.Event | None = None) -> None:
        """Keep the server at the newest version until `stop` is set. Errors are reported as events, and everything is tried again.

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
                failures, self.problem = 0, None
            except (NoChain, NoChannel) as error:
                self.problem = str(error)  # the subscriber has reported it
            except DeltawireError as error:
                if stop.is_set():
                    return
                failures = min(failures + 1, _MOST_DOUBLINGS)
                if error is not self._subscriber.last_error and str(error) != self.problem:
                    emit(self._on_event, "adapter-failed", adapter=self.name, error=type(error).__name__, reason=str(error))
                self.problem = str(error)
            except ValueError:
                if not stop.is_set():  # otherwise another thread has just closed the subscriber
                    raise
            stop.wait(pace(poll, failures))

    def close(self) -> None:
        """Release the store. The server keeps its adapters, and their directories stay."""
        self._subscriber.close()
        for routes in self._owned:
            routes.close()
        if self._owns_store:
            self._store.close()

    def _weights(self) -> Mapping[str, NDArray[Any]]:
        """Return the tensors of the adapter as a bundle of its name."""
        state = self._subscriber.state
        bundles = bundle_names(state)
        bundle = self.name if self.name in bundles else MAIN
        if bundle == MAIN and bundles != [MAIN]:
            raise EngineRefused(
                f"the chain of the LoRA adapter {self.name!r} has no bundle of this name, but {', '.join(filter(None, bundles))}.",
                hint="Name the adapter as its bundle, or publish it in a chain of its own.",
            )
        return {join_name(self.name, tensor): array for tensor, array in BundleView(state, bundle).items()}

    def _read_files(self, version: Version) -> Mapping[str, bytes]:
        if not version.attachments or version.attachments != self._files[0]:
            files = read_model_files(self._store, seq=version.seq, options=self._options).files
            self._files = (dict(version.attachments), files)
        return self._files[1]


@contextlib.contextmanager
def following(followers: Sequence[LoraFollower], *, poll: float) -> Iterator[None]:
    """Run followers on threads of their own, until the block ends. Then they are closed.

    Parameters
    ----------
    followers
        The followers.
    poll
        Seconds between two looks for a new version.
    """
    stop = threading.Event()
    threads = [
        threading.Thread(target=each.run, kwargs={"poll": poll, "stop": stop}, name=f"deltawire-lora-{each.name}", daemon=True)
        for each in followers
    ]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        stop.set()
        for each in followers:
            each.close()  # this also ends a sync that waits for the store
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def adapter_folder(spool: Path, engine: str) -> Path:
    """Return the directory for the adapters of one server in a spool, which several servers may share.

    Parameters
    ----------
    spool
        The directory of the spool.
    engine
        The URL of the server.
    """
    return spool / f"lora-{blake3(engine.encode()).hexdigest()[:16]}"
