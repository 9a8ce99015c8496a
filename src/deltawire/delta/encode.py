"""From two states to a delta file."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..codec import join_pieces
from ..codec.base import Buffer, Codec, EncodedGroup, EncodeGroup
from ..dtypes import PAYLOAD_TYPES, PayloadType, payload_type
from ..errors import UnsupportedTensor
from ..format.checkpoints.staged_output import StagedOutput
from ..format.delta_file import Parts, Structure
from ..format.delta_files import grouped
from ..format.digest import Digest
from ..tensors.bits import State, TensorBits, UnwrittenTensor, keys_of, named_bits
from ..tensors.casting import Casting, Casts, WireDType, cast_on_host
from ..tensors.columns import Columns
from ..tensors.names import check_names
from ..tensors.state import Progress, codec_for, codec_on, digest_tensors, thread_count
from ..tensors.unwritten_state import PendingState, UnwrittenState
from .progress import reporting

_WORTH_THREAD = 1 << 15
"""A file with this many bytes of payloads, or more, is finished by another thread than the one that works with the GPU."""

_MOST_WRITERS = 4


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """The size of a delta and what changed. `before` and `after` are the digests of the two whole states, with all unchanged tensors."""

    bytes: int
    weight_bytes: int
    elements: int
    changed: int
    tensors_changed: int
    before: Digest
    after: Digest


def encode_delta(base: State, new: State, *, dtype: WireDType | None = None, threads: int | None = None) -> bytes:
    """Return the delta file that turns the state `base` into the state `new`, bit for bit.

    States map names to NumPy arrays (bf16 and fp8 as `ml_dtypes`) or torch tensors on the CPU or a GPU, of any shape and strides. The same
    states give the same bytes, on any device and with any number of threads. Beyond its inputs the call needs memory of about twice the
    size of the result, at most 64 MB for each thread if there are several, and on a GPU about 0.2 GB there, or 2% of the weights if that is
    more (docs/gpu.md).

    Raises a `TensorError` if a tensor cannot be encoded.

    Parameters
    ----------
    base
        The state that the delta is relative to.
    new
        The state that the delta leads to.
    dtype
        The type to which floating-point tensors of `new` (16 bits or more) are rounded first, such as an optimizer's float32 weights that
        are compared with a bfloat16 snapshot. A GPU rounds in the same pass, without a copy.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    return encode_with_summary(base, new, dtype=dtype, threads=threads)[0]


def encode_with_summary(
    base: State, new: State, *, dtype: WireDType | None = None, threads: int | None = None
) -> tuple[bytes, DeltaSummary]:
    """Like `encode_delta`, and also return what the pass over both states found: their digests, and how much changed."""
    pieces: list[Buffer] = []
    header, summary = _encode(base, new, thread_count(threads), pieces.append, None, Casting(dtype))
    return join_pieces([header, *pieces], thread_count(threads)), summary


