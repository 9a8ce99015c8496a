"""The weights of a vLLM server, as a replica that a subscriber keeps up to date.

An update is *live*: the delta files of one hop go into the spool, the workers decode them against their live memory, and the server swaps.
This needs workers that have learnt the layout of their model, and a server whose version is known.

Otherwise the server loads a full checkpoint: for its first version, unless it was started with one, and for repairs. The workers load it
from the store (live/cold_start.py), or from a mirror if the user has named one. A mirror is also made if nothing else works: if the
layout could not be learnt, so that deltas are of no use to the workers, if the spool cannot be used, or if the workers cannot load from
the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ....chain.records.reports import QUARANTINED, REFUSED
from ....chain.routes.restore import Hop
from ....chain.routes.walk_route import taking, walk_route
from ....chain.version import Version
from ....errors import ChainError, DecodingDiffers, EngineModelDiffers, EngineQuarantined, EngineRefused, RollbackDetected, SpoolError
from ....events import OnEvent, Value, emit
from ....format.records.record_parts import FileEntry
from ....format.records.version_records import Commit
from ....subscribe.mirror.locks import FileLock
from ....subscribe.mirror.mirror import Mirror
from ....subscribe.mirror.mirror_replica import MirrorReplica
from ....subscribe.spool.delta_spool import DeltaSpool
from ....subscribe.sync_context import SyncContext
from ....subscribe.tensor_table import TensorTable, read_tensor_table, write_table
from ...base import KvCache
from ...swap.swap_controller import SwapController, SwapRecord, SwapState
from .. import QUARANTINED_LABEL
from ..model_fit import describe_types, is_adapter
from .replica_settings import ReplicaSettings
from .routes import EngineUnreachable, WorkerStatus
from .server_update import OneCallUpdate, PausableServer, RoutesUpdate, ServerUpdate, has_version, label, worker_errors
from .staging_waits import StagingWaits
from .worker_versions import started_with, versions_back

_MOST_LIVE_FAILURES = 2
"""After this many live updates that were refused one after the other, the version is loaded from a mirror."""
_KEPT_HOPS = 2
_TYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""vLLM's names of types, and those of safetensors."""
Report = Callable[[str, int | None, str | None], None]
"""Tells the store what became of an update: the state of the engine, the number of its commit, and an error."""


