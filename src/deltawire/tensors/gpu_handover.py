"""From one thread to another: what a GPU was told to do with a state must be done before another thread reads it there.

Streams order work on a GPU, and by default all threads share one. A thread that works beside training must not use that: it would wait
for the step that is already queued, and the step after would wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import bits as tensors
from .bits import State


class Handover:
    """Made where states were last changed; entered, by any thread, to work on them.

    To enter it waits until all that the maker's streams had been given is done; within it, GPUs work for the thread on other streams. The
    maker's streams wait for nothing. Where all is on the host, it does nothing.
    """

    def __init__(self, *states: State) -> None:
        self._marks = [(gpu, gpu.mark()) for gpu in _gpus(states)]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        self.wait()
        with _in_background([gpu for gpu, _ in self._marks]):
            yield

    def wait(self) -> None:
        """Return when all that the maker's streams had been given is done."""
        for _, mark in self._marks:
            mark.synchronize()

    def precede(self) -> None:
        """Let what the calling thread's streams are given from now on come after what the maker's had been given. Nobody waits here."""
        for gpu, mark in self._marks:
            gpu.current().wait_event(mark)


@contextlib.contextmanager
def beside(*states: State) -> Iterator[Callable[[], None]]:
    """To work on states that are complete, beside all other streams: like a `Handover` of which there is nothing to wait for.

    Gives what waits until the work is done: to be called before anybody else may change what it reads, or use what it makes.
    """
    gpus = _gpus(states)

    def wait() -> None:
        for gpu in gpus:
            gpu.current().synchronize()

    with _in_background(gpus):
        yield wait


def finish(*states: State) -> None:
    """Wait until the GPUs that these are on have done all that they were given, by whatever thread, on whatever stream."""
    for gpu in _gpus(states):
        gpu.finish()


@contextlib.contextmanager
def _in_background(gpus: Sequence[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for gpu in gpus:
            stack.enter_context(gpu.using(gpu.stream("background")))
        yield


def _gpus(states: Sequence[State]) -> list[Any]:
    """The GPUs that have tensors of these states."""
    known = tensors.torch_tensor()
    if known is None:
        return []
    each: Iterator[Any] = (tensor for state in states for tensor in state.values() if isinstance(tensor, known))
    devices = dict.fromkeys(tensor.device for tensor in each if tensors.is_on_gpu(tensor))
    if not devices:
        return []
    from ..codec.gpu.device import gpu_at

    return [gpu_at(device) for device in devices]
