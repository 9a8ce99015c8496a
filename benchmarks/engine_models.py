"""Measures what an update costs a vLLM server on a CPU, for a dense model, one with experts, and a quantised one.

    python benchmarks/engine_models.py [--before DIR] [--keep]

With `--before`, the same is measured with another release of deltawire, in turns. DIR is a directory in which that release is installed:

    git worktree add ../before 05ef9b26 && pip install --no-deps --target ../before/installed ../before

Each server gets half of its updates while it is idle, which shows the cost of staging, and half while clients stream requests.

It needs vLLM. Trainer, server, store and clients share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sleeping_readers
from report import Table
from vllm_server import State, VllmServer, new_model

import deltawire
from deltawire import Publisher
from deltawire.chain.reader_options import ReaderOptions
from deltawire.events import Event

try:
    from deltawire.engines.vllm.driver.sidecar import Sidecar
except ModuleNotFoundError:  # --before: releases older than acacd8a0 have no folder "driver"
    from deltawire.engines.vllm.sidecar import Sidecar

CLIENTS = 4
MODELS = {"dense": (0, None), "experts": (8, None), "int4": (0, "int4")}
"""For each model, the number of experts and the recipe that quantises it."""
_MEGABYTE = 1e6
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Costs:
    """The measurements of one server, a value for each update."""

    model: str
    weight_bytes: int = 0
    pauses: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)
    server_seconds: list[float] = field(default_factory=list)
    sidecar_seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    first_memory: int = 0
    disk: int = 0
    anew: int = 0


class ServerProcesses:
    """The processes of a server: all those of the session that the server's first process began."""

    def __init__(self, session: int) -> None:
        self._session = session

    def seconds(self) -> float:
        """Return the processor seconds that they have used."""
        return sum(int(stat[11]) + int(stat[12]) for _, stat in self._stats()) / _TICKS

    def begin_peak(self) -> int:
        """Begin to look for the peak of memory. Returns the memory that they have now, in bytes."""
        for process, _ in self._stats():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")
        return self._memory("VmRSS")

    def peak(self) -> int:
        """Return the sum of the most memory that each has had since `begin_peak`, with mapped files, in bytes."""
        return self._memory("VmHWM")

    def _memory(self, what: str) -> int:
        total = 0
        for process, _ in self._stats():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{process}/status").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))
        return total

    def _stats(self) -> Iterator[tuple[int, list[str]]]:
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                stat = path.read_text().rpartition(")")[2].split()  # from the third field on
                if int(stat[3]) == self._session:
                    yield int(path.parent.name), stat


def measure_model(name: str, *, width: int, layers: int, updates: int) -> Costs:
    """Measure one model.

    Parameters
    ----------
    name
        A key of `MODELS`.
    width, layers
        The size of the model.
    updates
        The number of updates while the server is idle, and again under load.
    """
    experts, recipe = MODELS[name]
    costs = Costs(name)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        state = new_model(folder / "model", width=width, layers=layers, experts=experts)
        attachments = {path.name: path for path in (folder / "model").iterdir() if path.suffix == ".json"}
        publisher = opened.enter_context(Publisher(str(folder / "store"), quantise=recipe, attachments=attachments))
        publisher.publish(state)
        deltawire.pull(str(folder / "store"), folder / "first", options=ReaderOptions(pin=False))
        costs.weight_bytes = sum(path.stat().st_size for path in (folder / "first").glob("*.safetensors"))
        paths = [sleeping_readers.plugin_path(folder / "plugin"), os.environ.get("PYTHONPATH", "")]
        server = VllmServer(folder / "first", folder / "server.log", os.pathsep.join(filter(None, paths)))
        opened.callback(server.kill)
        server.wait()
        events: list[Event] = []
        sidecar = _sidecar(server.url, folder, events)
        opened.callback(sidecar.close)
        calls = _watched(sidecar)
        sidecar.step()
        rng = np.random.default_rng(3)
        for number, is_busy in itertools.product(range(updates + 1), (False, True)):
            with _load(server) if is_busy else contextlib.nullcontext():
                if is_busy:
                    time.sleep(0.5)
                _train(state, rng, visibly=recipe is not None)
                published = time.monotonic()
                version = publisher.publish(state)
                _update(costs, sidecar, ServerProcesses(server.session), calls, events, is_busy, published)
                assert server.routes.weight_version() == str(version.seq)
            if number == 0:  # the first update may load everything, because the version that a server loads at its start may be unknown
                costs = Costs(name, costs.weight_bytes, first_memory=max([costs.first_memory, *costs.memory]))
        costs.disk = sum(path.stat().st_size for part in ("mirror", "spool") for path in (folder / part).rglob("*") if path.is_file())
    return costs


