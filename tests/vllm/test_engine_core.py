"""A swap in one call, with a double of EngineCore that has steps in flight. test_one_call.py uses real ones."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import queue
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.engine.core", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request

from deltawire.engines.vllm import QUARANTINED_LABEL, engine_core
from deltawire.engines.vllm.engine_core import (
    NEEDED,
    NEEDED_BY_LOOP,
    NEEDED_OF_SCHEDULER,
    engine_state,
    install,
    swap_between_steps,
    used_adapters,
)


class SchedulerDouble:
    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.running = ["a", "b"]
        self.resets: list[tuple[bool, bool]] = []
        self.connector_resets = True

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.resets.append((reset_running_requests, reset_connector))
        self.running = []
        return self.connector_resets


class CoreDouble:
    """An EngineCore with steps in flight. `made` lists what happens, in order: the label of each token, and the calls of the workers."""

    def __init__(self, *, steps: int = 2, outcomes: tuple[str, ...] = ("made", "made")) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=SimpleNamespace(is_multimodal_model=False),
            weight_transfer_config=SimpleNamespace(backend="deltawire"),
        )
        self.scheduler = SchedulerDouble()
        self.batch_queue: deque[int] | None = deque(range(steps))
        self.model_executor = SimpleNamespace(is_sleeping=False, collective_rpc=self._call)
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.made: list[Any] = []
        self.label = "1"
        self.outcomes = outcomes
        self.step_fails = self.workers_died = False

    def _call(self, method: Any, timeout: Any, arguments: tuple[int, bool]) -> list[dict[str, Any]]:
        assert self.scheduler.pause_state == PauseState.PAUSED_ALL
        self.made.append(("swap", *arguments))
        if self.workers_died:
            raise RuntimeError("a worker died")
        return [{"outcome": outcome, "error": None if outcome == "made" else "why"} for outcome in self.outcomes]

    def _process_engine_step(self) -> None:
        assert self.scheduler.pause_state == PauseState.PAUSED_ALL
        if self.step_fails:
            raise RuntimeError("a step failed")
        assert self.batch_queue is not None
        self.batch_queue.pop()
        self.made.append(self.label)

    def is_scheduler_paused(self) -> bool:
        return self.scheduler.pause_state != PauseState.UNPAUSED

    def set_weight_version(self, label: str) -> None:
        self.label = label

    def reset_encoder_cache(self) -> None:
        self.made.append("encoder")


def swap(core: CoreDouble, kv_cache: str = "keep", **options: Any) -> dict[str, Any]:
    return swap_between_steps(core, 7, "7", kv_cache, **options)


def test_steps_in_flight_end_before_the_swap_and_keep_the_old_label() -> None:
    core = CoreDouble(steps=2)
    answer = swap(core)
    assert core.made == ["1", "1", ("swap", 7, False)]
    assert (answer["outcome"], answer["error"], answer["running"], answer["preempted"]) == ("made", None, True, 0)
    assert core.label == "7"
    assert core.scheduler.resets == []
    told = engine_state(core)["last_swap"]
    assert told == {name: answer[name] for name in ("outcome", "drain_ms", "swap_ms", "preempted")}


def test_an_engine_without_a_queue_of_batches_swaps_at_once() -> None:
    core = CoreDouble()
    core.batch_queue = None
    assert swap(core)["outcome"] == "made"
    assert core.made == [("swap", 7, False)]


def test_dropped_keys_and_values_are_counted() -> None:
    core = CoreDouble()
    core.vllm_config.model_config.is_multimodal_model = True
    assert swap(core, "drop")["preempted"] == 2
    assert core.scheduler.resets == [(True, True)]
    assert "encoder" in core.made


def test_a_cache_that_cannot_be_dropped_refuses_the_swap_before_anything_is_written() -> None:
    core = CoreDouble()
    core.scheduler.connector_resets = False
    answer = swap(core, "drop")
    assert (answer["outcome"], answer["running"], core.label) == ("refused", True, "1")
    assert "cannot be dropped" in answer["error"]
    assert not any(isinstance(entry, tuple) for entry in core.made)


def test_a_refused_swap_continues_with_the_old_label() -> None:
    core = CoreDouble(outcomes=("refused", "refused"))
    answer = swap(core)
    assert (answer["outcome"], answer["error"], answer["running"], core.label) == ("refused", "worker 0: why; worker 1: why", True, "1")


@pytest.mark.parametrize("how", ["told", "mixed", "died"])
def test_an_engine_in_an_unknown_state_stays_paused_until_it_is_repaired(how: str) -> None:
    core = CoreDouble(outcomes=("quarantined", "quarantined") if how == "told" else ("made", "refused"))
    core.workers_died = how == "died"
    answer = swap(core)
    assert (answer["outcome"], answer["running"], core.label) == ("quarantined", False, QUARANTINED_LABEL)
    assert core.scheduler.pause_state == PauseState.PAUSED_ALL
    assert "a swap failed" in engine_state(core)["held"]
    core.outcomes, core.workers_died = ("quarantined", "quarantined"), False
    assert not swap(core, anew=True)["running"]
    core.outcomes = ("made", "made")
    answer = swap(core, anew=True)
    assert (answer["outcome"], answer["running"], core.label) == ("made", True, "7")


def test_several_versions_are_written_in_one_pause_and_only_the_last_gets_a_label() -> None:
    core = CoreDouble(steps=1)
    answer = swap_between_steps(core, [5, 6, 7], "7", "drop")
    assert core.made == ["1", ("swap", 5, False), ("swap", 6, False), ("swap", 7, False)]
    assert (answer["outcome"], answer["running"], core.label) == ("made", True, "7")
    assert core.scheduler.resets == [(True, True)]


def test_a_first_version_that_is_refused_changes_nothing() -> None:
    core = CoreDouble(steps=0, outcomes=("refused",))
    answer = swap_between_steps(core, [5, 6, 7], "7", "keep")
    assert core.made == [("swap", 5, False)]
    assert (answer["outcome"], answer["running"], core.label) == ("refused", True, "1")


@pytest.mark.parametrize("how", ["refused", "died"])
def test_a_server_that_fails_between_versions_is_held(how: str) -> None:
    core = CoreDouble(steps=0)
    call = core.model_executor.collective_rpc

    def fail_later(method: Any, timeout: Any, arguments: tuple[int, bool]) -> list[dict[str, Any]]:
        core.outcomes, core.workers_died = (how,) if arguments[0] == 6 else ("made",), how == "died" and arguments[0] == 6
        return call(method, timeout, arguments)  # type: ignore[no-any-return]

    core.model_executor.collective_rpc = fail_later
    answer = swap_between_steps(core, [5, 6, 7], "7", "keep")
    assert core.made == [("swap", 5, False), ("swap", 6, False)]
    assert (answer["outcome"], answer["running"], core.label) == ("quarantined", False, QUARANTINED_LABEL)
    assert "commit 5 was written, but not 6" in answer["error"]
    assert core.scheduler.pause_state == PauseState.PAUSED_ALL
    assert "a swap failed" in engine_state(core)["held"]
    core.outcomes, core.workers_died = ("made",), False
    core.model_executor.collective_rpc = call
    answer = swap_between_steps(core, 7, "7", "keep", anew=True)
    assert (answer["outcome"], answer["running"], core.label) == ("made", True, "7")


WRONG = [([], "7", "keep"), ("abc", "7", "keep"), (None, "7", "keep"), ({"a": 1}, "7", "keep"), ([1, "z"], "7", "keep")]
WRONG += [(1 << 63, "7", "keep"), (-1, "7", "keep"), (True, "7", "keep"), (7, 7, "keep"), (7, "7", "all"), (7, "7", [])]


@pytest.mark.parametrize("arguments", WRONG, ids=repr)
def test_wrong_arguments_change_nothing(arguments: tuple[Any, Any, Any]) -> None:
    core = CoreDouble()
    answer = swap_between_steps(core, *arguments)
    assert (answer["outcome"], answer["running"], core.label, core.made) == ("refused", True, "1", [])
    assert "not" in answer["error"]
    assert not core.is_scheduler_paused()
    core.scheduler.pause_state = PauseState.PAUSED_NEW
    assert not swap_between_steps(core, *arguments)["running"]
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW


def test_workers_that_answer_something_else_leave_an_unknown_state() -> None:
    core = CoreDouble()
    core.model_executor.collective_rpc = lambda *_: [None, None]
    assert (swap(core)["outcome"], core.label) == ("quarantined", QUARANTINED_LABEL)
    assert "a swap failed" in engine_state(core)["held"]


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
@pytest.mark.parametrize("outcome", ["made", "refused"])
def test_an_engine_that_someone_has_paused_stays_paused(state: PauseState, outcome: str) -> None:
    core = CoreDouble(outcomes=(outcome,))
    core.scheduler.pause_state = state
    assert not swap(core)["running"]
    assert core.scheduler.pause_state == state


def test_an_engine_that_is_asleep_is_left_alone() -> None:
    core = CoreDouble()
    core.model_executor.is_sleeping = True
    answer = swap(core)
    assert (answer["outcome"], answer["running"], core.made) == ("asleep", False, [])
    assert engine_state(core)["asleep"]


def test_a_step_that_fails_ends_the_engine() -> None:
    core = CoreDouble()
    core.step_fails = True
    answer = swap(core)
    assert (answer["outcome"], answer["running"]) == ("quarantined", False)
    assert core.input_queue.get_nowait()[0] == EngineCoreRequestType.EXECUTOR_FAILED


@pytest.mark.parametrize("reason", ["data_parallel", "coordinator", "scheduler", "loop"])
def test_an_engine_that_cannot_swap_in_one_call_says_so_and_refuses(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = CoreDouble()
    state = {"one_call": True, "paused": False, "asleep": False, "held": None, "paused_by_others": False, "last_swap": None}
    state["unended_update"] = None
    assert engine_state(core) == state
    if reason == "data_parallel":
        core.vllm_config.parallel_config.data_parallel_size = 2
    elif reason == "coordinator":
        core.has_coordinator = True
    elif reason == "scheduler":
        monkeypatch.delattr(SchedulerDouble, "reset_prefix_cache")
    else:
        monkeypatch.delattr(CoreDouble, "_process_engine_step")
    assert not engine_state(core)["one_call"]
    assert swap(core)["outcome"] == "refused"
    assert core.made == []


class PlainCore:
    def collective_rpc(self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        return [{"method": method, "args": args}]


def test_only_our_calls_are_treated_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not install(PlainCore)  # it lacks what is needed

    class Core(PlainCore):
        set_weight_version = get_weight_version = reset_encoder_cache = step = step_with_batch_queue = add_request = None

    assert install(Core)
    once = Core.collective_rpc
    assert install(Core)
    assert Core.collective_rpc is once
    monkeypatch.setattr(engine_core, "engine_state", lambda core: {"one_call": True})
    monkeypatch.setattr(engine_core, "swap_between_steps", lambda core, *arguments: arguments)
    core = Core()
    assert core.collective_rpc("other", None, (1,)) == [{"method": "other", "args": (1,)}]
    assert core.collective_rpc("deltawire_status") == [{"method": "deltawire_status", "args": (), "one_call": True}]
    assert core.collective_rpc("deltawire_swap", None, (7, "7", "keep", False)) == [(7, "7", "keep", False)]
    assert inspect.signature(Core.collective_rpc) == inspect.signature(PlainCore.collective_rpc)


def test_requests_after_a_swap_that_marks_find_only_keys_of_the_new_weights() -> None:
    class Core(CoreDouble):
        step = step_with_batch_queue = None

        def collective_rpc(self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
            return [{"outcome": "made"}]

        def get_weight_version(self) -> str:
            return self.label

        def add_request(self, request: Request, request_wave: int = 0) -> None:
            self.made = [request.cache_salt, *request.block_hashes]

    assert install(Core)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(4, sha256)
    core = Core(steps=0)

    def add(salt: str | None = None) -> list[Any]:
        sampling = SamplingParams(max_tokens=1)
        core.add_request(Request("a", list(range(9)), sampling, None, cache_salt=salt, block_hasher=hasher), request_wave=1)
        assert len(core.made) == 3
        return core.made

    def hashes(salt: str | None) -> list[Any]:
        return [salt, *Request("b", list(range(9)), SamplingParams(max_tokens=1), None, cache_salt=salt, block_hasher=hasher).block_hashes]

    plain, named = hashes(None), hashes("v7.1")
    assert plain[1:] != named[1:]
    assert (add(), add("v7")) == (plain, hashes("v7"))
    swap(core, "mark")
    assert (add(), add("v7")) == (named, named)
    assert add("v6") == hashes("v6 v7.1")  # also a client that names an older version, or a salt of its own
    swap_between_steps(core, 8, "8", "mark")
    swap(core, "mark")  # a rollback: requests that began with this version have gone on with the one after it
    assert (add(), add("v7")) == (hashes("v7.3"), hashes("v7.3"))
    core.outcomes = ("refused", "refused")
    swap(core, "mark")
    assert add() == hashes("v7.3")
    core.outcomes, core.label = ("made", "made"), "8"  # the next update is made by vLLM's routes
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    core.collective_rpc("update_weights")
    core.scheduler.pause_state = PauseState.UNPAUSED
    assert add() == hashes("v8.4")
    swap(core, "keep")
    assert add() == plain


def test_adapters_are_in_use_while_requests_wait_or_run() -> None:
    core: Any = CoreDouble()
    assert used_adapters(core) == []  # a vLLM whose scheduler keeps requests in another way
    with_adapter = SimpleNamespace(lora_request=SimpleNamespace(lora_path="/a/math-v1"))
    core.scheduler.requests = {"1": with_adapter, "2": SimpleNamespace(lora_request=None), "3": with_adapter}
    assert used_adapters(core) == [{"used": ["/a/math-v1"], "asleep": False}]
    core.vllm_config.parallel_config.data_parallel_size = 2
    assert used_adapters(core) == []


def test_this_vllm_has_what_a_swap_in_one_call_needs() -> None:
    assert all(hasattr(EngineCore, name) for name in NEEDED)
    assert all(hasattr(EngineCoreProc, name) for name in NEEDED_BY_LOOP)
    assert all(hasattr(Scheduler, name) for name in NEEDED_OF_SCHEDULER)
    spec = importlib.util.find_spec("vllm.v1.engine.core")
    assert spec is not None
    assert spec.origin is not None
    assigned = {
        node.attr
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert {"batch_queue", "has_coordinator", "input_queue", "model_executor", "scheduler", "vllm_config"} <= assigned
