"""Provide the world of the chain's state machine: processes that freeze or die at any store call, and the history of their chain."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
from plain_reader import read_json
from support import bits_of, copied

import deltawire
from deltawire.store import Store, keys
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, Call, FaultyStore

State = dict[str, Any]


@dataclass(slots=True)
class Mishap:
    """A fault that strikes a process at a call of `op` (any method if empty) on a key with this prefix, after `countdown` such calls."""

    kind: str
    """ "crash", "unavailable", "unknown" (a read fails as unavailable instead), or "freeze" (the process stops until the test wakes it)."""
    after: bool
    op: str
    prefix: str
    countdown: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a piece of work, or the error that ended it."""

    value: Any = None
    error: BaseException | None = None


class Process:
    """A process that does one piece of work at a time in its own thread, on a store that triggers the next mishap."""

    def __init__(self, shared: Store) -> None:
        whens = [Before(self._strikes_before(kind), kind, times=None) for kind in ("crash", "unavailable", "unknown")]
        whens += [After(self._strikes_after(kind), kind, times=None) for kind in ("crash", "unavailable", "unknown")]
        self.store = FaultyStore(shared, [Before(self._watch, "crash", times=None), *whens])
        self.mishap: Mishap | None = None
        self.struck = False
        """Whether a call has failed since this was last reset."""
        self.frozen = False
        self.was_frozen = False
        self._verdict: tuple[str, bool] | None = None
        self._reports: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], Any]) -> Outcome | None:
        """Do the work and return how it ended, or None if the process froze in the middle."""
        self.struck = self.was_frozen = False
        self._thread = threading.Thread(target=self._work, args=(work,))
        self._thread.start()
        return self._wait()

    def wake(self, *, only_to_die: bool = False) -> Outcome | None:
        self.frozen = False
        if only_to_die:
            self._verdict = "crash", False
        self._woken.set()
        return self._wait()

    def _wait(self) -> Outcome | None:
        report = self._reports.get()
        if report is None:
            self.frozen = self.was_frozen = True
        elif self._thread is not None:
            self._thread.join()
        return report

    def _work(self, work: Callable[[], Any]) -> None:
        try:
            outcome = Outcome(work())
        except BaseException as error:
            outcome = Outcome(error=error)
        self._reports.put(outcome)

    def _watch(self, call: Call) -> bool:
        """Decide once per call what happens to it. This holds the store's lock, so while it waits other threads of the process wait too."""
        self._verdict = None
        mishap = self.mishap
        if mishap is None or (mishap.op and call.op != mishap.op) or not call.key.startswith(mishap.prefix):
            return False
        mishap.countdown -= 1
        if mishap.countdown >= 0:
            return False
        self.mishap = None
        if mishap.kind == "freeze":
            self._reports.put(None)
            self._woken.wait()
            self._woken.clear()
        else:
            self.struck = True
            is_in_doubt = mishap.kind == "unknown" and call.op.startswith(("put", "delete"))
            self._verdict = ("unavailable" if mishap.kind == "unknown" and not is_in_doubt else mishap.kind), mishap.after
        return self._verdict == ("crash", False)

    def _strikes_before(self, kind: str) -> Callable[[Call], bool]:
        return lambda call: self._verdict == (kind, False)

    def _strikes_after(self, kind: str) -> Callable[[Call], bool]:
        return lambda call: self._verdict == (kind, True)


