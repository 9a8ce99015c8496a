"""Encoding a delta in a separate thread, while the caller continues."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from ..tensors.bits import State
from ..tensors.casting import WireDType
from ..tensors.gpu_handover import GpuHandover
from .encode import encode_delta

_LONGEST = threading.TIMEOUT_MAX / 2
"""A longer time, such as infinity, is no limit. Python raises OverflowError if a thread is to wait for so long."""


class PendingDelta:
    """A delta that a separate thread makes; on a GPU it uses a separate stream, so that the caller's streams continue.

    Neither state may change before the delta is `done`. In a training loop, run the forward and backward pass, and call `result` before
    the optimizer writes. `start_delta` makes this object.

    Parameters
    ----------
    base, new, dtype, threads
        See `start_delta`.
    """

    def __init__(self, base: State, new: State, dtype: WireDType | None, threads: int | None) -> None:
        self._future: Future[bytes] = Future()
        handover = GpuHandover(base, new)

        def work() -> None:
            try:
                with handover.on_side_stream():
                    self._future.set_result(encode_delta(base, new, dtype=dtype, threads=threads))
            except BaseException as error:  # `result` raises it
                self._future.set_exception(error)

        threading.Thread(target=work, name="deltawire-encode", daemon=True).start()

    def done(self) -> bool:
        """Tell whether the delta was made, or failed. Then the states may change."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> bytes:
        """Wait for the delta. Return the same bytes as `encode_delta`, or raise the same error.

        Parameters
        ----------
        timeout
            Seconds after which `TimeoutError` is raised; None or infinity waits for ever.
        """
        return self._future.result(None if timeout is not None and timeout > _LONGEST else timeout)


def start_delta(base: State, new: State, *, dtype: WireDType | None = None, threads: int | None = None) -> PendingDelta:
    """Start to encode a delta as `encode_delta` does, and return at once.

    The encoding starts after all work that the caller's streams were given, if tensors are on a GPU.

    Parameters
    ----------
    base
        The state that the delta is relative to.
    new
        The state that the delta leads to.
    dtype
        The type to which floating-point tensors of `new` are rounded, as for `encode_delta`.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    return PendingDelta(base, new, dtype, threads)
