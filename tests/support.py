"""Helpers that several test files share: compare states by their bits, split and join delta files, run fresh interpreters."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array.copy() for name, array in state.items()}


def array_of(dtype: DType, bits: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Return an array of this type with these bits."""
    flat = np.asarray(bits).astype(dtype.bits).view(dtype.numpy)
    return flat if shape is None else flat.reshape(shape)


def split_delta(delta: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
    """Split a delta file into its metadata, its structure, and its payloads."""
    length = int.from_bytes(delta[:8], "little")
    header = json.loads(delta[8 : 8 + length])
    metadata = header.pop("__metadata__")
    data = delta[8 + length :]
    payloads = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    return metadata, json.loads(metadata.pop("changes", "{}")), payloads


def join_delta(
    metadata: Mapping[str, Any], changes: Any, payloads: Mapping[str, bytes], edit: Callable[[dict[str, Any]], Any] | None = None
) -> bytes:
    """Join what `split_delta` returned, with a correct BLAKE3. `edit` may change the header, or return another one."""
    data = b"".join(payloads.values())
    whole = dict(metadata) | {"blake3": blake3(data).hexdigest()}
    if changes:
        whole["changes"] = changes if isinstance(changes, str) else json.dumps(changes, separators=(",", ":"), ensure_ascii=False)
    header: dict[str, Any] = {"__metadata__": whole}
    end = 0
    for name, payload in payloads.items():
        header[name] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [end, end + len(payload)]}
        end += len(payload)
    edited = edit(header) if edit else None
    text = json.dumps(header if edited is None else edited, separators=(",", ":"), ensure_ascii=True)
    return join_text(text, data)


def join_text(text: str | bytes, data: bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + data


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
