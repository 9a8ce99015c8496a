"""A vLLM server as an engine for `SwapController`, and one update of its workers as the change that the controller makes.

A server swaps in one of two ways. Usually it swaps in one call (engine_core.py): `OneCallUpdate.apply` does everything, and the calls
before and after it send no request. Otherwise the controller pauses the server, `RoutesUpdate.apply` makes the update by vLLM's routes, and
the controller resumes the server. `PausableServer.one_call` says which way is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....chain.version import Version
from ....errors import EngineAsleep, EngineError, EngineRefused
from ....format.records.record_parts import record_hash
from ....format.records.version_records import Commit
from ...base import KvCache
from .routes import EngineUnreachable, PauseMode, RouteFailed, SwapAnswer, VllmRoutes, WorkerStatus

_PAUSE_LEASE_SECONDS = 60.0
"""A server that is paused by its routes, and that nobody resumes, looks after this time whether it can continue."""


class PausableServer:
    """Pauses and resumes a vLLM server.

    Parameters
    ----------
    routes
        A client of the server's routes.
    mode
        What happens to requests that the server is answering. A swap in one call continues them ("keep").
    may_call_once
        Whether to swap in one call if the server can.
    """

    name = "vllm"

    def __init__(self, routes: VllmRoutes, mode: PauseMode, *, may_call_once: bool = True) -> None:
        self.routes = routes
        self._mode: PauseMode = mode
        self._may_call_once = may_call_once and mode == "keep"
        self._requests_before = 0
        self.kv_cache = KvCache.DROP
        """The policy of the swap in progress."""
        self.one_call = False
        """True if swaps are made in one call."""
        self.must_resume = True
        """True if the server needs a request to resume."""
        self.stays_paused = False
        """True if somebody else has paused the server, who will resume it."""
        self.unended_update: str | None = None
        """Why it stays paused, and what to do, if a program has paused it for an update and has not ended that."""
        self._tells_pauses = False
        self._grants_pause_leases = False
        self.is_held = False
        """True if the server waits for its first version, so that only a swap may resume it."""
        self.http_calls = 0
        """The number of requests that the last swap sent from the pause on, with those that pause and resume the server."""

    def observe(self, workers: Sequence[WorkerStatus]) -> None:
        """Take from the status of the workers how this server swaps. Raises `EngineAsleep` if its memory is not resident."""
        self.one_call = self._may_call_once and all(worker.get("one_call", False) for worker in workers)
        self.is_held = any(worker.get("held") for worker in workers)
        self._grants_pause_leases = all("held" in worker for worker in workers)
        self.note_pause(workers)
        if any(worker.get("asleep", False) for worker in workers):
            raise EngineAsleep("the server is asleep, so its weights cannot be changed.")

    def note_pause(self, workers: Sequence[WorkerStatus]) -> None:
        """Take from the status of the workers whether the server needs a request to resume."""
        self._tells_pauses = all("paused_by_others" in worker for worker in workers)
        self.stays_paused = any(worker.get("paused_by_others", False) for worker in workers)
        self.must_resume = any(worker.get("paused", True) for worker in workers) and not self.stays_paused
        self.unended_update = next((str(worker["unended_update"]) for worker in workers if worker.get("unended_update")), None)

    def note_swap(self, *, is_running: bool) -> None:
        """Take from the answer to a swap in one call, which was made, whether the server needs a request to resume.

        Parameters
        ----------
        is_running
            True if the server generates. Otherwise somebody else has paused it, or a server with an older plugin is paused as before.
        """
        self.is_held, self.stays_paused = False, self._tells_pauses and not is_running
        self.must_resume = not is_running and not self.stays_paused

    def stop(self) -> None:
        """Pause the server, and end its requests, until a swap is made."""
        if self._grants_pause_leases:
            self.routes.pause_lease(_PAUSE_LEASE_SECONDS)
        self.routes.pause("abort", clear_cache=True)

    def pause(self, kv_cache: KvCache) -> None:
        self.kv_cache = kv_cache
        takes_pause_lease = self._grants_pause_leases and not self.one_call
        if not self.one_call:
            self.must_resume = not self.stays_paused
        if takes_pause_lease and (self._mode != "wait" or self._tells_pauses):  # with an older plugin, it would end during requests
            self.routes.pause_lease(_PAUSE_LEASE_SECONDS)
        self._requests_before = self.routes.requests
        if not self.one_call:
            self.routes.pause(self._mode, clear_cache=kv_cache is KvCache.DROP)
        if takes_pause_lease and self._mode == "wait":  # the requests took a part of the pause lease
            self.routes.pause_lease(_PAUSE_LEASE_SECONDS)

    def resume(self) -> None:
        try:
            if self.must_resume and not self.is_held:
                self.routes.resume()
        finally:
            self.http_calls = self.routes.requests - self._requests_before


class ServerUpdate:
    """Lets all workers of a server write a version, which they have staged. It is a `PreparedSwap`.

    Parameters
    ----------
    server
        The server, which the controller has paused.
    commit
        The version to write.
    anew
        True to load all weights, even if their version is known.
    between
        Versions that the workers write before it, in order, and that nobody may see. Only a swap in one call can have them.
    """

    def __init__(self, server: PausableServer, commit: Commit, *, anew: bool = False, between: Sequence[Commit] = ()) -> None:
        self._server = server
        self._routes = server.routes
        self._commit = commit
        self._version = Version.of(commit)
        self._anew = anew
        self._between = between
        self.workers: Sequence[WorkerStatus] = ()
        """The status of each worker after the update, as far as it is known."""
        self.failure: str | None = None
        """The reason why the workers did not take the update."""
        self.was_refused = False
        """True if no worker has changed anything."""

    def apply(self) -> None:
        raise NotImplementedError

    def confirm(self, *, full: bool) -> None:
        """Do nothing: the workers have read the weights back before they answered. `DeltaWireBackend` describes what they read."""

    def revert(self) -> None:
        raise NotImplementedError

    def _has_written(self) -> bool:
        """Return whether a worker has new weights, complete or not. The server would serve complete ones under the old label."""
        written = (self._commit, *self._between)
        return any(worker["quarantined"] or any(has_version(worker, commit) for commit in written) for worker in self.workers)


class OneCallUpdate(ServerUpdate):
    """An update of a server that swaps in one call."""

    answer: SwapAnswer | None = None
    """The answer of the server. None if its answer was lost."""

    def apply(self) -> None:
        try:
            seqs = [commit.seq for commit in (*self._between, self._commit)]
            seq = seqs if self._between else self._commit.seq  # servers with an older plugin know only one
            self.answer = self._routes.swap(seq, label(self._version), self._server.kv_cache, anew=self._anew)
        except EngineUnreachable:
            if not self._was_made():
                raise
            return
        self.workers, self.failure = self.answer.workers, self.answer.error
        if self.answer.outcome == "made":
            self._server.note_swap(is_running=self.answer.running)
        elif self.answer.outcome == "asleep":
            raise EngineAsleep("the server is asleep, so its weights cannot be changed.")
        elif self.answer.outcome == "refused":
            self.was_refused = True
            raise EngineRefused(f"the server did not take {self._version.describe()}: {self.failure or 'it gave no reason'}")
        else:
            raise EngineError(f"workers failed while they wrote: {self.failure or 'they gave no reason'}")

    def revert(self) -> None:
        """Return if the server has its old weights. Otherwise raise: the workers could not restore them."""
        if self.answer is None:
            self._ask()
            if not self._has_written():
                return
        elif self.answer.outcome in ("refused", "asleep"):
            return
        raise EngineError("the workers could not restore the weights that they have overwritten.")

    def _was_made(self) -> bool:
        """Ask a server whose answer was lost whether it has swapped. It answers when the swap has ended, whatever became of it."""
        self._ask()
        is_complete = all(has_version(worker, self._commit) for worker in self.workers)
        return is_complete and self._routes.weight_version() == label(self._version)

    def _ask(self) -> None:
        self.workers = self._routes.status()
        self._server.note_pause(self.workers)


class RoutesUpdate(ServerUpdate):
    """An update of a paused server by vLLM's routes."""

    def apply(self) -> None:
        try:
            self._routes.start_update()
            self._routes.update(self._version.seq, anew=self._anew)
            self._routes.finish_update(label(self._version))
        except RouteFailed as error:
            self.workers = self._routes.settle()
            self.failure = worker_errors(self.workers) or str(error)
            if self._has_written():
                raise EngineError(f"workers failed while they wrote: {self.failure}") from error
            self.was_refused = True
            raise EngineRefused(f"the workers did not take {self._version.describe()}: {self.failure}") from error
        self._server.is_held = False

    def revert(self) -> None:
        """Return if no worker has written anything. Otherwise raise, because a worker does not keep its old weights."""
        if not self.workers:  # the server did not answer, so its workers may have written
            self.workers = self._routes.settle()
        if self._has_written():
            raise EngineError("the workers do not keep the weights that they overwrite.")


def has_version(worker: WorkerStatus, commit: Commit) -> bool:
    """Return whether a worker has exactly this version. One of another chain can have the same number, and so the same label.

    Parameters
    ----------
    worker
        The status of the worker.
    commit
        The version.
    """
    return bool(worker["seq"] == commit.seq and worker.get("commit") == record_hash(commit.to_bytes()) and not worker["quarantined"])


def label(version: Version) -> str:
    """Return the name that the server gives to the weights of a version. Completions are attributed to it."""
    return str(version.seq)


def worker_errors(workers: Sequence[WorkerStatus]) -> str:
    """Return what failed in which worker, or an empty string."""
    found = [(rank, worker["error"] or worker["staging_error"]) for rank, worker in enumerate(workers)]
    return "; ".join(f"worker {rank}: {error}" for rank, error in found if error)
