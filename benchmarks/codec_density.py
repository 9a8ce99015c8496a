"""Compare the size of deltas with those of peers, from one changed weight in 100,000 to all weights."""

from __future__ import annotations

import numpy as np
from peers import PEERS, REIMPLEMENTED
from report import Table
from workloads import BF16, FP8_E4M3, synthetic_update

import deltawire

DENSITIES = (1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.9, 1.0)


def measure(elements: int) -> Table:
    table = Table(
        "codec-density",
        f"Any density: bits per weight (of all weights), {elements / 2**20:.0f} Mi weights",
        ["weights", "changed", "deltawire", *(peer.name for peer in PEERS), "raw"],
    )
    smallest = bounded = True
    for dtype, bits_type in ((BF16, np.uint16), (FP8_E4M3, np.uint8)):
        for density in DENSITIES:
            base, new = synthetic_update(elements, density, dtype)
            _add(table, str(dtype), base.view(bits_type), new.view(bits_type), {"w": base}, {"w": new})
        # Unrelated weights and random bits are not updates, but the worst input that can come.
        base, new = synthetic_update(elements, 0.5, dtype)[0], synthetic_update(elements, 0.5, dtype, seed=1)[0]
        _add(table, f"{dtype}, unrelated", base.view(bits_type), new.view(bits_type), {"w": base}, {"w": new})
        noise = np.random.default_rng(0).integers(0, 256, base.nbytes, np.uint8).view(bits_type)
        _add(table, f"{dtype}, noise", base.view(bits_type), noise, {"w": base}, {"w": noise.view(dtype)})
    for row in table.rows:
        ours, *peers, raw = (float(cell) for cell in row[2:])
        smallest &= ours < min(peers) or "," in row[0]
        bounded &= ours * elements <= raw * elements * 1.001 + 8 * 4096
    table.notes.append(REIMPLEMENTED)
    table.check("smaller than every peer at every density of updates", smallest)
    table.check("never more than raw + 0.1% + 4 KiB", bounded)
    return table


def _add(table: Table, label: str, old: np.ndarray, now: np.ndarray, base: dict, new: dict) -> None:  # type: ignore[type-arg]
    delta = deltawire.encode_delta(base, new)
    sizes = [len(delta), *(len(peer.encode(old, now)) for peer in PEERS), now.nbytes]
    changed = np.count_nonzero(old != now) / old.size
    table.rows.append([label, f"{changed:.4%}", *(f"{8 * size / old.size:.5g}" for size in sizes)])
    check = {"w": base["w"].copy()}
    deltawire.apply_delta(check, delta)
    assert np.array_equal(check["w"].view(old.dtype), now), "not exact"
