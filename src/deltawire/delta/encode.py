"""From two states to a delta file."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..codec.base import Buffer, EncodeJob
from ..errors import UnsupportedTensor
from ..format import delta_file
from ..format.checkpoints.staged_output import StagedOutput
from ..format.content_hash import new_hash
from ..format.delta_file import Parts, Structure
from ..format.digest import Digest
from ..tensors.bits import State, TensorBits, keys_of, named_bits
from ..tensors.casting import Casting, Casts, WireDType
from ..tensors.names import check_names
from ..tensors.state import Progress, batches, codec_for, digest_tensors, thread_count


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
        # The header comes first in the file but is known last, so the payloads go to a file without a name first.
        with tempfile.TemporaryFile(dir=staged.path.parent) as payloads, staged.path.open("xb") as out:
            header, summary = _encode(base, new, thread_count(threads), payloads.write, progress)
            out.write(header)
            payloads.seek(0)
            shutil.copyfileobj(payloads, out, 1 << 20)
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
    """Pass the data section to `write`, piece by piece, and return the header, which belongs before it."""
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
    header = delta_file.build_header(before, after, hasher.hexdigest(), sizes, structure, parts)
    size = len(header) + sum(size for _, size in sizes)
    weight_bytes, elements = sum(tensor.nbytes for tensor in pairs.new), sum(tensor.size for tensor in pairs.new)
    return header, DeltaSummary(size, weight_bytes, elements, changed, len(sizes), before, after)


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
