"""Measure quantising on a GPU, alone and together with encoding: masters of bfloat16 or float32 become a delta in host memory.

    python benchmarks/gpu_quantise.py                    # 8.2 B weights, as in docs/gpu.md: 60 GB of GPU memory
    python benchmarks/gpu_quantise.py --elements 1e9     # on a smaller GPU

It needs an NVIDIA GPU and torch. Weights are normal with standard deviation 0.02. The update is Gaussian noise of a size with which about
one code of fp8 in a thousand changes. Times are medians by the clock of the host, from the call to the last byte in host memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_codec import kernels_ms

from deltawire.codec.base import EncodeGroup
from deltawire.codec.bits import DeviceBits, QuantisedBits
from deltawire.codec.gpu.codec import GpuCodec
from deltawire.dtypes import PAYLOAD_TYPES, dtype_named
from deltawire.quantise import QuantisedLayout, Recipe
from deltawire.quantise.gpu.quantiser import GpuQuantiser, PendingQuantisation
from deltawire.quantise.weight_table import WeightTable, kind_number, source_number

DEVICE = torch.device("cuda", 0)
TYPES = {payload_type.name: payload_type for payload_type in PAYLOAD_TYPES}
PAYLOAD = {"e4m3": TYPES["F8_E4M3"], "e2m1": TYPES["F4_E2M1"], "int4": TYPES["U4"]}
ROWS, COLUMNS = 14336, 4096
"""The shape of the widest matrices of an 8 B model: 58.7 M weights."""
SEGMENT = 96 << 20
"""Bytes of codes that are quantised and encoded at a time."""


@dataclasses.dataclass
class Row:
    """One recipe and type of masters; times in milliseconds, memory as a share of the published bytes."""

    recipe: str
    masters: str
    elements: int
    changed: int = 0
    payload_bytes: int = 0
    read_ms: float = 0
    """The time to read the masters once: torch's largest value of each matrix."""
    quantise_ms: float = 0
    quantise_gb_per_s: float = 0
    segments_ms: float = 0
    """Quantise a segment into memory of its own and encode it, one after the other."""
    segments_memory: float = 0
    fused_ms: float = 0
    """Choose all scales, and encode all weights while they are quantised: kernels read the masters twice, and no codes are written."""
    fused_memory: float = 0
    scales_ms: float = 0
    """The part of it that chooses the scales."""
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    """The milliseconds of each kernel in it."""


