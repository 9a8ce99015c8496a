"""Measure quantising on a GPU together with encoding: master weights become a delta in host memory, or a version of a chain.

    python benchmarks/gpu_quantise.py                    # 8.2 B weights, as in docs/gpu-measurements.md: 60 GB of GPU memory
    python benchmarks/gpu_quantise.py --elements 1e9     # on a smaller GPU
    python benchmarks/gpu_quantise.py --publish          # also with a publisher and a store in host memory

It needs an NVIDIA GPU and torch. Weights are normal with standard deviation 0.02. The update is Gaussian noise of a size with which about
one code of fp8 in a thousand changes. Times are medians by the clock of the host, from the call to the last byte in host memory.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_codec import kernels_ms, peak
from report import commit

import deltawire
from deltawire.delta.encode import DeltaSummary, encode_many
from deltawire.events import Event
from deltawire.publish.batches import batches_of_quantised
from deltawire.publish.quantising import Quantising, quantise, quantise_segments
from deltawire.publish.upload.segments import cut_segments, part_of_state
from deltawire.store.memory import MemoryStore
from deltawire.tensors.bits import State
from deltawire.tensors.columns import in_columns

DEVICE = torch.device("cuda", 0)
ROWS, COLUMNS = 14336, 4096
"""The shape of the widest matrices of an 8 B model: 58.7 M weights."""
CALLS = 12
"""The measured calls of `publish`, enough for several skips."""


@dataclasses.dataclass
class Row:
    """One recipe and type of master weights; times in milliseconds, memory as a share of the published bytes."""

    recipe: str
    masters: str
    elements: int
    changed: int = 0
    delta_bytes: int = 0
    read_ms: float = 0
    """The time to read the master weights once: torch's largest value of each matrix."""
    quantise_ms: float = 0
    """Quantise segments into memory, one after the other, without encoding."""
    fused_ms: float = 0
    """Choose all scales, and encode all tensors; codes are not written. The result is the bytes of delta files, with digests and hashes."""
    fused_memory: float = 0
    batches: int = 0
    batched_ms: float = 0
    """The same in batches, as a publisher does it, so that new scales take little memory."""
    batched_memory: float = 0
    scales_ms: float = 0
    """The part of it that chooses the scales."""
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    """The milliseconds of each kernel in it."""
    publish_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    """The phases of `Publisher.publish`, whose snapshot is on the GPU. `total` is the time until the commit, `follow` the time until the
    snapshot has followed, and `whole` the call. Medians of `CALLS` calls. It encodes no deltas back."""
    publish_longest_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    """The longest of these calls, phase by phase."""
    publish_memory: float = 0
    """The extra memory of such a call."""
    publish_with_skips_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    """The same by a publisher that makes skips, as publishers do by default: it also encodes deltas back."""
    publish_with_skips_longest_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    publish_with_skips_memory: float = 0


def median_ms(work: Callable[[], object], rounds: int = 4) -> float:
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


