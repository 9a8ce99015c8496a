"""Helpers that several test files share: compare states by their bits, split and join delta files, run fresh interpreters."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

import deltawire
from deltawire.codec.native import instruction_sets
from deltawire.dtypes import DType
from deltawire.publish.writer_options import WriterOptions

NATIVE = instruction_sets()
CODECS = ["reference", *NATIVE]
DIGEST_NEUTRAL = [-1, 1, 1, 1, 2, 1, -2, -2, 2, 0, -1, -1, 0, -1, 0, 1, -2, -1, -1, 1, -2, 1, 1, 1, -1, 0, -2, -2, -2, 1, 1, 0]
"""Added to the first words of a block of 512 bytes, these leave the digest as it is (docs/format.md §2).

Found by reducing a lattice of the factors T."""
PACKAGE = Path(deltawire.__file__).resolve().parent.parent  # the source or the installed package, whichever is under test


def bits_of(state: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return everything to compare of a state. It has no floats, so NaNs and signed zeros are compared as bits."""
    return {name: (str(array.dtype), tuple(array.shape), array.tobytes()) for name, array in state.items()}


def publisher_arguments(**given: Any) -> dict[str, Any]:
    """Return the arguments of a publisher, with those that are fields of `WriterOptions` moved into `options`."""
    fields = {field.name for field in dataclasses.fields(WriterOptions)}
    options = WriterOptions(**{name: given.pop(name) for name in fields & given.keys()})
    return {**given, "options": options}


def publish_fully(publisher: Any, state: Any, **given: Any) -> Any:
    """Publish a state, wait for the shortcuts that are due, and return what `publish` returned. So the order of store calls is fixed."""
    version = publisher.publish(state, **given)
    publisher.flush()
    return version


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array.copy() for name, array in state.items()}


def array_of(dtype: DType, bits: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Return an array of this type with these bits."""
    flat = np.asarray(bits).astype(dtype.bits).view(dtype.numpy)
    return flat if shape is None else flat.reshape(shape)


class SplitDelta(NamedTuple):
    """A delta file of version 3 in pieces (docs/format.md §1). `groups` are the payloads by id."""

    before: bytes
    after: bytes
    tensors: int
    changes: bytes
    parts: bytes
    groups: dict[int, bytes]


def varint(value: int) -> bytes:
    """Return an integer as LEB128."""
    low = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(digit | 128 for digit in low[:-1]), low[-1]])


def split_delta(delta: bytes) -> SplitDelta:
    """Split a delta file into its pieces, without checking anything."""
    at = 72

    def number() -> int:
        nonlocal at
        size = next(size for size in range(1, 20) if delta[at + size - 1] < 128)
        at += size
        return sum((byte & 127) << 7 * place for place, byte in enumerate(delta[at - size : at]))

    def piece() -> bytes:
        nonlocal at
        size = number()
        at += size
        return delta[at - size : at]

    tensors, changes, parts = number(), piece(), piece()
    groups = {}
    while at < len(delta):
        group = number()
        groups[group] = piece()
    return SplitDelta(delta[8:24], delta[24:40], tensors, changes, parts, groups)


def join_delta(split: SplitDelta) -> bytes:
    """Join what `split_delta` returned, with a correct BLAKE3."""
    body = varint(split.tensors) + varint(len(split.changes)) + split.changes + varint(len(split.parts)) + split.parts
    return join_body(split, body + b"".join(varint(group) + varint(len(payload)) + payload for group, payload in split.groups.items()))


def join_body(split: SplitDelta, body: bytes) -> bytes:
    """Return a delta file with this body, with a correct BLAKE3."""
    digests = split.before + split.after
    return b"dwdelta3" + digests + blake3(digests + body).digest() + body


def changes_of(delta: bytes) -> dict[str, Any]:
    """Return the added, removed and tied tensors of a delta file."""
    changes: dict[str, Any] = json.loads(split_delta(delta).changes or b"{}")
    return changes


def run_python(code: str, *arguments: str) -> str:
    """Run this code in a fresh interpreter, with warnings as errors, and return what it prints."""
    done = finished_python(code, *arguments, options=["-W", "error"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def finished_python(code: str, *arguments: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run this code in a fresh interpreter that can import the helpers of tests."""
    tests = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [PACKAGE, tests, tests / "integration"]))}
    command = [sys.executable, *options, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