class World:
    """The shared store with its own clock, and the history that every reader must agree with.

    Each publication has a unique step number, so every commit tells which state it must contain, even if its writer died.
    """

    def __init__(self) -> None:
        self.time = datetime(2020, 1, 1, tzinfo=timezone.utc)
        self.store = FaultyStore(MemoryStore(), clock=lambda: self.time)
        self.published: list[State] = []
        """The states that publishers were given, by step, whether or not their commits landed."""
        self.commits: list[dict[str, Any]] = []
        self.acknowledged: dict[int, int] = {}
        """The steps of the versions that publishers reported as published, by sequence number."""
        self._raw: list[bytes] = []
        self._floors: list[int] = []

    def pass_time(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)

    # The chain's records

    @property
    def epoch(self) -> int:
        """Return the highest epoch that has a commit."""
        return max((commit["epoch"] for commit in self.commits), default=0)

    @property
    def floor(self) -> int:
        return max(self._floors, default=-1)

    @property
    def head(self) -> int | None:
        """Return the current version."""
        return next((commit["state_seq"] for commit in reversed(self.commits) if not commit["_void"]), None)

    def is_version(self, seq: int) -> bool:
        return 0 <= seq < len(self.commits) and not self.commits[seq]["_void"] and self.commits[seq]["kind"] != "fence"

    def state_at(self, seq: int) -> State:
        assert self.is_version(seq), seq
        return self.published[self.commits[seq]["step"]]

    def read_new_commits(self) -> None:
        """Read the appended commits and check each against the earlier ones, which must not have changed by a byte."""
        for seq, raw in enumerate(self._raw):
            assert self.store.inner.get(keys.commit_key(seq), limit=len(raw)) == raw
        while (commit := read_json(self.store.inner, keys.commit_key(len(self.commits)))) is not None:
            seq = len(self.commits)
            assert commit["seq"] == seq
            assert commit["parent"] == (self.commits[-1]["_hash"] if seq else None)
            spans = [1 << k for k in range(1, 63) if seq and seq % (1 << k) == 0]
            assert commit["links"] == [[seq - span, self.commits[seq - span]["_hash"]] for span in spans]
            commit["_void"] = commit["epoch"] < self.epoch
            self.commits.append(commit)
            self._raw.append(self.store.inner.get(keys.commit_key(seq), limit=65536))
            if self.is_version(seq):
                self._check_version(commit)
        assert len(list(self.store.inner.list(keys.COMMITS))) == len(self.commits)
        self._read_floors()

    def acknowledge(self, seq: int, step: int) -> None:
        self.read_new_commits()
        assert self.is_version(seq)
        assert self.commits[seq]["step"] == step
        self.acknowledged[seq] = step

    def assert_is_version(self, version: deltawire.Version, state: Any) -> None:
        """Check that a reader that reports `version` holds exactly the state that was published as that version."""
        assert version.digest.hex() == self.commits[version.seq]["digest"]
        assert bits_of(state) == bits_of(self.state_at(version.seq)), version

    def _check_version(self, commit: dict[str, Any]) -> None:
        assert commit["digest"] == deltawire.state_digest(self.published[commit["step"]]).hex()
        if commit["kind"] == "rewind":
            assert commit["step"] == self.commits[commit["base"]["seq"]]["step"]
        elif commit["kind"] == "delta":
            before = next(other["seq"] for other in reversed(self.commits[:-1]) if not other["_void"])
            assert commit["base"]["seq"] == before

    def _read_floors(self) -> None:
        while (mark := read_json(self.store.inner, keys.mark_key(len(self._floors)))) is not None:
            assert mark["floor"] >= self.floor  # floors never fall
            self._floors.append(mark["floor"])

    # Versions that readers can rebuild

    def reachable(self) -> set[int]:
        """Return the versions that a new reader can rebuild from the objects in the store. It tries every route."""
        have = {info.key for info in self.store.inner.list(keys.DATA)}
        edges: list[tuple[int | None, int]] = []
        for commit in self.commits:
            if commit["_void"] or not all(file["key"] in have for file in commit["files"]):
                continue
            seq, base = commit["seq"], commit["base"] and commit["base"]["seq"]
            if commit["kind"] == "anchor" or base is not None:
                edges.append((base, seq))
            if commit["kind"] in ("fence", "rewind") and base is not None:
                edges.append((seq, base))
        for prefix in (keys.ANCHORS, keys.SKIPS):
            for info in self.store.inner.list(prefix):
                shortcut = read_json(self.store.inner, info.key)
                assert shortcut is not None
                if all(file["key"] in have for file in shortcut["files"]):
                    edges.append((shortcut["base"] and shortcut["base"]["seq"], shortcut["target"]["seq"]))
        reached: set[int | None] = {None}
        while new := {target for base, target in edges if base in reached} - reached:
            reached |= new
        return {seq for seq in reached if seq is not None and self.is_version(seq)}


def first_state() -> State:
    rng = np.random.default_rng(0)
    state = {f"layer.{i}.weight": rng.integers(0, 1 << 16, (8, 12), np.uint16).view(np.float16) for i in range(3)}
    state["norm"] = rng.integers(0, 1 << 32, 9, np.uint32).view(np.float32)
    return state


def changed_state(state: State, change: str, seed: int) -> State:
    """Return the next state. `change` is "same", "few" or "all" weights of a tensor, or a tensor "added", "removed" or "reshaped"."""
    rng = np.random.default_rng(seed)
    new = copied(state)
    name = sorted(new)[seed % len(new)]
    if change == "added":
        new[f"added.{seed}"] = rng.integers(0, 256, (3, 5), np.uint8)
    elif change == "removed" and len(new) > 1:
        del new[name]
    elif change == "reshaped":
        new[name] = new[name].reshape(-1)
    elif change != "same":
        bits = new[name].reshape(-1).view(f"u{new[name].itemsize}")
        bits[rng.integers(0, bits.size, bits.size if change == "all" else 2)] ^= 1
        new[name] = bits.view(new[name].dtype).reshape(new[name].shape)
    return new
