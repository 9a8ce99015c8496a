"""Continue a chain with many processes: each rebuilds some tensors from the store, and sends the other processes their parts of them.

Therefore the number of processes may change from job to job, and the way in which they hold the model, too. Every object is read once. No
process holds more whole tensors at a time than the files of one delta segment cover. In a signed chain the checkpoint is read twice: its
files are hashed before tensors are taken from them, because an attacker could make a change that the digest does not notice.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...chain.fetch import Fetcher
from ...chain.records.file_lists import FileLists
from ...chain.routes.restore import Hop
from ...chain.routes.walk_route import HopFailed, taking, walk_route
from ...delta.resolve import apply_delta
from ...dtypes import DType, dtype_named
from ...errors import ChainBroken, DataDamaged, DataMissing, DeltawireError, ObjectMissing, StoreError
from ...format.content_hash import content_hash, new_hash
from ...format.digest import Digest
from ...format.records.record_parts import FileEntry, Limits
from ...format.records.version_records import Commit, Shortcut
from ...format.safetensors_header import LENGTH_BYTES, MalformedHeader, header_length, parse_header
from ...store.base import Store
from ...tensors.state import state_digest
from ..upload.segments import SEGMENT_BYTES, TensorTable, cut_segments
from .division import Division, Parts, Reader
from .ranks import Ranks, error_named, together, without_hint

if TYPE_CHECKING:
    from .first_rank import FirstRank

_WINDOW = 64 << 20
"""Bytes that are read at a time to be hashed."""

ByFirst = Callable[[Callable[["FirstRank"], Any]], Any]
"""Does something in the first process, and returns the result in all."""


@dataclass(frozen=True, slots=True)
class _TensorLocation:
    """Where a tensor is in the store."""

    key: str
    offset: int
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, plain: Sequence[Any]) -> _TensorLocation:
        key, offset, dtype, shape = plain
        return cls(key, offset, dtype_named(dtype), tuple(shape))


@dataclass(frozen=True, slots=True)
class PartsReader:
    """Rebuilds the parts of all processes at a version. All processes have one, and call it at the same time."""

    ranks: Ranks
    store: Store
    fetcher: Fetcher
    limits: Limits
    threads: int | None

    def read(self, target: Commit, division: Division, by_first: ByFirst) -> Parts | None:
        """Return this process's parts of version `target`. Returns None, in all processes, if the version has other tensors.

        The first process finds routes. Raises `DataDamaged` if no route is left because of damaged or missing data.
        """
        assert target.digest is not None
        digest = target.digest
        routes = _SharedRoutes(target, by_first)
        return walk_route(routes, routes.find, lambda hops: self._take(hops, division, digest, check_hashes=target.signature is not None))

    def _take(self, hops: Sequence[Hop], division: Division, digest: Digest, *, check_hashes: bool) -> Parts | None:
        """Take a route from nothing. Raises `HopFailed` in all processes if one of them cannot take a hop.

        The checkpoint is read by ranges, for which records have no hashes. The digest of the whole state is checked in the end, which
        detects accidents. With `check_hashes`, one process also reads each file as a whole and compares it with the hash in its record.
        Every tensor that is taken from the file must have the same hash as then.
        """
        ranks, table = self.ranks, division.table
        locations: dict[str, _TensorLocation] = {}
        hashes: dict[str, str] = {}
        hops = self._with_files(hops)

        def find() -> list[Any]:
            with taking(hops[0]):
                return _find_share(self.store, hops[0].files, ranks)

        def check() -> dict[str, str]:
            with taking(hops[0]):
                return _hash_share(self.store, hops[0].files, ranks)

        for found in _try(ranks, hops, find):
            locations.update((name, _TensorLocation.of(plain)) for name, *plain in found)
        if _table(locations) != table:
            return None
        if check_hashes:
            for shares in _try(ranks, hops, check):
                hashes.update(shares)
        plan = _assign(table, _runs(table, hops), ranks.size)
        parts = division.new_parts(ranks.rank)
        total = Digest()
        for turn in range(max(map(len, plan))):
            tensors: dict[str, NDArray[Any]] = {}
            mine = plan[ranks.rank][turn] if turn < len(plan[ranks.rank]) else range(0)

            def rebuild(tensors: dict[str, NDArray[Any]] = tensors, mine: range = mine) -> str:
                self._rebuild(hops, table, locations, hashes if check_hashes else None, mine, tensors)
                return state_digest(tensors, threads=self.threads).hex()

            for own in _try(ranks, hops, rebuild):
                total += Digest.from_hex(own)
            theirs = [rank_plan[turn] if turn < len(rank_plan) else range(0) for rank_plan in plan]
            _send(ranks, division, parts, tensors, theirs)
        if total != digest:
            raise HopFailed(hops[0], DataDamaged(f"the checkpoint and its deltas lead to the digest {total}, not {digest}."))
        return parts

    def _with_files(self, hops: Sequence[Hop]) -> list[Hop]:
        """Return the same hops, with the files of their file lists, which every process reads itself."""
        lists = FileLists()
        filled: list[Hop] = []

        def read() -> None:
            for hop in hops:
                with taking(hop):
                    filled.append(dataclasses.replace(hop, files=lists.files_of(hop.record, self.fetcher, self.limits)))

        _try(self.ranks, hops, read)
        return filled

    def _rebuild(
        self,
        hops: Sequence[Hop],
        table: TensorTable,
        locations: dict[str, _TensorLocation],
        hashes: dict[str, str] | None,
        run: range,
        tensors: dict[str, NDArray[Any]],
    ) -> None:
        """Read a run of tensors from the checkpoint, and apply the deltas of the further hops to them."""
        with taking(hops[0]):
            for name in table.names[run.start : run.stop]:
                tensors[name] = _read_tensor(self.store, locations[name])
                if hashes is not None and content_hash(_as_bytes(tensors[name])) != hashes.get(name):
                    raise DataDamaged(f"tensor {name!r} in {locations[name].key} has another hash than when its file was checked.")
        for hop in hops[1:]:
            with taking(hop):
                for entry in hop.files:
                    assert entry.first is not None
                    assert entry.count is not None
                    if entry.first in run:
                        covered = table.names[entry.first : entry.first + entry.count]
                        apply_delta({name: tensors[name] for name in covered}, self.fetcher.fetch(entry), threads=self.threads)


class _SharedRoutes:
    """Routes that the first process finds for all processes."""

    def __init__(self, target: Commit, by_first: ByFirst) -> None:
        self._target = target
        self._by_first = by_first
        self._failure: HopFailed | None = None
        by_first(lambda first: first.forget_failures())

    def find(self) -> list[Hop]:
        try:
            return [_parse_hop(plain) for plain in self._by_first(lambda first: first.find_route())]
        except StoreError:
            raise
        except DeltawireError:
            if self._failure is None:
                raise
            why = without_hint(self._failure.error)
            raise DataDamaged(
                f"{self._target.describe()} cannot be rebuilt: {why} Open with starts_full=True to continue without it."
            ) from None

    def avoid(self, failure: HopFailed) -> None:
        self._by_first(lambda first: first.avoid(failure))
        self._failure = failure


def plain_hop(hop: Hop) -> dict[str, Any]:
    """Return a hop as JSON: its records, which name its files or its file list."""
    shortcut = None if hop.shortcut is None else hop.shortcut.to_bytes().decode()
    return {"target": hop.target.to_bytes().decode(), "base": hop.base, "source": hop.source, "shortcut": shortcut}


def _parse_hop(plain: dict[str, Any]) -> Hop:
    shortcut = None if plain["shortcut"] is None else Shortcut.parse(plain["shortcut"].encode())
    target = Commit.parse(plain["target"].encode())
    return Hop(target, plain["base"], (shortcut or target).files, plain["source"], shortcut=shortcut)


def _try(ranks: Ranks, hops: Sequence[Hop], work: Callable[[], Any]) -> list[Any]:
    """Do something in every process, and return all results. If it raises `HopFailed` in one process, it does so in all."""

    def attempt() -> dict[str, Any]:
        try:
            return {"done": work()}
        except HopFailed as failure:
            return {"hop": hops.index(failure.hop), "failed": type(failure.error).__name__, "why": without_hint(failure.error)}

    answers = together(ranks, attempt)
    for answer in answers:
        if "hop" in answer:
            raise HopFailed(hops[answer["hop"]], error_named(answer["failed"])(answer["why"]))
    return [answer["done"] for answer in answers]


def _send(ranks: Ranks, division: Division, parts: Parts, tensors: dict[str, NDArray[Any]], runs: Sequence[range]) -> None:
    """Send the tensors that this process rebuilt, and receive its own parts of the others. `runs` are the tensors of each rank."""
    names = division.table.names

    def byte_range(index: int, rank: int) -> slice:
        size = division.table.dtypes[index].itemsize
        start, stop = division.tensors[index].ranges[rank]
        return slice(start * size, stop * size)

    flat = {index: tensors[names[index]].reshape(-1).view(np.uint8) for index in runs[ranks.rank]}
    pieces = [np.concatenate([np.empty(0, np.uint8), *(flat[i][byte_range(i, rank)] for i in flat)]).data for rank in range(ranks.size)]
    for run, piece in zip(runs, ranks.deliver(pieces), strict=True):
        reader = Reader(piece)
        for index in run:
            elements = parts[names[index]].elements
            np.copyto(elements.view(np.uint8), reader.take(elements.nbytes))


def _find_share(store: Store, files: Sequence[FileEntry], ranks: Ranks) -> list[Any]:
    """Read the headers of this process's share of the files. Returns the location of each tensor in them, for JSON."""
    locations: list[Any] = []
    shards = [file for file in files if file.name is not None and file.name.endswith(".safetensors")]
    for file in shards[ranks.rank :: ranks.size]:
        try:
            length = header_length(_read(store, file.key, 0, LENGTH_BYTES).tobytes(), file.size)
            header = parse_header(_read(store, file.key, LENGTH_BYTES, length).tobytes(), file.size)
        except MalformedHeader as reason:
            raise DataDamaged(f"{file.key} is not a safetensors file: {reason}") from None
        for name, entry in header.entries.items():
            locations.append([name, file.key, header.data_start + entry.begin, entry.dtype.name, list(entry.shape)])
    return locations


