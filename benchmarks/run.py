"""All benchmarks, or those named: `python benchmarks/run.py [--trace FILE] [--quick] [size speed memory density import]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import codec_density
import codec_memory
import codec_size
import codec_speed
import import_time
from report import RESULTS, publish


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=["size", "speed", "memory", "density", "import", []], help="all if none is named")
    parser.add_argument("--trace", default="", help="recorded updates (npz); without it the size is measured on made ones")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs, not to quote")
    arguments = parser.parse_args()
    trace = Path(arguments.trace) if arguments.trace else None
    if trace and not trace.exists():
        parser.error(f"there is no {trace}")
    quick = arguments.quick
    benchmarks = {
        "size": lambda: codec_size.measure(trace),
        "speed": lambda: codec_speed.measure(1 << (24 if quick else 29), 2 if quick else 5),
        "memory": lambda: codec_memory.measure(1 << (25 if quick else 28)),
        "density": lambda: codec_density.measure(1 << (20 if quick else 26)),
        "import": import_time.measure,
    }
    missed = 0
    for name in arguments.names or benchmarks:
        table = benchmarks[name]()
        publish(table)
        missed += sum(not met for _, met in table.checks)
    print(f"Written to {RESULTS.name}/. {missed} goals not met." if missed else f"Written to {RESULTS.name}/. All goals met.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
