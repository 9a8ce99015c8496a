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

from deltawire.codec.base import ResolveGroup, ResolveJob
from deltawire.codec.reference import ReferenceCodec, groups, routing
from deltawire.codec.reference.codec import ReferenceResolution
from deltawire.codec.routing import CodedRows, RoutingRows
from deltawire.dtypes import PAYLOAD_TYPES, PayloadType
from deltawire.errors import CorruptDelta, CorruptRollouts, DeltawireError, DtypeMismatch, ShapeMismatch

ROOT = Path(__file__).parents[2]
EXECUTIONS = 3_000
ROUTING_EXECUTIONS = 800
ERRORS: dict[int, type[DeltawireError]] = {1: CorruptDelta, 2: DtypeMismatch, 3: ShapeMismatch}
_NUMBERS = struct.Struct("<6Q4I4I")
_TENSOR = struct.Struct("<5Q")


class Tensor(NamedTuple):
    """One tensor of a case, and its changes. `base` is None if it is added."""

    base: Any
    count: int
    seed: int
    changed: int
    indices: Any
    values: Any


class Case(NamedTuple):
    """The result of resolving a payload. `native/fuzz/driver.cpp` documents the file."""

    kind: PayloadType
    is_old: bool
    payload: bytes
    error: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    tensors: list[Tensor]


def read_cases(data: bytes) -> Iterator[Case]:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    while at < len(data):
        code, is_old, tensors, size, error, _, *lanes = _NUMBERS.unpack(take(_NUMBERS.size))
        kind = PAYLOAD_TYPES[code]
        bits = kind.dtype.bits
        payload = take(size)
        heads = []
        for _ in range(tensors):
            count, has_base, seed, changed, found = _TENSOR.unpack(take(_TENSOR.size))
            heads.append((np.frombuffer(take(count * bits.itemsize), bits) if has_base else None, count, seed, changed, found))
        indices = [np.frombuffer(take(8 * found), np.int64) for *_, found in heads]
        values = [np.frombuffer(take(bits.itemsize * found), bits) for *_, found in heads]
        listed = [Tensor(*head[:4], *changes) for head, *changes in zip(heads, indices, values, strict=True)]
        yield Case(kind, bool(is_old), payload, error, tuple(lanes[:4]), tuple(lanes[4:]), listed)


def resolve(case: Case) -> tuple[ReferenceResolution, list[int], tuple[int, ...], tuple[int, ...]]:
    resolution = ReferenceCodec().resolution(1, 0)
    span = 0, len(case.payload)
    if case.is_old:
        (tensor,) = case.tensors
        outcomes = resolution.add([ResolveJob(tensor.base, tensor.count, span, case.kind.dtype, tensor.seed)], case.payload)
        return resolution, outcomes.changed.tolist(), tuple(outcomes.before[0].tolist()), tuple(outcomes.after[0].tolist())
    counts, seeds = np.array([t.count for t in case.tensors], np.int64), np.array([t.seed for t in case.tensors], np.uint64)
    group = ResolveGroup(case.kind, [t.base for t in case.tensors], counts, seeds, span)
    (outcome,) = resolution.add_groups([group], case.payload)
    return resolution, outcome.changed.tolist(), outcome.before, outcome.after


def check(case: Case) -> None:
    """Check that the reference codec refuses the same payloads with the same kind of error, and gives the same results for the others."""
    if case.error:
        with pytest.raises(ERRORS[case.error]):
            resolve(case)
        return
    resolution, changed, before, after = resolve(case)
    assert changed == [tensor.changed for tensor in case.tensors]
    assert (before, after) == (case.before, case.after)
    for number, tensor in enumerate(case.tensors):
        ((indices, values),) = resolution.changes([number])
        assert np.array_equal(indices, tensor.indices)
        assert np.array_equal(values, tensor.values)


def run_target(target: str, executions: int, cases: Path) -> str:
    """Build and run a fuzz target. Returns its last words."""
    done = subprocess.run(
        [ROOT / "native/fuzz/run", target, str(executions), "-seed=1", f"-cases={cases}"],
        # Only the g++ driver writes cases. Compiling takes most of the time, and less with more memory between collections of garbage.
        env=os.environ | {"FUZZ_CXX": "g++", "FUZZ_GCC": "-O0;--param=ggc-min-heapsize=1000000"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("g++") is None, reason="cmake and g++ build the fuzzer")
def test_hostile_payloads_break_nothing_and_are_judged_as_the_reference_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fuzz target has small blocks, so that small groups have several.
    monkeypatch.setattr(groups, "tiles_per_block", lambda kind: {4: 8, 8: 4}.get(kind.width, 2))
    cases = tmp_path / "cases"
    said = run_target("resolve", EXECUTIONS, cases)
    assert f"{EXECUTIONS + len(list(ROOT.glob('tests/golden/*.delta.safetensors')))} executions of seed 1, no finding" in said
    found = list(read_cases(cases.read_bytes()))
    refused, resolved = ([case for case in found if bool(case.error) is wanted] for wanted in (True, False))
    for wanted in (True, False):
        assert sum(case.is_old is wanted for case in resolved) > 150
        assert sum(case.is_old is wanted for case in refused) > 150
    for case in [*resolved, *refused[::5]]:  # all accepted payloads, because accepting an invalid one is the worse mistake
        check(case)


def read_routing(data: bytes) -> Iterator[tuple[RoutingRows, CodedRows, Any]]:
    """Yield rows, their bytes, and the ids that were decoded, or None. `native/fuzz/fuzz_routing.cpp` documents the file."""
    at = 0

    def take(dtype: str, count: int) -> Any:
        nonlocal at
        found = np.frombuffer(data, dtype, count, at)
        at += found.nbytes
        return found

    while at < len(data):
        layers, top_k, experts, tokens, lengths, streams, size, is_refused = take("<u8", 8).tolist()
        copied, reference, ends = take("<i8", tokens), take("<i8", tokens), take("<u8", streams)
        order = take("<u2", layers * experts).reshape(layers, experts)
        ids = None if is_refused else take("<i2", tokens * layers * top_k).reshape(tokens, layers, top_k)
        recorded = take("u1", tokens * layers).reshape(tokens, layers)
        yield RoutingRows(experts, top_k, copied, reference, recorded, order), CodedRows(take("u1", lengths), ends, take("u1", size)), ids


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("g++") is None, reason="cmake and g++ build the fuzzer")
def test_hostile_routed_experts_break_nothing_and_are_judged_as_the_reference_judges_them(tmp_path: Path) -> None:
    cases = tmp_path / "cases"
    assert f"{ROUTING_EXECUTIONS} executions of seed 1, no finding" in run_target("routing", ROUTING_EXECUTIONS, cases)
    found = list(read_routing(cases.read_bytes()))
    refused, decoded = ([case for case in found if (case[2] is None) is wanted] for wanted in (True, False))
    assert min(len(refused), len(decoded)) > 50
    for rows, coded, ids in decoded:  # all accepted ones, because accepting invalid bytes is the worse mistake
        assert np.array_equal(routing.decode_rows(rows, coded), ids)
    for rows, coded, _ in refused[::5]:
        with pytest.raises(CorruptRollouts):
            routing.decode_rows(rows, coded)
