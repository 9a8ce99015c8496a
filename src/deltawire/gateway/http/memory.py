"""Counts the memory that bodies, answers and streams take, so that all requests together stay within one budget."""

from __future__ import annotations

import sys
from types import TracebackType

from ...errors import GatewayFull, RequestTooLarge

_PER_VALUE = 64
"""About the bytes that a value takes in memory: an empty list, or a number and its pointer in a list."""


class MemoryBudget:
    """The memory that requests may take together. Use it from one event loop.

    Parameters
    ----------
    most
        The most bytes.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self.most = most
        self.used = 0
        """The bytes that are reserved now."""

    def reservation(self) -> Reservation:
        """Return a reservation of no bytes."""
        return Reservation(self)

    def check(self, size: int, *, own: int = 0) -> None:
        """Raise `GatewayFull` if this many more bytes do not fit now, `RequestTooLarge` if they never fit with the request's own."""
        if own + size > self.most:
            raise RequestTooLarge(f"the request needs about {own + size:,} bytes of memory; all requests together may take {self.most:,}.")
        if self.used + size > self.most:
            raise GatewayFull(f"requests take {self.used:,} bytes of memory, and {size:,} more do not fit into {self.most:,}.")


class Reservation:
    """The memory of one request. It is released when all who hold the reservation have closed it.

    Parameters
    ----------
    budget
        The budget.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.size = 0
        self._holders = 1

    def add(self, size: int) -> None:
        """Reserve more bytes. Raises `GatewayFull` or `RequestTooLarge` if they do not fit, and then reserves nothing."""
        assert self._holders, "the reservation is closed"
        if size > 0:
            self.budget.check(size, own=self.size)
        self.budget.used += size
        self.size += size

    def resize(self, size: int) -> None:
        """Reserve this many bytes instead of the present ones. Raises as `add` does."""
        self.add(size - self.size)

    def fits(self, size: int) -> bool:
        """Reserve more bytes if they fit, and return whether they do."""
        try:
            self.add(size)
        except (GatewayFull, RequestTooLarge):
            return False
        return True

    def another(self) -> Reservation:
        """Return another reservation of the same budget."""
        return self.budget.reservation()

    def hold(self) -> None:
        """Keep the memory reserved until `close` was called once more."""
        self._holders += 1

    def close(self) -> None:
        """Release the memory, unless somebody else holds it."""
        self._holders -= 1
        if not self._holders:
            self.budget.used -= self.size
            self.size = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def json_memory(data: bytes) -> int:
    """Return about how many bytes it takes to parse JSON: its text, the strings in it, and its values.

    Parameters
    ----------
    data
        The JSON.
    """
    values = 1 + sum(data.count(mark) for mark in (b",", b"[", b"{", b":"))
    is_narrow = data.isascii() and b"\\u" not in data  # otherwise one character may make all others take four bytes
    return (2 if is_narrow else 8) * len(data) + _PER_VALUE * values