def _update(
    costs: Costs,
    sidecar: Sidecar,
    processes: ServerProcesses,
    calls: list[tuple[str, float, float]],
    events: list[Event],
    is_busy: bool,
    published: float,
) -> None:
    """Let the sidecar bring the newest version into the server, and add what that took."""
    calls.clear()
    events.clear()
    before, used, own = processes.begin_peak(), processes.seconds(), time.process_time()
    sidecar.step()
    resumed = time.monotonic()
    (swap,) = [event for event in events if event.name == "swapped"]
    pause = float(swap.fields["pause_seconds"] or 0)
    (worker,) = sidecar.routes.status()
    costs.anew += int(worker["last"].get("loaded_anew", 0))
    if not is_busy:
        costs.server_seconds.append(processes.seconds() - used)
        costs.sidecar_seconds.append(time.process_time() - own)
        costs.memory.append(max(0, processes.peak() - before))
        return
    inside = [route for route, began, ended in calls if route.endswith("deltawire_swap")]
    if not inside:
        began = min(began for route, began, _ in calls if route == "/pause")
        inside = [route for route, each, _ in calls if each >= began and route.startswith("/") and " " not in route and "info" not in route]
    costs.calls.append(len(inside))
    costs.pauses.append(pause)
    costs.writes.append(float(worker["last"]["write_ms"]) / 1e3)
    costs.behind.append(resumed - published)


def _sidecar(url: str, folder: Path, events: list[Event]) -> Sidecar:
    """Return a sidecar of this or of an older release."""
    parameters = inspect.signature(Sidecar.__init__).parameters
    places: dict[str, Any] = {"spool": folder / "spool"} if "spool" in parameters else {}
    mirror = None if "spool" in parameters else folder / "mirror"  # older releases need one
    return Sidecar(url, str(folder / "store"), mirror, on_event=events.append, **places)


def _watched(sidecar: Sidecar) -> list[tuple[str, float, float]]:
    """Return a list that gets each request of the sidecar: its route and method, when it began and when it ended."""
    calls: list[tuple[str, float, float]] = []
    ask = sidecar.routes._ask

    def watched(method: str, route: str, body: Any, *rest: Any) -> Any:
        began = time.monotonic()
        try:
            return ask(method, route, body, *rest)
        finally:
            what = f" {body['method']}" if isinstance(body, dict) and "method" in body else ""
            calls.append((route.partition("?")[0] + what, began, time.monotonic()))

    sidecar.routes._ask = watched  # type: ignore[method-assign]
    return calls


