"""A store that counts the bytes that pass through it, for progress bars."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ...store.base import Progress, Store
from ...store.keys import DATA
from ...store.wrapped import StoreCall, WrappedStore


class MeteredStore(WrappedStore):
    """Report the bytes of data objects that are transferred, from several threads. Small records are not counted.

    Parameters
    ----------
    inner
        The store that answers the calls.
    read
        Called with the number of bytes read since its last call.
    written
        Called with the number of bytes written since its last call.
    announced
        Called with the size of each object before it is written, if the size is known.
    """

    def __init__(
        self, inner: Store, read: Progress | None = None, *, written: Progress | None = None, announced: Progress | None = None
    ) -> None:
        super().__init__(inner)
        self._read = read
        self._written = written
        self._announced = announced

    def watch(self, call: StoreCall) -> AbstractContextManager[object]:
        if call.operation == "put" and call.key.startswith(DATA) and self._announced is not None and call.size is not None:
            self._announced(call.size)
        return nullcontext()

    def counted(self, call: StoreCall, progress: Progress | None) -> Progress | None:
        if not call.key.startswith(DATA):
            return progress
        return _both(self._read if call.operation == "read_into" else self._written, progress)


def _both(first: Progress | None, second: Progress | None) -> Progress | None:
    if first is None or second is None:
        return first or second

    def report(done: int) -> None:
        first(done)
        second(done)

    return report
