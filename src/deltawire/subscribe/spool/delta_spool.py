"""The spool: a directory on the host of an engine, from which its workers take updates.

It holds the next updates, not the model:

    DIR/hop-BASE-TARGET.json  one hop: both commits, and the files that lead from one to the other
    DIR/files/                delta files, named by their hashes
    DIR/tensors.json          names, types and shapes of the chain's tensors (tensor_table.py)
    DIR/shards/               shards of a full checkpoint, only while workers load it
    DIR/kept/SERVER/          tensors that the workers of a server share (engines/vllm/live/kept_bases.py), while the server runs
    DIR/lock                  `flock` file of the one process that writes
    DIR/ahead                 `flock` file of the one process that fetches files before their commit exists
    DIR/alive                 `flock` file of all processes that use the spool

One process fetches a hop, usually the sidecar, and every worker of the host maps the same files. The manifest of a hop is written last and
replaced as a whole, so a hop whose manifest can be read is complete, unless files were deleted or the machine lost power since then.
`hop` therefore looks for the files, and `open` compares each file with its hash. Nothing in a spool has to be kept: a hop that is missing
or damaged is fetched again.

The directory belongs to one user (mode 0700). Locks and maps work on one machine only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from ...chain.routes.restore import Hop
from ...errors import ChainBroken, SpoolError, UnsupportedVersion
from ...format.records.record_parts import CommitRef, FileEntry
from ..cache.delta_cache import PART, DeltaCache
from ..cache.private_folder import check_private, hold_folder, make_private, remove_abandoned, retryable_error, spool_errors
from ..mirror.locks import FileLock, LifeWatch
from ..sync_context import SyncContext
from .spooled_hop import SpooledHop, manifest_bytes, read_manifest

_MANIFEST = re.compile(r"hop-(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})\.json")
_PAUSE = 0.02
_KEPT_SHARDS = 2
"""Shards of a checkpoint that stay while workers load it: the one that most of them load, and the next one."""
_ROOM, _LEAST_ROOM = 4, 1 << 30
"""The default directory is in memory if there is room for this many deltas, and at least for this many bytes.

