"""The bytes of a training step, from recorded densities: of a full checkpoint, of deltawire's delta, and of XOR + zstd-1. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UnusablePlan
from ..publish.shortcuts.cadence import AnchorPolicy, ChainCost, Speed, anchor_due
from ..publish.upload.segments import MOST_SEGMENTS, SEGMENT_BYTES
from .quantities import MOST_BYTES, MOST_WEIGHTS, checked


@dataclass(frozen=True, slots=True)
class Density:
    """The recorded changes of one step in one format: GRPO with a learning rate of 1e-6 (docs/benchmarks.md).

    Parameters
    ----------
    state_bits
        Bits of the full state for each weight, with its scales.
    changed
        The share of the weights that change.
    bits
        Bits of the delta for each changed weight, with changed scales, digests and headers.
    xor_ratio
        How many times larger XOR + zstd-1 is.
    """

    state_bits: float
    changed: float
    bits: float
    xor_ratio: float


DENSITIES = {
    "bf16": Density(16.0, 0.0107, 6.925, 3.19),
    "fp8-block": Density(8 + 32 / 128**2, 0.000926, 8.89, 2.18),
    "fp8-channel": Density(8.0, 0.000929, 8.87, 2.22),
    "nvfp4": Density(4 + 8 / 16, 0.000048, 17.73, 2.82),
    "mxfp4": Density(4 + 8 / 32, 0.000041, 18.21, 2.77),
    "int4": Density(4 + 16 / 32, 0.000041, 18.11, 2.90),
}
"""The figures of benchmarks/results/quantised-size.json (sticky scales) and codec-size.json."""

_ALIASES = {"fp8": "fp8-block", "bfloat16": "bf16"}

_BITS_OF_BF16 = ((9e-6, 17.67), (9.9e-5, 11.35), (0.001005, 8.930), (0.010009, 6.992), (0.05002, 5.703), (0.200027, 4.678), (1.0, 4.231))
_BITS_OF_FP8 = ((9e-6, 22.27), (9.8e-5, 13.62), (0.001007, 9.841), (0.010031, 6.885), (0.050118, 5.693), (0.200447, 4.752), (1.0, 4.374))
"""Share that changes, and bits for each change: benchmarks/results/codec-density.json. The last row is that of 50% changed."""


def dtype_named(name: str) -> str:
    """Return the name in `DENSITIES` of a format. `fp8` means `fp8-block`."""
    found = _ALIASES.get(name, name)
    if found not in DENSITIES:
        raise UnusablePlan(f"The format {name[:40]!r} is not known. Choose one of fp8, {', '.join(DENSITIES)}.", hint="")
    return found


def bits_per_change(dtype: str, changed: float) -> float:
    """Return the bits of a delta for each changed weight, at another density than the recorded one.

    The measured curve of bits against density gives the shape, and the recorded step of this format gives the height.

    Parameters
    ----------
    dtype
        The format, a key of `DENSITIES`.
    changed
        The share of the weights that change.
    """
    recorded = DENSITIES[dtype]
    curve = _BITS_OF_BF16 if dtype == "bf16" else _BITS_OF_FP8
    return recorded.bits * _interpolated(curve, changed) / _interpolated(curve, recorded.changed)


@dataclass(frozen=True, slots=True)
class Workload:
    """The bytes that one training step publishes.

    Parameters
    ----------
    state_bytes
        The size of a full checkpoint.
    delta_bytes
        The size of one delta.
    xor_bytes
        The size of one step as XOR + zstd-1.
    full_every
        Readers fetch a full checkpoint every this many steps. None: never, as deltawire's readers do.
    steps
        How many steps the totals are for.
    changed
        The share of the weights that change; None if only sizes are known.
    """

    state_bytes: float
    delta_bytes: float
    xor_bytes: float
    full_every: int | None = None
    steps: int = 1000
    changed: float | None = None

    def __post_init__(self) -> None:
        for what, value in (("The full checkpoint", self.state_bytes), ("The delta", self.delta_bytes), ("XOR + zstd-1", self.xor_bytes)):
            checked(value, f"{what}, in bytes,", most=MOST_BYTES, least=1)
        checked(self.steps, "The number of steps", most=1e9, least=1)
        if self.full_every is not None:
            checked(self.full_every, "The number of steps from one full checkpoint to the next", most=1e9, least=1)

    @classmethod
    def of_model(
        cls,
        params: float,
        dtype: str = "bf16",
        *,
        changed: float | None = None,
        bits: float | None = None,
        in_bf16: float = 0,
        full_every: int | None = None,
        steps: int = 1000,
    ) -> Workload:
        """Return the workload of a model, computed from recorded densities.

        Parameters
        ----------
        params
            The number of weights.
        dtype
            The format that engines serve: `bf16`, `fp8`, or another key of `DENSITIES`.
        changed
            The share of the weights that a step changes. None: as recorded.
        bits
            Bits of the delta for each changed weight. None: from the measured curve.
        in_bf16
            How many of the weights stay in bf16, for example those of the embedding. They change as bf16 does.
        full_every, steps
            As for `Workload`.
        """
        dtype = dtype_named(dtype)
        checked(params, "The number of weights", most=MOST_WEIGHTS, least=1)
        checked(in_bf16, "The number of weights in bf16", most=params)
        recorded, kept = DENSITIES[dtype], DENSITIES["bf16"]
        share = recorded.changed if changed is None else checked(changed, "The share that changes", most=1.0, least=1e-9)
        each = bits_per_change(dtype, share) if bits is None else checked(bits, "The bits per change", most=64.0, least=0.01)
        others = params - in_bf16
        state = (others * recorded.state_bits + in_bf16 * kept.state_bits) / 8
        coded, coded_kept = others * share * each / 8, in_bf16 * kept.changed * kept.bits / 8
        xor = coded * recorded.xor_ratio + coded_kept * kept.xor_ratio
        return cls(max(state, 1.0), max(coded + coded_kept, 1.0), min(max(xor, 1.0), max(state, 1.0)), full_every, steps, share)

    @property
    def objects(self) -> int:
        """The number of files of a delta, by the publisher's rule for segments."""
        return max(1, min(MOST_SEGMENTS, math.ceil(self.state_bytes / SEGMENT_BYTES)))

    @property
    def anchor_versions(self) -> int:
        """The number of versions from one anchor to the next, by the rule that publishers follow."""
        policy, cost = AnchorPolicy(), ChainCost()
        size = int(self.delta_bytes)
        while not anchor_due(policy, cost, int(self.state_bytes), Speed()):
            cost.add_update(size)
        return cost.versions

    def fetched(self, update: float) -> float:
        """Return the bytes that a reader fetches in a step on average.

        Parameters
        ----------
        update
            The bytes of each update.
        """
        every = self.full_every
        return update if every is None else (self.state_bytes + (every - 1) * update) / every

    def total(self, update: float) -> float:
        """Return the bytes that a reader fetches in all steps. With `full_every`, the first step is a full checkpoint.

        Parameters
        ----------
        update
            The bytes of each update.
        """
        full = 0 if self.full_every is None else math.ceil(self.steps / self.full_every)
        return full * self.state_bytes + (self.steps - full) * update


def _interpolated(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value of a curve at a density. It is straight between points, over the logarithm of the density."""
    at = min(max(at, curve[0][0]), curve[-1][0])
    upper = max(1, bisect_left(curve, (at,)))
    (low, first), (high, last) = curve[upper - 1], curve[upper]
    return first + (last - first) * math.log(at / low) / math.log(high / low)
