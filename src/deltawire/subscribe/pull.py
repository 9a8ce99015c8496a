"""Write one version of a chain to a plain checkpoint directory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..chain.fetch import Fetcher
from ..chain.reader_options import ReaderOptions
from ..chain.routes.remaining_routes import Routes
from ..chain.routes.restore import Hop, fetched_hops
from ..chain.routes.walk_route import HopFailed, walk_route
from ..chain.version import Version
from ..errors import CheckpointError
from ..events import OnEvent, emit
from ..format.checkpoints.checkpoint import Checkpoint
from ..format.checkpoints.shard_layout import restore_layout
from ..format.checkpoints.staged_output import StagedOutput
from ..format.records.record_parts import holds_weights
from ..format.records.version_records import Commit
from ..store import Progress, Store
from ..store.copies.locations import Location
from ..store.occupancy import misplaced
from ..tensors.state import state_digest
from .cache.delta_cache import DeltaCache
from .cache.host_cache import open_host_cache
from .chain_view import ChainView
from .mirror.checkpoint_in_place import CheckpointInPlace
from .mirror.hops_on_disk import HopsOnDisk
from .pin_keeper import PinKeeper
from .sync_context import SyncContext

_DELTAS = ".deltas"
"""A hidden name, which no file of a checkpoint has."""


def pull(
    url: Location,
    out_dir: Path | str,
    *,
    seq: int | None = None,
    replace: bool = False,
    options: ReaderOptions | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    on_event: OnEvent | None = None,
) -> Version:
    """Write one version of a chain to a new directory that any library loads as a checkpoint. Return the version.

    The directory appears only when it is complete, on disk, and its digest is that of the version. Files are changed in place, so memory
    does not grow with the model. A checkpoint that `deltawire publish` read from several files is written to the same files again, byte
    for byte; this takes the space of the model twice while it runs. Raises the errors that `Subscriber.sync` raises, and `CheckpointError`
    if the directory cannot be written.

    Parameters
    ----------
    url
        The location of the chain: a URL, a path, or an open store. Or a list of them: the origin, and copies that relays keep.
    out_dir
        The directory to write. It must not exist, unless `replace` is set.
    seq
        The number of the version's commit, `Version.seq`. It is not the version number that `deltawire log` shows. None writes the newest
        version.
    replace
        Whether to replace an existing checkpoint in `out_dir`. A directory that also holds other files than weights and attachments is
        still refused.
    options
        Which chain to accept and how to read it.
    threads
        How many threads decode and check. None uses all processors.
    progress
        Called with the number of bytes fetched since its last call, from any thread. The event "planned" announces the total.
    on_event
        Called with each event.
    """
    options = options or ReaderOptions()
    out = Path(out_dir)
    if why := misplaced(out):
        raise CheckpointError(f"{out} {why}. Name another directory for the checkpoint: `deltawire pull URL DIR`.")
    with _opened(url, options, on_event) as store:
        log = options.open_log(store)
        chain = ChainView(log, max_silence=options.max_silence, channel=options.open_channel(log))
        pins = PinKeeper(store, options.reader, enabled=options.pin, on_event=on_event)

        shared = open_host_cache(options, on_event)

        def arrived(count: int) -> None:
            pins.renew()
            if progress is not None:
                progress(count)

        staged = StagedOutput(out, directory=True, replace=replace)

        def build(target: Commit) -> Commit:
            fetcher = Fetcher(store, limits=chain.log.limits, patience=options.patience, on_event=on_event, shared=shared)
            routes = Routes(chain.log, fetcher=fetcher, on_event=on_event)
            context = SyncContext(chain.log, routes, patience=options.patience, progress=arrived, on_event=on_event, shared=shared)

            def take(hops: Sequence[Hop]) -> Commit:
                pins.hold_route(chain.log.run, hops)
                unwanted = _unwanted_files(target, hops[0])
                entries = [*(target.attachments or ()), *(entry for hop in hops for entry in hop.files if entry.name not in unwanted)]
                size = sum(entry.size for entry in entries)
                staged.refuse_losses({entry.name for entry in entries if entry.name is not None})  # before fetching; repeated at the end
                emit(on_event, "planned", seq=target.seq, updates=target.updates, hops=fetched_hops(hops), bytes=size)
                try:
                    _build(staged.path, hops, context, threads)
                except HopFailed:
                    shutil.rmtree(staged.path)
                    staged.path.mkdir()
                    raise
                return target

            return walk_route(routes, lambda: routes.find(None, target), take)

        try:
            target = chain.reach(seq, build)
            chain.check_silence()
            if restore_layout(staged.path) and state_digest(Checkpoint(staged.path), threads=threads) != target.digest:
                raise CheckpointError(f"{target.describe()} was damaged while it was written to {out}. Are disk and memory sound?")
            staged.commit()
        except OSError as error:
            raise CheckpointError(f"{error.filename or out}: {error.strerror or error}.") from error
        finally:
            staged.discard()
            pins.release()
        return Version.of(target)


def _build(folder: Path, hops: Sequence[Hop], context: SyncContext, threads: int | None) -> None:
    (folder / _DELTAS).mkdir()
    deltas = DeltaCache(folder / _DELTAS)
    on_disk = HopsOnDisk(context, deltas, context.report, threads=threads)
    target = hops[-1].target
    on_disk.fetch_attachments(target, folder)
    on_disk.place_attachments(target, folder)
    deltas.keep_only((), 0)
    on_disk.fetch_checkpoint(hops[0], folder, leave_out=_unwanted_files(target, hops[0]))
    digest = hops[0].target.digest
    for hop in hops[1:]:
        assert digest is not None
        on_disk.fetch_deltas(hop)
        on_disk.apply_deltas(hop, folder, digest)
        deltas.keep_only((), 0)
        digest = hop.target.digest
    if len(hops) > 1:
        CheckpointInPlace(folder, threads=threads).flush()
    shutil.rmtree(folder / _DELTAS)


def _unwanted_files(target: Commit, first_hop: Hop) -> set[str]:
    """Return the names of attachments among the files of a checkpoint, if the target's own attachments replace them.

    Checkpoints of version 1 list such files. They may be older than the target, which is rebuilt from the weights only.
    """
    if target.attachments is None:
        return set()
    return {entry.name for entry in first_hop.files if entry.name is not None and not holds_weights(entry.name)}


class _opened:
    """Opens a store for the time of a context. A store that the caller has opened stays open."""

    def __init__(self, url: Location, options: ReaderOptions, on_event: OnEvent | None) -> None:
        self._store = options.open_store(url, on_event=on_event)
        self._owned = not isinstance(url, Store)

    def __enter__(self) -> Store:
        return self._store

    def __exit__(self, *_: object) -> None:
        if self._owned:
            self._store.close()
