"""A vLLM plugin for tests. Updates fail half-way in the workers of the ranks that the file named by DELTAWIRE_TEST_FAULTS lists.

{"load": RANKS}           fails to load everything
{"apply": RANKS}          fails when an update of live memory is written
{"revert": RANKS}         fails to write the old values back
{"killed-staging": RANKS} is killed while it decodes an update
{"killed-written": RANKS} is killed when an update of live memory is written, and not confirmed yet
{"late": RANKS}           has wrong weights when it confirms an update after the swap
{"stale": RANKS}          uses other weights for decoding than for prompts, as CUDA graphs do that read old memory
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any


def register() -> None:
    path = os.environ.get("DELTAWIRE_TEST_FAULTS")
    if path is None:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from deltawire.engines.vllm import loading
    from deltawire.engines.vllm.live.layout_update import LayoutUpdate
    from deltawire.engines.vllm.live.live_weights import LiveWeights

    if getattr(loading.load_tensors, "is_faulty", False):
        return
    load_tensors, apply, add, revert = loading.load_tensors, LayoutUpdate.apply, LayoutUpdate.add, LayoutUpdate.revert
    check_direct, execute = LiveWeights.check_direct, GPUModelRunner.execute_model

    def fails(kind: str) -> bool:
        from vllm.distributed.parallel_state import get_world_group

        faults = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        return get_world_group().rank_in_group in faults.get(kind, [])

    def load_nothing(model: Any, model_config: Any, tensors: Any) -> None:
        if fails("load"):
            raise RuntimeError("injected: nothing can be loaded")
        load_tensors(model, model_config, tensors)

    def add_or_die(update: LayoutUpdate, *arguments: Any) -> Any:
        found = add(update, *arguments)
        if fails("killed-staging"):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def apply_and_fail(update: LayoutUpdate, **options: Any) -> None:
        apply(update, **options)
        if fails("killed-written"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fails("apply"):
            raise RuntimeError("injected: the update is written, but the worker fails")

    def revert_nothing(update: LayoutUpdate) -> None:
        if fails("revert"):
            raise RuntimeError("injected: the old values cannot be written")
        revert(update)

    def check_later(weights: LiveWeights) -> None:
        if fails("late"):
            next(iter(weights._direct_tensors.by_name.values())).neg_()
        check_direct(weights)

    def execute_stale(runner: Any, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        counts = scheduled.num_scheduled_tokens.values()
        if not counts or any(count > 1 for count in counts) or not fails("stale"):
            return execute(runner, scheduled, *arguments, **options)
        weight = next(tensor for name, tensor in runner.model.named_parameters() if name.endswith("o_proj.weight"))
        weight.data.neg_()
        try:
            return execute(runner, scheduled, *arguments, **options)
        finally:
            weight.data.neg_()

    LiveWeights.check_direct, GPUModelRunner.execute_model = check_later, execute_stale  # type: ignore[method-assign]
    load_nothing.is_faulty = True  # type: ignore[attr-defined]
    LayoutUpdate.apply, LayoutUpdate.add, LayoutUpdate.revert = apply_and_fail, add_or_die, revert_nothing  # type: ignore[method-assign]
    loading.load_tensors = load_nothing
