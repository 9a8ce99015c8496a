"""Compute what a training step of a large model costs in each format, from the densities and sizes that `quantised-size` measured."""

from __future__ import annotations

import json
from dataclasses import dataclass

from report import RESULTS, Table

MODELS = {"8B": (8.03e9, 2 * 128_256 * 4_096), "70B": (70.6e9, 2 * 128_256 * 8_192), "1T": (1.04e12, 2 * 163_840 * 7_168)}
"""All weights, and those of the embedding and the output layer, which stay in bf16: as in Llama 3.1 8B and 70B, and in Kimi K2."""

_STATE_BITS = {
    "bf16": 16.0,
    "fp8-block": 8 + 32 / 128**2,
    "fp8-block-ue8m0": 8 + 32 / 128**2,
    "fp8-channel": 8.0,
    "fp8-tensor": 8.0,
    "nvfp4": 4 + 8 / 16,
    "mxfp4": 4 + 8 / 32,
    "int4": 4 + 16 / 32,
    "int4-128": 4 + 16 / 128,
}
"""Bits of the full state for each weight, with its scales."""


@dataclass(frozen=True)
class Density:
    """The changes of a step: the share of the weights, and the bits of the delta for each changed weight, scales and headers included."""

    changed: float
    bits: float


def measure() -> Table:
    """Return the table of docs/scale.md."""
    densities = _measured()
    table = Table(
        "step-cost",
        "One step, computed from recorded densities: bytes of the delta, of the full state, and their ratio",
        ["format", "changed", "bits per change", *MODELS],
    )
    kept = densities["bf16"]
    for name, bits_per_weight in _STATE_BITS.items():
        density = densities[name]
        cells = []
        for weights, in_bf16 in MODELS.values():
            quantised = weights - in_bf16
            delta = quantised * density.changed * density.bits + in_bf16 * kept.changed * kept.bits
            full = quantised * bits_per_weight + in_bf16 * _STATE_BITS["bf16"]
            cells.append(f"{_bytes(delta / 8)} of {_bytes(full / 8)}: {full / delta:,.0f}×")
        table.rows.append([name, f"{density.changed:.4%}", f"{density.bits:.2f}", *cells])
    shares = ", ".join(f"{in_bf16 / weights:.1%} of the {name} model" for name, (weights, in_bf16) in MODELS.items())
    table.notes.append(f"Embedding and output layer stay in bf16 in every row. They are {shares}, and change as the row bf16 says.")
    return table


def _measured() -> dict[str, Density]:
    """Read the rows with sticky scales from the results, and the row of bf16 from those of `size`."""
    found = {}
    for row in json.loads((RESULTS / "quantised-size.json").read_text())["rows"]:
        name, kind = row[0].split(", ")
        if kind == "sticky":
            found[name] = Density(float(row[1].rstrip("%")) / 100, float(row[3]))
    size = json.loads((RESULTS / "codec-size.json").read_text())
    bits = next(float(row[1]) for row in size["rows"] if row[0] == "deltawire")
    changed = float(size["title"].rsplit("(", 1)[1].rstrip("%)")) / 100
    return found | {"bf16": Density(changed, bits)}


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
