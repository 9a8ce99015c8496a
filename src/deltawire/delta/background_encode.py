"""Encoding beside other work: a call that returns at once, and tells later."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from ..tensors.bits import State
from ..tensors.casting import WireDType
from ..tensors.gpu_handover import Handover
from .encode import encode_delta


class PendingDelta:
    """A delta that is being made by a thread of its own; on a GPU also on a stream of its own, beside what the caller's streams do.

    Neither state may change before it is `done`: a training step goes on through forward and backward pass, and asks for the `result`
    before the optimizer writes.
    """

    def __init__(self, base: State, new: State, dtype: WireDType | None, threads: int | None) -> None:
        self._future: Future[bytes] = Future()
        handover = Handover(base, new)

        def work() -> None:
            try:
                with handover.taken():
                    self._future.set_result(encode_delta(base, new, dtype=dtype, threads=threads))
            except BaseException as error:  # raised by `result`
                self._future.set_exception(error)

        threading.Thread(target=work, name="deltawire-encode", daemon=True).start()

    def done(self) -> bool:
        """Whether it was made, or failed. Then the states may change."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the delta: the same bytes as from `encode_delta`, or the same error. `TimeoutError` after so many seconds."""
        return self._future.result(timeout)


def start_delta(base: State, new: State, *, dtype: WireDType | None = None, threads: int | None = None) -> PendingDelta:
    """Like `encode_delta`, but returns at once. What the caller's streams were told to do with tensors on a GPU is done first."""
    return PendingDelta(base, new, dtype, threads)
