"""A store that prints a line for every request, for `--verbose`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ...errors import DeltawireError
from ...store.wrapped import StoreCall, WrappedStore
from ..output import figures
from ..output.terminal import print_trace


class TracedStore(WrappedStore):
    """Print a line on stderr for each request to the store `inner`: the request, its time, and its error if it failed."""

    def watch(self, call: StoreCall) -> AbstractContextManager[object]:
        if call.operation == "list":  # its pages are fetched later
            print_trace(_describe(call))
            return nullcontext()
        return _traced(_describe(call))


def _describe(call: StoreCall) -> str:
    match call.operation:
        case "list":
            return f"list {call.key or 'everything'}" + ("" if call.after is None else f" after {call.after}")
        case "delete":
            return f"delete {call.keys[0]}" if len(call.keys) == 1 else f"delete {len(call.keys):,} objects"
        case "read_into":
            return f"read {call.key} {figures.size(call.size or 0)} from byte {call.offset:,}"
        case "put_if_absent":
            return f"create {call.key} {figures.size(call.size or 0)}"
        case operation:
            return f"{operation} {call.key}" + ("" if call.size is None else f" {figures.size(call.size)}")


@contextmanager
def _traced(request: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    except DeltawireError as error:
        print_trace(f"{request}: {type(error).__name__} after {_milliseconds(start)}")
        raise
    print_trace(f"{request}: {_milliseconds(start)}")


def _milliseconds(start: float) -> str:
    return f"{1e3 * (time.perf_counter() - start):.1f} ms"