def median_ms(work: Callable[[], object], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def peak(work: Callable[[], Any], nbytes: int) -> tuple[Any, float]:
    """Return the result, and the peak of memory that is unavailable to other work, including freed memory that waits for a stream."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = work()
    return result, (torch.cuda.memory_stats()["active_bytes.all.peak"] - before) / nbytes


class Model:
    """Matrices of masters, and what is published for them. `published` is the version before."""

    def __init__(self, recipe: str, dtype: torch.dtype, elements: int) -> None:
        self.recipe = Recipe.parse(recipe)
        source = dtype_named({torch.float32: "F32", torch.bfloat16: "BF16"}[dtype])
        count = max(1, elements // (ROWS * COLUMNS))
        self.layout = QuantisedLayout.of(
            self.recipe, {f"model.layers.{i}.self_attn.o_proj.weight": (source, (ROWS, COLUMNS)) for i in range(count)}
        )
        random = torch.Generator(DEVICE).manual_seed(1)
        self.masters = [torch.empty(ROWS, COLUMNS, dtype=dtype, device=DEVICE) for _ in range(count)]
        for tensor in self.masters:
            tensor.copy_(torch.randn(ROWS, COLUMNS, device=DEVICE, generator=random) * 0.02)
        weight = self.layout.weights[0]
        self.forms = {role: self.layout.outputs[name] for role, name in weight.outputs.items() if role != "shape"}
        self.published = [self._outputs() for _ in self.masters]
        self.source = source_number(source)
        self.quantiser = GpuQuantiser(DEVICE)
        assert self.quantiser.quantise_weights(self.recipe, self.table(range(count), self.published, None)) is None
        for tensor in self.masters:
            noise = torch.randn(ROWS, COLUMNS, device=DEVICE, generator=random) * 6e-7
            tensor.copy_(tensor.float() + noise)

    def _outputs(self) -> dict[str, torch.Tensor]:
        types = {"F8_E4M3": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F32": torch.float32, "BF16": torch.bfloat16}
        return {str(role): torch.empty(form.shape, dtype=types[form.dtype.name], device=DEVICE) for role, form in self.forms.items()}

    def table(self, which: range, out: list[dict[str, torch.Tensor]], previous: list[dict[str, torch.Tensor]] | None) -> WeightTable:
        n = len(which)

        def addresses(outputs: list[dict[str, torch.Tensor]] | None, role: str) -> Any:
            found = [outputs[i][role].data_ptr() if outputs is not None and role in outputs[i] else 0 for i in range(n)]
            return np.array(found, np.uint64)

        return WeightTable(
            np.array([self.masters[i].data_ptr() for i in which], np.uint64),
            np.full(n, COLUMNS * self.masters[0].element_size(), np.int64),
            np.full(n, ROWS, np.int64),
            np.full(n, COLUMNS, np.int64),
            np.full(n, self.source, np.uint8),
            addresses(out, "codes"),
            addresses(out, "scale"),
            addresses(out, "global_scale"),
            addresses(previous, "scale"),
            addresses(previous, "global_scale"),
            np.arange(n, dtype=np.int64),
        )

    def scales(self) -> list[dict[str, torch.Tensor]]:
        """Return memory for the scales of all weights."""
        types = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.int8, "U8": torch.uint8}
        forms = {role: form for role, form in self.forms.items() if role != "codes"}
        return [
            {str(role): torch.empty(form.shape, dtype=types[form.dtype.name], device=DEVICE) for role, form in forms.items()}
            for _ in self.masters
        ]

    def quantised(self, scales: list[dict[str, torch.Tensor]]) -> list[QuantisedBits]:
        form, facts = self.forms["codes"], (kind_number(self.recipe), self.source, self.recipe.group_size or 0)
        integer = torch.int32 if self.masters[0].dtype == torch.float32 else torch.int16
        return [
            QuantisedBits(tensor.view(integer), form.shape, form.dtype.itemsize, facts, own["scale"], own.get("global_scale"))
            for tensor, own in zip(self.masters, scales, strict=True)
        ]

    def segments(self) -> list[range]:
        codes = self.published[0]["codes"]
        each = max(1, SEGMENT // (codes.numel() * codes.element_size()))
        return [range(start, min(start + each, len(self.masters))) for start in range(0, len(self.masters), each)]


def measure(recipe: str, dtype: torch.dtype, elements: int) -> Row:
    model = Model(recipe, dtype, elements)
    count = len(model.masters)
    row = Row(recipe, str(dtype).removeprefix("torch."), count * ROWS * COLUMNS)
    row.read_ms = median_ms(lambda: [tensor.max() for tensor in model.masters])
    codec = GpuCodec(DEVICE)
    payload = PAYLOAD[model.recipe.element]
    integer = {8: torch.int8, 4: torch.int32 if payload.name == "U4" else torch.int8}[payload.width]
    segments = model.segments()
    scratch = [model._outputs() for _ in segments[0]]

    def quantise(which: range) -> None:
        old = model.published[which.start : which.stop]
        bad = model.quantiser.start(model.recipe, model.table(which, scratch, old))
        assert bad.first_nonfinite() is None

    row.quantise_ms = median_ms(lambda: [quantise(which) for which in segments])
    row.quantise_gb_per_s = row.elements * model.masters[0].element_size() / row.quantise_ms / 1e6

    def publish() -> list[Any]:
        found = []
        for which in segments:
            quantise(which)
            old = [DeviceBits(model.published[i]["codes"].view(integer)) for i in which]
            new = [DeviceBits(scratch[k]["codes"].view(integer)) for k in range(len(which))]
            found += codec.encode_groups([EncodeGroup(payload, old, new, np.arange(len(which), dtype=np.uint64))], 1)
        return found

    def choose(scales: list[dict[str, torch.Tensor]]) -> PendingQuantisation:
        return model.quantiser.start(model.recipe, model.table(range(count), scales, model.published), makes_codes=False)

    def fused() -> Any:
        scales = model.scales()
        pending = choose(scales)
        old = [DeviceBits(one["codes"].view(integer)) for one in model.published]
        (found,) = codec.encode_groups([EncodeGroup(payload, old, model.quantised(scales), np.arange(count, dtype=np.uint64))], 1)
        assert pending.first_nonfinite() is None
        return found

    encoded = publish()
    row.changed = int(sum(int(group.changed.sum()) for group in encoded))
    row.payload_bytes = sum(len(piece) for group in encoded for piece in group.pieces)
    published = sum(tensor.nbytes for one in model.published for tensor in one.values())
    assert int(fused().changed.sum()) == row.changed, "weights that are quantised as they are read have other changes"
    _, row.fused_memory = peak(fused, published)
    row.fused_ms = median_ms(fused)
    kernels_ms(fused, row.kernels)
    row.scales_ms = median_ms(lambda: choose(model.scales()).first_nonfinite())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["active_bytes.all.current"] - sum(t.nbytes for one in scratch for t in one.values())
    torch.cuda.reset_peak_memory_stats()
    publish()
    row.segments_memory = (torch.cuda.memory_stats()["active_bytes.all.peak"] - before) / published
    row.segments_ms = median_ms(publish, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=8.2e9)
    parser.add_argument("--recipes", default="fp8-block,nvfp4,fp8-channel,fp8-tensor,mxfp4,int4")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for recipe in arguments.recipes.split(","):
        for dtype in (torch.bfloat16, torch.float32):
            if dtype == torch.float32 and recipe not in ("fp8-block", "nvfp4"):
                continue
            row = measure(recipe, dtype, int(arguments.elements))
            torch.cuda.empty_cache()
            rows.append(dataclasses.asdict(row))
            print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in rows[-1].items()}), flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
