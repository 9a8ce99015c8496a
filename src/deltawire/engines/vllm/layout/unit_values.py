"""Values for the units of raw parameters: neutral, random, or digits that encode positions.

A storage is looked at as *words*: signed integers of the width of its units, or bytes for 4-bit units. Values are made in pieces, so that
they need little memory in addition to the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

PIECE = 1 << 22
"""The number of words that are handled in one operation."""

_E8M0 = getattr(torch, "float8_e8m0fnu", None)


@dataclass(frozen=True, slots=True)
class Fill:
    """Values for all words of a parameter's storage.

    Parameters
    ----------
    count
        The number of words.
    make
        Returns the words of a range. A range begins at a multiple of `PIECE`, and has at most so many words.
    """

    count: int
    make: Callable[[int, int], torch.Tensor]

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all ranges, with their words."""
        for start in range(0, self.count, PIECE):
            end = min(self.count, start + PIECE)
            yield slice(start, end), self.make(start, end)

    def write(self, words: torch.Tensor) -> None:
        """Write the values to a storage."""
        for position, values in self.pieces():
            words[position] = values

    def equals(self, words: torch.Tensor) -> bool:
        """Return whether a storage has exactly these values."""
        return words.numel() == self.count and all(torch.equal(words[position], values) for position, values in self.pieces())

    def whole(self) -> torch.Tensor:
        """Return all values."""
        return torch.cat([values for _, values in self.pieces()])


def constant_fill(count: int, bits: int, value: int, device: torch.device) -> Fill:
    """Return a fill with one value in all units.

    Parameters
    ----------
    count
        The number of words.
    bits
        The width of a unit.
    value
        The value of a unit.
    device
        The device of the values.
    """
    word = _signed(value * 17, 8) if bits == 4 else _signed(value, bits)
    kind = word_type(bits)
    return Fill(count, lambda start, end: torch.full((end - start,), word, dtype=kind, device=device))


def digit_fill(count: int, bits: int, number: int, digit_bits: int, offset: int, device: torch.device) -> Fill:
    """Return a fill with one digit of the position of each unit. Positions count from 1, so each has a digit that is not 0.

    Parameters
    ----------
    count
        The number of words.
    bits
        The width of a unit.
    number
        The number of the digit.
    digit_bits
        The number of bits of a digit.
    offset
        The value for the digit 0.
    device
        The device of the values.
    """
    kind, per_word = word_type(bits), 2 if bits == 4 else 1

    def make(start: int, end: int) -> torch.Tensor:
        digits = torch.arange(start * per_word + 1, end * per_word + 1, device=device) >> (digit_bits * number)
        digits &= (1 << digit_bits) - 1
        if bits == 4:
            return (digits[::2] | (digits[1::2] << 4)).to(torch.uint8).view(kind)
        return (digits + offset).to(kind)

    return Fill(count, make)


def random_fill(count: int, bits: int, dtype: torch.dtype, seed: int, device: torch.device, *, is_scale: bool, is_mild: bool) -> Fill:
    """Return a fill with random bits that are finite numbers.

    Parameters
    ----------
    count
        The number of words.
    bits
        The width of a unit.
    dtype
        The type of the parameter.
    seed
        A seed. The same one gives the same values.
    device
        The device of the values.
    is_scale
        True if the values must be positive, and neither huge nor tiny.
    is_mild
        True for scales that are small powers of two.
    """
    kind = word_type(bits)

    def make(start: int, end: int) -> torch.Tensor:
        generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + start // PIECE)
        if is_mild and is_scale and dtype.is_floating_point:
            powers = torch.randint(-3, 4, (end - start,), generator=generator, device=device)
            return _power_of_two(powers, dtype).view(kind)
        size = torch.empty(0, dtype=kind).element_size()
        random = torch.randint(0, 256, ((end - start) * size,), generator=generator, device=device, dtype=torch.uint8)
        if dtype.is_floating_point or is_scale:
            _make_finite(random.view(-1, size)[:, -1], size, is_scale=is_scale)
        return random.view(kind)

    return Fill(count, make)


def _make_finite(highest: torch.Tensor, size: int, *, is_scale: bool) -> None:
    """Change the highest bytes of numbers so that these are finite."""
    if size == 1 and is_scale:  # for e4m3 and for e8m0
        highest.bitwise_and_(0x3F).add_(0x3A)
    elif size == 1:  # neither NaN nor zero
        highest.copy_((highest & 0x80) | (highest & 0x7F).clamp(1, 0x7A))
    elif is_scale:
        highest.bitwise_and_(0x0B).bitwise_or_(0x30)
    else:
        highest.bitwise_and_(0xBF)


def neutral_value(dtype: torch.dtype) -> int:
    """Return the bits of the number 1; of 0 for integers."""
    if not dtype.is_floating_point:
        return 0
    one = _power_of_two(torch.zeros(1, dtype=torch.int64), dtype)
    return int(one.view(word_type(8 * one.element_size())))


def digits_of(dtype: torch.dtype, bits: int) -> tuple[int, int]:
    """Return the number of bits of a position that one value can carry, and the value for 0. All values are positive finite numbers."""
    if bits == 4:
        return 4, 0
    if not dtype.is_floating_point:
        return (6, 0x20) if bits == 8 else (12, 0)
    if dtype == _E8M0:
        return 6, 0x40
    return {8: (6, 0x10), 16: (12, 0x1000), 32: (20, 0x38000000), 64: (30, 0x3F00000000000000)}[bits]


def storage_units(tensor: torch.Tensor, unit_bits: int) -> torch.Tensor:
    """Return the whole storage of a tensor as words."""
    storage = tensor.untyped_storage()
    kind = word_type(unit_bits)
    memory = torch.empty(0, dtype=kind, device=tensor.device)
    memory.set_(storage, 0, (storage.nbytes() // memory.element_size(),))
    return memory


def word_type(unit_bits: int) -> torch.dtype:
    """Return the type of words."""
    kind: torch.dtype = getattr(torch, f"int{max(unit_bits, 8)}")
    return kind


def halves(words: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit halves of bytes, the low one first."""
    return torch.stack([words & 15, (words >> 4) & 15], dim=1).view(-1)


def unit_values(tensor: torch.Tensor, bits: int, start: int, end: int) -> torch.Tensor:
    """Return some units of a storage, as 64-bit integers."""
    words = storage_units(tensor, bits)
    if bits == 4:
        return halves(words[start // 2 : end // 2]).to(torch.int64)
    return words[start:end].to(torch.int64)


def same_words(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two storages are equal. One of them may be in host memory."""
    if first.numel() != second.numel():
        return False
    pieces = range(0, first.numel(), 8 * PIECE)
    return all(torch.equal(first[start : start + 8 * PIECE], second[start : start + 8 * PIECE].to(first.device)) for start in pieces)


def _power_of_two(exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == _E8M0:
        return (exponents + 127).to(torch.uint8).view(dtype)
    return torch.exp2(exponents.to(torch.float32)).to(dtype)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >= 1 << (bits - 1) else value
