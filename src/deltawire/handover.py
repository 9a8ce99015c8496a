"""From one thread to another: what a GPU was told to do with a state must be done before another thread reads it there.

Streams order work on a GPU, and by default all threads share one. A thread that works beside training must not use that: it would wait
for the step that is already queued, and the step after would wait for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from .tensors import State, tensor_bits


class Handover:
    """Made where states were last changed; entered, by any thread, to work on them.

    To enter it waits until all that the maker's streams had been given is done; within it, GPUs work for the thread on other streams. The
    maker's streams wait for nothing. Where all is on the host, it does nothing.
    """

    def __init__(self, *states: State) -> None:
        self._marks: list[tuple[Any, Any]] = []
        if "torch" in sys.modules:
            from .codec.gpu import codec

            bits = [tensor_bits(name, tensor).bits for state in states for name, tensor in state.items()]
            self._marks = codec.marks(bits)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for gpu, mark in self._marks:
                mark.synchronize()
                stack.enter_context(gpu.using(gpu.stream("background")))
            yield
