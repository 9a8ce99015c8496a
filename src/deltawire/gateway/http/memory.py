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
        self.used_by: dict[str, int] = {}
        """The bytes that are reserved now by callers with a name."""

    def reservation(self, caller: str | None = None) -> Reservation:
        """Return a reservation of no bytes. A caller with a name may reserve at most half of the memory, so that others have room."""
        return Reservation(self, caller)

    def check(self, size: int, *, own: int = 0, caller: str | None = None) -> None:
        """Raise `GatewayFull` if this many more bytes do not fit now, `RequestTooLarge` if they never fit with the request's own."""
        most, whose = (self.most, "all requests") if caller is None else (self.most // 2, "requests of one caller")
        if own + size > most:
            raise RequestTooLarge(f"the request needs about {own + size:,} bytes of memory; {whose} together may take {most:,}.")
        if self.used + size > self.most:
            raise GatewayFull(f"requests take {self.used:,} bytes of memory, and {size:,} more do not fit into {self.most:,}.")
        if caller is not None and (used := self.used_by.get(caller, 0)) + size > most:
            raise GatewayFull(f"requests of the caller {caller} take {used:,} bytes of memory, and {size:,} more do not fit into {most:,}.")

    def add(self, size: int, caller: str | None) -> None:
        """Count bytes that a caller reserves, or releases if the number is negative."""
        self.used += size
        if caller is not None:
            self.used_by[caller] = self.used_by.get(caller, 0) + size
            if not self.used_by[caller]:
                del self.used_by[caller]


class Reservation:
    """The memory of one request. It is released when all who hold the reservation have closed it.

    Parameters
    ----------
    budget
        The budget.
    caller
        The name of the caller whose request it is. None without API keys, and for what belongs to no caller.
    """

    def __init__(self, budget: MemoryBudget, caller: str | None = None) -> None:
        self.budget, self._caller = budget, caller
        self.size = 0
        self._holders = 1

    def add(self, size: int) -> None:
        """Reserve more bytes. Raises `GatewayFull` or `RequestTooLarge` if they do not fit, and then reserves nothing."""
        assert self._holders, "the reservation is closed"
        if size > 0:
            self.check(size)
        self.budget.add(size, self._caller)
        self.size += size

    def check(self, size: int) -> None:
        """Raise as `add` does, and reserve nothing."""
        self.budget.check(size, own=self.size, caller=self._caller)

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
        """Return another reservation of the same budget and caller."""
        return self.budget.reservation(self._caller)

    def hold(self) -> None:
        """Keep the memory reserved until `close` was called once more."""
        self._holders += 1

    def close(self) -> None:
        """Release the memory, unless somebody else holds it."""
        self._holders -= 1
        if not self._holders:
            self.budget.add(-self.size, self._caller)
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
