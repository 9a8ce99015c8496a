"""A swap in one call to vLLM's EngineCore, the process that schedules the steps of a server.

    POST /collective_rpc {"method": "deltawire_swap", "args": [SEQ, LABEL, KV_CACHE, ANEW]}

SEQ is the number of a commit, or a list of them: the versions on the way and the one that the server gets.

EngineCore handles requests only between two steps. For this one it schedules nothing more, finishes the steps in flight, lets all workers
swap, labels the weights, and continues. `/pause`, `/start_weight_update`, `/update_weights`, `/finish_weight_update` and `/resume` do the
same in five requests, and `/pause` alone sleeps for 20 ms.

**Why the steps in flight are finished first.** The workers take calls in order, so each step runs completely before or after the swap. But
EngineCore labels tokens when it processes a step's result, and not when it starts the step. With asynchronous scheduling or pipeline
parallelism, the results of up to two steps would get the new label although the old weights made them.

**Several versions in one call.** A follower of a channel must not serve the versions between. So the workers take all of them while the
engine schedules nothing, and only the last one gets a label. If one fails after another was made, the engine is held: its weights are
those of a version that nobody asked for.

**What the answer says.** It is one dictionary: `outcome`, `error`, `workers` (the status of each), `drain_ms`, `swap_ms`, `preempted` (the
number of requests whose keys and values were dropped) and `running`. The outcome is one of these:

    made         the weights are those of the version, and have its label
    refused      nothing has changed, and the server continues
    asleep       the same: the server's memory is not resident
    quarantined  the weights are in an unknown state; the server stays paused, and its label says so

vLLM's routes stay the way to swap if several engines work in step (data parallelism), and for a vLLM that lacks one of the attributes in
`NEEDED`. The status of the workers (`deltawire_status`) says whether the server can swap in one call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

from ..base import KvCache
from . import QUARANTINED_LABEL, abandoned_updates, engine_holds, engine_watch

SWAP, STATUS, PAUSE_LEASE, QUARANTINE = "deltawire_swap", "deltawire_status", "deltawire_lease", "deltawire_quarantine"
ADAPTERS = "deltawire_adapters"
"""The names of the calls that EngineCore treats in its own way. All others go to the workers unchanged."""
READING = ("deltawire_learn", "deltawire_adopt", "deltawire_prepare")
"""Calls that read the weights. An engine that is asleep has none in its memory, so it refuses them."""
WRITING = ("start_weight_update", "update_weights")
"""Calls of vLLM's routes for an update. An engine that runs, or that is asleep, refuses them."""
FOREIGN = ("reset_weights", "reload_weights")
"""Calls of vLLM that write to the weights. They are those of no known version afterwards."""

_KV_CACHE = tuple(policy.value for policy in KvCache)
NEEDED = (
    "collective_rpc",
    "set_weight_version",
    "get_weight_version",
    "reset_encoder_cache",
    "step",
    "step_with_batch_queue",
    "add_request",
)
"""The attributes that the class EngineCore must have."""
NEEDED_BY_LOOP = ("_process_engine_step",)
"""The attributes that an engine with steps in flight must have. `EngineCoreProc` has them."""
NEEDED_OF_SCHEDULER = ("pause_state", "set_pause_state", "reset_prefix_cache")


