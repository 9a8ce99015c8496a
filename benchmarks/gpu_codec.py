"""Measure the codec on a GPU: encode, resolve, scatter and digest, compared with a device copy and torch's own `nonzero`.

    python benchmarks/gpu_codec.py                    # 8.2 B weights, as in docs/gpu.md: 50 GB of GPU memory
    python benchmarks/gpu_codec.py --elements 1e9     # on a smaller GPU

It needs an NVIDIA GPU and torch. Times are medians by CUDA events, from the call to the last byte, including work on the host. Weights and
updates are those of `workloads.synthetic_update`, drawn on the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workloads import BF16, FP8_E4M3, update_size

import deltawire
from deltawire.codec.base import Buffer
from deltawire.codec.gpu.device import gpu_at
from deltawire.codec.gpu.digest import start_digest
from deltawire.codec.gpu.encode import encode_tensors
from deltawire.codec.gpu.kernel_table import KernelTable
from deltawire.codec.gpu.resolve import resolve_tensors
from deltawire.dtypes import dtype_named
from deltawire.tensors.gpu_handover import GpuHandover

DEVICE = torch.device("cuda", 0)
GPU = gpu_at(DEVICE)
TYPES = {
    "bf16": (torch.bfloat16, torch.int16, dtype_named("BF16"), BF16, 0.02),
    "fp8": (torch.float8_e4m3fn, torch.int8, dtype_named("F8_E4M3"), FP8_E4M3, 16.0),
}
LARGEST = 58_720_256  # elements: the widest matrices of an 8 B model


@dataclasses.dataclass
class Row:
    """One workload; times in milliseconds, memory as a share of the weights' bytes."""

    name: str
    elements: int
    tensors: int
    changed: int = 0
    payload_bytes: int = 0
    copy_ms: float = 0
    nonzero_ms: float = 0
    nonzero_copy_ms: float = 0
    encode_ms: float = 0
    encode_kernels_ms: float = 0
    encode_memory: float = 0
    masters_ms: float = 0
    resolve_ms: float = 0
    resolve_pinned_ms: float = 0
    resolve_kernels_ms: float = 0
    resolve_memory: float = 0
    patch_memory: float = 0
    scatter_ms: float = 0
    digest_ms: float = 0
    encode_delta_ms: float = 0
    apply_delta_ms: float = 0
    """The time of the public function, with names, hashes and the delta file."""
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    """Milliseconds by kernel, for one call each of encode and resolve."""


