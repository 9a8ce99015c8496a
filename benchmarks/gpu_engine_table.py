"""Prints the results of gpu_engine.py as a table with a column for each model, and keeps them in results/gpu-engine.json.

    python benchmarks/gpu_engine_table.py OUT/dense-8b.json OUT/moe-10b.json …

Without files, it prints what results/gpu-engine.json holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import RESULTS, Table, show

Update = dict[str, Any]
_LONG = ("calls", "spans", "events", "status")


def table_of(models: list[dict[str, Any]]) -> Table:
    """Return the table of docs/gpu-measurements.md. Times are milliseconds."""
    sizes = (f"{model['parameters'] / 1e9:.1f} B weights ({model['bytes'] / 1e9:.1f} GB, {model['tensors']} tensors)" for model in models)
    titles = [f"{model['model']}, {size}" for model, size in zip(models, sizes, strict=True)]
    table = Table("gpu-engine", "Updates of a vLLM server on a GPU", ["", *titles])
    table.rows = [[name, *(cell(model) for model in models)] for name, cell in _ROWS.items()]
    return table


def _chosen(model: dict[str, Any], steps: str, after_repeated: bool | None) -> list[Update]:
    """Return the updates of these kinds. True and False choose those whose update before was staged several times, or once."""
    found = []
    before = 1
    for update in model["updates"]:
        if update["step"].partition(":")[0] in steps.split() and after_repeated in (None, before > 1):
            found.append(update)
        before = update.get("worker_stages", 1)
    return found


def _span(
    key: str,
    *,
    steps: str = "idle one load",
    factor: float = 1.0,
    digits: int = 0,
    of_worker: bool = False,
    after_repeated: bool | None = None,
) -> Any:
    """Return a function that gives the lowest and the highest value of a key in updates of these kinds (`_chosen`)."""

    def cell(model: dict[str, Any]) -> str:
        chosen = _chosen(model, steps, after_repeated)
        values = [(update["worker"] if of_worker else update).get(key) for update in chosen]
        return _between([factor * value for value in values if value is not None], digits)

    return cell


def _gap(key: str, *policies: str) -> Callable[[dict[str, Any]], str]:
    def cell(model: dict[str, Any]) -> str:
        chosen = [update for update in model["updates"] if update["step"].endswith(policies)]
        return _between([update[key] for update in chosen if update.get(key) is not None], 1)

    return cell


def _memory(model: dict[str, Any]) -> str:
    peaks = [update["peak_mib"] for update in model["updates"] if update["step"].endswith("keep") and "peak_mib" in update]
    return f"{max(peaks):.0f} MiB, {max(peaks) * 2**20 / model['bytes']:.2%}" if peaks else "–"


def _rates(model: dict[str, Any]) -> str:
    found = [update["rates"] for update in _chosen(model, "staging", None)]
    return "; ".join(f"{each['before']:,.0f}, {each['staging']:,.0f} and {each['after']:,.0f}" for each in found) or "–"


def _slower(steps: str) -> Callable[[dict[str, Any]], str]:
    """Return a function that tells how much slower eight streams are while the worker stages, than the mean of before and after."""

    def cell(model: dict[str, Any]) -> str:
        rates = [update["rates"] for update in _chosen(model, steps, None)]
        shares = [100 * (1 - 2 * each["staging"] / (each["before"] + each["after"])) for each in rates]
        return f"{_between(shares, 1)}%" if shares else "–"

    return cell


def _reload(model: dict[str, Any]) -> str:
    reloads = model.get("reload", {}).get("reloads", [])
    most = max((each["extra_bytes"] for each in reloads), default=0)
    return f"{_between([1e3 * each['seconds'] for each in reloads], 0)}, and {most / 1e9:.2f} GB of GPU memory" if reloads else "–"


def _exact(model: dict[str, Any]) -> str:
    by_hand, reload = model.get("by_hand"), model.get("reload")
    parts = [] if by_hand is None else [f"{len(by_hand['different'])} of {by_hand['compared']} parameters"]
    parts += [] if reload is None else [f"{len(reload['different'])} of {reload['compared']} tensors"]
    return ", ".join(parts) or "–"


def _between(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    low, high = f"{min(values):,.{digits}f}", f"{max(values):,.{digits}f}"
    return low if low == high else f"{low}–{high}"


_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "bytes of a version, MB": _span("delta_bytes", factor=1e-6, digits=1),
    "from the commit until the server generates with it": _span("commit_to_serving_ms", after_repeated=False),
    "the same, for an update after one that was staged several times": _span("commit_to_serving_ms", after_repeated=True),
    "… the sidecar fetches and checks the files": _span("fetch_ms"),
    "… the workers stage, until the sidecar knows it": _span("staging_ms", after_repeated=False),
    "… for an update after one that was staged several times": _span("staging_ms", after_repeated=True),
    "… of which the worker's own work": _span("worker_stage_ms"),
    "… the request that swaps": _span("swap_call_ms"),
    "in it: steps in flight are finished, if idle": _span("drain_ms", steps="idle", digits=1),
    "… with eight streams": _span("drain_ms", steps="load staging", digits=1),
    "in it: the worker": _span("total_ms", steps="idle one load staging", digits=1, of_worker=True),
    "… agree": _span("agree_ms", steps="idle one load staging", digits=1, of_worker=True),
    "… write": _span("write_ms", steps="idle one load staging", digits=1, of_worker=True),
    "… recompute": _span("recompute_ms", steps="idle one load staging", digits=1, of_worker=True),
    "… confirm": _span("confirm_ms", steps="idle one load staging", digits=1, of_worker=True),
    "longest gap between two tokens of a stream, KV cache kept": _gap("gap_ms", "keep"),
    "the same, KV cache dropped": _gap("gap_ms", "drop"),
    "longest gap while the worker stages": _gap("gap_staging_ms", "keep", "drop"),
    "tokens/s of eight streams, before, while it stages without a break, and after": _rates,
    "slower while it stages without a break, than the mean of before and after": _slower("staging"),
    "the same, while it stages once": _slower("load"),
    "generation lost by one staging": _span("generation_lost_ms", steps="staging", digits=1),
    "GPU memory beyond the weights, KV cache kept": _memory,
    "vLLM's own reload of all weights": _reload,
    "different from hashes made without vLLM, and from vLLM's own reload": _exact,
}


def main() -> None:
    if not sys.argv[1:]:
        show(table_of(list(json.loads((RESULTS / "gpu-engine.json").read_text()).values())))
        return
    models = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    for model in models:
        model["updates"] = [{key: value for key, value in update.items() if key not in _LONG} for update in model["updates"]]
        model["first"] = {key: value for key, value in model.get("first", {}).items() if key not in _LONG}
    RESULTS.mkdir(exist_ok=True)
    kept = {model["model"]: model for model in models}
    (RESULTS / "gpu-engine.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    show(table_of(models))


if __name__ == "__main__":
    main()