def _train(state: State, rng: np.random.Generator, *, visibly: bool) -> None:
    """Change 1% of the elements of every tensor. `visibly` changes a high bit, so that quantised values change too."""
    for tensor in state.values():
        bits = tensor.reshape(-1).view(np.uint16)
        where = rng.choice(bits.size, max(1, bits.size // 100), replace=False)
        bits[where] ^= np.uint16(64) if visibly else rng.integers(1, 64, where.size).astype(np.uint16)


@contextlib.contextmanager
def _load(server: VllmServer) -> Iterator[None]:
    """Stream requests until the block ends."""
    stop = threading.Event()

    def ask(client: int) -> None:
        while not stop.is_set():
            for _ in server.stream((10 + client, 20), 100):
                pass

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure(*, width: int, layers: int, updates: int, before: Path | None = None) -> Table:
    """Measure all models, each in a process of its own.

    Parameters
    ----------
    width, layers
        The size of the models.
    updates
        The number of updates while the server is idle, and again under load.
    before
        A directory in which another release is installed, to measure it too.
    """
    releases = {"": None} if before is None else {", before": before, ", now": None}
    found = {
        f"{name}{release}": _in_a_process(name, source, width=width, layers=layers, updates=updates)
        for name, (release, source) in itertools.product(MODELS, releases.items())
    }
    return _table(found, updates)


def _in_a_process(name: str, source: Path | None, **size: int) -> Costs:
    paths = [str(Path(__file__).parent), *([str(source)] if source else []), os.environ.get("PYTHONPATH", "")]
    code = f"import engine_models, json; print(json.dumps(vars(engine_models.measure_model({name!r}, **{size!r}))))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measurement of {name} failed:\n{done.stderr[-6000:]}")
    return Costs(**json.loads(done.stdout.splitlines()[-1]))


def _table(found: dict[str, Costs], updates: int) -> Table:
    columns = ["model", "weights", "pause, ms", "of it writing, ms", "HTTP calls in the pause", "seconds behind the trainer"]
    columns += ["processor seconds, server + sidecar", "memory of staging", "on disk", "loaded anew"]
    table = Table("engine-models", f"vLLM on CPU: one update of 1% of the weights (median of {updates}; {CLIENTS} streams)", columns)
    for name, costs in found.items():
        table.rows.append(
            [
                name,
                f"{costs.weight_bytes / _MEGABYTE:.0f} MB",
                f"{1e3 * statistics.median(costs.pauses):.0f} (at most {1e3 * max(costs.pauses):.0f})",
                f"{1e3 * statistics.median(costs.writes):.1f}",
                str(max(costs.calls)),
                f"{statistics.median(costs.behind):.2f}",
                f"{statistics.median(costs.server_seconds):.2f} + {statistics.median(costs.sidecar_seconds):.2f}",
                f"{costs.first_memory / _MEGABYTE:.1f} MB, then {statistics.median(costs.memory) / _MEGABYTE:.1f} MB",
                f"{costs.disk / _MEGABYTE:.0f} MB",
                f"{costs.anew} of {2 * updates}",
            ]
        )
    table.notes = [
        "Pause, writing, HTTP calls and the time behind the trainer were measured while clients streamed requests; processor time and "
        "memory while the server was idle. The time behind the trainer includes encoding and uploading. Memory includes mapped files: "
        "what the server's processes need beyond what they have when an update begins, for the first one and for the median of the others. "
        "Processes keep memory that they have used, so a later update may need no more (0.0 MB). "
        "Processes of the server sleep while they wait for messages; by default they use a core for a second after each message "
        "(benchmarks/sleeping_readers.py).",
    ]
    now = {costs.model: costs for name, costs in found.items() if not name.endswith("before")}
    dense = now["dense"]
    pause, write = 1e3 * statistics.median(dense.pauses), 1e3 * statistics.median(dense.writes)
    table.check(f"the pause of the dense model is at most 40 ms ({pause:.0f})", pause <= 40)
    table.check(f"of it, writing takes at most 5 ms ({write:.1f})", write <= 5)
    table.check(f"at most 3 HTTP calls in the pause ({max(dense.calls)})", max(dense.calls) <= 3)
    table.check("no model is loaded anew", not any(costs.anew for costs in now.values()))
    return table


def measure_here(quick: bool = False, before: Path | None = None) -> Table:
    """Measure with sizes for a small machine."""
    return measure(width=4, layers=1 if quick else 4, updates=2 if quick else 6, before=before)


if __name__ == "__main__":
    from report import keep, show

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a directory in which another release is installed")
    parser.add_argument("--quick", action="store_true", help="use small sizes")
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results and docs/benchmarks.md")
    chosen = parser.parse_args()
    table = measure_here(chosen.quick, chosen.before)
    show(table)
    if chosen.keep:
        keep(table)