def weights(elements: int, density: float, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, _, _, numpy, scale = TYPES[kind]
    size = update_size(density, numpy)
    base = torch.empty(elements, dtype=dtype, device=DEVICE)
    new = torch.empty_like(base)
    random = torch.Generator(DEVICE).manual_seed(1)
    for start in range(0, elements, 1 << 28):
        part = slice(start, min(start + (1 << 28), elements))
        master = torch.randn(part.stop - part.start, device=DEVICE, generator=random) * scale
        base[part] = master.to(dtype)
        master += torch.randn(master.numel(), device=DEVICE, generator=random) * size
        new[part] = (master.clamp_(-448, 448) if kind == "fp8" else master).to(dtype)
    return base, new


def median_ms(work: Callable[[], object], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def kernels_ms(work: Callable[[], object], each: dict[str, float] | None = None) -> float:
    """Return the time in which at least one kernel ran, without copies. Add the time of each kernel to `each`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
        torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and "emcpy" not in e.name]
    if each is not None:
        times: Counter[str] = Counter()
        for event in found:
            name = event.name if event.name.isidentifier() else "torch"
            times[name] += (event.time_range.end - event.time_range.start) / 1000
        each.update({name: round(ms, 2) for name, ms in times.most_common() if ms >= 0.01})
    total = end = 0.0
    for first, last in sorted((event.time_range.start, event.time_range.end) for event in found):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total / 1000


def peak(work: Callable[[], Any], nbytes: int) -> tuple[Any, float]:
    """Return the result, and the peak of memory that is unavailable to other work, including freed memory that waits for a stream."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = work()
    return result, (torch.cuda.memory_stats()["active_bytes.all.peak"] - before) / nbytes


def nonzero(base: torch.Tensor, new: torch.Tensor, integer: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Find the changes as a trainer does without a codec, in slabs, because `nonzero` takes at most 2^31 elements."""
    found = []
    for start in range(0, base.numel(), 1 << 30):
        a, b = base[start : start + (1 << 30)].view(integer), new[start : start + (1 << 30)].view(integer)
        indices = (a != b).nonzero().view(-1)
        found.append((indices, b[indices]))
    return found


def in_a_row(pieces: Sequence[Buffer], *, pinned: bool) -> memoryview:
    """Return the bytes of payloads as a receiver has them, one after the other. With `pinned` the GPU can fetch them itself."""
    memory = torch.empty(sum(map(len, pieces)), dtype=torch.uint8, pin_memory=pinned).numpy()
    at = 0
    for piece in pieces:
        memory[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return memoryview(memory)


def measure(name: str, elements: int, density: float, kind: str, sizes: list[int] | None = None, peers: bool = False) -> Row:
    _, integer, dtype, _, _ = TYPES[kind]
    base, new = weights(elements, density, kind)
    if sizes is None:
        sizes = [min(LARGEST, elements - at) for at in range(0, elements, LARGEST)]
    at = sum(sizes)
    starts = [end - size for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    bases, news = ([side.data_ptr() + start * side.element_size() for start in starts] for side in (base, new))
    facts = sizes, list(range(len(sizes))), [dtype.code] * len(sizes)

    def table() -> KernelTable:
        """Make the arguments for each call again, as the codec does."""
        return KernelTable.of(bases, *facts)

    def pairs() -> KernelTable:
        return KernelTable.of(bases, *facts, news)

    nbytes = base.numel() * base.element_size()
    row = Row(name, at, len(sizes))
    if peers:
        row.copy_ms = median_ms(lambda: torch.empty_like(base).copy_(base))
        found = nonzero(base, new, integer)
        row.nonzero_ms = median_ms(lambda: nonzero(base, new, integer), 3)
        row.nonzero_copy_ms = median_ms(lambda: [(i.cpu(), v.cpu()) for i, v in found], 2)
        del found
    encoded, row.encode_memory = peak(lambda: encode_tensors(pairs(), GPU), nbytes)
    row.changed = int(encoded.changed.sum())
    row.payload_bytes = int(encoded.sizes.sum())
    payloads, pinned = in_a_row(encoded.pieces, pinned=False), in_a_row(encoded.pieces, pinned=True)
    ends = itertools.accumulate(encoded.sizes.tolist())
    payload_ranges = [(end - size, end) if size else None for size, end in zip(encoded.sizes.tolist(), ends, strict=True)]
    after = encoded.after
    del encoded
    row.encode_ms = median_ms(lambda: encode_tensors(pairs(), GPU))
    row.encode_kernels_ms = kernels_ms(lambda: encode_tensors(pairs(), GPU), row.kernels)
    row.digest_ms = median_ms(lambda: start_digest(table(), GPU))
    (patch, outcomes), row.resolve_memory = peak(lambda: resolve_tensors(table(), payload_ranges, payloads, GPU), nbytes)
    assert (outcomes.after == after).all(), "resolving does not lead to the new weights"
    row.patch_memory = patch.nbytes / nbytes
    addresses = table().base
    patch.write(patch.targets(addresses), swap=True)
    assert torch.equal(base.view(integer), new.view(integer)), "the scatter is not exact"
    # The number of swaps is even, so the old weights are restored.
    row.scatter_ms = median_ms(lambda: patch.write(patch.targets(addresses), swap=True), 6)
    assert not row.changed or not torch.equal(base.view(integer), new.view(integer))
    row.resolve_ms = median_ms(lambda: resolve_tensors(table(), payload_ranges, payloads, GPU), 5)
    row.resolve_pinned_ms = median_ms(lambda: resolve_tensors(table(), payload_ranges, pinned, GPU), 5)
    row.resolve_kernels_ms = kernels_ms(lambda: resolve_tensors(table(), payload_ranges, pinned, GPU), row.kernels)
    old, now = (
        {f"model.layers.{i}.weight": side[start : start + size] for i, (start, size) in enumerate(zip(starts, sizes, strict=True))}
        for side in (base, new)
    )
    row.encode_delta_ms = median_ms(lambda: deltawire.encode_delta(old, now), 3)
    turns = itertools.cycle([deltawire.encode_delta(old, now), deltawire.encode_delta(now, old)])
    row.apply_delta_ms = median_ms(lambda: deltawire.apply_delta(old, next(turns)), 5)  # once forward and once back
    if peers and kind == "bf16":
        row.masters_ms = masters_ms(pairs(), new)
    return row


def masters_ms(table: KernelTable, new: torch.Tensor) -> float:
    """Measure encoding from float32 weights that round to the new weights."""
    masters = torch.empty(new.numel(), dtype=torch.float32, device=DEVICE)
    for start in range(0, new.numel(), 1 << 30):
        masters[start : start + (1 << 30)] = new[start : start + (1 << 30)]
    wide = dataclasses.replace(table, next=masters.data_ptr() + 2 * (table.next - new.data_ptr()), next_is_float32=True)
    assert (encode_tensors(wide, GPU).after == encode_tensors(table, GPU).after).all()
    return median_ms(lambda: encode_tensors(wide, GPU), 5)


def training_step(
    parts: int, rounds: int, layers: int = 22, width: int = 2048, heads: int = 16, batch: int = 8, length: int = 2048
) -> dict[str, Any]:
    """Measure steps of a decoder of 1.1 B parameters with and without a delta of each, made on another thread and stream.

    A step accumulates gradients over `parts` batches of 16,384 tokens. Steps with and without deltas take turns.
    """
    layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True, bias=False)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(DEVICE, torch.bfloat16)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.numel()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.numel()], lr=1e-6, fused=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(batch, length, width, device=DEVICE, dtype=torch.bfloat16)
    snapshot = {name: tensor.clone() for name, tensor in weights.items()}
    sizes: list[int] = []

    def publish(handover: GpuHandover) -> None:
        with handover.on_side_stream():
            sizes.append(len(deltawire.encode_delta(snapshot, weights)))
            torch._foreach_copy_(list(snapshot.values()), list(weights.values()))
            torch.cuda.current_stream().synchronize()

    def started() -> threading.Thread:
        worker = threading.Thread(target=publish, args=(GpuHandover(weights),))
        worker.start()
        return worker

    def step(worker: threading.Thread | None) -> None:
        for _ in range(parts):
            model(x, mask=mask, is_causal=True).square().mean().backward()
        if worker:
            worker.join()  # the weights change next
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def seconds(count: int, publishing: bool) -> float:
        """Return the time of one step among others on the stream of the training. The host is ahead of it, as in real training."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        step(started() if publishing else None)
        begin.record()
        for _ in range(count):
            step(started() if publishing else None)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    count = max(6 // parts, 1)
    for publishing in (False, True):
        seconds(count, publishing)
    sizes.clear()
    plain, published = [], []
    for _ in range(rounds):
        plain.append(seconds(count, False))
        published.append(seconds(count, True))
    a, b = statistics.median(plain), statistics.median(published)
    return {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "tokens": parts * batch * length,
        "step_ms": 1e3 * a,
        "step_ms_spread": 1e3 * (max(plain) - min(plain)),
        "publishing_ms": 1e3 * b,
        "publishing_ms_spread": 1e3 * (max(published) - min(published)),
        "each_ms": 1e3 * (b - a),
        "cost": b / a - 1,
        "delta_bytes": statistics.median(sizes),
    }


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: round(x, 2 if name.endswith("_ms") else 5) if isinstance(x, float) else x for name, x in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=8.2e9)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--only", help="measure only workloads whose names contain this")
    parser.add_argument("--no-training", action="store_true")
    options = parser.parse_args()
    elements = int(options.elements)
    small = elements // 10_000 // 8 * 8
    workloads: list[tuple[str, Callable[[str], Row]]] = [
        ("bf16, 1.08%", lambda name: measure(name, elements, 0.0108, "bf16", peers=True)),
        ("bf16, 0.1%", lambda name: measure(name, elements, 0.001, "bf16")),
        ("bf16, 10%", lambda name: measure(name, elements, 0.1, "bf16")),
        ("fp8, 1.08%", lambda name: measure(name, elements, 0.0108, "fp8", peers=True)),
        ("bf16, 1.08%, 10,000 tensors", lambda name: measure(name, 10_000 * small, 0.0108, "bf16", [small] * 10_000)),
    ]
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": []}
    print(results["device"], "torch", results["torch"], flush=True)
    for name, work in workloads:
        if options.only and options.only not in name:
            continue
        row = _rounded(dataclasses.asdict(work(name)))
        results["rows"].append(row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if not options.no_training:
        results["training"] = [_rounded(training_step(parts, rounds)) for parts, rounds in ((1, 7), (4, 5), (16, 2))]
        print(json.dumps(results["training"]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
