"""Says what one version changes: its files from their own bytes, and its tensors by comparing it with the version before it.

Files are always checked against their commit first, so a damaged version is found here. Tensors are compared only if the model is small
enough, because that needs both versions in memory. Otherwise the files alone tell how many weights changed in each run of tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chain.fetch import Fetcher
from ..chain.log import ChainLog
from ..chain.reader_options import ReaderOptions
from ..chain.routes.remaining_routes import Routes
from ..delta.inspect import PayloadFacts, inspect_delta
from ..dtypes import PayloadType, dtype_of_numpy, payload_type
from ..errors import DeltawireError, StoreError
from ..format.records.record_parts import FileEntry
from ..format.records.version_records import Commit
from ..store.base import Store
from ..subscribe.subscriber import Subscriber
from .plain_values import short

MOST_BYTES = 256 << 20
"""Files and weights of more bytes than this are not read, unless the caller allows more."""
MOST_TENSORS = 4096
"""The most tensors, and the most files, that are listed."""
_MOST_META = 32
_BINS = 16
"""Steps are counted by their powers of two; the last bin has all larger ones."""
_STRIP = 96
_SLICE = 1 << 20


class VersionDetails:
    """Reads the details of versions, one at a time.

    Parameters
    ----------
    store
        The store. The caller closes it.
    options
        How the chain is read.
    most_bytes
        The most bytes of files, and of weights, that are read for one version.
    """

    def __init__(self, store: Store, options: ReaderOptions, *, most_bytes: int = MOST_BYTES) -> None:
        self._store = store
        self._options = dataclasses.replace(options, pin=False, patience=0.0, host_cache=None, ahead_bytes=0)
        self._most = most_bytes

    def read(self, log: ChainLog, commit: Commit, *, collected: bool) -> dict[str, Any]:
        """Return the details as plain values. `problem` says what is wrong with the version's files, if anything is.

        Raises errors of the store.

        Parameters
        ----------
        log
            The chain.
        commit
            The version's commit.
        collected
            Whether the version's files may have been collected.
        """
        found: dict[str, Any] = {**_facts(commit), "problem": None, "note": None, "segments": [], "tensors_changed": None}
        if commit.kind != "delta":
            return found
        try:
            found["segments"] = self._segments(log, commit)
        except _TooLarge as error:
            return found | {"note": str(error)}
        except StoreError:
            raise
        except DeltawireError as error:
            return found | {"note" if collected else "problem": short(str(error), 400)}
        try:
            found["tensors_changed"] = self._tensors(log, commit)
        except _TooLarge as error:
            found["note"] = str(error)
        except StoreError:
            raise
        except DeltawireError as error:
            found["note"] = short(f"tensors are not compared, because another version that this needs cannot be read: {error}", 400)
        return found

    def _segments(self, log: ChainLog, commit: Commit) -> list[dict[str, Any]]:
        if commit.stored_bytes > self._most:
            raise _TooLarge(f"its files have {commit.stored_bytes:,} bytes, so they are not read here.")
        fetcher = Fetcher(self._store, limits=log.limits, patience=0)
        files = log.files_of(commit, fetcher=fetcher)
        return [self._segment(fetcher, entry) for entry in files[:MOST_TENSORS]]

    def _segment(self, fetcher: Fetcher, entry: FileEntry) -> dict[str, Any]:
        facts = inspect_delta(fetcher.fetch(entry))
        return {
            "first": entry.first,
            "count": entry.count,
            "bytes": entry.size,
            "payloads": [_plain_payload(payload) for payload in facts.payloads[:64]],
        }

    def _tensors(self, log: ChainLog, commit: Commit) -> list[dict[str, Any]] | None:
        """Return the tensors that changed, in the order of their names. Every weight of both versions is checked by its digest."""
        assert commit.base is not None
        if commit.state_bytes > self._most // 2:
            raise _TooLarge(f"its weights have {commit.state_bytes:,} bytes, so tensors are not compared here.")
        base = log.state_commit(log.ancestor(commit, commit.base.seq))
        need = sum(entry.size for hop in Routes(log).find(None, base) for entry in hop.files)
        if need > self._most:
            raise _TooLarge(f"the version before it takes {need:,} bytes to read, so tensors are not compared here.")
        with Subscriber(self._store, options=self._options, threads=1, undo_bytes=0) as subscriber:
            subscriber.sync(seq=base.seq)
            before = {name: array.copy() for name, array in subscriber.state.items()}
            subscriber.sync(seq=commit.seq)
            return compare(before, subscriber.state)


class _TooLarge(Exception):
    pass


def compare(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """Return how many elements of each tensor differ, and by how many steps, as powers of two. Tensors of one name have one type.

    Parameters
    ----------
    before, after
        The weights of two versions.
    """
    found = []
    for name in sorted(after)[:MOST_TENSORS]:
        array = after[name]
        kind = payload_type(name, dtype_of_numpy(array.dtype))
        old, new = (one.reshape(-1).view(kind.dtype.bits) for one in (before[name], array))
        steps = np.zeros(_BINS, np.int64)
        for start in range(0, old.size, _SLICE):
            steps += _steps(old[start : start + _SLICE], new[start : start + _SLICE], kind)
        found.append(
            {
                "name": short(name, 200),
                "dtype": kind.name,
                "elements": int(old.size) * kind.per_element,
                "changed": int(steps.sum()),
                "steps": _without_zeros(steps.tolist()),
            }
        )
    return found


def _steps(old: NDArray[Any], new: NDArray[Any], kind: PayloadType) -> NDArray[np.int64]:
    """Count the elements that differ, by the power of two of their distance in representable values."""
    differ = np.flatnonzero(old != new)
    ranks = [_ranks(_unpacked(one[differ], kind), kind) for one in (old, new)]
    distance = np.abs(ranks[0] - ranks[1])
    distance = np.maximum(distance[_unpacked(old[differ], kind) != _unpacked(new[differ], kind)], 1.0)  # +0 and −0 have the same rank
    powers = np.minimum(np.frexp(distance)[1] - 1, _BINS - 1)
    return np.bincount(powers, minlength=_BINS).astype(np.int64)


def _unpacked(bits: NDArray[Any], kind: PayloadType) -> NDArray[np.uint64]:
    wide = bits.astype(np.uint64)
    if not kind.is_packed:
        return wide
    shifts = np.arange(kind.per_element, dtype=np.uint64) * np.uint64(kind.width)
    return np.asarray((wide[:, None] >> shifts) & np.uint64((1 << kind.width) - 1)).reshape(-1)


def _ranks(bits: NDArray[np.uint64], kind: PayloadType) -> NDArray[np.float64]:
    """Return the positions of elements among all values of their type. A float has its sign in the highest bit."""
    if not kind.exponent_bits:
        return bits.astype(np.float64)
    magnitude = (bits & np.uint64((1 << (kind.width - 1)) - 1)).astype(np.float64)
    return np.where(bits >> np.uint64(kind.width - 1) == 1, -magnitude, magnitude)


def _plain_payload(payload: PayloadFacts) -> dict[str, Any]:
    return {
        "label": short(payload.label, 120),
        "elements": payload.elements,
        "changed": payload.changed,
        "bytes": payload.bytes,
        "steps": list(payload.steps[:_BINS]),
        "strip": _strip(payload.density),
    }


def _strip(density: Sequence[tuple[int, int]]) -> list[float]:
    """Return the share of changed elements in at most 96 parts of a payload, from its first element to its last."""
    if not density:
        return []
    elements, changed = np.array(density, np.int64).T
    cuts = np.arange(min(_STRIP, len(elements))) * len(elements) // min(_STRIP, len(elements))
    totals, changes = np.add.reduceat(elements, cuts), np.add.reduceat(changed, cuts)
    return [round(float(share), 5) for share in changes / np.maximum(totals, 1)]


def _without_zeros(counts: list[int]) -> list[int]:
    last = max((index for index, count in enumerate(counts) if count), default=-1)
    return counts[: last + 1]


def _facts(commit: Commit) -> dict[str, Any]:
    meta = sorted(commit.meta.items())[:_MOST_META]
    return {
        "seq": commit.seq,
        "version": commit.updates,
        "kind": commit.kind,
        "step": commit.step,
        "epoch": commit.epoch,
        "time": commit.time / 1000,
        "base": None if commit.base is None else commit.base.seq,
        "digest": None if commit.digest is None else commit.digest.hex(),
        "bytes": commit.stored_bytes,
        "state_bytes": commit.state_bytes,
        "tensors": commit.tensors,
        "changed": commit.changed,
        "files": commit.file_count,
        "recipe": None if commit.recipe is None else short(str(commit.recipe), 120),
        "signed_by": None if commit.signature is None else commit.signature.key,
        "meta": [[short(name, 60), short(value, 200)] for name, value in meta],
        "attachments": [short(str(entry.name), 120) for entry in (commit.attachments or ())[:_MOST_META]],
    }