def _hash_share(store: Store, files: Sequence[FileEntry], ranks: Ranks) -> dict[str, str]:
    """Compare this process's share of the files with the hashes in their records. Returns the hashes of all tensors in them."""
    shards = [file for file in files if file.name is not None and file.name.endswith(".safetensors")]
    found: dict[str, str] = {}
    for file in shards[ranks.rank :: ranks.size]:
        found |= _hash_tensors(store, file)
    return found


def _hash_tensors(store: Store, file: FileEntry) -> dict[str, str]:
    """Return the BLAKE3 of each tensor in a file. Raises `DataDamaged` if the hash of the whole file is not that of its record."""
    prefix = _read(store, file.key, 0, min(LENGTH_BYTES, file.size))
    try:
        text = _read(store, file.key, LENGTH_BYTES, header_length(prefix.tobytes(), file.size))
        header = parse_header(text.tobytes(), file.size)
    except MalformedHeader as reason:
        raise DataDamaged(f"{file.key} is not a safetensors file: {reason}") from None
    whole = new_hash()
    whole.update(prefix.data)
    whole.update(text.data)
    found: dict[str, str] = {}
    for name, entry in header.entries.items():  # without holes between them, up to the end of the file
        own = new_hash()
        for begin in range(entry.begin, entry.end, _WINDOW):
            piece = _read(store, file.key, header.data_start + begin, min(_WINDOW, entry.end - begin))
            whole.update(piece.data)
            own.update(piece.data)
        found[name] = own.hexdigest()
    if whole.hexdigest() != file.blake3:
        raise DataDamaged(f"{file.key} in {store.url} is damaged: its content does not have the hash of its record.")
    return found


