"""Taking a chain up again with many processes: each rebuilds some tensors from the store, and sends everybody its parts of them.

So it does not matter how many processes published before, or how they held the model; every object is read once, and nobody holds more
whole tensors than one run of them, which are those that the files of one delta segment are about. In a signed chain the checkpoint is read
twice: its files are hashed before tensors are taken from them, as the digest alone does not notice a change that was made to escape it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...chain.fetch import Fetcher
from ...delta.resolve import apply_delta
from ...errors import ChainBroken, ChainError, DataDamaged, DeltaError, ObjectMissing, StateError
from ...format.content_hash import content_hash, new_hash
from ...format.digest import Digest
from ...format.records.chain_records import FileEntry
from ...format.safetensors_header import LENGTH_BYTES, MalformedHeader, TensorEntry, header_length, parse_header
from ...store.base import Store
from ...tensors.state import state_digest
from ..upload.segments import SEGMENT_BYTES, TensorTable, cut_segments
from .parts import Division, Parts, Reader
from .ranks import Ranks, together

_WINDOW = 64 << 20

Route = Sequence[Sequence[FileEntry]]
"""The files of each hop; those of the first are a checkpoint."""


@dataclass(frozen=True, slots=True)
class HopFailed:
    """Which hop of a route could not be taken, and why."""

    hop: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stands in the store."""

    key: str
    offset: int
    entry: TensorEntry


def restore_parts(
    ranks: Ranks,
    store: Store,
    fetcher: Fetcher,
    division: Division,
    route: Route,
    digest: Digest,
    *,
    check_hashes: bool,
    threads: int | None,
) -> Parts | HopFailed | None:
    """This process's parts of the state that a route leads to; None if that has other tensors than these. In all processes alike.

    The checkpoint is read by ranges, of which records have no hashes. The digest of the whole state is checked in the end, which finds
    accidents. With `check_hashes`, as for a signed chain, each file is read once more by one process and compared with the hash in its
    record, and every tensor that is taken from it with the hash that the tensor had then.
    """
    places: dict[str, _Place] = {}
    hashes: dict[str, str] = {}

    def find() -> dict[str, Any]:
        try:
            places.update(_find_tensors(store, route[0]))
        except (ChainError, ObjectMissing) as error:
            return {"why": str(error)}
        return {"same": _table(places) == division.table}

    for answer in together(ranks, find):
        if "why" in answer:
            return HopFailed(0, answer["why"])
        if not answer["same"]:
            return None
    if check_hashes:
        for answer in together(ranks, lambda: _hash_share(store, route[0], ranks)):
            if "why" in answer:
                return HopFailed(0, answer["why"])
            hashes.update(answer["hashes"])
    runs = _runs(division.table, route)
    plan = _assign(division.table, runs, ranks.size)
    parts = division.new_parts(ranks.rank)
    total = Digest()
    for turn in range(max(map(len, plan))):
        tensors: dict[str, NDArray[Any]] = {}
        mine = plan[ranks.rank][turn] if turn < len(plan[ranks.rank]) else range(0)

        def rebuild(tensors: dict[str, NDArray[Any]] = tensors, mine: range = mine) -> dict[str, Any]:
            failed = _rebuild(store, fetcher, division.table, places, hashes if check_hashes else None, route, mine, tensors, threads)
            return {"digest": state_digest(tensors, threads=threads).hex()} if failed is None else {"hop": failed.hop, "why": failed.reason}

        for answer in together(ranks, rebuild):
            if "hop" in answer:
                return HopFailed(answer["hop"], answer["why"])
            total += Digest.from_hex(answer["digest"])
        theirs = [rank_plan[turn] if turn < len(rank_plan) else range(0) for rank_plan in plan]
        _send(ranks, division, parts, tensors, theirs)
    return parts if total == digest else HopFailed(0, f"the checkpoint and its deltas lead to the digest {total}, not {digest}.")


def _rebuild(
    store: Store,
    fetcher: Fetcher,
    table: TensorTable,
    places: dict[str, _Place],
    hashes: dict[str, str] | None,
    route: Route,
    run: range,
    tensors: dict[str, NDArray[Any]],
    threads: int | None,
) -> HopFailed | None:
    """Read a run of tensors from the checkpoint, and change them by the deltas that follow."""
    hop = 0
    try:
        for name in table.names[run.start : run.stop]:
            tensors[name] = _read_tensor(store, places[name])
            if hashes is not None and content_hash(_as_bytes(tensors[name])) != hashes.get(name):
                raise DataDamaged(f"tensor {name!r} in {places[name].key} is not the one whose hash was checked.")
        for files in route[1:]:
            hop += 1
            for entry in files:
                assert entry.first is not None
                assert entry.count is not None
                if entry.first in run:
                    covered = table.names[entry.first : entry.first + entry.count]
                    apply_delta({name: tensors[name] for name in covered}, fetcher.fetch(entry), threads=threads)
    except (ChainError, DeltaError, StateError, ObjectMissing) as error:
        return HopFailed(hop, str(error))
    return None


