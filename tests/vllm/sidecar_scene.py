"""A sidecar with a chain and the double of a server, for tests of the requests that a sidecar sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from completions_double import CompletionsDouble

from deltawire import Publisher
from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.records.reports import Report, read_reports
from deltawire.engines import KvCache
from deltawire.engines.vllm.driver.routes import EngineUnreachable, RouteFailed, SwapAnswer
from deltawire.engines.vllm.driver.sidecar import QUARANTINED_LABEL, Sidecar, default_mirror
from deltawire.events import Event
from deltawire.store import open_store
from deltawire.subscribe.tensor_table import load_table


class ServerDouble:
    """A server with two workers that answer as real ones would. `failing` names the routes that fail, `lost` those that get no answer.

    With `one_call` it swaps in one call. `answers` are the outcomes of the next swaps, in order; after them, swaps are made.
    """

    def __init__(self) -> None:
        self.hashes: Callable[[int], str] = str
        """Returns the hash of a commit."""
        self.one_call = False
        self.answers: list[str] = []
        self.why_refused = "refused"
        self.is_live = True
        """True if deltas can be decoded against the live weights."""
        self.loaded_types = "bfloat16"
        self.misfit: str | None = None
        """The reason why the tensors of the chain do not fit the model."""
        self.asleep = self.held = False
        self.paused_by_others = False
        self.unended_update: str | None = None
        self.pause_leases: list[tuple[float, bool]] = []
        self.completions, self.completions_status = CompletionsDouble(), 500
        self.restart()
        self.calls: list[str] = []
        self.swaps: list[int | list[int]] = []
        """The versions that each swap in one call was asked for."""
        self.requests = 0
        self.failing: set[str] = set()
        self.lost: set[str] = set()

    def restart(self) -> None:
        self.name, self.paused = "default", False
        self.worker: dict[str, Any] = {
            "seq": None,
            "staged": None,
            "staging_error": None,
            "quarantined": False,
            "error": None,
            "last": {},
        }
        self.commit: str | None = None
        self.digest: str | None = None
        self.undo: list[list[int]] = [[], []]
        """The versions that each worker can go back to, the nearest first."""
        self.started_with: int | None = None
        """The version whose weights the server was started with."""

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.requests += 1
        if call in self.lost:
            raise EngineUnreachable("no answer.")
        if call in self.failing:
            raise RouteFailed(call, 500, "broken")

    def weight_version(self) -> str:
        return self.name

    def is_paused(self) -> bool:
        return self.paused

    def status(self) -> list[dict[str, Any]]:
        if "status after a swap" in self.lost and self.calls and self.calls[-1].startswith("swap"):
            raise EngineUnreachable("no answer.")
        core = {"one_call": self.one_call, "paused": self.paused, "asleep": self.asleep, "held": self.held}
        core |= {"paused_by_others": self.paused_by_others, "unended_update": self.unended_update if self.paused else None}
        core |= {"live": self.is_live, "why_not": None if self.is_live else "of its layout", "commit": self.commit, "digest": self.digest}
        core |= {"misfit": self.misfit, "loaded_types": self.loaded_types}
        kept = [[{"seq": seq, "commit": self.hashes(seq)} for seq in undo] for undo in self.undo]
        return [{**self.worker, **core, "undo": undo} for undo in kept]

    def learn(self, table: Path) -> list[dict[str, Any]]:
        assert load_table(table)["w"].shape == (100,)
        self._note("learn")
        return self.status()

    def adopt(self, commit: dict[str, Any]) -> list[dict[str, Any]]:
        self._note(f"adopt {commit['seq']}")
        if commit["seq"] == self.started_with:
            self.worker["seq"], self.commit = commit["seq"], commit["commit"]
        return self.status()

    def swap(self, seq: int | list[int], label: str, kv_cache: KvCache, *, anew: bool = False) -> SwapAnswer:
        self.swaps.append(seq)
        seq = seq[-1] if isinstance(seq, list) else seq
        outcome = self.answers.pop(0) if self.answers else "made"
        if outcome == "made":
            self.worker |= {"seq": seq, "quarantined": False, "error": None}
            self.commit = self.hashes(seq)
            is_over = (anew or self.held) and not self.paused_by_others
            self.name, self.paused, self.held = label, self.paused and not is_over, False
        elif outcome == "quarantined":
            self.worker |= {"seq": None, "quarantined": True, "error": "half-way"}
            self.name, self.paused = QUARANTINED_LABEL, True
        self._note(f"swap {kv_cache.value}{self._source() if anew else ''}")
        error = None if outcome == "made" else f"worker 0: {self.why_refused if outcome == 'refused' else outcome}"
        return SwapAnswer(outcome, error, self.status(), 1.0, 2.0, 3, not self.paused)

    def quarantine(self, reason: str) -> list[dict[str, Any]]:
        self._note("quarantine")
        self.worker |= {"seq": None, "quarantined": True, "error": reason}
        self.name, self.paused = QUARANTINED_LABEL, self.one_call or self.paused
        return self.status()

    def model(self) -> str:
        return "tiny"

    def complete(self, body: dict[str, Any]) -> Any:
        assert not self.paused, "a paused server does not answer"
        if "complete" in self.failing:
            raise RouteFailed("/v1/completions", self.completions_status, "broken")
        return self.completions.complete(body)

    def initialise(self, info: dict[str, Any]) -> None:
        self.info = info

    def _source(self) -> str:
        """Return where the workers load from: a mirror that they were told of, or the store."""
        return " mirror" if "mirror" in self.info else " store"

    def prepare(self, seq: int) -> list[dict[str, Any]]:
        self._note("prepare")
        self.worker["staged"] = None if "stage" in self.failing else seq
        self.worker["staging_error"] = "no such version" if "stage" in self.failing else None
        return self.status()

    def settle(self) -> list[dict[str, Any]]:
        if self.lost:
            raise EngineUnreachable("no answer.")
        return self.status()

    def pause(self, mode: str, *, clear_cache: bool) -> None:
        self._note(f"pause {mode}{' clear' if clear_cache else ''}")
        self.paused = True

    def pause_lease(self, seconds: float) -> None:
        self.pause_leases.append((seconds, self.paused))

    def start_update(self) -> None:
        self._note("start")

    def update(self, seq: int, *, anew: bool = False) -> None:
        assert anew or not self.worker["quarantined"]
        if ("load" if anew else "write") in self.failing:
            self.worker |= {"quarantined": True, "error": "half-way", "seq": None}
            self.commit = None
        self._note("load" if anew else "write")
        self.worker |= {"seq": seq, "quarantined": False, "error": None}
        self.commit = self.hashes(seq)

    def finish_update(self, weight_version: str | None) -> None:
        self._note("finish")
        self.name = str(weight_version)

    def label(self, weight_version: str) -> None:
        self.name = weight_version

    def resume(self) -> None:
        assert not self.worker["quarantined"], "a quarantined server was resumed"
        self._note("resume")
        self.paused = self.paused_by_others = False


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = np.zeros(100, np.float32)
        self.publisher = Publisher(folder / "store")
        self.server = ServerDouble()
        self.server.hashes = self.hash_of
        self.events: list[Event] = []
        self.sidecar = self.start()

    def start(self, *, has_mirror: bool = False, channel: str | None = None, **options: Any) -> Sidecar:
        return Sidecar(
            self.server,  # type: ignore[arg-type]
            self.folder / "store",
            self.folder / "mirror" if has_mirror else None,
            options=ReaderOptions(reader="engine", channel=channel),
            spool=self.folder / "spool",
            on_event=self.events.append,
            **options,
        )

    def publish(self) -> int:
        self.weights[0] += 1
        return int(self.publisher.publish({"w": self.weights}).seq)  # type: ignore[union-attr]

    def hash_of(self, seq: int) -> str:
        with open_store(self.folder / "store") as store:
            log = ChainLog(store)
            commit = log.read(seq)
            assert commit is not None
            return log.ref(commit).commit

    def report(self) -> Report:
        with open_store(self.folder / "store") as store:
            (report,) = read_reports(store, ChainLog(store).run)
            return report

    def serve(self) -> int:
        """Publish the first version, and let the server load it."""
        seq = self.publish()
        self.sidecar.step()
        self.server.calls.clear()
        self.server.pause_leases.clear()
        self.events.clear()
        return seq

    @property
    def cached_mirror(self) -> Path:
        """The mirror that is made if nothing else works."""
        return default_mirror((self.folder / "store").as_uri())
