"""Measure the way of an update from a trainer through a store to a reader, compared with saving and loading a full checkpoint."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from chain_updates import training_run
from codec_speed import read_both
from numpy.typing import NDArray
from report import Table
from safetensors.numpy import load_file, save_file
from workloads import State

import deltawire
from deltawire.events import Event

_PHASES = ["encode", "upload", "commit", "find", "fetch", "verify", "resolve", "apply"]
_CRITICAL = {
    "codec": ["encode", "resolve", "apply"],
    "store, where the codec waits for it": ["uploads", "commit", "find", "files"],
}


@contextmanager
def directory() -> Iterator[str]:
    """Yield the path of an empty directory, and delete the directory afterwards."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def measure(
    elements: int, steps: int, location: Callable[[], AbstractContextManager[str]] = directory, where: str = "a local directory"
) -> Table:
    """Publish steps of 1% changes, and sync a reader after each.

    Parameters
    ----------
    elements
        The number of weights.
    steps
        The number of steps.
    location
        Returns a context manager that yields the URL of an empty location in a store.
    where
        The name of the store in the table.
    """
    name = "chain-speed" if location is directory else "chain-speed-s3"
    table = Table(
        name,
        f"Publish → visible: {2 * elements / 2**30:.2g} GiB of bf16 weights, {steps} steps of 1% changes, through {where}",
        ["method", "bytes per step", "fewer by", "seconds per step", "less by"],
    )
    with tempfile.TemporaryDirectory() as folder, location() as url:
        events: list[Event] = []
        whole = Path(folder, "model.safetensors")
        publishes: list[dict[str, float]] = []
        syncs: list[dict[str, float]] = []
        cached: list[float] = []
        flushed: list[float] = []
        sizes: list[int] = []
        publisher = deltawire.Publisher(url, run="benchmark", on_event=events.append)
        subscriber = deltawire.Subscriber(url, on_event=events.append)
        for step, state in zip(range(steps + 1), training_run(elements, 0.01), strict=False):
            events.clear()
            version = publisher.publish(state, step=step)
            subscriber.sync()
            _check(state, subscriber.state)
            if step == 0:  # the first version is a full checkpoint
                continue
            publishes.append(_fields(events, "published"))
            syncs.append(_fields(events, "synced"))
            sizes.append(version.bytes)
            if step % 4 == 1:
                cached.append(_save_and_load(state, whole, url, flush=False))
            if step % 4 == 3:
                flushed.append(_save_and_load(state, whole, url, flush=True))
        reading = statistics.median(_seconds_to_read(state, subscriber.state) for _ in range(5))
        subscriber.close()
        publisher.close()
    seconds = [p["total_seconds"] + s["total_seconds"] for p, s in zip(publishes, syncs, strict=True)]
    ours, theirs, unsafe = (statistics.median(times) for times in (seconds, flushed, cached))
    weight_bytes = 2 * elements
    table.rows.append(["full checkpoint, safetensors, in the page cache", f"{weight_bytes / 1e6:,.0f} MB", "", f"{unsafe:.2f}", ""])
    table.rows.append(["full checkpoint, safetensors, flushed to disk", f"{weight_bytes / 1e6:,.0f} MB", "", f"{theirs:.2f}", ""])
    mean = statistics.mean(sizes)
    table.rows.append(
        ["deltawire", f"{mean / 1e6:.2f} MB", f"{weight_bytes / mean:.0f}×", f"{ours:.3f}", f"{unsafe / ours:.1f}× / {theirs / ours:.1f}×"]
    )
    steps_of = [{**published, **synced} for published, synced in zip(publishes, syncs, strict=True)]
    for step, published, synced in zip(steps_of, publishes, syncs, strict=True):
        step["uploads_seconds"], step["files_seconds"] = published["wait_seconds"], synced["wait_seconds"]
    seconds_of = {phase: statistics.median([step[f"{phase}_seconds"] for step in steps_of]) for phase in [*_PHASES, "uploads", "files"]}
    table.notes.append("Phases: " + ", ".join(f"{phase} {1e3 * seconds_of[phase]:.0f} ms" for phase in _PHASES) + " (medians).")
    table.notes.append("Uploads run while later tensors are encoded; fetching and verifying run while earlier ones are decoded.")
    shares = {name: sum(step[f"{phase}_seconds"] for step in steps_of for phase in phases) for name, phases in _CRITICAL.items()}
    shares["everything else"] = sum(seconds) - sum(shares.values())
    table.notes.append("Shares: " + ", ".join(f"{name} {part / sum(seconds):.0%}" for name, part in shares.items()) + ".")
    floor = 1.5 * reading
    table.notes.append(
        f"Reading both states once, and the reader's copy once more, takes {1e3 * floor:.0f} ms on this machine. This is the lower bound."
    )
    table.notes.append(
        f"Compared with a checkpoint that is flushed to disk, as deltawire's data are, deltawire takes {theirs / ours:.1f} × less time; "
        f"the lower bound would take {theirs / floor:.1f} × less."
    )
    table.check("at least 150 × fewer bytes", weight_bytes / statistics.mean(sizes) >= 150)
    table.check(f"at least 8 × less time than safetensors' save_file and load_file (is {unsafe / ours:.1f} ×)", unsafe / ours >= 8)
    return table


def _save_and_load(state: State, path: Path, url: str, *, flush: bool) -> float:
    """Return the seconds to write a full checkpoint and to load it again, through the store unless that is a directory."""
    start = time.perf_counter()
    save_file(state, path)
    if flush:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if "://" in url:
        from deltawire.store import open_store

        store = open_store(url)
        with path.open("rb") as file:
            store.put("whole/model.safetensors", iter(lambda: file.read(8 << 20), b""), size=path.stat().st_size)
        buffer = bytearray(path.stat().st_size)
        store.read_into("whole/model.safetensors", memoryview(buffer))
        path.write_bytes(buffer)
    loaded = load_file(path)
    seconds = time.perf_counter() - start
    _check(state, loaded)
    path.unlink()
    return seconds


def _seconds_to_read(state: State, same: Mapping[str, NDArray[Any]]) -> float:
    """Return the seconds in which all cores together read two equal states."""
    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: read_both(state[name], same[name]), state))
    return time.perf_counter() - start


def _fields(events: list[Event], name: str) -> dict[str, float]:
    found = [event for event in events if event.name == name]
    assert len(found) == 1, [event.name for event in events]
    return {key: value for key, value in found[0].fields.items() if isinstance(value, int | float)}


def _check(state: State, other: object) -> None:
    """Fail unless both states are the same bit for bit."""
    for name, tensor in state.items():
        assert np.array_equal(tensor.view(np.uint16), other[name].view(np.uint16)), name  # type: ignore[index]
