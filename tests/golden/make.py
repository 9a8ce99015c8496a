"""Write the golden files of version 1: run `python tests/golden/make.py` with the package and `tests` on the path.

Each case is NAME.base.safetensors and NAME.delta.safetensors; manifest.json records the result. The files are made once: readers must
always decode them. You may add cases. The bytes of existing cases change only with the version of the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from old_deltas import encode_old

import deltawire
from deltawire.dtypes import DTYPES, DType, dtype_named, dtype_of_numpy

HERE = Path(__file__).resolve().parent
MANIFEST = HERE / "manifest.json"

State = dict[str, Any]


class Pair(NamedTuple):
    """A case: two states, and which tensors share the memory of which other tensor in both."""

    base: State
    new: State
    tied: Mapping[str, str] = {}


def generator(seed: int) -> Callable[[int], Any]:
    """Return a function that makes 64-bit words by SplitMix64. NumPy's generators may change with a release, this one never does."""
    position = np.uint64(seed << 32)

    def words(count: int) -> Any:
        nonlocal position
        x = (position + np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        position += np.uint64(count)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    return words


def weights(dtype: DType, words: Any) -> Any:
    """Return the bits of numbers of many scales and both signs. Larger scales are more frequent."""
    scale = np.minimum(np.array([int(w).bit_length() for w in words & np.uint64(0xFFF)]) + 3, (1 << dtype.exponent_bits) - 2)
    sign = (words >> np.uint64(63)) << np.uint64(dtype.width - 1)
    fraction = (words >> np.uint64(8)) & np.uint64((1 << dtype.exponent_shift) - 1)
    return (sign | scale.astype(np.uint64) << np.uint64(dtype.exponent_shift) | fraction).astype(dtype.bits)


def chunk_modes() -> Pair:
    """Return a tensor with raw, coded and same chunks, and tensors of one chunk each."""
    words = generator(1)
    tile = 1 << 14
    base = (words(3 * tile + 100) >> np.uint64(56)).astype(np.uint8)
    new = base.copy()
    new[:tile] ^= (words(tile) % np.uint64(255)).astype(np.uint8) + np.uint8(1)
    new[tile : 2 * tile] += np.where(words(tile) % np.uint64(2), 1, 255).astype(np.uint8)
    small = np.arange(30, dtype=np.uint8)
    return Pair({"all": base, "one": np.array([7], np.uint8)}, {"all": new, "one": np.array([9], np.uint8), "zeros": small * 0})


def value_modes() -> Pair:
    """Return a tensor whose only chunk uses unit, runs, direct and symbols, each in its own context."""
    words = generator(2)
    exponent = np.repeat(np.arange(127, 123, -1), 1000).astype(np.uint32)
    base = exponent << np.uint32(23) | (words(4000) >> np.uint64(42)).astype(np.uint32)
    new = base.copy()
    at = np.arange(0, 1000, 4)
    new[at] += np.uint32(1)
    new[1000 + at] += np.where(at % 160, 1, 50).astype(np.uint32)
    new[2000 + at] -= (words(at.size) % np.uint64(30)).astype(np.uint32) + np.uint32(20)
    new[3000 + at] ^= (words(at.size) >> np.uint64(40)).astype(np.uint32) | np.uint32(1 << 31)
    return Pair({"weight": base.view(np.float32)}, {"weight": new.view(np.float32)})


def inverted() -> Pair:
    """Return tensors in which most elements change."""
    base = np.zeros(2000, np.uint16)
    new = base + 1
    new[[5, 900, 901]] = 0
    return Pair({"x": base, "y": base[:100]}, {"x": new, "y": base[:100] + 1})


def escapes() -> Pair:
    """Return tensors with gaps, runs and magnitudes that are too long for the Rice code."""
    base = np.zeros(6000, np.int32)
    new = base.copy()
    new[:300] = 1
    new[[*range(100, 115), 200]] = 3
    new[5000] = 1 << 30
    new[5999] = -(1 << 31)
    runs = np.zeros(2100, np.uint16)
    mostly_one = (np.arange(2100) % 3 == 0).astype(np.uint16)
    mostly_one[[*range(0, 60, 3), 1998]] = 40
    wide = np.zeros(300, np.uint64)
    far = wide.copy()
    far[[0, 1, 2, 3]] = [1 << 63, (1 << 63) + 1, 5, (1 << 64) - (1 << 40)]
    return Pair({"gaps": base, "runs": runs, "wide": wide}, {"gaps": new, "runs": mostly_one, "wide": far})


def symbols() -> Pair:
    """Return a tensor whose new elements have few different top bytes."""
    words = generator(3)
    base = (words(600) >> np.uint64(3)).astype(np.int64)
    top = np.array([0x3F, 0x40, 0xBF, 0xC0], np.uint64)[(words(600) % np.uint64(4)).astype(np.int64)]
    y = top << np.uint64(56) | (words(600) >> np.uint64(8))
    return Pair({"x": base}, {"x": base ^ y.view(np.int64)})


def every_dtype() -> Pair:
    """Return zeros, extremes, infinities, NaNs and ordinary numbers of each type. Some of each change."""
    base: State = {}
    new: State = {}
    for dtype in DTYPES:
        words = generator(100 + dtype.code)
        top = 1 << (dtype.width - 1)
        infinity = ((1 << dtype.exponent_bits) - 1) << dtype.exponent_shift
        special = [0, top, 1, top - 1, 2 * top - 1, infinity, top | infinity, infinity + 1]
        plain = weights(dtype, words(192)) if dtype.exponent_bits else (words(192) >> np.uint64(64 - dtype.width)).astype(dtype.bits)
        bits = np.concatenate([np.array(special, np.uint64).astype(dtype.bits), plain])
        if dtype.name == "BOOL":
            bits &= 1
        after = bits.copy()
        after[::9] ^= dtype.bits.type(1)
        if dtype.name != "BOOL":
            after[3::31] ^= dtype.bits.type(top)
            after[:8] = after[:8][::-1]
        base[dtype.name], new[dtype.name] = bits.view(dtype.numpy).reshape(10, 20), after.view(dtype.numpy).reshape(10, 20)
    return Pair(base, new)


def training_step() -> Pair:
    """Return bf16 weights, a few of which move by one step."""
    words = generator(4)
    dtype = dtype_named("BF16")
    base = weights(dtype, words(9000))
    at = np.flatnonzero(words(9000) % np.uint64(40) == 0)
    new = base.copy()
    new[at] += np.where(words(at.size) % np.uint64(3), 1, 65535).astype(np.uint16)
    return Pair({"model.weight": base.view(dtype.numpy).reshape(90, 100)}, {"model.weight": new.view(dtype.numpy).reshape(90, 100)})


def structure() -> Pair:
    """Return tensors that are added, removed, retyped, reshaped, tied, empty or scalar, or have unusual names."""
    x = np.arange(24, dtype=np.float32)
    base = {"embed": x, "head": x, "gone": x[:3], "retyped": x[:4], "reshaped": x[:6], "kept": x[:5], "scalar": np.array(1.5)}
    base |= {"empty": np.zeros((0, 3), np.int8), '重み/../"\n': x[:7]}
    y = x.copy()
    y[[3, 9]] = [-3, np.nan]
    new = {"embed": y, "head": y, "retyped": np.arange(4), "reshaped": x[:6].reshape(2, 3), "kept": x[:5], "scalar": np.array(2.5)}
    new |= {
        "empty": np.zeros((0, 3), np.int8),
        '重み/../"\n': -x[:7],
        "fresh": y[:10],
        "fresh and empty": np.zeros((2, 0)),
        "+ fresh": y[:2],
    }
    return Pair(base, new, {"head": "embed"})


def nothing() -> Pair:
    """Return two equal states."""
    base = {"x": np.arange(10, dtype=np.int16)}
    return Pair(base, base)


CASES = [chunk_modes, value_modes, inverted, escapes, symbols, every_dtype, training_step, structure, nothing]


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state as a plain safetensors file."""
    header: dict[str, Any] = {}
    end = 0
    for name, array in state.items():
        header[name] = {"dtype": dtype_of_numpy(array.dtype).name, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in state.values()))


def read_state(path: Path, tied: Mapping[str, str]) -> State:
    """Return the state of a file as writable arrays. Tied tensors are one array."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    state: State = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        begin, end = entry["data_offsets"]
        dtype = dtype_named(entry["dtype"])
        state[name] = np.frombuffer(bytearray(raw[8 + length + begin : 8 + length + end]), dtype.numpy).reshape(entry["shape"])
    return state | {name: state[target] for name, target in tied.items()}


def facts(state: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the type, the shape and the BLAKE3 of the bytes of each tensor."""
    return {
        name: [dtype_of_numpy(array.dtype).name, list(array.shape), blake3(array.tobytes()).hexdigest()]
        for name, array in sorted(state.items())
    }


def main() -> None:
    manifest = {}
    for case in CASES:
        base, new, tied = case()
        delta = encode_old(base, new)
        name = case.__name__
        write_state(HERE / f"{name}.base.safetensors", {n: array for n, array in base.items() if n not in tied})
        (HERE / f"{name}.delta.safetensors").write_bytes(delta)
        manifest[name] = {
            "about": case.__doc__,
            "delta": blake3(delta).hexdigest(),
            "before": deltawire.state_digest(base).hex(),
            "after": deltawire.state_digest(new).hex(),
            "tied": dict(tied),
            "result": facts(new),
        }
    MANIFEST.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
