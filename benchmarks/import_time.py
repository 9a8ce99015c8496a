"""Measure the time of `import deltawire` beyond that of importing NumPy."""

from __future__ import annotations

import statistics
import subprocess
import sys

from report import Table

_CHILD = "import time, numpy; start = time.perf_counter(); import deltawire; print(time.perf_counter() - start)"


def measure(rounds: int = 11) -> Table:
    children = [subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True) for _ in range(rounds)]
    times = [1000 * float(child.stdout) for child in children]
    median = statistics.median(times)
    table = Table("import-time", "`import deltawire` after `import numpy`", ["median", "smallest"])
    table.rows.append([f"{median:.0f} ms", f"{min(times):.0f} ms"])
    table.check("at most 60 ms", median <= 60)
    return table
