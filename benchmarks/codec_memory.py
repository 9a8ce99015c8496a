"""Measure memory beyond the inputs, as the growth of the peak resident set, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import Table

_CHILD = """
import json, resource, sys
sys.path.insert(0, {benchmarks!r})
import numpy as np, deltawire
from workloads import synthetic_update
what, elements, density = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
base, new = synthetic_update(elements, density)
small = slice(0, 1 << 16)
warm = deltawire.encode_delta({{"w": base[small]}}, {{"w": new[small]}})
deltawire.apply_delta({{"w": base[small].copy()}}, warm)
if what == "encode":
    before = peak()
    delta = deltawire.encode_delta({{"w": base}}, {{"w": new}})
    grown = peak() - before
else:
    with open(sys.argv[4], "rb") as file:
        delta = file.read()
    before = peak()
    deltawire.apply_delta({{"w": base}}, delta)
    grown = peak() - before
    assert np.array_equal(base.view(np.uint16), new.view(np.uint16))
if what == "encode":
    with open(sys.argv[4], "wb") as file:
        file.write(delta)
print(json.dumps([grown, len(delta)]))
"""


def measure(elements: int) -> Table:
    table = Table(
        "codec-memory",
        f"Memory beyond the inputs: {2 * elements / 2**30:.2g} GiB of bf16 weights",
        ["changed", "delta", "encode", "apply", "allowed: 64 MiB + 2 × delta"],
    )
    with tempfile.TemporaryDirectory() as folder:
        for density in (0.0108, 0.1, 0.5):
            child = _CHILD.format(benchmarks=str(Path(__file__).parent))
            grown = {}
            for what in ("encode", "apply"):
                command = [sys.executable, "-c", child, what, str(elements), str(density), f"{folder}/delta"]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                grown[what], size = json.loads(done.stdout)
            allowed = (64 << 20) + 2 * size
            table.rows.append([f"{density:.2%}", *(f"{n / 2**20:.1f} MiB" for n in (size, grown["encode"], grown["apply"], allowed))])
            table.check(f"both within 64 MiB + 2 × delta at {density:.2%}", max(grown.values()) <= allowed)
    return table
