"""Run the native codec on hostile payloads under sanitizers (docs/fuzzing.md), and compare its results with the reference codec."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from deltawire.codec.base import ResolveJob
from deltawire.codec.reference import ReferenceCodec
from deltawire.dtypes import DTYPES
from deltawire.errors import CorruptDelta, DeltawireError, DtypeMismatch, ShapeMismatch

ROOT = Path(__file__).parents[2]
EXECUTIONS = 20_000
ERRORS: dict[int, type[DeltawireError]] = {1: CorruptDelta, 2: DtypeMismatch, 3: ShapeMismatch}
_NUMBERS = struct.Struct("<7Q4I4I")


class Case(NamedTuple):
    """The result of resolving a payload. `native/fuzz/driver.cpp` documents the file."""

    dtype: Any
    base: Any
    count: int
    seed: int
    payload: bytes
    error: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    indices: Any
    values: Any


def read_cases(data: bytes) -> Iterator[Case]:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    while at < len(data):
        code, count, has_base, seed, size, error, changed, *lanes = _NUMBERS.unpack(take(_NUMBERS.size))
        dtype = next(dtype for dtype in DTYPES if dtype.code == code)
        width = dtype.bits.itemsize
        base = np.frombuffer(take(count * width), dtype.bits) if has_base else None
        payload = take(size)
        found = 0 if error else changed
        indices, values = np.frombuffer(take(8 * found), np.int64), np.frombuffer(take(width * found), dtype.bits)
        yield Case(dtype, base, count, seed, payload, error, tuple(lanes[:4]), tuple(lanes[4:]), indices, values)


def check(case: Case) -> None:
    """Check that the reference codec refuses the same payloads with the same kind of error, and gives the same results for the others."""
    resolution = ReferenceCodec().resolution(1, 0)
    job = ResolveJob(case.base, case.count, (0, len(case.payload)), case.dtype, case.seed)
    if case.error:
        with pytest.raises(ERRORS[case.error]):
            resolution.add([job], case.payload)
        return
    outcome = resolution.add([job], case.payload)
    assert outcome.changed.tolist() == [len(case.indices)]
    assert tuple(outcome.after[0].tolist()) == case.after
    if case.base is None:
        dense = np.zeros(case.count, case.dtype.bits)
        dense[case.indices] = case.values
        assert np.array_equal(resolution.dense([0])[0], dense)
        return
    assert tuple(outcome.before[0].tolist()) == case.before
    ((indices, values),) = resolution.changes([0])
    assert np.array_equal(indices, case.indices)
    assert np.array_equal(values, case.values)


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("g++") is None, reason="cmake and g++ build the fuzzer")
def test_hostile_payloads_break_nothing_and_are_judged_as_the_reference_judges_them(tmp_path: Path) -> None:
    cases = tmp_path / "cases"
    done = subprocess.run(
        [ROOT / "native/fuzz/run", str(EXECUTIONS), "-seed=1", f"-cases={cases}"],
        env=os.environ | {"FUZZ_CXX": "g++", "FUZZ_GCC": "-O0"},  # only the g++ driver writes cases, and compiling takes most of the time
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert f"{EXECUTIONS + len(list(ROOT.glob('tests/golden/*.delta.safetensors')))} executions of seed 1, no finding" in done.stdout
    found = list(read_cases(cases.read_bytes()))
    refused, resolved = ([case for case in found if bool(case.error) is wanted] for wanted in (True, False))
    assert len(resolved) > 5_000
    assert len(refused) > 5_000
    for case in [*resolved, *refused[::5]]:  # all accepted payloads, because accepting an invalid one is the worse mistake
        check(case)
