"""Python runs as many instructions for an update of many tensors as for one of few, with as many files. These tests need no vLLM."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from emulator.build import compiler  # noqa: E402
from emulator.gpu import EmulatedGpu, emulated  # noqa: E402
from emulator.gpu import __file__ as emulator_file  # noqa: E402
from fake_layout import alone  # noqa: E402
from many_tensors import ManyTensors, qwen3  # noqa: E402

_FILES = 4


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    if device == "gpu" and compiler() is None:
        pytest.skip("needs a C++ compiler to emulate a GPU")
    with emulated(EmulatedGpu()) if device == "gpu" else contextlib.nullcontext():
        yield


def steps_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many instructions Python ran, and what `work` returned. A loop has some for each turn, even if it calls nothing."""
    steps = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        if frame.f_code.co_filename == emulator_file:
            return None
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    usual = sys.gettrace()
    sys.settrace(trace)
    try:
        found = work()
    finally:
        sys.settrace(usual)
    return steps, found


def steps_of_an_update(layers: int, experts: int) -> tuple[int, int, int]:
    """Return the number of tensors, and the instructions while an update is staged and while it is swapped in."""
    worker = ManyTensors(qwen3(layers, experts), files=_FILES)
    for number in range(3):  # the first update works out what later ones need again
        hop = worker.step()
        data = {entry.key: worker.read(entry) for entry in hop.files}
        staging, staged = steps_of(lambda: worker.weights.stage(hop, lambda entry: data[entry.key]))  # noqa: B023
        swapping, outcome = steps_of(lambda: worker.weights.swap(staged, alone))  # noqa: B023
        assert outcome.outcome == "made", number
        assert worker.is_exact()
        assert len(hop.files) == _FILES
    return len(worker.state), staging, swapping


@pytest.mark.parametrize("device", ["host", "gpu"])
def test_python_does_not_look_at_each_tensor(device: str) -> None:
    with on_device(device):
        few, staging_few, swapping_few = steps_of_an_update(2, 4)
        many, staging_many, swapping_many = steps_of_an_update(2, 40)
    assert many - few == 2 * 36 * 3
    assert staging_many - staging_few < many - few  # the shortest loop needs 5 for each turn; longer numbers in files need some, too
    assert swapping_many - swapping_few < many - few


@pytest.mark.parametrize("device", ["host", "gpu"])
def test_updates_of_some_tensors_are_exact_whatever_the_update_before_left(device: str) -> None:
    """Files cover only tensors that change. The others are digested by themselves, and what is known of them is kept."""
    with on_device(device):
        worker = ManyTensors(qwen3(2, 4), files=_FILES)
        names = list(worker.state)
        for changing in (names[:5], names[-5:], names[:5], names, names[20:22], names[20:22]):
            hop = worker.step(changing)
            assert (len(hop.files) < _FILES) == (changing is not names)
            staged = worker.weights.stage(hop, worker.read)
            assert worker.weights.swap(staged, alone).outcome == "made"
            assert worker.is_exact()
