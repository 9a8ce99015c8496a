"""Reports the progress of one long call of native code while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..tensors.state import Progress

_INTERVAL_SECONDS = 0.1


def bytes_done() -> int:
    """Return how many bytes of weights native code has encoded or decoded in this process. Always 0 if it is not built."""
    try:
        from ..codec import native
    except ImportError:
        return 0
    return native.bytes_done()


@contextmanager
def reporting(progress: Progress | None, total: int) -> Iterator[None]:
    """Report the work within the context as it proceeds, and the rest at its end, `total` bytes in all.

    A thread of its own calls `progress`. Work of other threads of this process counts, too, so the numbers are only good for a progress
    bar. After an error nothing more is reported.
    """
    if progress is None:
        yield
        return
    begin, reported = bytes_done(), 0
    ended = threading.Event()

    def report() -> None:
        nonlocal reported
        while not ended.wait(_INTERVAL_SECONDS):
            done = min(bytes_done() - begin, total)
            if done > reported:
                progress(done - reported)
                reported = done

    thread = threading.Thread(target=report, name="deltawire-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if reported < total:
        progress(total - reported)
