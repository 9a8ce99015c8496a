"""A sidecar sends requests in the right order. The server is a double; test_swaps.py and test_failures.py use real ones."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltawire import Publisher
from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.reports import QUARANTINED, REFUSED, SERVING, Report, read_reports
from deltawire.engines import KvCache
from deltawire.engines.http_session import http_session
from deltawire.engines.vllm.driver.readiness import ReadinessRoute
from deltawire.engines.vllm.driver.routes import EngineUnreachable, RouteFailed, SwapAnswer
from deltawire.engines.vllm.driver.sidecar import QUARANTINED_LABEL, Sidecar
from deltawire.errors import EngineAsleep, EngineError, EngineQuarantined, EngineRefused, EngineUnavailable, StoreUnavailable, SwapFailed
from deltawire.events import Event
from deltawire.format.digest import Digest
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
        self.is_live: bool | None = None
        """True if deltas can be decoded against the live weights. None if the workers do not know of this."""
        self.asleep = self.held = False
        self.leases: list[tuple[float, bool]] = []
        self.restart()
        self.calls: list[str] = []
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
        if self.is_live is not None:
            core |= {"live": self.is_live, "why_not": None if self.is_live else "of its layout", "commit": self.commit}
            core |= {"digest": self.digest}
        return [{**self.worker, **core}, {**self.worker, **core}]

    def learn(self, table: Path) -> list[dict[str, Any]]:
        assert load_table(table)["w"].shape == (100,)
        self._note("learn")
        return self.status()

    def adopt(self, commit: dict[str, Any]) -> list[dict[str, Any]]:
        self._note(f"adopt {commit['seq']}")
        if commit["seq"] == self.started_with:
            self.worker["seq"], self.commit = commit["seq"], commit["commit"]
        return self.status()

    def swap(self, seq: int, label: str, kv_cache: KvCache, *, anew: bool = False) -> SwapAnswer:
        outcome = self.answers.pop(0) if self.answers else "made"
        if outcome == "made":
            self.worker |= {"seq": seq, "quarantined": False, "error": None}
            self.commit = self.hashes(seq) if self.is_live else None
            self.name, self.paused, self.held = label, self.paused and not (anew or self.held), False
        elif outcome == "quarantined":
            self.worker |= {"seq": None, "quarantined": True, "error": "half-way"}
            self.name, self.paused = QUARANTINED_LABEL, True
        self._note(f"swap {kv_cache.value}{' anew' if anew else ''}")
        error = None if outcome == "made" else f"worker 0: {outcome}"
        return SwapAnswer(outcome, error, self.status(), 1.0, 2.0, 3, not self.paused)

    def initialise(self, info: dict[str, Any]) -> None:
        self.info = info

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

    def lease(self, seconds: float) -> None:
        self.leases.append((seconds, self.paused))

    def start_update(self) -> None:
        self._note("start")

    def update(self, seq: int, *, anew: bool = False) -> None:
        assert anew or not self.worker["quarantined"]
        if ("load" if anew else "write") in self.failing:
            self.worker |= {"quarantined": True, "error": "half-way", "seq": None}
        self._note("load" if anew else "write")
        self.worker |= {"seq": seq, "quarantined": False, "error": None}

    def finish_update(self, weight_version: str | None) -> None:
        self._note("finish")
        self.name = str(weight_version)

    def label(self, weight_version: str) -> None:
        self.name = weight_version

    def resume(self) -> None:
        assert not self.worker["quarantined"], "a quarantined server was resumed"
        self._note("resume")
        self.paused = False


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = np.zeros(100, np.float32)
        self.publisher = Publisher(folder / "store")
        self.server = ServerDouble()
        self.server.hashes = self.hash_of
        self.events: list[Event] = []
        self.sidecar = self.start()

    def start(self, *, has_mirror: bool = True, **options: Any) -> Sidecar:
        return Sidecar(
            self.server,  # type: ignore[arg-type]
            self.folder / "store",
            self.folder / "mirror" if has_mirror else None,
            options=ReaderOptions(reader="engine"),
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


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.sidecar.close()
    scene.publisher.close()


def test_a_version_is_staged_before_the_pause_and_named_before_the_server_continues(scene: Scene) -> None:
    seq = scene.publish()
    assert scene.sidecar.step() is not None
    assert scene.server.calls == ["prepare", "pause keep clear", "start", "write", "finish", "resume"]
    assert scene.server.name == str(seq)
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)
    assert scene.sidecar.step() is None
    (swapped,) = (event for event in scene.events if event.name == "swapped")
    assert swapped.fields["http_calls"] == 5
    assert scene.server.leases == [(60.0, False)]  # so the server continues if this process dies in the pause


def test_a_version_that_cannot_be_staged_never_pauses_the_server(scene: Scene) -> None:
    scene.publish()
    scene.server.failing = {"stage"}
    with pytest.raises(EngineRefused, match="no such version"):
        scene.sidecar.step()
    assert scene.server.calls == ["prepare"]
    assert scene.report().state == REFUSED


def test_a_server_that_refuses_continues_with_what_it_has(scene: Scene) -> None:
    scene.publish()
    scene.server.failing = {"start"}
    with pytest.raises(EngineRefused):
        scene.sidecar.step()
    assert not scene.server.paused
    assert scene.report().state == REFUSED


def test_an_update_that_fails_half_way_is_repaired_before_the_server_continues(scene: Scene) -> None:
    seq = scene.publish()
    scene.server.failing = {"write"}
    scene.sidecar.step()
    assert scene.server.calls[3:] == ["write", "pause keep clear", "start", "load", "finish", "resume"]
    assert scene.server.name == str(seq)
    assert [event.name for event in scene.events if event.name in ("engine-quarantined", "repaired")] == ["engine-quarantined", "repaired"]


def test_a_server_that_cannot_be_repaired_stays_paused_until_it_can(scene: Scene) -> None:
    scene.publish()
    scene.server.failing = {"write", "load"}
    for _ in range(2):
        with pytest.raises(EngineQuarantined):
            scene.sidecar.step()
        assert scene.server.paused
        assert scene.server.name == QUARANTINED_LABEL
        assert (scene.report().state, scene.report().error) == (QUARANTINED, "worker 0: half-way; worker 1: half-way")
    scene.server.failing = set()
    seq = scene.publish()
    scene.sidecar.step()
    assert not scene.server.paused
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)


def test_new_weights_are_never_served_under_the_old_label(scene: Scene) -> None:
    first = scene.publish()
    scene.sidecar.step()
    seq = scene.publish()
    scene.server.failing = {"finish"}
    with pytest.raises(EngineQuarantined):
        scene.sidecar.step()
    assert scene.server.paused
    assert scene.server.name == QUARANTINED_LABEL != str(first)
    scene.server.failing = set()
    scene.sidecar.step()
    assert not scene.server.paused
    assert scene.server.name == str(seq)


def test_a_server_that_does_not_resume_is_resumed_by_the_next_step(scene: Scene) -> None:
    seq = scene.publish()
    scene.server.failing = {"resume"}
    with pytest.raises(EngineUnavailable):
        scene.sidecar.step()
    assert scene.server.paused
    assert scene.server.name == str(seq)
    scene.server.failing = set()
    scene.server.calls.clear()
    scene.sidecar.step()
    assert scene.server.calls == ["resume"]
    assert (scene.report().state, scene.report().seq) == (SERVING, seq)


def test_a_server_that_is_lost_during_an_update_is_asked_what_it_has(scene: Scene) -> None:
    seq = scene.publish()
    scene.server.lost = {"write"}
    with pytest.raises(EngineUnreachable):
        scene.sidecar.step()
    scene.server.lost = set()
    scene.server.calls.clear()
    scene.sidecar.step()
    assert scene.server.calls == ["prepare", "pause keep clear", "start", "write", "finish", "resume"]
    assert scene.server.name == str(seq)


def test_a_server_that_was_restarted_is_brought_to_the_newest_version(scene: Scene) -> None:
    seq = scene.publish()
    scene.sidecar.step()
    scene.server.restart()
    assert scene.sidecar.step() is not None
    assert scene.server.name == str(seq)


def test_a_new_sidecar_resumes_a_server_that_the_one_before_left_paused(scene: Scene) -> None:
    scene.publish()
    scene.sidecar.step()
    scene.server.paused = True
    scene.server.calls.clear()
    again = scene.start()
    again.step()
    again.close()
    assert scene.server.calls == ["resume"]


@pytest.fixture
def one_call(scene: Scene) -> Scene:
    """A scene whose server swaps in one call and serves a version already."""
    scene.server.one_call = True
    scene.publish()
    scene.sidecar.step()
    scene.server.calls.clear()
    scene.events.clear()
    return scene


def test_a_swap_in_one_call_sends_one_request(one_call: Scene) -> None:
    seq = one_call.publish()
    one_call.sidecar.step()
    assert one_call.server.calls == ["prepare", "swap drop"]
    assert one_call.server.name == str(seq)
    (swapped,) = (event.fields for event in one_call.events if event.name == "swapped")
    assert (swapped["http_calls"], swapped["kv_cache"], swapped["preempted"]) == (1, "drop", 3)
    assert swapped["pause_seconds"] == 3e-3  # the time that the server reports, without the request's own


@pytest.mark.parametrize(("pause", "allowed"), [("abort", True), ("wait", True), ("keep", False)])
def test_routes_are_used_if_one_call_is_not_possible_or_not_wanted(scene: Scene, pause: Any, allowed: bool) -> None:
    scene.server.one_call = True
    scene.publish()
    with contextlib.closing(scene.start(pause=pause, one_call=allowed)) as sidecar:
        sidecar.step()
    assert scene.server.calls == ["prepare", f"pause {pause} clear", "start", "write", "finish", "resume"]
    assert scene.server.leases == [(60.0, pause == "wait")]  # that pause begins when all requests have ended


def test_a_refused_swap_changes_nothing_and_is_reported(one_call: Scene) -> None:
    before = one_call.server.name
    one_call.publish()
    one_call.server.answers = ["refused"]
    with pytest.raises(EngineRefused, match="worker 0: refused"):
        one_call.sidecar.step()
    assert one_call.server.calls == ["prepare", "swap drop"]
    assert (one_call.server.name, one_call.report().state) == (before, REFUSED)


def test_a_quarantined_server_is_repaired_by_the_next_call(one_call: Scene) -> None:
    seq = one_call.publish()
    one_call.server.answers = ["quarantined", "quarantined"]
    with pytest.raises(EngineQuarantined):
        one_call.sidecar.step()
    assert one_call.server.calls == ["prepare", "swap drop", "swap drop anew"]
    assert (one_call.server.paused, one_call.server.name) == (True, QUARANTINED_LABEL)
    assert one_call.report().state == QUARANTINED
    one_call.sidecar.step()
    assert one_call.server.calls[3:] == ["swap drop anew"]
    assert (one_call.server.paused, one_call.server.name) == (False, str(seq))
    assert one_call.report().state == SERVING


@pytest.mark.parametrize("was_made", [True, False])
def test_a_server_whose_answer_was_lost_is_asked_what_it_has(one_call: Scene, was_made: bool) -> None:
    seq = one_call.publish()
    one_call.server.lost = {"swap drop"}
    one_call.server.answers = [] if was_made else ["refused"]
    if was_made:
        one_call.sidecar.step()
        assert one_call.report().seq == seq
    else:
        with pytest.raises(SwapFailed):
            one_call.sidecar.step()
        one_call.server.lost = set()
        one_call.sidecar.step()
    assert "resume" not in one_call.server.calls
    assert one_call.server.name == str(seq)


def test_a_server_that_is_gone_during_a_swap_is_asked_by_the_next_step(one_call: Scene) -> None:
    seq = one_call.publish()
    one_call.server.lost = {"swap drop", "status after a swap"}
    with pytest.raises(EngineUnreachable):
        one_call.sidecar.step()
    one_call.server.lost = set()
    one_call.server.calls.clear()
    one_call.sidecar.step()
    assert one_call.server.calls == []  # it has made the swap
    assert one_call.server.name == str(seq)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_server_that_is_asleep_is_not_changed(one_call: Scene, when: str) -> None:
    before = one_call.server.name
    one_call.publish()
    one_call.server.asleep = when == "before"
    one_call.server.answers = ["asleep"] if when == "during" else []
    with pytest.raises(EngineAsleep):
        one_call.sidecar.step()
    assert one_call.server.calls == ([] if when == "before" else ["prepare", "swap drop"])
    assert one_call.server.name == before
    one_call.server.asleep = False
    one_call.sidecar.step()
    assert one_call.server.name != before


def test_a_held_server_is_reported_once_for_each_reason(one_call: Scene) -> None:
    for asleep in (True, True, False, True):
        one_call.publish()
        one_call.server.asleep = asleep
        with contextlib.suppress(EngineAsleep):
            one_call.sidecar.step()
    assert [event.fields["reason"] for event in one_call.events if event.name == "engine-held"] == ["it is asleep"] * 2


def ask(port: int, path: str = "/ready") -> tuple[int, dict[str, Any]]:
    with http_session(f"http://127.0.0.1:{port}") as session:
        answer = session.ask("GET", path, timeout=60)
        return answer.status, json.loads(answer.content) if answer.status in (200, 503) else {}


def test_the_readiness_route_says_which_version_is_served_or_why_none(scene: Scene) -> None:
    scene.server.one_call = True
    with ReadinessRoute("127.0.0.1:0", scene.sidecar.readiness) as route:
        assert ask(route.port) == (503, {"reason": "the server has no version of the chain yet."})
        seq = scene.publish()
        scene.server.answers = ["quarantined", "quarantined"]
        stop = threading.Event()
        running = threading.Thread(target=scene.sidecar.run, kwargs={"poll": 0.01, "stop": stop})
        running.start()
        while not any(event.name == "swapped" for event in scene.events):
            assert running.is_alive()
            status, told = ask(route.port)
            assert status == 503 or told == {"seq": seq, "updates": 1}
        stop.set()
        running.join()
        assert ask(route.port) == (200, {"seq": seq, "updates": 1})
        scene.publish()
        scene.server.answers = ["refused"]
        with pytest.raises(EngineRefused):
            scene.sidecar.step()
        assert ask(route.port) == (200, {"seq": seq, "updates": 1})  # it serves the version before
        assert ask(route.port, "/other")[0] == 404


@pytest.mark.parametrize("address", ["8001", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536"])
def test_an_address_that_cannot_be_read_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        ReadinessRoute(address, lambda: (True, {}))


def test_a_port_that_is_taken_is_named() -> None:
    with (
        ReadinessRoute("127.0.0.1:0", lambda: (True, {})) as route,
        pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{route.port}"),
    ):
        ReadinessRoute(f"127.0.0.1:{route.port}", lambda: (True, {}))


@pytest.mark.parametrize("is_one_call", [True, False])
def test_a_held_server_is_resumed_only_by_a_version(scene: Scene, is_one_call: bool) -> None:
    scene.server.one_call, scene.server.held, scene.server.paused = is_one_call, True, True
    scene.publish()
    scene.server.answers, scene.server.failing = ["refused"], {"start"}
    with pytest.raises(EngineRefused):
        scene.sidecar.step()
    assert scene.server.paused
    scene.server.failing = set()
    scene.sidecar.step()
    assert not scene.server.paused


@pytest.fixture
def live(scene: Scene) -> Scene:
    """A scene whose server takes deltas into its live memory, and has its first version."""
    scene.server.one_call = scene.server.is_live = True
    scene.publish()
    scene.sidecar.step()
    assert scene.server.calls == ["learn", "adopt 1", "prepare", "swap drop"]  # the first version comes from the mirror
    scene.server.calls.clear()
    scene.events.clear()
    return scene


def spooled(scene: Scene) -> list[str]:
    return sorted(path.name for path in (scene.folder / "spool").glob("hop-*.json"))


def test_deltas_go_to_live_weights_through_the_spool_one_version_after_the_other(live: Scene) -> None:
    before = (live.folder / "mirror").stat().st_mtime_ns
    first = live.publish()
    last = live.publish()
    live.sidecar.step()
    assert live.server.calls == ["prepare", "swap drop"] * 2
    assert live.server.name == str(last)
    assert spooled(live) == [f"hop-{first - 1}-{first}.json", f"hop-{first}-{last}.json"]
    assert [event.fields["live"] for event in live.events if event.name == "swapped"] == [1, 1]
    assert (live.folder / "mirror").stat().st_mtime_ns == before
    assert (live.report().state, live.report().seq) == (SERVING, last)
    for _ in range(3):
        live.publish()
        live.sidecar.step()
    assert len(spooled(live)) == 2
    live.sidecar.close()
    assert spooled(live) == []


def test_a_new_sidecar_goes_on_with_live_weights(live: Scene) -> None:
    with contextlib.closing(live.start()) as again:
        again.step()
        assert live.server.calls == ["learn"]
        live.publish()
        again.step()
    assert live.server.calls == ["learn", "prepare", "swap drop"]


def test_a_version_of_another_chain_with_the_same_number_is_not_recognised(live: Scene) -> None:
    live.server.commit = "0" * 64
    seq = live.publish()
    with contextlib.closing(live.start()) as again:
        again.step()
    assert live.server.calls == ["learn", f"adopt {seq}", f"adopt {seq - 1}", "swap drop anew"]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_server_that_was_started_with_a_version_is_not_loaded_again(scene: Scene, is_held: bool) -> None:
    scene.server.one_call = scene.server.is_live = True
    scene.server.held = scene.server.paused = is_held
    scene.server.started_with = scene.publish()
    last = scene.publish()
    scene.sidecar.step()
    assert scene.server.calls[:5] == ["learn", f"adopt {last}", f"adopt {last - 1}", "prepare", "swap drop"]
    assert (scene.server.name, scene.server.paused) == (str(last), False)
    assert not (scene.folder / "mirror").exists()
    assert [event.fields["seq"] for event in scene.events if event.name == "adopted"] == [last - 1]


def test_a_held_server_that_was_started_with_the_newest_version_is_resumed(scene: Scene) -> None:
    scene.server.one_call = scene.server.is_live = scene.server.held = scene.server.paused = True
    seq = scene.server.started_with = scene.publish()
    scene.sidecar.step()
    assert scene.server.calls == ["learn", f"adopt {seq}", "resume"]
    assert (scene.server.name, scene.server.paused) == (str(seq), False)


def test_a_server_that_refuses_two_deltas_is_loaded_from_the_mirror(live: Scene) -> None:
    seq = live.publish()
    live.server.answers = ["refused", "refused"]
    for _ in range(2):
        with pytest.raises(EngineRefused):
            live.sidecar.step()
    live.sidecar.step()
    assert live.server.calls == ["prepare", "swap drop"] * 2 + ["swap drop anew"]
    assert live.server.name == str(seq)
    live.server.calls.clear()
    live.publish()
    live.sidecar.step()
    assert live.server.calls == ["prepare", "swap drop"]


def test_live_weights_in_an_unknown_state_are_repaired_from_the_mirror(live: Scene) -> None:
    seq = live.publish()
    live.server.answers = ["quarantined"]
    live.sidecar.step()
    assert live.server.calls == ["prepare", "swap drop", "swap drop anew"]
    assert (live.server.name, live.server.paused) == (str(seq), False)


def test_a_spool_that_cannot_be_used_does_not_stop_updates(live: Scene) -> None:
    spool = live.folder / "spool"
    spool.rename(live.folder / "moved")
    spool.write_text("not a directory")
    seq = live.publish()
    live.sidecar.step()
    assert live.server.calls == ["swap drop anew"]
    assert live.server.name == str(seq)
    assert any(event.name == "mirror-used" for event in live.events)


def test_a_layout_that_cannot_be_learnt_is_updated_from_the_mirror(scene: Scene) -> None:
    scene.server.one_call, scene.server.is_live = True, False
    for _ in range(2):
        scene.publish()
        scene.sidecar.step()
    assert scene.server.calls == ["learn", "prepare", "swap drop", "prepare", "swap drop"]
    assert [event.fields["reason"] for event in scene.events if event.name == "mirror-used"] == ["of its layout"]


def test_a_server_that_restarts_while_the_store_is_away_gets_the_version_of_the_mirror(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreUnavailable("it is away")

    seq = scene.publish()
    scene.sidecar.step()
    monkeypatch.setattr(scene.sidecar._subscriber, "_move", fail)
    assert scene.sidecar.step() is None  # the server keeps its version
    scene.server.restart()
    assert scene.sidecar.step() is not None
    assert scene.server.name == str(seq)


def test_live_weights_go_over_fences_and_rewinds(live: Scene) -> None:
    live.publisher.close()
    live.publisher = Publisher(live.folder / "store")  # this writes a fence
    seq = live.publish()
    live.sidecar.step()
    assert live.server.name == str(seq)
    assert spooled(live) == [f"hop-1-{seq}.json"]
    live.publisher.close()
    live.publisher = Publisher(live.folder / "store", resume_from_seq=1)  # this goes back
    live.sidecar.step()
    assert live.sidecar.served is not None
    assert live.server.name == str(live.sidecar.served.seq)
    assert live.server.name != str(seq)
    assert live.server.calls.count("swap drop anew") <= 1  # if no route leads back, the mirror has the version


def test_without_a_mirror_the_workers_load_full_checkpoints_themselves(scene: Scene) -> None:
    scene.server.one_call = scene.server.is_live = True
    first = scene.publish()
    with contextlib.closing(scene.start(has_mirror=False)) as sidecar:
        sidecar.step()
        assert scene.server.calls == ["learn", f"adopt {first}", "swap drop anew"]
        store = (scene.folder / "store").as_uri()
        expected = {"confirm": "auto", "threads": None, "url": store, "run": None, "trusted_keys": [], "spool": str(scene.folder / "spool")}
        assert scene.server.info == expected
        scene.publish()
        sidecar.step()
        assert scene.server.calls[3:] == ["prepare", "swap drop"]
        scene.server.answers = ["quarantined"]
        last = scene.publish()
        sidecar.step()
        assert scene.server.calls[5:] == ["prepare", "swap drop", "swap drop anew"]
        assert (scene.report().state, scene.report().seq) == (SERVING, last)
    assert not (scene.folder / "mirror").exists()
    assert "mirror-used" not in [event.name for event in scene.events]
    with pytest.raises(ValueError, match="must be live"):
        scene.start(has_mirror=False, live=False)


def test_a_server_that_was_started_with_an_earlier_version_goes_on_from_there(scene: Scene) -> None:
    scene.server.one_call = scene.server.is_live = True
    scene.publish()
    seq = scene.server.started_with = scene.publish()
    scene.publisher.close()
    scene.publisher = Publisher(scene.folder / "store")  # this writes a fence, which has the same digest
    last = [scene.publish() for _ in range(3)][-1]
    with open_store(scene.folder / "store") as store:
        commit = ChainLog(store).read(seq)
        assert commit is not None
        assert commit.digest is not None
        half = Digest((1, 2, 3, 4))  # two workers hold parts of the model, whose digests add up
        halves = [half.hex(), (commit.digest - half).hex()]
    status = scene.server.status
    scene.server.status = lambda: [{**worker, "digest": digest} for worker, digest in zip(status(), halves, strict=True)]  # type: ignore[method-assign]
    scene.sidecar.step()
    assert scene.server.calls[:2] == ["learn", f"adopt {seq}"]
    assert scene.server.calls[2:] == ["prepare", "swap drop"] * 3
    assert scene.server.name == str(last)
    assert not (scene.folder / "mirror").exists()
