"""From two states to a delta file."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..codec.base import Buffer, EncodeGroup, EncodeJob, GroupCodec
from ..dtypes import PAYLOAD_TYPES, PayloadType, payload_type
from ..errors import UnsupportedTensor
from ..format.checkpoints.staged_output import StagedOutput
from ..format.content_hash import new_hash
from ..format.delta_file import Parts, Structure
from ..format.delta_files import grouped, named
from ..format.digest import Digest
from ..tensors.bits import State, TensorBits, keys_of, named_bits
from ..tensors.casting import Casting, Casts, WireDType
from ..tensors.names import check_names
from ..tensors.state import Progress, batches, codec_for, digest_tensors, thread_count

WRITES_GROUPS = bool(os.environ.get("DELTAWIRE_WRITES_GROUPS"))
"""Whether deltas of version 3 are written. It is set when all codecs can write them."""


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
    size of the result, and on a GPU about 0.2 GB there, or 2% of the weights if that is more (docs/gpu.md).

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
    return b"".join([header, *pieces]), summary


def write_delta(base: State, new: State, path: Path, *, threads: int | None = None, progress: Progress | None = None) -> DeltaSummary:
    """Like `encode_delta`, but write a file, which appears complete or not at all. Memory does not grow with the states."""
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


def _encode(
    base: State, new: State, threads: int, write: Callable[[Buffer], object], progress: Progress | None, casting: Casting | None = None
) -> tuple[bytes, DeltaSummary]:
    """Pass everything after the header to `write`, piece by piece, and return the header, which belongs before it."""
    if WRITES_GROUPS:
        return _encode_groups(base, new, threads, write, progress, casting)
    pairs, removed = _pairs(base, new, casting if casting is not None and casting.is_given else None)
    codec = codec_for(itertools.chain(removed, pairs.new, filter(None, pairs.old)))
    parts = _parts(pairs, removed)
    before = digest_tensors(removed, threads, codec)
    after = Digest()
    aliases = _aliases(pairs)

    hasher = new_hash(threads=threads > 1)
    sizes: list[tuple[str, int]] = []
    changed = 0
    for batch in batches(range(len(pairs.new)), lambda number: pairs.new[number].nbytes, codec):
        own = [number for number in batch if pairs.new[number].name not in aliases] if aliases else batch
        news, olds = [pairs.new[number] for number in own], [pairs.old[number] for number in own]
        keys = keys_of(news)
        sides = zip(olds, news, keys.seeds.tolist(), strict=True)
        found = codec.encode([EncodeJob(old.bits if old else None, now.bits, now.dtype, seed) for old, now, seed in sides], threads)
        stays = np.array([old is not None for old in olds], np.bool_)
        before += keys.digest(found.before[stays], stays)
        after += keys.digest(found.after)
        changed += int(found.changed.sum())
        sizes += [(tensor.name, size) for tensor, size in zip(news, found.sizes.tolist(), strict=True) if size]
        for piece in found.pieces:
            hasher.update(piece)
            write(piece)
        tied = [number for number in batch if pairs.new[number].name in aliases] if aliases else []
        before += digest_tensors([old for old in (pairs.old[number] for number in tied) if old], threads, codec)
        after += digest_tensors([pairs.new[number] for number in tied], threads, codec)
        if progress:
            progress(sum(pairs.new[number].nbytes for number in batch))

    changing = {name for name, _ in sizes}
    structure = Structure(
        {now.name: (now.dtype, now.shape) for now, old in pairs if old is None},
        tuple(tensor.name for tensor in removed),
        {name: target for name, target in aliases.items() if target in changing},
    )
    header = named.build_header(before, after, hasher.hexdigest(), sizes, structure, parts)
    size = len(header) + sum(size for _, size in sizes)
    weight_bytes, elements = sum(tensor.nbytes for tensor in pairs.new), sum(tensor.size for tensor in pairs.new)
    return header, DeltaSummary(size, weight_bytes, elements, changed, len(sizes), before, after)


def _encode_groups(
    base: State, new: State, threads: int, write: Callable[[Buffer], object], progress: Progress | None, casting: Casting | None = None
) -> tuple[bytes, DeltaSummary]:
    pairs, removed = _pairs(base, new, casting if casting is not None and casting.is_given else None)
    codec = cast("GroupCodec", codec_for(itertools.chain(removed, pairs.new, filter(None, pairs.old))))
    parts = _parts(pairs, removed)
    aliases = _aliases(pairs)
    keys = keys_of(pairs.new)
    groups = _groups(pairs, aliases)
    found = codec.encode_groups([_encode_group(kind, members, pairs, keys.seeds) for _, kind, members in groups], threads)
    tied = [number for number, tensor in enumerate(pairs.new) if tensor.name in aliases] if aliases else []
    before = digest_tensors(removed, threads, codec) + keys.tag([old is not None for old in pairs.old])
    after = keys.tag()
    for number in tied:
        seed = int(keys.seeds[number])
        was, now = pairs.old[number], pairs.new[number]
        before += Digest.sum(codec.digest([(was.bits, seed)] if was else [], threads))
        after += Digest.sum(codec.digest([(now.bits, seed)], threads))
    for encoded in found:
        before += Digest(encoded.before)
        after += Digest(encoded.after)

    added = {now.name: (now.dtype, now.shape) for now, old in pairs if old is None}
    structure = Structure(added, tuple(tensor.name for tensor in removed), aliases)
    names = [tensor.name for tensor in pairs.new]
    dtypes = {tensor.name: tensor.dtype for tensor in pairs.new} if parts else {}
    body: list[Buffer] = [grouped.start_of_body(len(pairs.new), structure, parts, names, dtypes)]
    for (group, _, _), encoded in zip(groups, found, strict=True):
        if encoded.pieces:
            body += [grouped.start_of_group(group, sum(map(len, encoded.pieces))), *encoded.pieces]
    header = grouped.header(before, after, body, threads=threads > 1)
    for piece in body:
        write(piece)
    if progress:
        progress(sum(tensor.nbytes for tensor in pairs.new))
    changed = np.concatenate([np.zeros(0, np.int64), *(encoded.changed for encoded in found)])
    is_added = np.array([pairs.old[number] is None for _, _, members in groups for number in members], np.bool_)
    return header, DeltaSummary(
        len(header) + sum(map(len, body)),
        sum(tensor.nbytes for tensor in pairs.new),
        sum(pairs.new[number].size * kind.per_element for _, kind, members in groups for number in members)
        + sum(pairs.new[number].size for number in tied),
        int(changed.sum()),
        int(np.count_nonzero((changed > 0) | is_added)),
        before,
        after,
    )


def _groups(pairs: _Pairs, aliases: Mapping[str, str]) -> list[tuple[int, PayloadType, list[int]]]:
    """Return the groups of a delta in the order of the file: id, payload type and the numbers of their tensors."""
    targets = sorted(set(aliases.values()))
    by_type: dict[int, list[int]] = {}
    by_target: dict[str, tuple[PayloadType, int]] = {}
    for number, tensor in enumerate(pairs.new):
        if tensor.name in aliases:
            continue
        kind = payload_type(tensor.name, tensor.dtype)
        if tensor.name in targets:
            by_target[tensor.name] = kind, number
        else:
            by_type.setdefault(kind.code, []).append(number)
    apart = [by_target[name] for name in targets]
    groups = [(grouped.group_id(code), PAYLOAD_TYPES[code], by_type[code]) for code in sorted(by_type)]
    return groups + [(grouped.group_id(kind.code, index), kind, [number]) for index, (kind, number) in enumerate(apart, 1)]


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
