"""Handing states on a GPU from one thread to another.

Work that a thread gives to a GPU runs later, in the order of a stream. Before another thread reads the result, that work must be done.
By default all threads share one stream. Code that runs during training must not use it: it would wait for the training step that is
already queued, and the next step would wait for it. So such code works on a side stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import torch_types
from .bits import State, TensorPart
from .columns import ColumnState

if TYPE_CHECKING:
    from ..codec.gpu.device import Gpu


class GpuHandover:
    """Marks a point in the work of the current streams, so that any thread can wait for it before it uses the states.

    Make it in the thread that last changed the states. The streams of that thread never wait. If all tensors are in host memory, every
    method does nothing.

    Parameters
    ----------
    states
        The states that another thread will use.
    """

    def __init__(self, *states: State) -> None:
        self._marks = [(gpu, gpu.mark()) for gpu in _gpus(states)]

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Wait for the marked work; within the context, the calling thread's GPU work goes to side streams."""
        self.synchronize()
        with _on_side_streams([gpu for gpu, _ in self._marks]):
            yield

    def synchronize(self) -> None:
        """Wait until the marked work is done."""
        for _, mark in self._marks:
            mark.synchronize()

    def delay_current_streams(self) -> None:
        """Let later work on the calling thread's streams start after the marked work. The thread itself does not wait."""
        for gpu, mark in self._marks:
            gpu.current().wait_event(mark)


@contextlib.contextmanager
def on_side_stream(*states: State) -> Iterator[Callable[[], None]]:
    """Let the calling thread's GPU work go to side streams, for states that are complete already.

    The context gives a function that waits until the work is done. Call it before another thread changes what the work reads, or uses
    what it makes.
    """
    gpus = _gpus(states)

    def wait() -> None:
        for gpu in gpus:
            gpu.current().synchronize()

    with _on_side_streams(gpus):
        yield wait


def synchronize_gpus(*states: State) -> None:
    """Wait until the GPUs that hold these states have done all work that any thread gave them, on any stream."""
    for gpu in _gpus(states):
        gpu.synchronize()


def synchronize_streams(*states: State) -> None:
    """Wait until the GPUs that hold these states have done all work of the calling thread's streams."""
    for gpu in _gpus(states):
        gpu.current().synchronize()


@contextlib.contextmanager
def _on_side_streams(gpus: Sequence[Gpu]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for gpu in gpus:
            stack.enter_context(gpu.using(gpu.stream("background")))
        yield


def _gpus(states: Sequence[State]) -> list[Gpu]:
    """Return the GPUs that hold tensors of these states."""
    known = torch_types.torch_tensor()
    if known is None:
        return []
    known_devices = [state.columns.bits.device for state in states if isinstance(state, ColumnState)]
    states = [state for state in states if not isinstance(state, ColumnState)]
    own = (tensor.elements if isinstance(tensor, TensorPart) else tensor for state in states for tensor in state.values())
    each: Iterator[Any] = (tensor for tensor in own if isinstance(tensor, known))
    devices = dict.fromkeys(device for tensor in each if (device := torch_types.gpu_of(tensor)) is not None)
    devices.update(dict.fromkeys(device for device in known_devices if device is not None))
    if not devices:
        return []
    from ..codec.gpu.device import gpu_at

    return [gpu_at(device) for device in devices]