class Model:
    """Matrices of master weights, and what is published for them. `published` is the version before."""

    def __init__(self, recipe: str, dtype: torch.dtype, elements: int) -> None:
        random = torch.Generator(DEVICE).manual_seed(1)
        self.masters: dict[str, Any] = {}
        for number in range(max(1, elements // (ROWS * COLUMNS))):
            name = f"model.layers.{number}.self_attn.o_proj.weight"
            self.masters[name] = (torch.randn(ROWS, COLUMNS, device=DEVICE, generator=random) * 0.02).to(dtype)
        quantising = Quantising(recipe, None)
        self.layout = quantising.layout_of(self.masters)
        self.table = quantising.table_of(self.layout)
        self.segments = cut_segments(self.table.sizes)
        published: dict[str, Any] = {}
        for index in range(len(self.segments)):
            published |= self.quantise([index], None, written=True)
        self.published: Any = in_columns(published)  # as a publisher has them
        self._random = random
        self.update()

    def update(self) -> None:
        for tensor in self.masters.values():
            noise = torch.randn(ROWS, COLUMNS, device=DEVICE, generator=self._random) * 6e-7
            tensor.copy_(tensor.float() + noise)

    def names(self, index: int) -> Sequence[str]:
        return self.table.names_of(self.segments[index])

    def quantise(self, batch: Sequence[int], previous: Any, *, written: bool) -> State:
        names = [name for index in batch for name in self.names(index)]
        make = quantise if written else quantise_segments
        return make(self.layout, names, self.masters, previous)

    def part(self, state: Any, index: int) -> Any:
        return part_of_state(state, self.table, self.segments[index])

    def delta(self, batches: Sequence[Sequence[int]]) -> list[tuple[bytes, DeltaSummary]]:
        """Return the deltas of all segments, as `upload_update` makes them."""
        found = []
        for batch in batches:
            new = self.quantise(batch, self.published, written=False)
            found += encode_many([(self.part(self.published, index), self.part(new, index)) for index in batch])
        return found


def measure(recipe: str, dtype: torch.dtype, elements: int, *, publishes: bool = False, profiles: bool = False) -> Row:
    model = Model(recipe, dtype, elements)
    row = Row(recipe, str(dtype).removeprefix("torch."), len(model.masters) * ROWS * COLUMNS)
    row.read_ms = median_ms(lambda: [tensor.max() for tensor in model.masters.values()])
    whole = [range(len(model.segments))]
    batches = batches_of_quantised(model.layout, model.table, model.masters, model.segments)
    assert batches is not None
    row.quantise_ms = median_ms(lambda: [model.quantise([i], model.published, written=True) for i in whole[0]], 2)
    encoded = model.delta(whole)
    row.changed = sum(summary.changed for _, summary in encoded)
    row.delta_bytes = sum(len(delta) for delta, _ in encoded)
    assert [delta for delta, _ in model.delta(batches)] == [delta for delta, _ in encoded]
    del encoded
    row.batches = len(batches)
    _, row.fused_memory = peak(lambda: model.delta(whole), model.table.state_bytes)
    row.fused_ms = median_ms(lambda: model.delta(whole))
    _, row.batched_memory = peak(lambda: model.delta(batches), model.table.state_bytes)
    row.batched_ms = median_ms(lambda: model.delta(batches))
    row.scales_ms = median_ms(lambda: [model.quantise(batch, model.published, written=False) for batch in batches])
    kernels_ms(lambda: model.delta(batches), row.kernels)
    if profiles:
        profile = cProfile.Profile()
        profile.runcall(model.delta, batches)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if publishes:
        row.publish_ms, row.publish_longest_ms, row.publish_memory = publish(model, recipe, skips=False, profiles=profiles)
        row.publish_with_skips_ms, row.publish_with_skips_longest_ms, row.publish_with_skips_memory = publish(model, recipe, skips=True)
    return row


def publish(model: Model, recipe: str, *, skips: bool, profiles: bool = False) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the median and the longest milliseconds of each phase of a publication, of `CALLS` calls, and the extra memory of one more.

    With `skips`, publications encode deltas back, too. Skips themselves are made on a thread while no publication is measured.
    """
    model.published = None
    torch.cuda.empty_cache()
    phases: list[dict[str, float]] = []

    def note(event: Event) -> None:
        if event.name == "published":
            phases.append(
                {name.removesuffix("_seconds"): float(value) for name, value in event.fields.items() if name.endswith("_seconds")}
            )

    with deltawire.Publisher(
        MemoryStore(),
        quantise=recipe,
        snapshot="device",
        attachments={"config.json": b"{}"},
        options=deltawire.WriterOptions(skips=skips),
        on_event=note,
    ) as publisher:
        publisher.publish(model.masters)
        whole = []
        for _ in range(CALLS + 1):
            model.update()
            torch.cuda.synchronize()
            start = time.perf_counter()
            version = publisher.publish(model.masters)
            whole.append(time.perf_counter() - start)
            assert version.kind == "delta"
            publisher.flush()
        calls = [each | {"follow": call - each["total"], "whole": call} for call, each in zip(whole[1:], phases[2:], strict=True)]
        median, longest = ({name: choose([each[name] for each in calls]) for name in calls[-1]} for choose in (statistics.median, max))
        model.update()
        _, memory = peak(lambda: publisher.publish(model.masters), model.table.state_bytes)
        publisher.flush()
        if profiles:
            model.update()
            torch.cuda.synchronize()
            profile = cProfile.Profile()
            profile.runcall(publisher.publish, model.masters)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    found = ({name: round(1e3 * seconds, 2) for name, seconds in each.items()} for each in (median, longest))
    return next(found), next(found), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=8.2e9)
    parser.add_argument("--recipes", default="fp8-block,nvfp4,fp8-channel,fp8-tensor,mxfp4,int4")
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print what takes the host's time while a delta is made")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for recipe in arguments.recipes.split(","):
            if dtype == torch.float32 and recipe not in ("fp8-block", "nvfp4"):
                continue
            publishes = arguments.publish and dtype == torch.bfloat16 and recipe in ("fp8-block", "nvfp4")
            row = measure(recipe, dtype, int(arguments.elements), publishes=publishes, profiles=arguments.profile)
            torch.cuda.empty_cache()
            rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in dataclasses.asdict(row).items()})
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                found = {"device": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__, "commit": commit(), "rows": rows}
                arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
