"""The state digest: what two states must share to be the same, bit for bit (docs/format.md §2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from ..codec.base import Lanes
from ..dtypes import DType

_CONTEXT = "deltawire 2026 tensor digest v1"
_GOLDEN = 0x9E3779B97F4A7C15

PART_ALIGNMENT = 512
"""Parts of tensors begin at multiples of so many bytes: 256 words, which share one M of docs/format.md §2."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A linear, order-free 128-bit check of named tensors: digests of disjoint parts of a state add up to the digest of the whole.

    Any single wrong 16-bit word is always noticed, anything else but for one chance in about 2^60. It is no signature:
    whoever wants to can make two states of the same digest.
    """

    lanes: Lanes = (0, 0, 0, 0)

    def __add__(self, other: Digest) -> Digest:
        a, b = self.lanes, other.lanes
        return Digest(((a[0] + b[0]) % 2**32, (a[1] + b[1]) % 2**32, (a[2] + b[2]) % 2**32, (a[3] + b[3]) % 2**32))

    def __sub__(self, other: Digest) -> Digest:
        a, b = self.lanes, other.lanes
        return Digest(((a[0] - b[0]) % 2**32, (a[1] - b[1]) % 2**32, (a[2] - b[2]) % 2**32, (a[3] - b[3]) % 2**32))

    def hex(self) -> str:
        """32 hexadecimal digits, as files carry it."""
        return b"".join(lane.to_bytes(4, "little") for lane in self.lanes).hex()

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """The inverse of `hex`; ValueError for anything that `hex` does not write."""
        raw = bytes.fromhex(text)
        if len(raw) != 16 or raw.hex() != text:
            raise ValueError(f"not a digest: {text!r}")
        return cls(_lanes(raw))

    def __str__(self) -> str:
        return self.hex()


@dataclass(frozen=True, slots=True)
class TensorKey:
    """What a tensor's name, type and shape contribute: a constant, and the seed of its coefficients."""

    tag: Digest
    seed: int

    @classmethod
    def of(cls, name: str, dtype: DType, shape: Sequence[int]) -> TensorKey:
        identity = f"{dtype.name}\0{','.join(map(str, shape))}\0{name}".encode()
        raw = blake3(identity, derive_key_context=_CONTEXT).digest(24)
        return cls(Digest(_lanes(raw[:16])), int.from_bytes(raw[16:], "little"))

    def part(self, start: int) -> TensorKey:
        """The key of a part that begins `start` bytes into the tensor, a multiple of `PART_ALIGNMENT`.

        It has no tag, and the coefficients that the same words have in the whole: the digests of all parts add up to it, but for its tag.
        """
        return TensorKey(Digest(), (self.seed + 2 * _GOLDEN * (start // PART_ALIGNMENT)) % 2**64)

    def digest(self, word_sums: Lanes) -> Digest:
        """The digest of the tensor whose words sum up to `word_sums` under this seed."""
        return self.tag + Digest(word_sums)


def _lanes(raw: bytes) -> Lanes:
    a, b, c, d = (int.from_bytes(raw[i : i + 4], "little") for i in (0, 4, 8, 12))
    return a, b, c, d
