"""Measure the dashboard on long chains and large fleets: what it reads, its memory, and when a browser shows the page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Table

from deltawire.format.digest import Digest
from deltawire.format.records.member_records import Heartbeat, LinkReport, UpdateReport
from deltawire.format.records.record_parts import CommitRef, FileEntry, Limits, link_targets, record_hash
from deltawire.format.records.run_records import Epoch, Head, Run
from deltawire.format.records.version_records import Commit
from deltawire.store import Store, fleet_keys, keys, open_store

_ID, _NONCE, _HASH = "ab" * 16, "cd" * 16, "ef" * 32
_STATE_BYTES = 16_000_000_000
_DELTA_BYTES = 74_000_000
_START = 1_700_000_000_000
_LOOKS = 5
"""The looks that find nothing new, over which bytes are averaged."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The results for one size."""

    chain_bytes: int
    look_seconds: float
    requests: int
    read_bytes: int
    idle_requests: float
    idle_bytes: float
    page_bytes: int
    memory: int
    first_paint: float | None
    drawn: float | None
    older_seconds: float
    load: float


def measure(sizes: tuple[tuple[int, int], ...]) -> Table:
    """Return the table for these numbers of versions and members."""
    table = Table(
        "dashboard",
        "The dashboard on long chains and large fleets, over a directory",
        [
            "versions",
            "members",
            "first look",
            "requests",
            "read",
            "all commits",
            "each later look",
            "memory",
            "page",
            "first paint",
            "all drawn",
            "128 older versions",
        ],
    )
    found = []
    for versions, members in sizes:
        one = _measure(versions, members)
        found.append(one)
        table.rows.append(
            [
                f"{versions:,}",
                f"{members:,}",
                f"{one.look_seconds:.1f} s",
                f"{one.requests:,}",
                _size(one.read_bytes),
                _size(one.chain_bytes),
                f"{one.idle_requests:.0f} requests, {_size(one.idle_bytes)}",
                _size(one.memory),
                _size(one.page_bytes),
                "–" if one.first_paint is None else f"{one.first_paint:.2f} s",
                "–" if one.drawn is None else f"{one.drawn:.2f} s",
                f"{one.older_seconds:.2f} s",
            ]
        )
    table.notes.append(
        "The first look and the memory are those of the command, from its start; memory is the most that it had. "
        "Paint is counted from the request for the page, in a headless Chromium. "
        "All commits: the bytes that a page would read that reads all of them. "
        "128 older versions: from the request for a page in the middle of the chain to its last byte."
    )
    loads = [one.load for one in found]
    table.notes.append(
        f"While this was measured, {min(loads):.0f} to {max(loads):.0f} processes were ready to run "
        f"on {os.cpu_count()} processors (load averages of one minute, which include this benchmark)."
    )
    last = found[-1]
    table.check("a look at the longest chain reads at most 1/20 of its commits", 20 * last.read_bytes <= last.chain_bytes)
    table.check("memory grows by less than 100 MB from the smallest to the largest", last.memory - found[0].memory < 100e6)
    return table


