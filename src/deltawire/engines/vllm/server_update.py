"""A vLLM server as an engine that `SwapController` pauses and resumes, and one update of its workers as the change that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...chain.version import Version
from ...errors import EngineError, EngineRefused
from ..base import KvCache
from .routes import PauseMode, RouteFailed, VllmRoutes

WorkerStatus = dict[str, Any]
"""The result of `DeltaWireBackend.status` for one worker."""


class PausableServer:
    """Pauses and resumes a vLLM server.

    Parameters
    ----------
    routes
        A client of the server's routes.
    mode
        What happens to requests that the server is answering.
    """

    name = "vllm"

    def __init__(self, routes: VllmRoutes, mode: PauseMode) -> None:
        self._routes = routes
        self._mode: PauseMode = mode
        self._requests_before = 0
        self.http_calls = 0
        """The number of requests that the last swap sent from the pause on, with those that pause and resume the server."""

    def pause(self, kv_cache: KvCache) -> None:
        self._requests_before = self._routes.requests
        self._routes.pause(self._mode, clear_cache=kv_cache is KvCache.DROP)

    def resume(self) -> None:
        try:
            self._routes.resume()
        finally:
            self.http_calls = self._routes.requests - self._requests_before


class ServerUpdate:
    """Lets all workers of a paused server write a version, which they have staged. It is a `PreparedSwap`.

    Parameters
    ----------
    routes
        A client of the server's routes.
    version
        The version to write.
    anew
        True to load all weights from the mirror. It is the only update that quarantined workers accept.
    """

    def __init__(self, routes: VllmRoutes, version: Version, *, anew: bool = False) -> None:
        self._routes = routes
        self._version = version
        self._anew = anew
        self._workers: Sequence[WorkerStatus] = ()
        self.failure: str | None = None
        """Why the workers did not take the update."""

    def apply(self) -> None:
        try:
            self._routes.start_update()
            self._routes.update(self._version.seq, anew=self._anew)
            self._routes.finish_update(label(self._version))
        except RouteFailed as error:
            self._workers = self._routes.settle()
            self.failure = worker_errors(self._workers) or str(error)
            if self._has_written():
                raise EngineError(f"workers failed while they wrote: {self.failure}") from error
            raise EngineRefused(f"the workers did not take {self._version.describe()}: {self.failure}") from error

    def confirm(self, *, full: bool) -> None:
        """Do nothing: the workers have read the weights back before they answered. `DeltaWireBackend` describes what they read."""

    def revert(self) -> None:
        """Return if no worker has written anything. Otherwise raise, because a worker does not keep its old weights."""
        if not self._workers:  # the server did not answer, so its workers may have written
            self._workers = self._routes.settle()
        if self._has_written():
            raise EngineError("the workers do not keep the weights that they overwrite.")

    def _has_written(self) -> bool:
        """Return whether a worker has new weights, complete or not. The server would serve complete ones under the old label."""
        return any(worker["quarantined"] or worker["seq"] == self._version.seq for worker in self._workers)


def label(version: Version) -> str:
    """Return the name that the server gives to the weights of a version. Completions are attributed to it."""
    return str(version.seq)


def worker_errors(workers: Sequence[WorkerStatus]) -> str:
    """Return what failed in which worker, or an empty string."""
    found = [(rank, worker["error"] or worker["staging_error"]) for rank, worker in enumerate(workers)]
    return "; ".join(f"worker {rank}: {error}" for rank, error in found if error)