class ServerReplica:
    """The weights of a server. `commit` is the version that the server is known to have.

    Parameters
    ----------
    server
        The server.
    settings
        How it is brought to new versions.
    kv_cache
        What happens to keys and values that the old weights computed.
    report
        Called with what became of each update that was not made.
    on_event
        Called with each event.
    """

    def __init__(
        self, server: PausableServer, settings: ReplicaSettings, *, kv_cache: KvCache, report: Report, on_event: OnEvent | None = None
    ) -> None:
        self._server = server
        self._routes = server.routes
        self._settings = settings
        self._report = report
        self._on_event = on_event
        self.controller = SwapController(server, kv_cache=kv_cache, details=self._swap_details, on_event=on_event)
        self.last_update: ServerUpdate | None = None
        """The last update, whatever became of it."""
        self._commit: Commit | None = None
        if settings.prefers_mirror:
            Mirror(settings.mirror).refuse_occupied()  # now, and not when it is needed for the first time
        self._spool = DeltaSpool(settings.spool)
        self._held_spool = self._spool.hold()
        self._leading: FileLock | None = None
        """Held by the one sidecar that fetches files ahead of commits for all users of the spool."""
        self._is_live = False
        self._live_failures = 0
        self._stage_seconds = 0.0
        self._waits = StagingWaits()
        self._told_hold: str | None = None
        self._told_why_not: str | None = None
        self._told_draft: str | None = None
        self._refused: Commit | None = None
        self._remedy: str | None = None
        """A version whose results were wrong, even after it was loaded anew."""
        self._mirror: MirrorReplica | None = None
        """The mirror. None if there is none, so that the workers load full checkpoints from the store."""
        if settings.mirror.exists():
            self._open_mirror()
        self.mirror = self._mirror

    @property
    def commit(self) -> Commit | None:
        return self._commit

    @property
    def why_paused(self) -> str | None:
        """The reason why somebody else's pause of the server lasts. None if there is no such pause."""
        if not self._server.stays_paused:
            return None
        unended = self._server.unended_update
        return "somebody else has paused the server: POST /resume ends this." if unended is None else f"the server stays paused: {unended}."

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        return {} if self._mirror is None else self._mirror.state

    def forget(self) -> None:
        """Forget which version the server has, because it was restarted, or changed by another process."""
        self._commit = None

    def look_again(self) -> None:
        """Ask a server that somebody else has paused whether it still is."""
        if self._server.stays_paused:
            workers = self._routes.status()
            self._server.note_pause(workers)
            self._tell_hold(workers)

    def quarantine(self, error: DecodingDiffers, *, for_good: bool) -> EngineQuarantined:
        """Let the server stay paused, because what it computes with its version is wrong. Returns the error to raise.

        Parameters
        ----------
        error
            What is wrong.
        for_good
            True to refuse this version until the server is restarted. Otherwise the next `move` loads it anew.
        """
        commit, reason = self._commit, error.message
        assert commit is not None
        self._routes.quarantine(reason)
        if not self._server.one_call:  # engines that work in step pause only together
            self._server.stop()
        self._commit, self._refused, self._remedy = None, commit if for_good else None, error.hint
        self._report(QUARANTINED, None, reason)
        return self.controller.quarantine(Version.of(commit), reason)

    def move(self, target: Commit, context: SyncContext) -> None:
        if target == self._refused and self._routes.weight_version() == QUARANTINED_LABEL:
            raise DecodingDiffers(
                f"the server computes wrong results with {target.describe()}, even after it was loaded anew.", hint=self._remedy
            )
        workers = self._connect()
        if self._commit is None:
            self._recognise(workers, target, context)
        if self._commit != target and not self._go_back(workers, target, context):
            if self._is_live and self._commit is not None and self._live_failures < _MOST_LIVE_FAILURES:
                self._move_live(target, context)
            else:
                self._load(target, context)

    def restore(self) -> bool:
        """Bring the server to the version that the mirror has, without the store. Returns False if there is no such version."""
        if self._mirror is None or self._mirror.commit is None:
            return False
        if self._commit != self._mirror.commit:
            workers = self._connect()
            if not self._has(workers, self._mirror.commit):
                self._swap_in_mirror(self._mirror.commit)
            self._commit = self._mirror.commit
        return True

    def wants_ahead(self) -> bool:
        if self._leading is None:
            with contextlib.suppress(OSError):
                self._leading = self._spool.try_leader()
        return self._leading is not None and self._is_live

    def take_ahead(self, files: Iterable[tuple[FileEntry, memoryview]]) -> None:
        with contextlib.suppress(SpoolError):  # such as a full disk: then they are fetched as usual
            self._spool.put_ahead(dict(files))

    def close(self) -> None:
        if self._leading is not None:
            self._leading.release()
        if self._mirror is not None:
            self._mirror.close()
        with contextlib.suppress(SpoolError):
            self._spool.keep_only(0)  # it is usually in memory, and the next sidecar fetches what it needs
        self._held_spool.release()

    # The version of the server

    def _connect(self) -> list[WorkerStatus]:
        """Set the server up, and look at its state. Raises `EngineAsleep` if its weights cannot be changed now."""
        self._routes.initialise(self._init_info())
        workers = self._routes.status()
        self._tell_hold(workers)
        self._server.observe(workers)
        if any(worker["quarantined"] for worker in workers):
            self.controller.assume(SwapState.QUARANTINED)
            self._commit = None
        elif self._commit is None:  # an earlier sidecar may have been killed during a swap
            self.controller.assume(SwapState.HALTED if self._routes.is_paused() else SwapState.SERVING)
        self._is_live = self._is_live and all(worker.get("live") for worker in workers)
        return workers

    def _recognise(self, workers: Sequence[WorkerStatus], target: Commit, context: SyncContext) -> None:
        """Find out which version the server has, and whether it can be updated live."""
        self._is_live, self._live_failures = False, 0
        self._commit = self._labelled(workers, context)
        try:
            (anchor, *_) = context.routes.find(None, target)
            table = read_tensor_table(context, anchor)
            write_table(self._spool.table_path, table)
        except (ChainError, SpoolError) as error:  # a mirror may have a way without this checkpoint
            self._tell_why_not(str(error))
            return
        workers = self._routes.learn(self._spool.table_path)
        self._check_fit(workers, table, target)
        self._is_live = all(worker["live"] for worker in workers)
        self._tell_draft(workers)
        self._tell_why_not(next((str(worker["why_not"]) for worker in workers if worker.get("why_not")), None))
        if self._is_live:
            self._commit = self._labelled(workers, context)
        if self._is_live and self._commit is None and self.controller.state is not SwapState.QUARANTINED:
            # A server that is held off its channel must not be resumed there, so it is taken for one without a version.
            only_target = context.in_one and self._server.is_held
            self._commit = self._adopt((target,) if only_target else started_with(workers, target, anchor.target, context), context)

    def _check_fit(self, workers: Sequence[WorkerStatus], table: TensorTable, target: Commit) -> None:
        """Raise `EngineModelDiffers` if the tensors of the chain do not fit the model of the server."""
        reason = next((str(worker["misfit"]) for worker in workers if worker.get("misfit")), None)
        if reason is None:
            return
        url, holds = self._settings.url, describe_types(table, target.recipe)
        serves = next((str(worker["loaded_types"]) for worker in workers if worker.get("loaded_types")), "another model")
        remedy = f"name it with --lora NAME={url}" if is_adapter(table) else f"start it with the files of `deltawire pull {url} DIR`"
        differs = f"the chain holds {holds}, but the server serves {serves}"
        if holds == f"{_TYPE_NAMES.get(serves)} weights":
            differs = "the tensors of the chain are not those of the model that the server serves"
        error = EngineModelDiffers(f"{differs}: {remedy}. The chain is not used: {reason}.")
        self._report(REFUSED, None if self._commit is None else self._commit.seq, error.message)
        raise error

    def _labelled(self, workers: Sequence[WorkerStatus], context: SyncContext) -> Commit | None:
        """Return the version that the workers have and the server is labelled with. None if it is no version of this chain."""
        found = {(worker["seq"], worker.get("commit")) for worker in workers}
        if len(found) != 1 or any(worker["quarantined"] for worker in workers):
            return None
        ((seq, commit_hash),) = found
        if seq is None or commit_hash is None or self._routes.weight_version() != str(seq):
            return None
        commit = context.log.read(seq)
        if commit is None or commit.digest is None or context.log.ref(commit).commit != commit_hash:
            return None
        return commit

    def _init_info(self) -> dict[str, Any]:
        """Return what the workers must know. Workers that load from a mirror need no access to the store."""
        settings = self._settings
        info: dict[str, Any] = {"spool": str(settings.spool.absolute()), "confirm": settings.confirm, "threads": settings.threads}
        if settings.gpu_share is not None:
            info["gpu_share"] = settings.gpu_share
        if settings.undo_bytes:  # servers with an older plugin do not know it
            info["undo_bytes"] = settings.undo_bytes
        if self._mirror is not None:
            return info | {"mirror": str(settings.mirror.absolute())}
        if settings.relays:
            info["relays"] = list(settings.relays)
        return info | {"url": settings.url, "run": settings.run, "trusted_keys": list(settings.trusted_keys)}

    def _adopt(self, candidates: Iterable[Commit], context: SyncContext) -> Commit | None:
        """Return the version that a server was started with. The digest of its weights shows it. None if it is none of these."""
        for commit in candidates:
            ref = context.log.ref(commit)
            workers = self._routes.adopt(ref.plain())
            if all(worker["commit"] == ref.commit for worker in workers):
                self._routes.label(label(Version.of(commit)))
                self._server.is_held = False  # its weights are those of a version
                emit(self._on_event, "adopted", seq=commit.seq, updates=commit.updates)
                return commit
        return None

    def _has(self, workers: Sequence[WorkerStatus], commit: Commit) -> bool:
        return all(has_version(worker, commit) for worker in workers) and self._routes.weight_version() == label(Version.of(commit))

    # The way of an update

    def _go_back(self, workers: Sequence[WorkerStatus], target: Commit, context: SyncContext) -> bool:
        """Let the workers write back what their last updates replaced. Returns False if they do not go back to the target this way."""
        versions = versions_back(workers, target, context) if self._is_live and self._commit is not None else []
        if not versions or (len(versions) > 1 and not self._server.one_call):
            return False
        try:
            with context.report.watch.phase("apply"):
                self._stage(Version.of(versions[0]), 0)
                context.check_wanted()
                self._update(target, anew=False, between=versions[:-1])
        except (EngineRefused, EngineQuarantined):  # deltas or a full checkpoint may lead there
            return False
        self._commit, self._live_failures = target, 0
        return True

    def _move_live(self, target: Commit, context: SyncContext) -> None:
        def find() -> Sequence[Hop]:
            assert self._commit is not None
            with context.report.watch.phase("find"):
                return context.routes.find(context.log.ref(self._commit), target)

        def take(hops: Sequence[Hop]) -> None:
            if hops and hops[0].base is None:  # the version before was collected, so only a full checkpoint leads to the target
                self._load(target, context)
                return
            deltas = [hop for hop in hops if hop.source != "fence"]  # a fence makes no version: the next hop starts from the one before it
            if context.in_one and len(deltas) > 1 and not self._server.one_call:
                self._load(target, context)  # another sidecar may find the server between two updates, and its pause lease may end there
                return
            for part in [deltas] if context.in_one and deltas else [[hop] for hop in deltas]:
                self._take(part, context)
            context.report.hops += len(hops)

        try:
            walk_route(context.routes, find, take)
        except EngineRefused:
            self._live_failures += 1
            raise
        except SpoolError as error:
            self._tell_why_not(str(error))
            self._load_from_mirror(target, context)
        except EngineQuarantined:
            self._load(target, context)

    def _take(self, hops: Sequence[Hop], context: SyncContext) -> None:
        """Bring the server over hops, to a complete version, in one swap. Versions between are staged within the swap."""
        assert self._commit is not None
        base = self._commit
        for hop in hops:
            with taking(hop):
                self._spool.put(dataclasses.replace(hop, base=base.seq), context)
            base = hop.target
        with context.report.watch.phase("apply"):
            self._stage(Version.of(hops[0].target), sum(entry.size for entry in hops[0].files))
            context.check_wanted()
            self._update(base, anew=False, between=[hop.target for hop in hops[:-1]])
        self._commit, self._live_failures = base, 0
        with contextlib.suppress(SpoolError):
            self._spool.keep_only(_KEPT_HOPS)

    def _load(self, target: Commit, context: SyncContext) -> None:
        """Let the server load a version in full, from the store if it can, otherwise from a mirror."""
        if self._mirror is None and not self._settings.prefers_mirror and self._is_live and self._live_failures < _MOST_LIVE_FAILURES:
            context.check_wanted()
            try:
                self._update(target, anew=True)
            except (EngineRefused, EngineQuarantined) as error:
                was_replaced = RollbackDetected.__name__ in str(error)  # a new mirror would accept what the workers refuse
                if was_replaced or self.last_update is None or not self.last_update.was_refused:
                    raise
                self._tell_why_not(str(error))  # nothing has changed: the workers may have no credentials for the store
            else:
                self._note_loaded(target, context)
                return
        if self._live_failures >= _MOST_LIVE_FAILURES:
            self._tell_why_not(f"the server has refused {self._live_failures} deltas")
        self._load_from_mirror(target, context)

    def _load_from_mirror(self, target: Commit, context: SyncContext) -> None:
        mirror = self._open_mirror()
        mirror.create(context.log.run.id)
        mirror.move(target, context)
        assert mirror.commit is not None
        self._swap_in_mirror(mirror.commit)
        self._note_loaded(mirror.commit, context)

    def _swap_in_mirror(self, commit: Commit) -> None:
        """Let the workers load the version that the mirror holds."""
        self._routes.initialise(self._init_info())
        self._update(commit, anew=True)

    def _note_loaded(self, commit: Commit, context: SyncContext) -> None:
        context.report.resynced = context.report.resynced or self._commit is not None
        self._commit, self._live_failures = commit, 0

    def _stage(self, version: Version, size: int) -> None:
        """Return when all workers have staged the update, for which they decode a number of bytes."""
        start = time.monotonic()
        deadline = start + self._settings.staging_patience
        self._waits.begin(size)
        workers = self._routes.prepare(version.seq)
        while not all(worker["staged"] == version.seq for worker in workers):
            if any(worker["staging_error"] for worker in workers) or time.monotonic() > deadline:
                reason = worker_errors(workers) or f"they took longer than {self._settings.staging_patience:.0f} seconds"
                self._report(REFUSED, None if self._commit is None else self._commit.seq, reason)
                raise EngineRefused(f"the workers cannot stage {version.describe()}: {reason}")
            time.sleep(self._waits.next(time.monotonic() - start))
            workers = self._routes.status()
        self._stage_seconds = time.monotonic() - start
        self._waits.note(self._stage_seconds)

    def _update(self, commit: Commit, *, anew: bool, between: Sequence[Commit] = ()) -> None:
        if not self._server.one_call:
            self._routes.settle()
        version = Version.of(commit)
        kind = OneCallUpdate if self._server.one_call else RoutesUpdate
        update = self.last_update = kind(self._server, commit, anew=anew, between=between)
        try:
            self.controller.swap(update, version)
        except EngineRefused as error:
            self._report(REFUSED, None if self._commit is None else self._commit.seq, update.failure or str(error))
            raise
        except EngineQuarantined as error:
            if isinstance(error.__cause__, EngineUnreachable):  # the next step asks the server what it has
                raise error.__cause__ from None
            self._commit = None
            self._routes.label(QUARANTINED_LABEL)
            self._report(QUARANTINED, None, update.failure or str(error))
            raise

    def _swap_details(self, record: SwapRecord) -> dict[str, Value]:
        update = self.last_update
        assert update is not None
        is_anew = any(worker["last"].get("loaded_anew") for worker in update.workers or self._routes.status())
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
            "live": int(self._is_live and not is_anew),
            "loaded_anew": int(is_anew),
        }

    def _open_mirror(self) -> MirrorReplica:
        if self._mirror is None:
            settings = self._settings
            mirror = MirrorReplica(settings.mirror, threads=settings.threads, trusted_keys=settings.trusted_keys)
            mirror.bind(settings.channel)
            self._mirror = mirror
        return self._mirror

    def _tell_hold(self, workers: Sequence[WorkerStatus]) -> None:
        """Emit an event if the server is held, asleep or paused by somebody else, once for each reason."""
        reason = next(filter(None, map(_why_held, workers)), None)
        if reason is not None and reason != self._told_hold:
            emit(self._on_event, "engine-held", reason=str(reason))
        self._told_hold = reason

    def _tell_draft(self, workers: Sequence[WorkerStatus]) -> None:
        """Emit an event if the server has a draft model that does not follow the chain, once for each reason."""
        reason = next((str(worker["draft"]["why_not"]) for worker in workers if (worker.get("draft") or {}).get("why_not")), None)
        if reason is not None and reason != self._told_draft:
            emit(self._on_event, "draft-kept", reason=reason)
        self._told_draft = reason

    def _tell_why_not(self, reason: str | None) -> None:
        """Emit an event if the server must load from a mirror, once for each reason."""
        if reason is not None and reason != self._told_why_not:
            emit(self._on_event, "mirror-used", reason=reason)
        self._told_why_not = reason


def _why_held(worker: WorkerStatus) -> str | None:
    """Return why a server does not generate, as the status of a worker says. None if it does."""
    if worker.get("held"):
        return str(worker["held"])
    if worker.get("asleep"):
        return "it is asleep"
    if worker.get("paused_by_others"):
        return str(worker.get("unended_update") or "somebody else has paused it")
    return None
