"""Once it has seen the names, the GPU codec makes no more calls of Python for more tensors. A mixture of experts has a hundred thousand."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from emulator.build import compiler

import deltawire
from deltawire.codec import using_codec

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402

DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
PER_TENSOR = 0.1
"""The calls that one more tensor may add. They are none today; one look at each tensor would be one call or more."""


def calls_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return the number of calls of Python functions and of functions in C that some work makes, and its result."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count, result


def states(count: int, dtype: Any, suffix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    old = {f"model.layers.{number}.{suffix}": (torch.arange(64, device=DEVICE) % 7).to(dtype) for number in range(count)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor.view(torch.uint8)[3] += 1
    return old, new


@pytest.mark.parametrize(
    ("dtype", "suffix"), [(torch.bfloat16, "weight"), (torch.float8_e4m3fn, "weight"), (torch.uint8, "weight_packed")], ids=str
)
def test_more_tensors_make_no_more_calls(dtype: Any, suffix: str) -> None:
    encoding, applying = {}, {}
    with using_codec("reference"), contextlib.nullcontext() if REAL else emulated(EmulatedGpu()):
        for count in (500, 1000, 500, 1000):  # the first two rounds also compile kernels, and look at each name
            old, new = states(count, dtype, suffix)
            encoding[count], delta = calls_of(lambda old=old, new=new: deltawire.encode_delta(old, new, threads=1))
            applying[count], _ = calls_of(lambda old=old, delta=delta: deltawire.apply_delta(old, delta, threads=1))
            assert all(torch.equal(old[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in new.items())
    for found in (encoding, applying):
        assert found[1000] - found[500] < 500 * PER_TENSOR, found