def _send(ranks: Ranks, division: Division, parts: Parts, tensors: dict[str, NDArray[Any]], runs: Sequence[range]) -> None:
    """Hand out the tensors that were rebuilt here, and take in one's own parts of what others have; `runs` are those of all ranks."""
    names = division.table.names

    def span(index: int, rank: int) -> slice:
        size = division.table.dtypes[index].itemsize
        start, stop = division.shares[index].spans[rank]
        return slice(start * size, stop * size)

    flat = {index: tensors[names[index]].reshape(-1).view(np.uint8) for index in runs[ranks.rank]}
    pieces = [np.concatenate([np.empty(0, np.uint8), *(flat[i][span(i, rank)] for i in flat)]).data for rank in range(ranks.size)]
    for run, piece in zip(runs, ranks.deliver(pieces), strict=True):
        reader = Reader(piece)
        for index in run:
            elements = parts[names[index]].elements
            np.copyto(elements.view(np.uint8), reader.take(elements.nbytes))


def _find_tensors(store: Store, files: Sequence[FileEntry]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for file in files:
        if file.name is None or not file.name.endswith(".safetensors"):
            continue
        try:
            length = header_length(_read(store, file.key, 0, LENGTH_BYTES).tobytes(), file.size)
            header = parse_header(_read(store, file.key, LENGTH_BYTES, length).tobytes(), file.size)
        except MalformedHeader as reason:
            raise DataDamaged(f"{file.key} is not a safetensors file: {reason}") from None
        for name, entry in header.entries.items():
            places[name] = _Place(file.key, header.data_start + entry.begin, entry)
    return places


def _hash_share(store: Store, files: Sequence[FileEntry], ranks: Ranks) -> dict[str, Any]:
    """The hashes of all tensors in this process's share of the files, which are compared with their records; or why not."""
    shards = [file for file in files if file.name is not None and file.name.endswith(".safetensors")]
    found: dict[str, str] = {}
    try:
        for file in shards[ranks.rank :: ranks.size]:
            found |= _hash_tensors(store, file)
    except (ChainError, ObjectMissing) as error:
        return {"why": str(error)}
    return {"hashes": found}


def _hash_tensors(store: Store, file: FileEntry) -> dict[str, str]:
    """The BLAKE3 of each tensor in a file. `DataDamaged` unless that of the whole file is what its record says."""
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
    for name, entry in header.entries.items():  # they follow each other without holes, up to the end of the file
        own = new_hash()
        for begin in range(entry.begin, entry.end, _WINDOW):
            piece = _read(store, file.key, header.data_start + begin, min(_WINDOW, entry.end - begin))
            whole.update(piece.data)
            own.update(piece.data)
        found[name] = own.hexdigest()
    if whole.hexdigest() != file.blake3:
        raise DataDamaged(f"{file.key} in {store.url} is damaged: its content does not have the hash of its record.")
    return found


def _table(places: dict[str, _Place]) -> TensorTable:
    ordered = sorted(places.items())
    return TensorTable(
        tuple(name for name, _ in ordered),
        tuple(place.entry.dtype for _, place in ordered),
        tuple(tuple(place.entry.shape) for _, place in ordered),
    )


def _read_tensor(store: Store, place: _Place) -> NDArray[Any]:
    flat = _read(store, place.key, place.offset, math.prod(place.entry.shape) * place.entry.dtype.itemsize)
    return flat.view(place.entry.dtype.numpy).reshape(place.entry.shape)


def _as_bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read(store: Store, key: str, offset: int, size: int) -> NDArray[np.uint8]:
    buffer = np.empty(size, np.uint8)
    if size:
        store.read_into(key, buffer.data, offset=offset)
    return buffer


def _runs(table: TensorTable, route: Route) -> list[range]:
    """All tensors in runs that no delta file of the route reaches beyond; what none is about, in runs of ordinary segments."""
    covered: list[range] = []
    for first, stop in sorted({(entry.first or 0, (entry.first or 0) + (entry.count or 0)) for files in route[1:] for entry in files}):
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
    """The runs of each rank, so that all have about as much to do: the largest first, to who has least."""
    plan: list[list[range]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    sizes = {run: sum(table.sizes[run.start : run.stop]) for run in runs}
    for run in sorted(runs, key=lambda run: (-sizes[run], run.start)):
        rank = load.index(min(load))
        plan[rank].append(run)
        load[rank] += sizes[run]
    return plan
