"""Measure the codec on a GPU: encode, resolve, scatter and digest, compared with a device copy and torch's own `nonzero`.

    python benchmarks/gpu_codec.py                    # 8.2 B weights, as in docs/gpu.md: 50 GB of GPU memory
    python benchmarks/gpu_codec.py --elements 1e9     # on a smaller GPU
    python benchmarks/gpu_codec.py --short            # fewer workloads and rounds: less than two minutes

It needs an NVIDIA GPU and torch. Times are medians by CUDA events, from the call to the last byte, including work on the host. Weights and
updates are those of `workloads.synthetic_update`, drawn on the GPU; 4-bit codes are those of normal weights, and some make a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import commit
from workloads import BF16, FP8_E4M3, update_size

import deltawire
from deltawire.codec.base import Buffer, EncodeGroup, GroupOutcome, ResolveGroup
from deltawire.codec.bits import BitsColumn, DeviceBits, MasterWeightBits
from deltawire.codec.gpu.codec import GpuCodec
from deltawire.codec.gpu.resolution import GpuResolution
from deltawire.dtypes import PAYLOAD_TYPES, PayloadType
from deltawire.tensors.columns import Columns
from deltawire.tensors.gpu_handover import GpuHandover

DEVICE = torch.device("cuda", 0)
CODEC = GpuCodec(DEVICE)
BY_NAME = {payload_type.name: payload_type for payload_type in PAYLOAD_TYPES}


@dataclasses.dataclass(frozen=True)
class Kind:
    """The type of weights: the torch type of tensors, the integers with the same bits, and the payload type."""

    torch: torch.dtype
    integer: torch.dtype
    type: PayloadType
    suffix: str = "weight"


KINDS = {
    "bf16": Kind(torch.bfloat16, torch.int16, BY_NAME["BF16"]),
    "fp8": Kind(torch.float8_e4m3fn, torch.int8, BY_NAME["F8_E4M3"]),
    "nvfp4": Kind(torch.uint8, torch.int8, BY_NAME["F4_E2M1"], "weight_packed"),
    "int4": Kind(torch.int32, torch.int32, BY_NAME["U4"], "weight_packed"),
}
NORMAL = {"bf16": (BF16, 0.02), "fp8": (FP8_E4M3, 16.0)}
"""The type of weights for `workloads.update_size`, and their standard deviation."""

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
    exchange_ms: float = 0
    """Scatter and digest in one pass."""
    encode_delta_ms: float = 0
    apply_delta_ms: float = 0
    """The time of the public function, with names, hashes and the delta file."""
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    """Milliseconds by kernel, for one call each of encode and resolve."""


def weights(elements: int, density: float, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flat tensors before and after an update that changes the share `density` of their elements, or of their 4-bit codes."""
    facts = KINDS[kind]
    base = torch.empty(elements // facts.type.per_element, dtype=facts.torch, device=DEVICE)
    new = torch.empty_like(base)
    random = torch.Generator(DEVICE).manual_seed(1)
    for start in range(0, elements, 1 << 28):
        size = min(1 << 28, elements - start)
        part = slice(start // facts.type.per_element, (start + size) // facts.type.per_element)
        master = torch.randn(size, device=DEVICE, generator=random)
        if facts.type.is_packed:
            codes = _codes(master, kind)
            base[part] = _packed(codes, facts)
            which = torch.rand(size, device=DEVICE, generator=random) < density
            new[part] = _packed(torch.where(which, codes ^ 1, codes), facts)
            continue
        numpy, scale = NORMAL[kind]
        master *= scale
        base[part] = master.to(facts.torch)
        master += torch.randn(size, device=DEVICE, generator=random) * update_size(density, numpy)
        new[part] = (master.clamp_(-448, 448) if kind == "fp8" else master).to(facts.torch)
    return base, new


def _codes(weights: torch.Tensor, kind: str) -> torch.Tensor:
    """Return 4-bit codes of normal weights: sign and magnitude, or signed integers with an offset of 8."""
    if kind == "int4":
        return (weights * 2.5).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=DEVICE)
    return torch.bucketize(weights.abs() * 2, borders).to(torch.uint8) | (weights < 0).to(torch.uint8) << 3


def _packed(codes: torch.Tensor, facts: Kind) -> torch.Tensor:
    return (codes[0::2] | codes[1::2] << 4).view(facts.torch)


def waited(start: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """Return a function that starts work and waits for it."""
    return lambda: start()()


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


class Workload:
    """Tensors before and after an update, and the codec's calls on them. Each call looks at all tensors again, as `encode_delta` does."""

    def __init__(self, elements: int, density: float, kind: str, sizes: Sequence[int]) -> None:
        self.kind = KINDS[kind]
        self.base, self.new = weights(elements, density, kind)
        own = [size // self.kind.type.per_element for size in sizes]
        self.counts = np.array(own, np.int64)
        self.seeds = np.arange(len(sizes), dtype=np.uint64)
        self.olds, self.news = (list(side.split(own)) for side in (self.base, self.new))
        self.nbytes = self.base.numel() * self.base.element_size()
        self.old, self.now = self.states()

    def bits(self, state: dict[str, torch.Tensor]) -> BitsColumn:
        columns = Columns.of(state)
        assert columns is not None
        return columns.bits

    def encode(self, news: Sequence[DeviceBits] | None = None) -> Any:
        group = EncodeGroup(self.kind.type, self.bits(self.old), self.bits(self.now) if news is None else news, self.seeds)
        return CODEC.encode_groups([group], 1)[0]

    def resolve(self, payload: memoryview) -> tuple[GpuResolution, GroupOutcome]:
        resolution = CODEC.deferred_resolution(1)
        group = ResolveGroup(self.kind.type, self.bits(self.old), self.counts, self.seeds, (0, len(payload)), True)
        (outcome,) = resolution.add_groups([group], payload)
        return resolution, outcome

    def digest(self) -> Any:
        return CODEC.digest(self.bits(self.old), self.seeds, 1)

    def states(self) -> list[dict[str, torch.Tensor]]:
        return [{f"model.layers.{i:06}.{self.kind.suffix}": tensor for i, tensor in enumerate(side)} for side in (self.olds, self.news)]


def host_ms(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the median time of calls by the clock of the host, for calls that wait for the device. Slow calls are made only twice."""
    times: list[float] = []
    while len(times) < (rounds + 1 if sum(times) < 4 else 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def measure(
    name: str, elements: int, density: float, kind: str, sizes: Sequence[int] | None = None, *, peers: bool = False, rounds: int = 7
) -> Row:
    sizes = sizes or [min(LARGEST, elements - at) for at in range(0, elements, LARGEST)]
    load = Workload(elements, density, kind, sizes)
    base, new, integer = load.base, load.new, load.kind.integer
    row = Row(name, elements, len(sizes))
    if peers:
        row.copy_ms = median_ms(lambda: torch.empty_like(base).copy_(base))
        found = nonzero(base, new, integer)
        row.nonzero_ms = median_ms(lambda: nonzero(base, new, integer), 3)
        row.nonzero_copy_ms = median_ms(lambda: [(i.cpu(), v.cpu()) for i, v in found], 2)
        del found
    load.encode()  # compiles kernels
    encoded, row.encode_memory = peak(load.encode, load.nbytes)
    row.changed = int(encoded.changed.sum())
    row.payload_bytes = sum(map(len, encoded.pieces))
    payload, pinned = in_a_row(encoded.pieces, pinned=False), in_a_row(encoded.pieces, pinned=True)
    after = encoded.after
    del encoded
    row.encode_ms = median_ms(load.encode, rounds)
    row.encode_kernels_ms = kernels_ms(load.encode, row.kernels)
    row.digest_ms = median_ms(load.digest, rounds)
    (resolution, outcome), row.resolve_memory = peak(lambda: load.resolve(payload), load.nbytes)
    assert outcome.after == after, "resolving does not lead to the new weights"
    row.patch_memory = sum(group.patch.nbytes for group in resolution.groups) / load.nbytes
    resolution.compact()
    resolution.exchange()
    assert torch.equal(base.view(integer), new.view(integer)), "the scatter is not exact"
    # The number of swaps is even each time, so the old weights are restored.
    row.scatter_ms = median_ms(resolution.exchange, 6)
    row.exchange_ms = median_ms(waited(resolution.exchange_and_digest), 5)
    assert not row.changed or not torch.equal(base.view(integer), new.view(integer))
    lanes = resolution.exchange_and_digest()().sum(axis=0, dtype=np.uint32).tolist()
    assert tuple(lanes) == after or not resolution.digested.all(), "the pass that writes finds another digest"
    resolution.exchange()
    del resolution
    row.resolve_ms = median_ms(lambda: load.resolve(payload), rounds)
    row.resolve_pinned_ms = median_ms(lambda: load.resolve(pinned), rounds)
    row.resolve_kernels_ms = kernels_ms(lambda: load.resolve(pinned), row.kernels)
    old, now = load.old, load.now
    row.encode_delta_ms = host_ms(lambda: deltawire.encode_delta(old, now), 3)
    turns = itertools.cycle([deltawire.encode_delta(old, now), deltawire.encode_delta(now, old)])
    row.apply_delta_ms = host_ms(lambda: deltawire.apply_delta(old, next(turns)), 5)  # once forward and once back
    if kind == "bf16" and peers:
        row.masters_ms = masters_ms(load)
    return row


def masters_ms(load: Workload) -> float:
    """Measure encoding from float32 weights that round to the new weights."""
    masters = torch.empty(load.new.numel(), dtype=torch.float32, device=DEVICE)
    for start in range(0, load.new.numel(), 1 << 30):
        masters[start : start + (1 << 30)] = load.new[start : start + (1 << 30)]
    wide: list[DeviceBits] = [MasterWeightBits(tensor) for tensor in masters.view(torch.int32).split(load.counts.tolist())]
    assert load.encode(wide).after == load.encode().after
    return median_ms(lambda: load.encode(wide), 5)


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
    parser.add_argument("--short", action="store_true", help="measure the most important workloads only, without training")
    options = parser.parse_args()
    elements = int(options.elements)
    rounds = 5 if options.short else 7

    def tensors(count: int, size: int) -> dict[str, Any]:
        return {"elements": count * size, "sizes": [size] * count}

    # The name, the arguments of `measure`, and whether it is one of the most important.
    workloads: list[tuple[str, dict[str, Any], bool]] = [
        ("bf16, 1.08%", {"density": 0.0108, "kind": "bf16", "peers": not options.short}, True),
        ("bf16, 0.1%", {"density": 0.001, "kind": "bf16"}, False),
        ("bf16, 10%", {"density": 0.1, "kind": "bf16"}, False),
        ("fp8, 1.08%", {"density": 0.0108, "kind": "fp8", "peers": True}, False),
        ("fp8, 0.12%", {"density": 0.0012, "kind": "fp8"}, True),
        ("nvfp4, 0.005%", {"density": 5e-5, "kind": "nvfp4"}, True),
        ("nvfp4, 1%", {"density": 0.01, "kind": "nvfp4"}, False),
        ("int4, 0.05%", {"density": 5e-4, "kind": "int4"}, True),
        ("bf16, 1.08%, 10,000 tensors", {"density": 0.0108, "kind": "bf16", **tensors(10_000, elements // 10_000 // 8 * 8)}, True),
        ("nvfp4, 0.005%, 10,000 tensors of 0.2 MB", {"density": 5e-5, "kind": "nvfp4", **tensors(10_000, 400_000)}, True),
        ("bf16, 1%, 100,000 tensors of 2,048", {"density": 0.01, "kind": "bf16", **tensors(100_000, 2048)}, True),
        ("bf16, 1.08%, 100,000 tensors", {"density": 0.0108, "kind": "bf16", **tensors(100_000, elements // 100_000 // 8 * 8)}, False),
    ]
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "commit": commit(), "rows": []}
    print(results["device"], "torch", results["torch"], flush=True)
    for name, arguments, important in workloads:
        if (options.only and options.only not in name) or (options.short and not important):
            continue
        row = _rounded(dataclasses.asdict(measure(name, **{"elements": elements, "rounds": rounds, **arguments})))
        results["rows"].append(row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if not options.no_training and not options.short:
        results["training"] = [_rounded(training_step(parts, rounds)) for parts, rounds in ((1, 7), (4, 5), (16, 2))]
        print(json.dumps(results["training"]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
