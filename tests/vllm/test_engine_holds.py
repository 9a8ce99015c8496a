"""An engine stays paused while its weights are those of no version, and ends a pause that nobody ends. The engine is a double."""

from __future__ import annotations

import contextlib
import inspect
import queue
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.engine.core", reason="vLLM is not installed")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from deltawire.engines.vllm import QUARANTINED_LABEL, abandoned_updates, engine_core, engine_holds
from deltawire.engines.vllm.engine_core import engine_state, swap_between_steps


class ExecutorDouble:
    def __init__(self, call: Callable[..., list[Any]]) -> None:
        self.sleeping_tags: set[str] = set()
        self.collective_rpc = call

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    def sleep(self, level: int = 1) -> None:
        self.sleeping_tags = {"weights", "kv_cache"} if level > 0 else set()


def core_class() -> Any:
    """Return a new class of engines that can be held. Each test has its own, because `install` changes it."""

    class Core:
        step = step_with_batch_queue = get_weight_version = reset_encoder_cache = None

        def __init__(self, *, backend: str = "deltawire") -> None:
            self.vllm_config = SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_size=1),
                weight_transfer_config=SimpleNamespace(backend=backend),
                model_config=SimpleNamespace(is_multimodal_model=False),
            )
            self.scheduler = SimpleNamespace(pause_state=PauseState.UNPAUSED, running=[], reset_prefix_cache=lambda **_: True)
            self.scheduler.has_unfinished_requests = lambda: bool(self.scheduler.running)
            self.scheduler.set_pause_state = lambda state: setattr(self.scheduler, "pause_state", state)
            self.batch_queue = None
            self.input_queue: queue.Queue[Any] = queue.Queue()
            self.workers: list[dict[str, Any]] = [{"seq": 3, "quarantined": False, "outcome": "made"} for _ in range(2)]
            self.model_executor = ExecutorDouble(self._call)
            self.label = "3"
            self.forgotten = self.stopped = 0
            self.falls_asleep: Callable[[], None] | None = None

        def _call(self, method: Any, timeout: Any = None, arguments: Any = ()) -> list[Any]:
            self.forgotten += method is engine_holds._forget
            self.stopped += method is engine_holds._stop_staging
            if method == "deltawire_quarantine":
                self.workers = [{**worker, "seq": None, "quarantined": True, "error": arguments[0]} for worker in self.workers]
            return self.workers

        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
            return self._call(method, timeout, args)

        def set_weight_version(self, label: str) -> None:
            self.label = label

        def add_request(self, request: Any) -> None:
            pass

        def sleep(self, level: int = 1, mode: str = "abort") -> None:
            self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self.falls_asleep = lambda: self.model_executor.sleep(level)
            if mode == "abort":
                self.falls_asleep()

        def wake_up(self, tags: Any = None) -> bool:
            self.model_executor.sleeping_tags -= set(tags or ("weights", "kv_cache"))
            if not self.model_executor.is_sleeping:
                self.resume_scheduler()
            return not self.model_executor.is_sleeping

        def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> None:
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)

        def resume_scheduler(self) -> None:
            self.scheduler.set_pause_state(PauseState.UNPAUSED)

        def is_scheduler_paused(self) -> bool:
            return bool(self.scheduler.pause_state != PauseState.UNPAUSED)

        def run_busy_loop(self) -> PauseState:
            state: PauseState = self.scheduler.pause_state
            return state

        def _handle_client_request(self, kind: Any, request: Any) -> None:
            pass

    Core.get_weight_version = lambda core: core.label  # type: ignore[assignment, misc]
    assert engine_holds.install(Core, Core)
    assert engine_holds.install(Core, Core)  # the second time changes nothing
    assert engine_core.install(Core)
    return Core


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_HOLD", "1")