def install(core_class: type) -> bool:
    """Let EngineCore swap in one call. Returns False, and changes nothing, if this vLLM does not have what is needed.

    Parameters
    ----------
    core_class
        vLLM's class `EngineCore`. It may have been changed already.
    """
    original = getattr(core_class, "collective_rpc", None)
    if getattr(original, "swaps_in_one_call", False):
        return True
    if original is None or not all(hasattr(core_class, name) for name in NEEDED):
        return False

    @functools.wraps(original)  # vLLM converts arguments by the signature
    def collective_rpc(
        core: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        if method == SWAP:
            return [swap_between_steps(core, *args, **(kwargs or {}))]
        if method == PAUSE_LEASE:
            engine_holds.grant_pause_lease(core, float(args[0]))
            return []
        if method == ADAPTERS:
            return used_adapters(core)
        if method == QUARANTINE:
            return engine_watch.quarantine(core, str(args[0]))
        if method in WRITING and engine_holds.uses_backend(core):
            engine_holds.check_writable(core)
            _note_write(core)
            abandoned_updates.note(core)
            core.deltawire_was_written = False
        if method in READING and core.model_executor.is_sleeping:
            raise RuntimeError("the server is asleep, so its weights cannot be read")
        if method in FOREIGN and engine_holds.uses_backend(core):
            engine_holds.forget(core)
            _note_write(core)
        try:
            answers: list[Any] = original(core, method, timeout, args, kwargs)
        except Exception:
            if method == "update_weights" and engine_holds.uses_backend(core):
                engine_holds.hold_if_quarantined(core)
            raise
        if method == "update_weights":
            core.deltawire_was_written = True
        if method == "finish_weight_update" and engine_holds.uses_backend(core):
            was_written, core.deltawire_was_written = getattr(core, "deltawire_was_written", False), False
            if not was_written:  # vLLM would give the label of an update to the old weights
                raise RuntimeError("no update was written, so the weights keep their label: begin again with /start_weight_update")
            engine_watch.begin(core)
            if engine_holds.has_pause_lease(core):
                abandoned_updates.forget(core)
            else:
                abandoned_updates.note(core)
        if method != STATUS:
            return answers
        state = engine_state(core)
        return [{**answer, **state} for answer in answers]

    collective_rpc.swaps_in_one_call = True  # type: ignore[attr-defined]
    core_class.collective_rpc = collective_rpc  # type: ignore[attr-defined]
    add_request = core_class.add_request  # type: ignore[attr-defined]

    @functools.wraps(add_request)
    def add_marked(core: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(core, "deltawire_marks", False):
            mark(request, core.get_weight_version(), getattr(core, "deltawire_writes", 0))
        return add_request(core, request, *arguments, **options)

    core_class.add_request = add_marked  # type: ignore[attr-defined]
    return True


def mark(request: Any, label: str, writes: int) -> None:
    """Let a new request find only keys and values that the present weights computed: vLLM hashes the salt with the tokens.

    The label alone is not enough. After a rollback, requests that began with the same version have left keys and values of a later one.
    A salt that the client chose stays a part of the salt, so that requests of different clients still share nothing.

    Parameters
    ----------
    request
        vLLM's `Request`, before the scheduler has it.
    label
        The label of the weights. A client can name it itself, as for a server that swaps by vLLM's routes.
    writes
        How often the weights were written.
    """
    own, chosen = f"v{label}.{writes}", request.cache_salt
    request.cache_salt = own if chosen in (None, f"v{label}") else f"{chosen} {own}"
    request.block_hashes.clear()
    request.update_block_hashes()


def _note_write(core: Any) -> None:
    core.deltawire_writes = getattr(core, "deltawire_writes", 0) + 1


def engine_state(core: Any) -> dict[str, Any]:
    """Return what only EngineCore knows about a server. The status of each worker contains it."""
    state: dict[str, Any] = {"one_call": can_swap(core), "paused": not _is_running(core), "asleep": bool(core.model_executor.is_sleeping)}
    state |= {"held": engine_holds.held(core), "paused_by_others": engine_holds.stays_paused(core)}
    state["unended_update"] = abandoned_updates.unended(core)
    return {**state, "last_swap": getattr(core, "deltawire_last_swap", None)}


def used_adapters(core: Any) -> list[dict[str, Any]]:
    """Return the directories of LoRA adapters that requests use, running or waiting, and whether the engine is asleep.

    The list is empty if this engine cannot tell.

    vLLM returns the answer of one engine only, so engines with data parallelism cannot tell.
    """
    requests = getattr(core.scheduler, "requests", None)
    if requests is None or not engine_holds.is_alone(core):
        return []
    adapters = [getattr(request, "lora_request", None) for request in requests.values()]
    used = sorted({str(adapter.lora_path) for adapter in adapters if adapter is not None})
    return [{"used": used, "asleep": bool(core.model_executor.is_sleeping)}]


def can_swap(core: Any) -> bool:
    """Return whether an engine can swap in one call. Engines in step with others cannot, because each would swap at another step."""
    has_all = all(hasattr(core.scheduler, name) for name in NEEDED_OF_SCHEDULER)
    return engine_holds.is_alone(core) and has_all and (core.batch_queue is None or all(hasattr(core, name) for name in NEEDED_BY_LOOP))


def swap_between_steps(core: Any, seq: int | list[int], label: str, kv_cache: str, anew: bool = False) -> dict[str, Any]:
    """Finish the steps in flight, let all workers swap, label the weights, and continue. Never raises. Returns the answer (see above).

    Parameters
    ----------
    core
        The EngineCore, on its own thread.
    seq
        The number of the version's commit, which the workers have staged. Or a list: the numbers of the versions on the way, of which the
        workers have staged the first, and of the version.
    label
        The label of the new weights.
    kv_cache
        "drop" computes the keys and values of running requests again, "keep" changes nothing, and "mark" lets requests that come after the
        swap find only keys and values of the new weights.
    anew
        True to load all weights. It is the only swap that quarantined workers make.
    """
    from vllm.v1.core.sched.interface import PauseState

    answer: dict[str, Any] = {"outcome": "refused", "error": None, "workers": [], "drain_ms": 0.0, "swap_ms": 0.0, "preempted": 0}
    if not can_swap(core):
        return {**answer, "error": "this engine cannot swap in one call.", "running": _is_running(core)}
    if (error := _wrong_argument(seq, label, kv_cache, anew)) is not None:
        return {**answer, "error": error, "running": _is_running(core)}
    if core.model_executor.is_sleeping:
        return {**answer, "outcome": "asleep", "error": "the server is asleep.", "running": False}
    before, began = core.scheduler.pause_state, time.perf_counter()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        _drain(core)
    except Exception as error:
        _end_engine(core)
        return {**answer, "outcome": "quarantined", "error": f"a step failed: {error}", "running": False}
    drained = time.perf_counter()
    answer["drain_ms"] = (drained - began) * 1e3
    try:
        # Nothing runs until the swap has ended, so this has the same effect as afterwards. But if it fails, nothing has changed yet.
        answer["preempted"] = _drop_caches(core) if kv_cache == "drop" else 0
    except Exception as error:
        answer["error"] = f"the KV cache cannot be dropped: {error}"
    else:
        answer |= _call_workers(core, seq if isinstance(seq, list) else [seq], anew)
    answer["swap_ms"] = (time.perf_counter() - drained) * 1e3
    core.deltawire_last_swap = {name: answer[name] for name in ("outcome", "drain_ms", "swap_ms", "preempted")}
    if answer["outcome"] in ("made", "quarantined"):
        _note_write(core)
    if answer["outcome"] == "quarantined":
        core.set_weight_version(QUARANTINED_LABEL)
        engine_holds.hold(core, engine_holds.FAILED)
        return {**answer, "running": False}
    if answer["outcome"] == "made":
        core.set_weight_version(label)
        core.deltawire_marks = kv_cache == "mark"
        if engine_holds.end_pause(core):
            before = PauseState.UNPAUSED
    core.scheduler.set_pause_state(before)
    if answer["outcome"] == "made" and engine_watch.is_unconfirmed(answer["workers"]):
        engine_watch.begin(core)
    return {**answer, "running": _is_running(core)}


def _wrong_argument(seq: Any, label: Any, kv_cache: Any, anew: Any) -> str | None:
    """Return what is wrong with the arguments of a swap, which come from another process, or None."""
    seqs = seq if isinstance(seq, list) else [seq]
    if not seqs or not all(type(number) is int and 0 <= number < 1 << 63 for number in seqs):
        return f"a version is the number of a commit, or a list of them, not {seq!r}"
    if not isinstance(label, str) or not isinstance(anew, bool):
        return f"the label must be a text, not {label!r}, and anew true or false, not {anew!r}"
    if kv_cache not in _KV_CACHE:
        return f"kv_cache must be one of {', '.join(_KV_CACHE)}, not {kv_cache!r}"
    return None


def _drain(core: Any) -> None:
    """Finish the steps in flight. Their tokens get the old label. Without a queue of batches, no step is in flight between two calls."""
    while core.batch_queue:
        core._process_engine_step()


def _drop_caches(core: Any) -> int:
    """Let the scheduler compute all keys and values again. Returns the number of requests that lose theirs."""
    running = len(core.scheduler.running)
    if not core.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError("the KV connector did not reset its cache")
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_encoder_cache()
    return running


def _call_workers(core: Any, seqs: list[int], anew: bool) -> dict[str, Any]:
    """Let all workers swap, to one version after the other. If a later one is refused, the weights are those of none that was asked for."""
    for number, seq in enumerate(seqs):
        answer = _call_workers_once(core, seq, anew)
        if number and answer["outcome"] != "made":
            return {**answer, "outcome": "quarantined", "error": f"commit {seqs[number - 1]} was written, but not {seq}: {answer['error']}"}
        if answer["outcome"] != "made":
            break
    return answer


def _call_workers_once(core: Any, seq: int, anew: bool) -> dict[str, Any]:
    """Let all workers swap. They return their status and outcome, and never raise. If one has died, the state of all is unknown."""
    try:
        workers: list[Mapping[str, Any]] = core.model_executor.collective_rpc(SWAP, None, (seq, anew))
        outcomes = {worker["outcome"] for worker in workers}
    except Exception as error:
        return {"outcome": "quarantined", "error": f"the workers did not answer: {error}"}
    outcome = outcomes.pop() if len(outcomes) == 1 else "quarantined"
    errors = [f"worker {rank}: {worker['error']}" for rank, worker in enumerate(workers) if worker.get("error")]
    return {"outcome": outcome, "error": "; ".join(errors) or None, "workers": list(workers)}


def _end_engine(core: Any) -> None:
    """End the engine, as a failed step does in its own loop. Its clients then see that it has ended."""
    from vllm.v1.engine import EngineCoreRequestType

    core.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))


def _is_running(core: Any) -> bool:
    from vllm.v1.core.sched.interface import PauseState

    return bool(core.scheduler.pause_state == PauseState.UNPAUSED and not core.model_executor.is_sleeping)
