"""The native codec gives the same bytes on another processor. The test cross-compiles it for qemu, and is skipped without these tools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from deltawire.codec.base import EncodeGroup
from deltawire.codec.native import NativeCodec
from deltawire.dtypes import PAYLOAD_TYPES, PayloadType

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NATIVE = Path(__file__).parents[2] / "native"
UNITS = ["chunk_decoder", "chunk_encoder", "digest", "dispatch", "encode", "kernels_scalar", "resolve", "view"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    out = tmp_path_factory.mktemp("aarch64") / "round_trip"
    sources = [str(NATIVE / f"{unit}.cpp") for unit in UNITS] + [str(Path(__file__).with_name("round_trip.cpp"))]
    command = [COMPILER, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-static", f"-I{NATIVE}", *sources, "-pthread", "-o", str(out)]
    subprocess.run(command, check=True)
    return out


@pytest.mark.parametrize("kind", [PAYLOAD_TYPES[code] for code in (9, 4, 12, 15, 13, 1, 16, 17)], ids=lambda kind: kind.name)
def test_aarch64_writes_the_same_bytes(program: Path, kind: PayloadType, tmp_path: Path) -> None:
    random = np.random.default_rng(kind.code)
    count = 40_000
    dtype = kind.dtype
    base = random.standard_normal(count).astype(np.float32)
    old = (base if dtype.name == "F32" else base * 10).astype(dtype.numpy).view(dtype.bits)
    new = old.copy()
    places = random.random(count) < 0.05
    new[places] ^= random.integers(1, 4, int(places.sum())).astype(dtype.bits)
    old.tofile(tmp_path / "base")
    new.tofile(tmp_path / "new")
    facts = [kind.code, dtype.itemsize, kind.width, kind.exponent_shift, kind.exponent_bits]
    command = [EMULATOR, program, tmp_path / "base", tmp_path / "new", tmp_path / "payload", *facts]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert done.stdout == "scalar\n"
    (ours,) = NativeCodec().encode_groups([EncodeGroup(kind, [old], [new], np.ones(1, np.uint64))], 1)
    assert (tmp_path / "payload").read_bytes() == b"".join(ours.pieces)