def _measure(versions: int, members: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as folder:
        with open_store(folder) as store:
            chain_bytes = write_chain(store, versions)
            write_members(store, members, versions)
        began = time.monotonic()
        with _serving(folder) as (process, url):
            first = _sections_after(url, 1)
            seconds = time.monotonic() - began
            later = _sections_after(url, 1 + _LOOKS)
            idle = later["looks"] - first["looks"]
            page = urllib.request.urlopen(f"{url}api/sections").read()
            began = time.monotonic()
            older = json.loads(urllib.request.urlopen(f"{url}api/commits?page={versions // 2 // 128}").read())
            older_seconds = time.monotonic() - began
            if not older["entries"] or any(entry["kind"] == "corrupt" for entry in older["entries"]):
                raise RuntimeError("older versions were not read")
            paint = _paint(url)
            memory = _peak_memory(process.pid)
    return Measured(
        chain_bytes,
        seconds,
        first["requests"],
        first["read_bytes"],
        (later["requests"] - first["requests"]) / idle,
        (later["read_bytes"] - first["read_bytes"]) / idle,
        len(page),
        memory,
        *(paint or (None, None)),
        older_seconds,
        os.getloadavg()[0],
    )


def write_chain(store: Store, versions: int) -> int:
    """Write a chain of records without data. Return the bytes of its commits."""
    store.put(keys.RUN, Run("long", _ID, _START, Limits()).to_bytes(), durable=False)
    store.put(keys.epoch_key(1), Epoch(_ID, 1, _NONCE, _START, None).to_bytes(), durable=False)
    hashes: list[str] = []
    written = 0
    for seq in range(versions + 1):
        data = _commit(seq, hashes).to_bytes()
        hashes.append(record_hash(data))
        written += len(data)
        store.put(keys.commit_key(seq), data, durable=False)
        if seq % 4 == 0 and seq > 4:
            store.put(keys.skip_key(seq, seq - 4), b"a skip that is listed and not read", durable=False)
    store.put(keys.HEAD, Head(versions).to_bytes(), durable=False)
    return written


def _commit(seq: int, hashes: list[str]) -> Commit:
    kind = "fence" if seq == 0 else "anchor" if seq == 1 else "delta"
    digest = Digest.from_hex(f"{seq:032x}") if seq else None
    before = None if seq < 2 else CommitRef(seq - 1, hashes[seq - 1], Digest.from_hex(f"{seq - 1:032x}"))
    file = FileEntry(keys.data_key(1, seq, _HASH, "safetensors"), _DELTA_BYTES, _STATE_BYTES, _HASH, first=0, count=400)
    whole = FileEntry(keys.data_key(1, seq, _HASH, "safetensors"), _STATE_BYTES + 1000, _STATE_BYTES, _HASH, name="model.safetensors")
    return Commit(
        id=_ID,
        seq=seq,
        epoch=1,
        nonce=_NONCE,
        kind=kind,
        parent=hashes[seq - 1] if seq else None,
        links=tuple((target, hashes[target]) for target in link_targets(seq)),
        base=before,
        state_seq=seq or None,
        updates=seq,
        digest=digest,
        state_bytes=_STATE_BYTES if seq else 0,
        tensors=400 if seq else 0,
        changed=80_000_000 if kind == "delta" else 0,
        step=seq - 1 if seq else None,
        time=_START + 30_000 * seq,
        files=() if seq == 0 else (whole,) if seq == 1 else (file,),
        meta={"reward": repr(0.3 + seq % 7 / 100), "mismatch_kl": "2.5e-05"} if seq else {},
        run="long",
        attachments=(),
    )


def write_members(store: Store, members: int, seq: int) -> None:
    """Write a heartbeat of each member."""
    for number in range(members):
        name = f"rollout-{number:04}"
        beat = Heartbeat(
            id=_ID,
            member=name,
            session=_NONCE,
            state="working",
            seq=seq - number % 3,
            step=seq - 1 - number % 3,
            lag=number % 3,
            tokens=1_000_000 + number,
            busy_ms=1_000_000,
            working=(),
            time=_START,
            link=LinkReport(25_000_000, 40, 0),
            behind_ms=4_000 + 10 * number,
            engine="vllm 0.32",
            update=UpdateReport(fetch_us=3_000_000, verify_us=90_000, resolve_us=800_000, pause_us=2_000 + 20 * number, total_us=3_900_000),
        )
        store.put(fleet_keys.member_key(name), beat.to_bytes(), durable=False)


@contextmanager
def _serving(folder: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "deltawire", "dashboard", "--from", folder, "--port", "0", "--every", "0.5", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def _sections_after(url: str, looks: int) -> dict[str, Any]:
    while True:
        status: dict[str, Any] = json.loads(urllib.request.urlopen(f"{url}api/sections").read())["status"]
        if status["problem"] is not None:
            raise RuntimeError(status["problem"])
        if status["looks"] >= looks:
            return status
        time.sleep(0.05)


def _peak_memory(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def _paint(url: str) -> tuple[float, float] | None:
    """Return the seconds until a browser paints something, and until it has drawn all sections. None if no browser is installed."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        return None
    if programs[0] is None or programs[1] is None:
        return None
    with tempfile.TemporaryDirectory(prefix="deltawire-browser-") as profile:
        options = webdriver.ChromeOptions()
        for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"):
            options.add_argument(flag)
        options.add_argument(f"--user-data-dir={profile}")
        options.binary_location = programs[0]
        driver = webdriver.Chrome(options=options, service=Service(programs[1]))
        try:
            driver.get(url)
            while not driver.execute_script("return performance.getEntriesByName('all-drawn').length"):
                time.sleep(0.02)
            first, drawn = driver.execute_script(
                "return ['first-contentful-paint', 'all-drawn'].map((name) => performance.getEntriesByName(name)[0].startTime)"
            )
            return first / 1000, drawn / 1000
        finally:
            driver.quit()


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"