def encode_many(states: Sequence[tuple[State, State]], *, threads: int | None = None) -> list[tuple[bytes, DeltaSummary]]:
    """Return what `encode_with_summary` returns for each pair of a base and a new state.

    A GPU encodes all of them at once, which takes little more time than one of them: it does not wait for the host in between. Threads make
    the first files while it still encodes.

    Parameters
    ----------
    states
        The pairs.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    count = thread_count(threads)
    works = [_work_on(base, new, None, count) for base, new in states]
    if not works or not all(work.codec.prefers_whole_state for work in works):
        return [_encoded_file(work, count) for work in works]
    with ThreadPoolExecutor(min(count, len(works), _MOST_WRITERS), "deltawire-encode") as pool:  # it starts threads when they are needed
        files = _Files(works, None if count < 2 else pool)
        works[0].codec.encode_groups([group for work in works for _, group in work.groups], count, files.add)
        for check in {check for work in works for check in work.checks}:
            check()
        return files.finish()


def write_delta(base: State, new: State, path: Path, *, threads: int | None = None, progress: Progress | None = None) -> DeltaSummary:
    """Like `encode_delta`, but write a file, which appears complete or not at all. The call holds the delta in memory once."""
    staged = StagedOutput(path, directory=False, replace=True)
    try:
        pieces: list[Buffer] = []
        header, summary = _encode(base, new, thread_count(threads), pieces.append, progress)
        with staged.path.open("xb") as out:
            out.writelines([header, *pieces])
            out.flush()
            os.fsync(out.fileno())
        staged.commit()
    finally:
        staged.discard()
    return summary


@dataclass(slots=True)
class _Pairs:
    """The tensors of the new state in the order of names, each with its predecessor in the base; None if it is added.

    These are two lists, not a list of pairs: Python's garbage collector would have to visit ten thousand pairs.
    """

    new: list[TensorBits] = field(default_factory=list)
    old: list[TensorBits | None] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[TensorBits, TensorBits | None]]:
        return zip(self.new, self.old, strict=True)


@dataclass(slots=True)
class _Work:
    """The work of encoding a delta. The digests and numbers are those of tensors that are in no group."""

    codec: Codec
    groups: list[tuple[int, EncodeGroup]]
    """The groups of the file, with their ids."""
    start: bytes
    """The body of the file up to the groups."""
    before: Digest
    after: Digest
    weight_bytes: int
    elements: int
    adds_tensors: bool = False
    checks: Collection[Callable[[], None]] = ()
    """The checks of all `UnwrittenTensor`s, or of a `PendingState`."""


def _encode(
    base: State, new: State, threads: int, write: Callable[[Buffer], object], progress: Progress | None, casting: Casting | None = None
) -> tuple[bytes, DeltaSummary]:
    """Pass everything after the header to `write`, piece by piece, and return the header, which belongs before it."""
    work = _work_on(base, new, casting, threads)
    with reporting(progress, work.weight_bytes):
        found = work.codec.encode_groups([group for _, group in work.groups], threads)
    for check in work.checks:
        check()
    return _write(work, found, threads, write)


class _Files:
    """Delta files, each of which is finished as soon as its groups are encoded.

    Parameters
    ----------
    works
        The work of all files. Their checks are left to the caller.
    pool
        Finishes large files; None if the calling thread does.
    """

    def __init__(self, works: Sequence[_Work], pool: Executor | None) -> None:
        self._works = works
        self._pool = pool
        self._positions = [(number, index) for number, work in enumerate(works) for index in range(len(work.groups))]
        self._encoded: list[dict[int, EncodedGroup]] = [{} for _ in works]
        self._finished: dict[int, Future[tuple[bytes, DeltaSummary]] | tuple[bytes, DeltaSummary]] = {}

    def add(self, number: int, group: EncodedGroup) -> None:
        """Take a group that is encoded, by its number among the groups of all files."""
        file, index = self._positions[number]
        encoded = self._encoded[file]
        encoded[index] = group
        if len(encoded) == len(self._works[file].groups):
            self._finish(file)

    def finish(self) -> list[tuple[bytes, DeltaSummary]]:
        """Return all files in order. All groups must have been added."""
        for file, work in enumerate(self._works):
            if not work.groups:
                self._finish(file)
        each = [self._finished[file] for file in range(len(self._works))]
        return [file.result() if isinstance(file, Future) else file for file in each]

    def _finish(self, file: int) -> None:
        groups = [group for _, group in sorted(self._encoded[file].items())]
        size = sum(len(piece) for group in groups for piece in group.pieces)
        if self._pool is None or size < _WORTH_THREAD:
            self._finished[file] = _finish(self._works[file], groups, 1)
        else:
            self._finished[file] = self._pool.submit(_finish, self._works[file], groups, 1)


def _encoded_file(work: _Work, threads: int) -> tuple[bytes, DeltaSummary]:
    """Encode a delta, and return its file."""
    found = work.codec.encode_groups([group for _, group in work.groups], threads)
    for check in work.checks:
        check()
    return _finish(work, found, threads)


def _finish(work: _Work, found: Sequence[EncodedGroup], threads: int) -> tuple[bytes, DeltaSummary]:
    """Return the file of groups that are encoded already."""
    pieces: list[Buffer] = []
    header, summary = _write(work, found, threads, pieces.append)
    return join_pieces([header, *pieces], threads), summary


def _write(work: _Work, found: Sequence[EncodedGroup], threads: int, write: Callable[[Buffer], object]) -> tuple[bytes, DeltaSummary]:
    """Do what `_encode` does, with groups that are encoded and checked already."""
    before, after = work.before, work.after
    body: list[Buffer] = [work.start]
    changed = tensors_changed = 0
    for (group, job), encoded in zip(work.groups, found, strict=True):
        before += Digest(encoded.before)
        after += Digest(encoded.after)
        changed += int(encoded.changed.sum())
        is_added = [base is None for base in job.bases] if work.adds_tensors else False
        tensors_changed += int(np.count_nonzero((encoded.changed > 0) | is_added))
        if encoded.pieces:
            body += [grouped.start_of_group(group, sum(map(len, encoded.pieces))), *encoded.pieces]
    header = grouped.header(before, after, body, threads=threads > 1)
    for piece in body:
        write(piece)
    size = len(header) + sum(map(len, body))
    return header, DeltaSummary(size, work.weight_bytes, work.elements, changed, tensors_changed, before, after)


def _work_on(base: State, new: State, casting: Casting | None, threads: int) -> _Work:
    is_cast = casting is not None and casting.is_given
    cast = cast_on_host(new, casting) if casting is not None and is_cast else None
    if cast is not None:
        new, is_cast = cast, False
    if not is_cast:
        work = _work_on_columns(base, new, threads)
        if work is not None:
            return work
    return _work_on_pairs(base, new, casting if is_cast else None, threads)


def _checks(new: State) -> Collection[Callable[[], None]]:
    return {tensor.check for tensor in new.values() if isinstance(tensor, UnwrittenTensor)}


def _columns_of(state: State) -> Columns | None:
    """Return the columns of a state, also of one on a GPU with tensors that are not written."""
    return state.unwritten if isinstance(state, UnwrittenState) else Columns.of(state)


def _work_on_columns(base: State, new: State, threads: int) -> _Work | None:
    """Return the work on two states of the same plain tensors; None for all others."""
    pending = new if isinstance(new, PendingState) else None
    old, now = _columns_of(base), _columns_of(new) if pending is None else pending.unwritten
    if old is None or now is None or not now.layout.is_like(old.layout):
        return None
    layout = now.layout
    sharing = now.sharing_addresses.tolist()
    aliases = _aliases(_Pairs([now[number] for number in sharing], [old[number] for number in sharing])) if sharing else {}
    codec = codec_on(now.bits.device or old.bits.device)
    if pending is not None and not codec.prepares:
        pending.finish()
        pending = None
    before = after = layout.tag
    members = [(kind, numbers, seeds) for (kind, numbers), seeds in zip(layout.groups, layout.seeds, strict=True)]
    groups: list[tuple[int, PayloadType, NDArray[np.int64], NDArray[np.uint64]]] = []
    if aliases:
        number_of = {layout.names[number]: number for number in sharing}
        tied = np.array([number_of[name] for name in aliases], np.int64)
        before += Digest.sum(codec.digest(old.take(tied), layout.keys.seeds[tied], threads))
        after += Digest.sum(codec.digest(now.take(tied), layout.keys.seeds[tied], threads))
        targets = [number_of[name] for name in sorted(set(aliases.values()))]
        apart = np.union1d(tied, targets)
        rests = [(kind, np.setdiff1d(numbers, apart)) for kind, numbers in layout.groups]
        members = [(kind, rest, layout.keys.seeds[rest]) for kind, rest in rests if rest.size]
        for index, number in enumerate(targets, 1):
            kind = payload_type(layout.names[number], layout.dtypes[number])
            groups.append((grouped.group_id(kind.code, index), kind, np.array([number], np.int64), layout.keys.seeds[[number]]))
    groups = [*((grouped.group_id(kind.code), kind, numbers, seeds) for kind, numbers, seeds in members), *groups]
    preparation = None if pending is None else pending.preparation
    jobs = [(group, EncodeGroup(kind, old.take(numbers), now.take(numbers), seeds, preparation)) for group, kind, numbers, seeds in groups]
    start = grouped.start_of_body(len(now), Structure(aliases=aliases), None, (), {})
    checks = [state.check for state in (base, new) if isinstance(state, UnwrittenState) or state is pending]
    return _Work(codec, jobs, start, before, after, layout.weight_bytes, layout.elements, checks=checks)


def _work_on_pairs(base: State, new: State, casting: Casting | None, threads: int) -> _Work:
    """Return the work on any two states."""
    pairs, removed = _pairs(base, new, casting)
    codec = codec_for(itertools.chain(removed, pairs.new, filter(None, pairs.old)))
    parts = _parts(pairs, removed)
    aliases = _aliases(pairs)
    keys = keys_of(pairs.new)
    groups = _groups(pairs, aliases)
    before = digest_tensors(removed, threads, codec) + keys.tag([old is not None for old in pairs.old])
    after = keys.tag()
    elements = 0
    for number in [number for number, tensor in enumerate(pairs.new) if tensor.name in aliases] if aliases else []:
        seed, was, now = keys.seeds[[number]], pairs.old[number], pairs.new[number]
        if was is not None:
            before += Digest.sum(codec.digest([was.bits], seed, threads))
        after += Digest.sum(codec.digest([now.bits], seed, threads))
        elements += now.size * payload_type(now.name, now.dtype).per_element
    elements += sum(pairs.new[number].size * kind.per_element for _, kind, members in groups for number in members)
    added = {now.name: (now.dtype, now.shape) for now, old in pairs if old is None}
    structure = Structure(added, tuple(tensor.name for tensor in removed), aliases)
    names = [tensor.name for tensor in pairs.new] if parts is not None else []
    dtypes = {tensor.name: tensor.dtype for tensor in pairs.new} if parts is not None else {}
    start = grouped.start_of_body(len(pairs.new), structure, parts, names, dtypes)
    jobs = [(group, _encode_group(kind, members, pairs, keys.seeds)) for group, kind, members in groups]
    checks = [*_checks(base), *_checks(new)]
    return _Work(codec, jobs, start, before, after, sum(tensor.nbytes for tensor in pairs.new), elements, bool(added), checks)


def _groups(pairs: _Pairs, aliases: Mapping[str, str]) -> list[tuple[int, PayloadType, list[int]]]:
    """Return the groups of a delta in the order of the file: id, payload type and the numbers of their tensors."""
    targets = sorted(set(aliases.values()))
    apart = set(targets)
    by_type: dict[int, list[int]] = {}
    by_target: dict[str, tuple[PayloadType, int]] = {}
    for number, tensor in enumerate(pairs.new):
        if tensor.name in aliases:
            continue
        kind = payload_type(tensor.name, tensor.dtype)
        if tensor.name in apart:
            by_target[tensor.name] = kind, number
        else:
            by_type.setdefault(kind.code, []).append(number)
    groups = [(grouped.group_id(code), PAYLOAD_TYPES[code], by_type[code]) for code in sorted(by_type)]
    for index, name in enumerate(targets, 1):
        kind, number = by_target[name]
        groups.append((grouped.group_id(kind.code, index), kind, [number]))
    return groups


def _encode_group(kind: PayloadType, members: Sequence[int], pairs: _Pairs, seeds: NDArray[np.uint64]) -> EncodeGroup:
    olds = [pairs.old[number] for number in members]
    return EncodeGroup(kind, [old.bits if old else None for old in olds], [pairs.new[number].bits for number in members], seeds[members])


def _pairs(base: State, new: State, casting: Casting | None) -> tuple[_Pairs, list[TensorBits]]:
    """Return the pairs to encode, and the tensors of the base that are removed."""
    for state in (base, new):
        check_names(state)
    pairs, casts = _Pairs(), Casts()
    removed: list[TensorBits] = []
    for name in sorted({*base, *new}):
        old = named_bits(name, base[name]) if name in base else None
        now = named_bits(name, new[name]) if name in new else None
        if now is not None and casting is not None:
            now = casts.cast(now, casting.dtype_of(now, new[name]), old)
        if old is not None and (now is None or not now.can_follow(old)):
            removed.append(old)
            old = None
        if now is not None:
            pairs.new.append(now)
            pairs.old.append(old)
    return pairs, removed


def _parts(pairs: _Pairs, removed: Sequence[TensorBits]) -> Parts | None:
    """Return the ranges that a delta between states of parts covers; None if the states consist of whole tensors."""
    tensors = [*pairs.new, *removed]
    if all(tensor.whole is None for tensor in tensors):
        return None
    changes_structure = bool(removed) or None in pairs.old
    for tensor in tensors:
        if tensor.whole is None or changes_structure:
            raise UnsupportedTensor(f"tensor {tensor.name!r}: a state of parts must have the same parts as its base, and no whole tensors.")
    return {tensor.name: (tensor.start, tensor.start + tensor.size) for tensor in tensors if tensor.size}


def _aliases(pairs: _Pairs) -> dict[str, str]:
    """Return the tensors that share their memory with an earlier one, in the base as well as in the new state."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    tensors_at = Counter(tensor.address for tensor in pairs.new)
    for now, old in pairs:
        if old is None or tensors_at[now.address] == 1 or not now.size:
            continue
        target = first.setdefault((old.memory, now.memory), now.name)
        if target != now.name:
            aliases[now.name] = target
    return aliases
