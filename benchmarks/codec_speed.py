"""Measure encode and apply in GB of weights per second, next to memcpy and the peers. One thread, unless a row says otherwise."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peers import PEERS, REIMPLEMENTED, DenseXor
from report import Table
from workloads import BF16, synthetic_update

import deltawire
from deltawire.codec import using_codec
from deltawire.codec.native import instruction_sets

DENSITY = 0.0108


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy at an address that is a multiple of 64, as torch allocates."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype)
    np.copyto(copy, array)
    return copy


def seconds(work: Callable[[], object], reset: Callable[[], object] = lambda: None) -> float:
    """Return the shorter time of two runs. In the first one caches, branch predictors and the allocator are not warm."""
    times = []
    for _ in range(2):
        reset()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_both(one: NDArray[Any], same: NDArray[Any]) -> None:
    """Compare two equal arrays with memcmp. No encoder that compares all weights can be faster."""
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    assert compare(one.ctypes.data, same.ctypes.data, one.nbytes) == 0


class Method:
    """One method to encode and apply, and its times."""

    def __init__(self, label: str, encode: Callable[[], bytes], apply: Callable[[bytes], object]) -> None:
        self.label, self.encode, self.apply = label, encode, apply
        self.encode_seconds: list[float] = []
        self.apply_seconds: list[float] = []


def measure(elements: int, rounds: int) -> Table:
    made_base, made_new = synthetic_update(elements, DENSITY)
    base, new = aligned(made_base), aligned(made_new)
    del made_base, made_new
    target = aligned(base)
    old, now, out = (array.view(np.uint16) for array in (base, new, target))

    def ours(codec: str, threads: int) -> Method:
        def encode() -> bytes:
            with using_codec(codec):
                return deltawire.encode_delta({"w": base}, {"w": new}, threads=threads)

        def apply(delta: bytes) -> None:
            with using_codec(codec):
                deltawire.apply_delta({"w": target}, delta, threads=threads)

        return Method(f"deltawire, {codec}" + ("" if threads == 1 else f", {threads} threads"), encode, apply)

    def resolved(codec: str) -> Method:
        def apply(delta: bytes) -> None:
            with using_codec(codec):
                deltawire.resolve_delta({"w": target}, delta, threads=1).apply({"w": target})

        return Method(f"deltawire, {codec}, resolve_delta then patch.apply", ours(codec, 1).encode, apply)

    best, *others = instruction_sets()
    methods = [ours(best, 1), resolved(best), ours(best, 2), *(ours(isa, 1) for isa in others)]
    whole = DenseXor(frame_bytes=base.nbytes)
    shipped_label = "XOR + zstd-1, one frame per tensor (slime, SkyRL)"
    methods.append(Method(shipped_label, lambda: whole.encode(old, now), lambda d: whole.apply(out, d)))
    for peer in PEERS:
        label = f"{peer.name}, 2 MiB frames (faster than shipped)" if isinstance(peer, DenseXor) else f"{peer.name} ({peer.used_by})"
        methods.append(Method(label, lambda peer=peer: peer.encode(old, now), lambda d, peer=peer: peer.apply(out, d)))  # type: ignore[misc]

    copies: list[float] = []
    reads: list[float] = []
    for _ in range(rounds):
        copies.append(seconds(lambda: np.copyto(out, old)))
        reads.append(seconds(lambda: read_both(out, old)))
        for method in methods:
            delta: list[bytes] = []
            method.encode_seconds.append(seconds(lambda m=method, d=delta: d.append(m.encode()), delta.clear))  # type: ignore[misc]
            restore = lambda: np.copyto(out, old)  # noqa: E731
            method.apply_seconds.append(seconds(lambda m=method, d=delta: m.apply(d[0]), restore))  # type: ignore[misc]
            assert np.array_equal(out, now), f"{method.label} is not exact"
        copies.append(seconds(lambda: np.copyto(out, old)))

    gigabytes = base.nbytes / 1e9
    copy, read = statistics.median(copies), statistics.median(reads)
    table = Table(
        "codec-speed",
        f"Speed: {base.nbytes / 2**30:.0f} GiB of bf16 weights, {np.count_nonzero(old != now) / base.size:.2%} changed; one thread; "
        f"medians of {rounds} rounds, GB of weights per second",
        ["method", "encode", "× memcpy", "apply", "× memcpy"],
        [
            ["memcpy", f"{gigabytes / copy:.1f}", "1.00", f"{gigabytes / copy:.1f}", "1.00"],
            ["only reading both states (memcmp), the lower bound of any encoder", f"{gigabytes / read:.1f}", f"{copy / read:.2f}", "", ""],
        ],
    )
    encode = {m.label: statistics.median(m.encode_seconds) for m in methods}
    apply = {m.label: statistics.median(m.apply_seconds) for m in methods}
    for label in encode:
        table.rows.append(
            [label] + [text for took in (encode[label], apply[label]) for text in (f"{gigabytes / took:.2f}", f"{copy / took:.2f}")]
        )
    mine, framed_label = methods[0].label, next(label for label in encode if "2 MiB frames" in label)
    table.notes.append("deltawire's `apply` checks the digests of the whole base and of the result. The peers' methods check nothing here.")
    table.check("encode at least 0.5 × memcpy", copy / encode[mine] >= 0.5)
    table.check("apply at least 0.5 × memcpy", copy / apply[mine] >= 0.5)
    faster = {label: (encode[label] / encode[mine], apply[label] / apply[mine]) for label in (shipped_label, framed_label)}
    table.check(f"encode at least 8 × XOR + zstd-1 as it is shipped (is {faster[shipped_label][0]:.1f} ×)", faster[shipped_label][0] >= 8)
    table.check(f"apply at least 5 × XOR + zstd-1 as it is shipped (is {faster[shipped_label][1]:.1f} ×)", faster[shipped_label][1] >= 5)
    table.notes.append(
        f"XOR + zstd-1 as it is shipped takes {encode[shipped_label] / read:.1f} × as long as only reading both states, "
        "which bounds the gain of any encoder. "
        f"deltawire reaches {read / encode[mine]:.2f} of that bound."
    )
    framed_encode, framed_apply = faster[framed_label]
    table.notes.append(
        "With frames of 2 MiB, which no system that we know uses, XOR + zstd-1 works in cache. Then "
        f"deltawire encodes {framed_encode:.1f} × and applies {framed_apply:.1f} × as fast."
    )
    table.notes.append(REIMPLEMENTED)
    assert base.dtype == BF16
    return table