def _table(locations: dict[str, _TensorLocation]) -> TensorTable:
    ordered = sorted(locations.items())
    return TensorTable(
        tuple(name for name, _ in ordered),
        tuple(location.dtype for _, location in ordered),
        tuple(location.shape for _, location in ordered),
    )


def _read_tensor(store: Store, location: _TensorLocation) -> NDArray[Any]:
    flat = _read(store, location.key, location.offset, math.prod(location.shape) * location.dtype.itemsize)
    return flat.view(location.dtype.numpy).reshape(location.shape)


def _as_bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read(store: Store, key: str, offset: int, size: int) -> NDArray[np.uint8]:
    buffer = np.empty(size, np.uint8)
    if size:
        try:
            store.read_into(key, buffer.data, offset=offset)
        except ObjectMissing as error:
            raise DataMissing(f"{key} is not in {store.url}.") from error
    return buffer


def _runs(table: TensorTable, hops: Sequence[Hop]) -> list[range]:
    """Divide all tensors into runs such that every delta file of the route covers tensors of one run only.

    Tensors that no delta file covers are divided into runs of the usual size of segments.
    """
    covered: list[range] = []
    for first, stop in sorted({(entry.first or 0, (entry.first or 0) + (entry.count or 0)) for hop in hops[1:] for entry in hop.files}):
        if stop > len(table.names):
            raise ChainBroken(f"a delta is said to cover tensors up to {stop}; there are {len(table.names)}.")
        if covered and first < covered[-1].stop:
            covered[-1] = range(covered[-1].start, max(stop, covered[-1].stop))
        else:
            covered.append(range(first, stop))
    runs: list[range] = []
    at = 0
    for run in [*covered, range(len(table.names), len(table.names))]:
        for gap in cut_segments(table.sizes[at : run.start], segment_bytes=SEGMENT_BYTES):
            runs.append(range(at + gap.first, at + gap.first + gap.count))
        if run:
            runs.append(run)
        at = run.stop
    return runs


def _assign(table: TensorTable, runs: Sequence[range], ranks: int) -> list[list[range]]:
    """Assign the runs to ranks so that all have about the same work: each run, the largest first, goes to the rank with the least."""
    plan: list[list[range]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]  # a heap
    sizes = {run: sum(table.sizes[run.start : run.stop]) for run in runs}
    for run in sorted(runs, key=lambda run: (-sizes[run], run.start)):
        least, rank = load[0]
        plan[rank].append(run)
        heapq.heapreplace(load, (least + sizes[run], rank))
    return plan