In a container, /dev/shm often has only 64 MB.
"""


class DeltaSpool:
    """The spool in a directory. It is made when the first hop is put there. Several processes and threads may use it.

    Parameters
    ----------
    folder
        The directory.
    most_bytes
        Most bytes of delta files. Older hops make room for new ones. None means as much as the disk has.
    """

    def __init__(self, folder: Path, *, most_bytes: int | None = None) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._files = DeltaCache(folder / "files")
        self._lock_path = folder / "lock"

    @property
    def table_path(self) -> Path:
        """The file with the names, types and shapes of the chain's tensors (`tensor_table.write_table`)."""
        return self.folder / "tensors.json"

    def hold(self) -> FileLock:
        """Make the directory, and keep it until the lock is released. Otherwise `default_spool` takes it for one that was left behind.

        Raises `SpoolError` if the directory cannot be used.
        """
        with spool_errors(self.folder):
            make_private(self.folder)
            return hold_folder(self.folder)

    def put(self, hop: Hop, context: SyncContext) -> SpooledHop:
        """Fetch the files of a hop that the spool lacks, check all of them, and write the manifest last.

        Waits while another process writes. If that process fetches the same files, this one does not. Raises the errors of
        `Fetcher.fetch`, `SpoolError` if the directory cannot be used or the hop is too large for it, and `MirrorBusy` if the process that
        writes is stopped.

        Parameters
        ----------
        hop
            A hop from a version, with its files (`Routes.find`). A full checkpoint is not a hop of this kind.
        context
            The sync in which the hop was found.
        """
        if hop.base is None or hop.has_unread_list:
            raise ValueError("only a delta whose files are known can be put into the spool")
        base = context.log.read(hop.base)
        if base is None:
            raise ChainBroken(f"commit {hop.base} is not in {context.log.store.url}.")
        spooled = SpooledHop(base, hop.target, hop.files, hop.source)
        data = manifest_bytes(spooled)
        with spool_errors(self.folder), self._writing(context):
            self._make_room(spooled)

            def write() -> list[FileEntry]:
                fetched = self._files.ensure(spooled.files, lambda entries: context.to_memory(hop, entries))
                _replace(self._manifest_path(base.seq, hop.target.seq), data)
                return fetched

            try:
                fetched = write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._tidy(0, also=spooled.files)  # older hops can be fetched again, and this one is needed now
                fetched = write()
            context.report.fetched(fetched, of=spooled.files)
        return spooled

    def try_leader(self) -> FileLock | None:
        """Take the lock of the process that fetches files before their commit exists, if no other process holds it."""
        return FileLock.try_exclusive(self.folder / "ahead")

    def put_ahead(self, files: Mapping[FileEntry, memoryview]) -> None:
        """Keep files of a hop that is not known yet, so that `put` finds them. Does nothing while another process writes.

        Raises `SpoolError` if the directory cannot be used.

        Parameters
        ----------
        files
            The files and their bytes, which were compared with their hashes.
        """
        with spool_errors(self.folder):
            lock = FileLock.try_exclusive(self._lock_path) if files and self.folder.is_dir() else None
            if lock is not None:
                with lock:
                    (self.folder / "files").mkdir(exist_ok=True)
                    self._files.ensure(files, lambda missing: [(entry, files[entry]) for entry in missing])

    def hop(self, base: CommitRef, seq: int) -> SpooledHop | None:
        """Return the hop from a commit to commit `seq`. None if it is not, or not completely, in the spool.

        Raises `UnsupportedVersion` if a newer release of deltawire has written its manifest, and `SpoolError` if other users can write to
        the directory: nothing else proves that the hop leads to a version of the chain.

        Parameters
        ----------
        base
            The commit that the hop starts from. A hop of another chain, or of another history, has another hash here and is ignored.
        seq
            The number of the commit that it leads to.
        """
        with spool_errors(self.folder), contextlib.suppress(FileNotFoundError):
            check_private(self.folder)
            found = read_manifest(self._manifest_path(base.seq, seq))
            if found is None or found.target.seq != seq or found.base_ref.commit != base.commit:
                return None
            return found if all(map(self._files.holds, found.files)) else None
        return None

    def open(self, entry: FileEntry) -> memoryview:
        """Map a file of a hop, and compare it with its hash. The map stays valid after the file is deleted. Uses one thread only.

        Raises `SpoolError`, which is retryable: when the hop is put again, missing and damaged files are fetched again.

        Parameters
        ----------
        entry
            One of the files of a hop.
        """
        with spool_errors(self.folder):
            found = self._files.open_sound(entry, threads=False)  # engines generate meanwhile
            if found is None:
                path = self._files.path(entry)
                raise retryable_error(f"{path} is damaged." if path.exists() else f"{path} is not in the spool.")
            return memoryview(found)

    def peek(self, entry: FileEntry) -> memoryview:
        """Map a file of a hop without reading it. Nothing is checked, so only what a digest proves may be used. Raises `SpoolError`.

        Parameters
        ----------
        entry
            One of the files of a hop.
        """
        with spool_errors(self.folder):
            if not self._files.holds(entry):
                raise retryable_error(f"{self._files.path(entry)} is not in the spool.")
            return memoryview(self._files.open(entry))

    def keep_only(self, newest: int) -> None:
        """Delete all but the hops that were put last, and all files that these do not need. Does nothing while another process writes.

        Parameters
        ----------
        newest
            How many hops stay.
        """
        with spool_errors(self.folder):
            lock = FileLock.try_exclusive(self._lock_path) if self.folder.is_dir() else None
            if lock is not None:
                with lock:
                    self._tidy(newest)

    def drop_abandoned(self) -> None:
        """Delete what is as large as a model and belongs to processes that have ended: shards, and tensors that workers shared."""
        with spool_errors(self.folder):
            self._drop_shards()
            remove_abandoned(self.folder / "kept")

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Keep the shards that `shard` fetches for as long as any process is in this context. The last one deletes them."""
        shards = self.folder / "shards"
        with spool_errors(self.folder):
            make_private(self.folder)
            shards.mkdir(exist_ok=True)
            reading = self.folder / "loading"
            reading.touch()
            while (lock := FileLock.try_shared(reading)) is None:  # held exclusively only while shards are deleted
                time.sleep(_PAUSE)
        try:
            yield
        finally:
            lock.release()
            with spool_errors(self.folder):
                self._drop_shards()

    def shard(self, hop: Hop, entry: FileEntry, context: SyncContext) -> Path:
        """Return a shard of a full checkpoint as a file, and fetch it unless another process of this host has done so.

        Call it within `loading`. The file may be deleted when more shards are fetched: map it at once, and call again if it is gone.

        Parameters
        ----------
        hop
            The full checkpoint.
        entry
            One of its files.
        context
            The sync in which it was found.
        """
        path = self.folder / "shards" / f"{entry.blake3}.safetensors"
        with spool_errors(self.folder), self._writing(context):
            if not (path.exists() and path.stat().st_size == entry.size):
                self._drop_shards(keep=_KEPT_SHARDS - 1)
                arriving = path.with_suffix(PART)
                context.to_file(hop, entry, arriving)
                os.replace(arriving, path)
                context.report.fetched([entry])
        return path

    @contextlib.contextmanager
    def _writing(self, context: SyncContext) -> Iterator[None]:
        """Wait until no other process writes, and hold the lock."""
        make_private(self.folder)
        (self.folder / "files").mkdir(exist_ok=True)
        watch = LifeWatch(self._lock_path)
        while (lock := FileLock.try_exclusive(self._lock_path)) is None:
            if context.is_halted():
                raise retryable_error(f"{self.folder}: stopped while another process writes to the spool.")
            watch.check()
            time.sleep(_PAUSE)
        with lock, lock.showing_life():
            yield

    def _make_room(self, new: SpooledHop) -> None:
        if self._most_bytes is None:
            return
        if new.nbytes > self._most_bytes:
            raise SpoolError(
                f"{new.target.describe()} needs {new.nbytes:,} bytes in {self.folder}; {self._most_bytes:,} are allowed.",
                hint="Allow the spool more bytes, or publish smaller updates.",
            )
        held = self._hops()
        while held and new.nbytes + _bytes_of(hop for _, hop in held) > self._most_bytes:
            held.pop()
        self._tidy(len(held), also=new.files)

    def _hops(self) -> list[tuple[Path, SpooledHop]]:
        """Return all hops, those that were put last first. Deletes manifests that cannot be read."""
        found: list[tuple[int, int, Path, SpooledHop]] = []
        for path in self.folder.iterdir():
            if _MANIFEST.fullmatch(path.name):
                hop = None
                with contextlib.suppress(UnsupportedVersion):
                    hop = read_manifest(path)
                if hop is None:
                    path.unlink(missing_ok=True)
                else:
                    found.append((path.stat().st_mtime_ns, hop.target.seq, path, hop))
        return [(path, hop) for _, _, path, hop in sorted(found, key=lambda item: item[:2], reverse=True)]

    def _tidy(self, newest: int, *, also: Iterable[FileEntry] = ()) -> None:
        hops = self._hops()
        for path, _ in hops[newest:]:
            path.unlink(missing_ok=True)
        if (self.folder / "files").is_dir():
            self._files.keep_only([*also, *(entry for _, hop in hops[:newest] for entry in hop.files)])
        for path in self.folder.glob(f"*{PART}"):
            path.unlink(missing_ok=True)
        self.drop_abandoned()

    def _drop_shards(self, *, keep: int = 0) -> None:
        """Delete the shards that were fetched longest ago. Without `keep`, delete all, unless a process is loading."""
        folder = self.folder / "shards"
        if not folder.is_dir():
            return
        with contextlib.ExitStack() as held:
            if not keep:
                lock = FileLock.try_exclusive(self.folder / "loading")
                if lock is None:
                    return
                held.enter_context(lock)
            for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)[keep:]:
                path.unlink(missing_ok=True)

    def _manifest_path(self, base: int, target: int) -> Path:
        return self.folder / f"hop-{base}-{target}.json"


def default_spool(url: str, delta_bytes: int = 0) -> Path:
    """Return the usual directory for the spool of a chain: in memory (/dev/shm) if there is room for four deltas and at least 1 GiB,
    otherwise in this user's cache. Deletes what killed sidecars and servers of this user have left in both directories.

    Parameters
    ----------
    url
        The location of the chain.
    delta_bytes
        About how many bytes a delta has. 0 if that is not known.
    """
    name = blake3(url.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltawire" / "spools"
    root = Path("/dev/shm") / f"deltawire-{os.getuid()}"
    parents = [cache]
    with contextlib.suppress(OSError, SpoolError):
        make_private(root)
        parents.append(root)  # otherwise another user has made it, and could put links and other files there
    for parent in parents:
        with contextlib.suppress(OSError, SpoolError):
            remove_abandoned(parent)
            for other in parent.iterdir():  # some of its users have ended, perhaps
                with contextlib.suppress(SpoolError):
                    DeltaSpool(other).drop_abandoned()
    with contextlib.suppress(OSError):
        if root in parents and shutil.disk_usage(root).free >= max(_ROOM * delta_bytes, _LEAST_ROOM):
            return root / name
    return cache / name


def _replace(path: Path, data: bytes) -> None:
    """Replace a file as a whole. The caller holds the lock."""
    arriving = path.with_suffix(PART)
    try:
        arriving.write_bytes(data)
        os.replace(arriving, path)
    except BaseException:
        arriving.unlink(missing_ok=True)
        raise


def _bytes_of(hops: Iterable[SpooledHop]) -> int:
    return sum({entry.blake3: entry.size for hop in hops for entry in hop.files}.values())
