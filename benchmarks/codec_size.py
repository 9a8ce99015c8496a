"""Compare bits per changed weight on recorded updates with peers and the order-0 bound. Sizes include headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from peers import PEERS, REIMPLEMENTED
from report import Table
from workloads import State, order0_bound_bits, synthetic_update, trace_steps

import deltawire


def measure(trace: Path | None) -> Table:
    steps: Iterable[tuple[State, State]] = trace_steps(trace) if trace else _synthetic()
    source = f"{trace.name}, all steps" if trace else "synthetic updates (no trace was given)"
    totals: dict[str, float] = {"deltawire": 0, "order-0 bound": 0} | {peer.name: 0 for peer in PEERS}
    changed = weights = 0
    for base, new in steps:
        flat = {name: (base[name].reshape(-1).view(np.uint16), new[name].reshape(-1).view(np.uint16)) for name in base}
        changed += sum(int(np.count_nonzero(old != now)) for old, now in flat.values())
        weights += sum(old.size for old, _ in flat.values())
        for old, now in flat.values():
            totals["order-0 bound"] += order0_bound_bits(old, now)
            for peer in PEERS:
                totals[peer.name] += 8 * len(peer.encode(old, now))
        delta = deltawire.encode_delta(base, new)
        totals["deltawire"] += 8 * len(delta)
        deltawire.apply_delta(base, delta)
        assert all(np.array_equal(old, now) for old, now in flat.values()), "not exact"
    bits = {name: total / changed for name, total in totals.items()}
    table = Table(
        "codec-size",
        f"Size: {source}; {changed:,} changes of {weights:,} weights ({changed / weights:.2%})",
        ["coding", "bits per changed weight", "smaller than bf16", "deltawire is smaller by"],
    )
    for name in sorted(bits, key=lambda name: bits[name]):
        used = next((f" ({peer.used_by})" for peer in PEERS if peer.name == name), "")
        reduction = f"{16 * weights / changed / bits[name]:.0f}×"
        ratio = "" if name in ("deltawire", "order-0 bound") else f"{bits[name] / bits['deltawire']:.2f}×"
        table.rows.append([f"{name}{used}", f"{bits[name]:.3f}", reduction, ratio])
    over = bits["deltawire"] / bits["order-0 bound"]
    table.notes.append(f"deltawire is {over:.3f} × the order-0 bound, H(position | tensor, exponent) + H(step | tensor, exponent).")
    table.notes.append(REIMPLEMENTED)
    table.check("at most 7.1 bits per changed weight", bits["deltawire"] <= 7.1)
    table.check("at least 209 × smaller than bf16", 16 * weights / changed / bits["deltawire"] >= 209)
    table.check("at most 1.05 × the order-0 bound", over <= 1.05)
    best = min(bits[peer.name] for peer in PEERS)
    table.check("half the size of the best peer", bits["deltawire"] <= best / 2)
    return table


def _synthetic() -> Iterator[tuple[State, State]]:
    for seed in range(4):
        base, new = synthetic_update(1 << 23, 0.0108, seed=seed)
        yield {"weight": base}, {"weight": new}