def test_an_engine_waits_for_its_first_version_if_asked_to(hold: None) -> None:
    core = core_class()()
    assert core.run_busy_loop() == PauseState.PAUSED_ALL
    assert engine_state(core)["held"] == engine_holds.FIRST
    core.workers = [{"outcome": "refused", "error": "why"}]
    assert not swap_between_steps(core, 3, "3", "keep")["running"]
    assert engine_state(core)["held"] == engine_holds.FIRST
    core.workers = [{"outcome": "made"}]
    assert swap_between_steps(core, 3, "3", "keep")["running"]
    assert engine_state(core)["held"] is None
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)  # an operator pauses it: a swap does not end this
    assert not swap_between_steps(core, 4, "4", "keep")["running"]


def test_other_engines_are_not_held(hold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert core_class()(backend="nccl").run_busy_loop() == PauseState.UNPAUSED
    several = core_class()()
    several.has_coordinator = True
    assert several.run_busy_loop() == PauseState.UNPAUSED
    monkeypatch.setenv("DELTAWIRE_HOLD", "0")
    assert core_class()().run_busy_loop() == PauseState.UNPAUSED


def test_an_operator_can_resume_a_held_engine(hold: None) -> None:
    core = core_class()()
    core.run_busy_loop()
    core.resume_scheduler()
    assert (engine_state(core)["held"], engine_state(core)["paused"]) == (None, False)


@pytest.mark.parametrize(("level", "forgets"), [(1, False), (2, True)])
def test_weights_that_a_sleep_discards_are_no_version(hold: None, level: int, forgets: bool) -> None:
    core = core_class()()
    core.sleep(level)
    assert engine_state(core)["asleep"]
    assert (core.forgotten, core.label) == (int(forgets), QUARANTINED_LABEL if forgets else "3")
    assert core.wake_up()
    assert engine_state(core)["held"] == (engine_holds.SLEPT if forgets else None)
    assert engine_state(core)["paused"] == forgets


def fail_a_swap(core: Any) -> None:
    """Let one of two workers fail, so that the weights are a mixture of two versions."""
    core.workers = [{"seq": 4, "quarantined": False, "outcome": "made"}, {"seq": None, "quarantined": True, "outcome": "quarantined"}]
    assert swap_between_steps(core, 4, "4", "keep")["outcome"] == "quarantined"


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_engine_that_is_held_stays_so_when_it_sleeps_and_wakes_up(level: int, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_class()()
    if is_first:
        monkeypatch.setenv("DELTAWIRE_HOLD", "1")
        core.run_busy_loop()
    else:
        fail_a_swap(core)
    reason = engine_state(core)["held"]
    assert reason == (engine_holds.FIRST if is_first else engine_holds.FAILED)
    core.sleep(level)
    assert core.wake_up()
    assert engine_state(core)["held"] == reason
    assert core.scheduler.pause_state == PauseState.PAUSED_ALL  # requests that were frozen make no step either
    core.workers = [{"seq": 5, "quarantined": False, "outcome": "made"} for _ in range(2)]
    assert swap_between_steps(core, 5, "5", "keep", anew=True)["running"]
    core.sleep(1)
    core.wake_up()
    assert not engine_state(core)["paused"]


def test_an_engine_with_a_mixture_of_versions_finishes_no_requests() -> None:
    core = core_class()()
    core.pause_scheduler("wait")
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW  # its requests end with the weights of a version
    fail_a_swap(core)
    core.pause_scheduler("wait", clear_cache=False)
    assert core.scheduler.pause_state == PauseState.PAUSED_ALL
    core.resume_scheduler()
    core.pause_scheduler("wait")
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW


def test_an_engine_that_finishes_its_requests_first_forgets_its_weights_when_it_falls_asleep() -> None:
    """An update that is made meanwhile must be forgotten, too."""
    core = core_class()()
    core.sleep(2, "wait")
    assert (core.forgotten, core.label) == (0, "3")
    core.falls_asleep()
    assert (core.forgotten, core.label) == (1, QUARANTINED_LABEL)


def test_an_engine_that_falls_asleep_reads_its_weights_no_more() -> None:
    core = core_class()()
    core.collective_rpc("deltawire_prepare", None, (4,))
    core.sleep(1)
    assert (core.stopped, core.forgotten) == (1, 0)
    for method in ("deltawire_learn", "deltawire_adopt", "deltawire_prepare"):
        with pytest.raises(RuntimeError, match="asleep"):
            core.collective_rpc(method, None, (4,))
    core.wake_up()
    core.collective_rpc("deltawire_prepare", None, (4,))
    core.sleep(1)
    assert core.stopped == 2


@pytest.mark.parametrize("method", ["reset_weights", "reload_weights"])
def test_weights_that_vllm_writes_by_itself_are_no_version(method: str) -> None:
    core = core_class()()
    core.collective_rpc(method)
    assert (core.forgotten, core.label) == (1, QUARANTINED_LABEL)
    other = core_class()(backend="other")
    other.collective_rpc(method)
    assert (other.forgotten, other.label) == (0, "3")


def test_without_a_hold_an_engine_wakes_up_as_before() -> None:
    core = core_class()()
    core.sleep(2)
    core.wake_up()
    state = engine_state(core)
    assert (state["one_call"], state["paused"], state["asleep"], state["held"]) == (True, False, False, None)
    assert core.label == QUARANTINED_LABEL


def paused_for_too_long(core: Any) -> None:
    """Pause the engine as a program does that dies then, and let the pause lease end."""
    core.collective_rpc("deltawire_lease", None, (0.0,))
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    kind, request = core.input_queue.get(timeout=60)
    assert kind == EngineCoreRequestType.WAKEUP
    core._handle_client_request(kind, request)


def test_an_engine_that_nobody_resumes_continues_with_its_version() -> None:
    core = core_class()()
    paused_for_too_long(core)
    assert not engine_state(core)["paused"]
    with pytest.raises(RuntimeError, match="pause it again"):  # the program comes back after all
        core.collective_rpc("start_weight_update")
    with pytest.raises(RuntimeError, match="pause it again"):  # even if it had begun the update
        core.collective_rpc("update_weights", None, (), {"update_info": {"seq": 4}})
    core.collective_rpc("deltawire_lease", None, (60.0,))
    core.pause_scheduler("keep")
    core.collective_rpc("start_weight_update")


@pytest.mark.parametrize("method", ["start_weight_update", "update_weights"])
def test_an_engine_that_runs_refuses_updates_by_routes(method: str) -> None:
    core = core_class()()
    core.pause_scheduler("keep")
    core.collective_rpc(method)
    core.resume_scheduler()  # another client, or an operator
    with pytest.raises(RuntimeError, match="not paused"):
        core.collective_rpc(method)
    with pytest.raises(RuntimeError, match="keep their label") if method == "start_weight_update" else contextlib.nullcontext():
        core.collective_rpc("finish_weight_update")  # the workers may have been written to before the engine was resumed
    with pytest.raises(RuntimeError, match="keep their label"):
        core.collective_rpc("finish_weight_update")
    other = core_class()(backend="nccl")  # vLLM's own backends decide by themselves
    other.collective_rpc(method)
    other.collective_rpc("finish_weight_update")


@pytest.mark.parametrize("method", ["start_weight_update", "update_weights"])
def test_an_engine_whose_weights_are_not_in_its_memory_refuses_updates_by_routes(method: str) -> None:
    core = core_class()()
    core.sleep(1)
    with pytest.raises(RuntimeError, match="asleep"):
        core.collective_rpc(method)
    core.wake_up(["weights"])  # the KV cache is not there yet
    core.collective_rpc(method)


@pytest.mark.parametrize("is_written", [True, False])
def test_an_update_by_routes_that_leaves_a_mixture_holds_the_engine(is_written: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_class()()
    core.pause_scheduler("keep")
    call = core.model_executor.collective_rpc

    def fail(method: Any, *arguments: Any) -> list[Any]:
        if method == "update_weights":
            core.workers[1]["quarantined"] = is_written
            raise RuntimeError("a worker failed")
        return call(method, *arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(core, "_call", fail)
    with pytest.raises(RuntimeError, match="a worker failed"):
        core.collective_rpc("update_weights")
    assert engine_state(core)["held"] == (engine_holds.FAILED if is_written else None)
    core.sleep(1)
    core.wake_up()
    assert engine_state(core)["paused"] == is_written


@pytest.mark.parametrize("reason", ["quarantined", "versions", "label", "asleep", "several", "died"])
def test_an_engine_whose_weights_are_not_known_stays_paused(reason: str) -> None:
    core = core_class()()
    if reason == "quarantined":
        core.workers[1]["quarantined"] = True
    elif reason == "versions":
        core.workers[1]["seq"] = 4
    elif reason == "label":
        core.label = "4"
    elif reason == "asleep":
        core.model_executor.sleep(1)
    elif reason == "several":
        core.has_coordinator = True
    else:
        core.model_executor.collective_rpc = lambda method: {}[method]
    paused_for_too_long(core)
    assert core.is_scheduler_paused()
    assert core.deltawire_lease.deadline > 0  # it looks again later


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_lease_that_cannot_end_is_refused(seconds: float) -> None:
    core = core_class()()
    with pytest.raises(ValueError, match="seconds"):
        core.collective_rpc("deltawire_lease", None, (seconds,))
    core.pause_scheduler("keep")
    assert engine_state(core)["paused_by_others"]


def test_a_pause_without_a_lease_and_one_that_was_ended_in_time_are_left_alone() -> None:
    core = core_class()()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    core._handle_client_request(EngineCoreRequestType.WAKEUP, None)
    assert core.is_scheduler_paused()
    core.collective_rpc("deltawire_lease", None, (60.0,))
    core.resume_scheduler()
    assert core.deltawire_lease is None


def test_an_engine_that_finishes_its_requests_for_a_program_that_dies_continues_when_they_have_ended() -> None:
    core = core_class()()
    core.scheduler.running = ["a request"]
    core.collective_rpc("deltawire_lease", None, (60.0,))
    core.pause_scheduler("wait")
    pause_lease = core.deltawire_lease
    pause_lease.deadline = 0.0
    core._handle_client_request(EngineCoreRequestType.WAKEUP, None)
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW
    assert pause_lease.deadline > time.monotonic()  # it looks again later
    core.scheduler.running = []
    pause_lease.deadline = 0.0
    core._handle_client_request(EngineCoreRequestType.WAKEUP, None)
    assert not core.is_scheduler_paused()
    core.scheduler.running = ["a request"]
    core.collective_rpc("deltawire_lease", None, (60.0,))
    core.pause_scheduler("keep")
    core.deltawire_lease.deadline = 0.0
    core._handle_client_request(EngineCoreRequestType.WAKEUP, None)
    assert not core.is_scheduler_paused()  # it was frozen, and continues


def swap(core: Any, seq: int, **options: Any) -> bool:
    """Swap in one call. Returns whether the engine runs then."""
    core.workers = [{"seq": seq, "quarantined": False, "outcome": "made"} for _ in range(2)]
    return bool(swap_between_steps(core, seq, str(seq), "keep", **options)["running"])


@pytest.mark.parametrize("when", ["running", "held", "failed", "has a pause lease"])
def test_an_engine_that_an_operator_pauses_stays_paused(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_class()()
    if when == "held":
        monkeypatch.setenv("DELTAWIRE_HOLD", "1")
        core.run_busy_loop()
    elif when == "failed":
        fail_a_swap(core)
    core.pause_scheduler("keep")
    if when == "has a pause lease":
        core.collective_rpc("deltawire_lease", None, (0.0,))
        core.pause_scheduler("keep")
        wake(core)
    assert engine_state(core)["paused_by_others"]
    assert not swap(core, 4, anew=True)
    assert (engine_state(core)["held"], engine_state(core)["paused_by_others"]) == (None, True)
    core.resume_scheduler()
    assert (engine_state(core)["paused"], engine_state(core)["paused_by_others"]) == (False, False)
    assert swap(core, 5)


def test_a_swap_ends_a_pause_with_a_lease_and_one_by_a_quarantine() -> None:
    core = core_class()()
    core.collective_rpc("deltawire_lease", None, (60.0,))
    core.pause_scheduler("keep")
    assert not engine_state(core)["paused_by_others"]
    assert swap(core, 4)
    core.resume_scheduler()
    core.collective_rpc("deltawire_quarantine", None, ("its tokens are wrong",))
    assert not engine_state(core)["paused_by_others"]
    assert swap(core, 5, anew=True)


def test_a_pause_after_a_lease_that_is_over_is_one_of_its_own() -> None:
    core = core_class()()
    core.collective_rpc("deltawire_lease", None, (0.0,))  # the program dies before it pauses the engine
    core.pause_scheduler("keep")
    assert engine_state(core)["paused_by_others"]
    core._handle_client_request(EngineCoreRequestType.WAKEUP, None)
    assert core.is_scheduler_paused()
    core.resume_scheduler()
    paused_for_too_long(core)
    core.pause_scheduler("keep")  # by a program without a pause lease, after the engine has continued
    core.collective_rpc("start_weight_update")


def begin_update(core: Any, *, until: str, pause_lease: bool = False) -> None:
    """Begin an update of commit 4 by vLLM's routes, and die after the call `until`. The last timer of the engine wakes it up at once."""
    if pause_lease:
        core.collective_rpc("deltawire_lease", None, (600.0,))
    core.pause_scheduler("keep")
    for method in ("start_weight_update", "update_weights", "finish_weight_update"):
        core.collective_rpc(method)
        if method == "update_weights":
            core.workers = [{**worker, "seq": 4} for worker in core.workers]
        if method == "finish_weight_update":
            core.set_weight_version("4")
        if method == until:
            break


def look_at_update(core: Any, *, after: float) -> None:
    """Let a wake-up come this long after the last request of an update."""
    watch = getattr(core, "deltawire_update_watch", None)
    if watch is not None:
        watch.due -= after
    core._handle_client_request(EngineCoreRequestType.WAKEUP, None)


@pytest.mark.parametrize(
    ("until", "told"),
    [
        ("start_weight_update", "those of version 3, and POST /resume"),
        ("update_weights", "have version 4, but its weights have the label '3'. POST"),
        ("finish_weight_update", "those of version 4, and POST /resume"),
    ],
)
def test_an_update_without_a_lease_that_nobody_ends_is_reported_and_the_engine_stays_paused(
    until: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_class()()
    begin_update(core, until=until)
    look_at_update(core, after=59.0)
    assert engine_state(core)["unended_update"] is None
    logged: list[str] = []
    monkeypatch.setattr(abandoned_updates.logger, "error", lambda text, *values: logged.append(text % values))
    for _ in range(2):
        look_at_update(core, after=60.0)
        assert told in engine_state(core)["unended_update"]
        assert core.is_scheduler_paused()
    assert [told in text for text in logged] == [True]  # it is logged once
    core.resume_scheduler()
    assert engine_state(core)["unended_update"] is None
    look_at_update(core, after=60.0)
    core.pause_scheduler("keep")  # by an operator
    look_at_update(core, after=60.0)
    assert (engine_state(core)["paused"], engine_state(core)["unended_update"]) == (True, None)


def test_an_update_that_goes_on_is_reported_no_more() -> None:
    core = core_class()()
    begin_update(core, until="start_weight_update")
    look_at_update(core, after=60.0)
    assert engine_state(core)["unended_update"] is not None
    core.collective_rpc("update_weights")
    assert engine_state(core)["unended_update"] is None


def test_the_time_until_an_update_is_reported_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_class()()
    monkeypatch.setenv("DELTAWIRE_UPDATE_SECONDS", "0")
    begin_update(core, until="start_weight_update")
    monkeypatch.setenv("DELTAWIRE_UPDATE_SECONDS", "a while")  # the second look is a minute later
    wake(core)
    assert engine_state(core)["unended_update"] is not None
    assert core.deltawire_update_watch.due > time.monotonic()


@pytest.mark.parametrize("until", ["start_weight_update", "update_weights", "finish_weight_update"])
@pytest.mark.parametrize("is_paused_before", [True, False])
def test_an_update_with_a_lease_is_left_to_the_lease_unless_an_operator_has_paused_the_engine(until: str, is_paused_before: bool) -> None:
    core = core_class()()
    if is_paused_before:
        core.pause_scheduler("keep")
    begin_update(core, until=until, pause_lease=True)
    look_at_update(core, after=60.0)
    is_ended = until == "finish_weight_update"
    assert (engine_state(core)["unended_update"] is None) == (is_ended or not is_paused_before)
    assert core.is_scheduler_paused()


def wake(core: Any) -> None:
    """Let an engine that waits for requests handle the next wake-up."""
    kind, request = core.input_queue.get(timeout=60)
    assert kind == EngineCoreRequestType.WAKEUP
    core._handle_client_request(kind, request)


@pytest.mark.parametrize("is_one_call", [True, False])
@pytest.mark.parametrize("is_wrong", [True, False])
def test_an_engine_looks_by_itself_whether_its_workers_confirm_a_swap(is_one_call: bool, is_wrong: bool) -> None:
    core = core_class()()
    core.workers = [{"seq": 3, "quarantined": False, "unconfirmed": rank == 1, "outcome": "made"} for rank in range(2)]
    if is_one_call:
        assert swap_between_steps(core, 3, "3", "keep")["running"]
    else:
        core.pause_scheduler("keep")
        core.collective_rpc("update_weights")
        core.collective_rpc("finish_weight_update")
        core.resume_scheduler()
    wake(core)
    assert (core.label, engine_state(core)["paused"]) == ("3", False)
    core.workers[1] |= {"quarantined": is_wrong, "unconfirmed": False, "error": "of its digest" if is_wrong else None}
    wake(core)
    assert core.deltawire_watch is None
    assert engine_state(core)["paused"] == is_wrong
    if is_wrong:
        assert core.label == QUARANTINED_LABEL
        assert "worker 1: of its digest" in str(engine_state(core)["held"])
        assert all(worker["quarantined"] for worker in core.workers)
        core.workers = [{"seq": 4, "quarantined": False, "outcome": "made"}]
        assert swap_between_steps(core, 4, "4", "drop", anew=True)["running"]
    assert core.input_queue.empty()


def test_an_engine_whose_workers_have_confirmed_a_swap_does_not_look_again() -> None:
    core = core_class()()
    swap_between_steps(core, 3, "3", "keep")
    assert getattr(core, "deltawire_watch", None) is None
    other = core_class()(backend="nccl")
    other.collective_rpc("finish_weight_update")
    assert getattr(other, "deltawire_watch", None) is None


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_client_can_quarantine_an_engine(is_alone: bool) -> None:
    core = core_class()()
    core.has_coordinator = not is_alone
    (first, _) = core.collective_rpc("deltawire_quarantine", None, ("its tokens are wrong",))
    assert (first["quarantined"], first["error"], core.label) == (True, "its tokens are wrong", QUARANTINED_LABEL)
    assert engine_state(core)["paused"] == is_alone
    assert engine_state(core)["held"] == ("its tokens are wrong" if is_alone else None)


def test_this_vllm_has_what_holds_need() -> None:
    assert engine_holds.install(EngineCore, EngineCoreProc)
    assert engine_core.install(EngineCore)
    for engine in (EngineCore, EngineCoreProc):
        assert list(inspect.signature(engine.pause_scheduler).parameters) == ["self", "mode", "clear_cache"]
        assert engine.pause_scheduler.__wrapped__.__qualname__ == f"{engine.__name__}.pause_scheduler"
