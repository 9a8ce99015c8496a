"""The state digest, which tells whether two states are equal bit for bit (docs/format.md §2)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ..codec.base import Lanes, Sums
from ..dtypes import DType

_CONTEXT = "deltawire 2026 tensor digest v1"
_GOLDEN = 0x9E3779B97F4A7C15
_KEY = np.dtype([("tag", "<u4", 4), ("seed", "<u8")])

_LONGEST_KEPT = 256
"""Keys are kept for names of at most this many characters. A delta names the tensors that it adds, and very long names would fill the
memory.
"""

PART_ALIGNMENT = 512
"""Parts of tensors begin at multiples of this many bytes: 256 words, which share one M of docs/format.md §2."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A 128-bit check of named tensors that adds up: the digests of disjoint parts of a state sum to the digest of the whole.

    It always notices a single wrong 16-bit word, and misses other accidents with a chance of about 2^-60. It does not protect against
    attackers, who can make two states with the same digest.

    Parameters
    ----------
    lanes
        The four sums, each below 2^32.
    """

    lanes: Lanes = (0, 0, 0, 0)

    def __add__(self, other: Digest) -> Digest:
        a, b = self.lanes, other.lanes
        return Digest(((a[0] + b[0]) % 2**32, (a[1] + b[1]) % 2**32, (a[2] + b[2]) % 2**32, (a[3] + b[3]) % 2**32))

    def __sub__(self, other: Digest) -> Digest:
        a, b = self.lanes, other.lanes
        return Digest(((a[0] - b[0]) % 2**32, (a[1] - b[1]) % 2**32, (a[2] - b[2]) % 2**32, (a[3] - b[3]) % 2**32))

    def hex(self) -> str:
        """Return it as 32 hexadecimal digits, as files carry it."""
        return b"".join(lane.to_bytes(4, "little") for lane in self.lanes).hex()

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """Return the digest that `hex` wrote.

        Parameters
        ----------
        text
            32 lower-case hexadecimal digits. Anything else raises ValueError.
        """
        raw = bytes.fromhex(text)
        if len(raw) != 16 or raw.hex() != text:
            raise ValueError(f"not a digest: {text!r}")
        return cls(struct.unpack("<4I", raw))

    @classmethod
    def sum(cls, rows: Sums) -> Digest:
        """Return the sum of several digests.

        Parameters
        ----------
        rows
            The digests, one in each row of an array with four columns.
        """
        a, b, c, d = rows.sum(axis=0, dtype=np.uint32).tolist()
        return cls((a, b, c, d))

    def __str__(self) -> str:
        return self.hex()


@dataclass(frozen=True, slots=True)
class TensorKeys:
    """The contribution of names, types and shapes to a digest, in columns: constants, and the seeds of the coefficients."""

    tags: Sums
    seeds: NDArray[np.uint64]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, DType, Sequence[int]]]) -> TensorKeys:
        """Return the keys of tensors with these names, types and shapes."""
        each = ((_key if len(name) <= _LONGEST_KEPT else _key.__wrapped__, name, dtype, shape) for name, dtype, shape in tensors)
        raw = np.frombuffer(b"".join([key(name, dtype.name, tuple(shape)) for key, name, dtype, shape in each]), _KEY)
        return cls(raw["tag"].astype(np.uint32), raw["seed"].astype(np.uint64))

    def followed_by(self, others: TensorKeys) -> TensorKeys:
        return TensorKeys(np.concatenate([self.tags, others.tags]), np.concatenate([self.seeds, others.seeds]))

    def of_parts(self, starts: Sequence[int | None]) -> TensorKeys:
        """Return the keys of parts of the tensors. `starts` are byte positions, multiples of `PART_ALIGNMENT`; None means a whole tensor.

        Parts have no tag, and their words have the same coefficients as in the whole. So the digests of all parts add up to that of the
        whole, except for its tag.
        """
        blocks = np.array([(start or 0) // PART_ALIGNMENT for start in starts], np.uint64)
        is_whole = np.array([start is None for start in starts], np.uint32)
        return TensorKeys(self.tags * is_whole[:, None], self.seeds + np.uint64(2 * _GOLDEN % 2**64) * blocks)

    def digest(self, word_sums: Sums, which: Any = slice(None)) -> Digest:
        """Return the digest of all these tensors, or of those in `which`, if their words sum up to `word_sums`."""
        return self.tag(which) + Digest.sum(word_sums)

    def tag(self, which: Any = slice(None)) -> Digest:
        """Return the contribution of the tensors that does not depend on their elements."""
        return Digest.sum(self.tags[which])


@functools.lru_cache(maxsize=1 << 16)  # successive states have the same tensors
def _key(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    identity = f"{dtype}\0{','.join(map(str, shape))}\0{name}".encode()
    return blake3(identity, derive_key_context=_CONTEXT).digest(_KEY.itemsize)
